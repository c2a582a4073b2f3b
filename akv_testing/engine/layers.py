"""What one layer computes: attention over pages, and the SwiGLU behind it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from akv_testing.engine.config import ModelConfig
from akv_testing.engine.place import Place

#: Base of the RoPE frequencies, as most published models have it.
_ROPE_BASE = 10_000.0
#: Keeps RMSNorm finite for a vector of zeros.
_EPSILON = 1e-6


class LowRank(NamedTuple):
    """What an adapter adds to a layer's queries, keys and values: `x @ down @ up`."""

    #: (hidden, rank)
    down: Tensor
    #: (rank, query + 2 * kv)
    up: Tensor


class Rope:
    """Rotary position embedding, as a table of angles."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies = _ROPE_BASE ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
        angles = torch.outer(torch.arange(config.max_tokens, dtype=torch.float64), frequencies)
        self._cos = angles.cos().float().to(device)
        self._sin = angles.sin().float().to(device)

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Turn (tokens, heads, head_size) of the positions from `start` on."""
        cos, sin = (table[start : start + x.shape[0]].unsqueeze(1) for table in (self._cos, self._sin))
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention:
    """The weights of attention. Matrices are (inputs, outputs)."""

    def __init__(self, config: ModelConfig, kv_heads: int, generator: torch.Generator, device: torch.device) -> None:
        hidden, kv, query = config.hidden, kv_heads * config.head_size, config.heads * config.head_size
        self._heads, self._head_size = config.heads, config.head_size
        self.kv_heads = kv_heads
        self.attention_norm = torch.ones(hidden, device=device)
        self.query_key_value = random_matrix(generator, hidden, query + 2 * kv).to(device)
        self.attention_out = random_matrix(generator, query, hidden).to(device)

    def attend(
        self, hidden: Tensor, place: Place, keys: Tensor, values: Tensor, rope: Rope, adapter: LowRank | None = None
    ) -> Tensor:
        """What attention adds to (tokens, hidden); their keys and values go to their pages."""
        x = norm(hidden, self.attention_norm)
        count, size = x.shape[0], self._head_size
        kv, query = self.kv_heads * size, self._heads * size
        projected = x @ self.query_key_value
        if adapter is not None:
            projected = projected + x @ adapter.down @ adapter.up
        q, k, v = torch.split(projected, [query, kv, kv], dim=-1)
        q = rope.rotate(q.view(count, self._heads, size), place.start)
        k = rope.rotate(k.view(count, self.kv_heads, size), place.start)
        place.write(keys, k)
        place.write(values, v.view(count, self.kv_heads, size))
        attended = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            place.read(keys).unsqueeze(0),
            place.read(values).unsqueeze(0),
            attn_mask=place.mask,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).reshape(count, query) @ self.attention_out


class Layer(Attention):
    """The weights of one layer."""

    def __init__(self, config: ModelConfig, kv_heads: int, generator: torch.Generator, device: torch.device) -> None:
        super().__init__(config, kv_heads, generator, device)
        self.mlp_norm = torch.ones(config.hidden, device=device)
        self.gate_up = random_matrix(generator, config.hidden, 2 * config.intermediate).to(device)
        self.down = random_matrix(generator, config.intermediate, config.hidden).to(device)

    def transform(self, hidden: Tensor) -> Tensor:
        """What the SwiGLU adds to (tokens, hidden)."""
        gate, up = (norm(hidden, self.mlp_norm) @ self.gate_up).chunk(2, dim=-1)
        return (functional.silu(gate) * up) @ self.down


def random_matrix(generator: torch.Generator, inputs: int, outputs: int) -> Tensor:
    """Weights that keep the size of what they are applied to."""
    return torch.randn(inputs, outputs, generator=generator).div_(math.sqrt(inputs))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _EPSILON) * weight
