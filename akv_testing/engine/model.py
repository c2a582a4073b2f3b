"""The reference engine's model: a small decoder-only transformer whose attention reads and writes pages.

Each sequence is computed by itself, whatever else is in the pass. That costs speed and buys what the tests of akv live on: a
sequence's bits depend on its own tokens and chunk boundaries and on nothing else, so a run with KV from the pool can be
compared with a run without, bit for bit and under any load (Q1). A production engine batches the products and gives that up.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from akv_testing.engine.config import ModelConfig
from akv_testing.engine.pages import Pages
from akv_testing.engine.place import Place

#: Base of the RoPE frequencies, as most published models have it.
_ROPE_BASE = 10_000.0
#: Keeps RMSNorm finite for a vector of zeros.
_EPSILON = 1e-6


class Layer:
    """The weights of one layer. Matrices are (inputs, outputs)."""

    def __init__(self, config: ModelConfig, kv_heads: int, generator: torch.Generator, device: torch.device) -> None:
        hidden, kv, query = config.hidden, kv_heads * config.head_size, config.heads * config.head_size
        self.kv_heads = kv_heads
        self.attention_norm = torch.ones(hidden, device=device)
        self.mlp_norm = torch.ones(hidden, device=device)
        self.query_key_value = _random(generator, hidden, query + 2 * kv).to(device)
        self.attention_out = _random(generator, query, hidden).to(device)
        self.gate_up = _random(generator, hidden, 2 * config.intermediate).to(device)
        self.down = _random(generator, config.intermediate, hidden).to(device)


class Model:
    """Weights, and the forward pass of one chunk of one sequence. Has no state between passes: that lies in the pages."""

    def __init__(self, config: ModelConfig, device: str = "cpu") -> None:
        """Draw the weights, float32, from `config.seed`: on the CPU, so that every device has the same. Takes tens of ms."""
        self.config = config
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(config.seed)
        # Embeddings of unit size, unlike the matrices: a residual stream that starts small would hide what attention adds.
        self.embedding = torch.randn(config.vocabulary, config.hidden, generator=generator).to(self.device)
        kv_heads = {layer: group.kv_heads for group in config.layer_groups() for layer in group.layers}
        self.layers = [Layer(config, kv_heads[number], generator, self.device) for number in range(config.layers)]
        self.final_norm = torch.ones(config.hidden, device=self.device)
        self.unembedding = _random(generator, config.hidden, config.vocabulary).to(self.device)
        frequencies = _ROPE_BASE ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
        angles = torch.outer(torch.arange(config.max_tokens, dtype=torch.float64), frequencies)
        self._cos = angles.cos().float().to(self.device)
        self._sin = angles.sin().float().to(self.device)

    def forward(self, tokens: Sequence[int], start: int, tables: Sequence[Sequence[int]], pages: Pages) -> Tensor:
        """Compute one chunk: its KV goes to the pages of its positions. Returns the last token's logits, (vocabulary,).

        `tokens` stand at positions [start, start + len(tokens)); the KV before them lies in the pages already. `tables`: per
        layer group, the page of block i at position i, -1 where a window's page is gone. Blocks the thread; on CUDA it queues
        the work and returns.
        """
        with torch.inference_mode():
            places = pages.places(tables, start, start + len(tokens), self.device)
            hidden = self.embedding[torch.tensor(tokens, device=self.device)]
            for number, layer in enumerate(self.layers):
                keys, values = pages.layer(number)
                normed = _norm(hidden, layer.attention_norm)
                hidden = hidden + self._attention(layer, normed, start, places[pages.group_of(number)], keys, values)
                gate, up = (_norm(hidden, layer.mlp_norm) @ layer.gate_up).chunk(2, dim=-1)
                hidden = hidden + (functional.silu(gate) * up) @ layer.down
            return _norm(hidden[-1], self.final_norm) @ self.unembedding

    def _attention(self, layer: Layer, x: Tensor, start: int, place: Place, keys: Tensor, values: Tensor) -> Tensor:
        config = self.config
        count = x.shape[0]
        kv, query = layer.kv_heads * config.head_size, config.heads * config.head_size
        q, k, v = torch.split(x @ layer.query_key_value, [query, kv, kv], dim=-1)
        q = self._rotate(q.view(count, config.heads, config.head_size), start)
        k = self._rotate(k.view(count, layer.kv_heads, config.head_size), start)
        place.write(keys, k)
        place.write(values, v.view(count, layer.kv_heads, config.head_size))
        attended = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            place.read(keys).unsqueeze(0),
            place.read(values).unsqueeze(0),
            attn_mask=place.mask,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).reshape(count, query) @ layer.attention_out

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        cos, sin = (table[start : start + x.shape[0]].unsqueeze(1) for table in (self._cos, self._sin))
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _random(generator: torch.Generator, inputs: int, outputs: int) -> Tensor:
    return torch.randn(inputs, outputs, generator=generator).div_(math.sqrt(inputs))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _EPSILON) * weight
