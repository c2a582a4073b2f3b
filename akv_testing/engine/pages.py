"""The reference engine's KV pages: the tensors, and how akv sees them."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from akv.values.layout import LayerGroup, Layout, Region
from akv_testing.engine.config import EngineConfig


class Place:
    """Where the KV of one chunk goes, and where everything up to its end is read. Made once per layer group and chunk."""

    def __init__(self, table: Sequence[int], start: int, end: int, tokens_per_block: int, device: torch.device) -> None:
        blocks = -(-end // tokens_per_block)
        self._table = torch.tensor(table[:blocks], device=device)
        positions = torch.arange(start, end, device=device)
        self._pages = self._table[positions // tokens_per_block]
        self._slots = positions % tokens_per_block
        self._end = end

    def write(self, cache: Tensor, chunk: Tensor) -> None:
        """Store (tokens, heads, head_size) of the chunk."""
        cache[self._pages, :, self._slots] = chunk

    def read(self, cache: Tensor) -> Tensor:
        """All of the sequence up to the chunk's end, (heads, tokens, head_size)."""
        pages = cache[self._table].transpose(0, 1)
        return pages.reshape(pages.shape[0], -1, pages.shape[3])[:, : self._end]


class Pages:
    """The KV cache of one engine. `layout` and `caches` are what `akv.open_connector()` takes."""

    def __init__(self, config: EngineConfig) -> None:
        """Allocate on `config.device`, zeroed."""
        model = config.model
        self._tokens_per_block = config.tokens_per_block
        self._layers_per_group = model.layers // config.layer_groups
        shape = (config.pages, model.kv_heads, config.tokens_per_block, model.head_size)
        #: Per layer group, per region (keys of its first layer, values of its first layer, keys of the next ...): a tensor
        #: (pages, kv_heads, tokens_per_block, head_size), float32.
        self.caches: tuple[tuple[Tensor, ...], ...] = tuple(
            tuple(torch.zeros(shape, device=config.device) for _ in range(2 * self._layers_per_group))
            for _ in range(config.layer_groups)
        )
        self.layout = layout_of(config)

    def group_of(self, layer: int) -> int:
        """The layer group of a layer."""
        return layer // self._layers_per_group

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of one layer, all pages."""
        regions = self.caches[self.group_of(layer)]
        first = 2 * (layer % self._layers_per_group)
        return regions[first], regions[first + 1]

    def place(self, table: Sequence[int], start: int, end: int, device: torch.device) -> Place:
        """Where positions [start, end) lie in a sequence with this page table."""
        return Place(table, start, end, self._tokens_per_block, device)

    def digests(self, tables: Sequence[Sequence[int]], blocks: int) -> tuple[tuple[bytes, ...], ...]:
        """A digest of the bytes of each page, per group, for the first blocks of a sequence. Equal digests, equal pages.

        Digests and not copies, because runs are compared across processes. Blocks the thread: about 1 ms per MiB.
        """
        return tuple(
            tuple(_digest([cache[table[block]] for cache in regions]) for block in range(blocks))
            for regions, table in zip(self.caches, tables, strict=True)
        )


def layout_of(config: EngineConfig) -> Layout:
    """The layout of an engine's pages, as akv names it."""
    model = config.model
    per_group = model.layers // config.layer_groups
    nbytes = 4 * model.kv_heads * config.tokens_per_block * model.head_size
    return Layout(
        tokens_per_block=config.tokens_per_block,
        groups=tuple(
            LayerGroup(
                layers=tuple(range(first, first + per_group)),
                dtype="float32",
                kv_heads=model.kv_heads,
                head_size=model.head_size,
                regions=tuple(
                    Region(name=f"layers.{layer}.{kind}", bytes_per_page=nbytes)
                    for layer in range(first, first + per_group)
                    for kind in ("k", "v")
                ),
            )
            for first in range(0, model.layers, per_group)
        ),
    )


def _digest(parts: list[Tensor]) -> bytes:
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(part.cpu().contiguous().numpy().tobytes())
    return state.digest()
