"""The reference engine's model: a small decoder-only transformer whose attention reads and writes pages.

Each sequence is computed by itself, whatever else is in the pass. That costs speed and buys what the tests of akv live on: a
sequence's bits depend on its own tokens and chunk boundaries and on nothing else, so a run with KV from the pool can be
compared with a run without, bit for bit and under any load (Q1). A production engine batches the products and gives that up.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from akv.values.scope import Lora
from akv_testing.engine.config import ModelConfig
from akv_testing.engine.drafter import Drafter
from akv_testing.engine.layers import Layer, LowRank, Rope, norm, random_matrix
from akv_testing.engine.pages import Pages

#: Size of what an adapter adds, next to what the weights give: enough to change what is generated.
_ADAPTER_SCALE = 0.5


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
        self.unembedding = random_matrix(generator, config.hidden, config.vocabulary).to(self.device)
        self.rope = Rope(config, self.device)
        self.drafter: Drafter | None = None
        if config.drafter != "none":
            # Drawn last: a target is the same with a drafter and without.
            self.drafter = Drafter(config, kv_heads.get(config.layers), generator, self.device)
        self._adapters: dict[Lora, list[LowRank]] = {}

    def forward(
        self, tokens: Sequence[int], start: int, tables: Sequence[Sequence[int]], pages: Pages, lora: Lora | None = None
    ) -> Tensor:
        """Compute one chunk: its KV goes to the pages of its positions. Returns the last token's logits, (vocabulary,).

        `tokens` stand at positions [start, start + len(tokens)); the KV before them lies in the pages already. `tables`: per
        layer group, the page of block i at position i, -1 where a window's page is gone. Blocks the thread; on CUDA it queues
        the work and returns.
        """
        with torch.inference_mode():
            return self.logits(self.hidden_states(tokens, start, tables, pages, lora)[-1])

    def hidden_states(
        self, tokens: Sequence[int], start: int, tables: Sequence[Sequence[int]], pages: Pages, lora: Lora | None = None
    ) -> Tensor:
        """As `forward()`, and returns what the last layer gives for each token, (tokens, hidden)."""
        with torch.inference_mode():
            places = pages.places(tables, start, start + len(tokens), self.device)
            adapters = self._adapters_of(lora)
            hidden = self.embed(tokens)
            for number, layer in enumerate(self.layers):
                keys, values = pages.layer(number)
                place = places[pages.group_of(number)]
                adapter = adapters[number] if adapters else None
                hidden = hidden + layer.attend(hidden, place, keys, values, self.rope, adapter)
                hidden = hidden + layer.transform(hidden)
            return hidden

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """(tokens, hidden). Ids outside the vocabulary, where the engine takes them, look like others."""
        return self.embedding[torch.tensor([token % self.config.vocabulary for token in tokens], device=self.device)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits for what the last layer gave: (hidden,) or (tokens, hidden)."""
        return norm(hidden, self.final_norm) @ self.unembedding

    def _adapters_of(self, lora: Lora | None) -> list[LowRank]:
        """An adapter's weights for each layer. They follow from its id and its revision, so that every process has them."""
        if lora is None:
            return []
        if lora not in self._adapters:
            name = f"{self.config.seed}/{lora.id}/{lora.revision}"
            seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
            generator = torch.Generator().manual_seed(seed)
            self._adapters[lora] = [self._adapter(layer, generator) for layer in self.layers]
        return self._adapters[lora]

    def _adapter(self, layer: Layer, generator: torch.Generator) -> LowRank:
        inputs, outputs = layer.query_key_value.shape
        down = random_matrix(generator, inputs, self.config.adapter_rank)
        up = random_matrix(generator, self.config.adapter_rank, outputs).mul_(_ADAPTER_SCALE)
        return LowRank(down.to(self.device), up.to(self.device))
