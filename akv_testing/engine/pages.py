"""The reference engine's KV pages: the tensors, and how akv sees them."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from akv.values.layout import LayerGroup, Layout, Region
from akv_testing.engine.config import AttentionGroup, EngineConfig
from akv_testing.engine.place import Place

#: Elements of a page as a tensor has them.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Pages:
    """The KV cache of one engine. `layout` and `caches` are what `akv.open_connector()` takes."""

    def __init__(self, config: EngineConfig, *, spare_pages: int = 0) -> None:
        """Allocate on `config.device`, zeroed. `spare_pages`: behind those of the cache, for the computer alone."""
        self._tokens_per_block = config.tokens_per_block
        self._groups = config.groups
        #: For each layer: its group, and where it stands in it.
        self._of_layer = {
            layer: (number, at) for number, group in enumerate(self._groups) for at, layer in enumerate(group.layers)
        }
        #: Per layer group, per region (keys of its first layer, values of its first layer, keys of the next ...): a tensor
        #: (pages, kv_heads, tokens_per_block, head_size).
        self.caches: tuple[tuple[Tensor, ...], ...]
        #: The same with the spare pages.
        self._memory = tuple(
            _allocate(config, group, count + spare_pages)
            for group, count in zip(self._groups, config.page_counts, strict=True)
        )
        self.caches = tuple(
            tuple(memory[:count] for memory in regions)
            for regions, count in zip(self._memory, config.page_counts, strict=True)
        )
        self.layout = layout_of(config)

    def group_of(self, layer: int) -> int:
        """The layer group of a layer."""
        return self._of_layer[layer][0]

    def spare_page(self, group: int) -> int:
        """The first page of a layer group that is no request's."""
        return len(self.caches[group][0])

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of one layer, all pages, spare ones last."""
        group, at = self._of_layer[layer]
        regions = self._memory[group]
        return regions[2 * at], regions[2 * at + 1]

    def places(self, tables: Sequence[Sequence[int]], start: int, end: int, device: torch.device) -> list[Place]:
        """Per layer group, where positions [start, end) lie in a sequence with these page tables."""
        return [
            Place(group, table, start, end, self._tokens_per_block, device)
            for group, table in zip(self._groups, tables, strict=True)
        ]

    def place(self, layer: int, tables: Sequence[Sequence[int]], start: int, end: int, device: torch.device) -> Place:
        """As `places()`, for one layer alone."""
        group = self.group_of(layer)
        return Place(self._groups[group], tables[group], start, end, self._tokens_per_block, device)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages: for each layer group from one page to another, or nothing at all."""
        for regions, (source, target) in zip(self.caches, copies, strict=False):
            for cache in regions:
                cache[target].copy_(cache[source])

    def digests(self, tables: Sequence[Sequence[int]], blocks: int) -> tuple[tuple[bytes, ...], ...]:
        """A digest of the bytes of each page, per group, for the first blocks of a sequence. Equal digests, equal pages.

        Empty where the table has no page: windows give theirs back. Digests and not copies, because runs are compared across
        processes. Blocks the thread: about 1 ms per MiB.
        """
        return tuple(
            tuple(_digest([cache[page] for cache in regions]) if page >= 0 else b"" for page in table[:blocks])
            for regions, table in zip(self.caches, tables, strict=True)
        )


def layout_of(config: EngineConfig) -> Layout:
    """The layout of an engine's pages, as akv names it."""
    return Layout(
        tokens_per_block=config.tokens_per_block,
        groups=tuple(
            LayerGroup(
                layers=group.layers,
                attention="sliding_window" if group.window_tokens else "full",
                window_tokens=group.window_tokens,
                sink_tokens=group.sink_tokens,
                dtype=group.dtype,
                kv_heads=group.kv_heads,
                head_size=config.model.head_size,
                regions=tuple(
                    Region(
                        name=f"layers.{layer}.{kind}",
                        bytes_per_page=(
                            group.bytes_per_element * group.kv_heads * config.tokens_per_block * config.model.head_size
                        ),
                    )
                    for layer in group.layers
                    for kind in ("k", "v")
                ),
            )
            for group in config.groups
        ),
    )


def _allocate(config: EngineConfig, group: AttentionGroup, pages: int) -> tuple[Tensor, ...]:
    shape = (group.kv_heads, config.tokens_per_block, config.model.head_size)
    regions = 2 * len(group.layers)
    dtype = DTYPES[group.dtype]
    if config.contiguous_pages:
        whole = torch.zeros((pages, regions, *shape), dtype=dtype, device=config.device)
        return tuple(whole[:, region] for region in range(regions))
    # In one piece: pages of layers that lie evenly apart move to and from a GPU without a kernel.
    return tuple(torch.zeros((regions, pages, *shape), dtype=dtype, device=config.device).unbind(0))


def _digest(parts: list[Tensor]) -> bytes:
    state = blake2b(digest_size=16)
    for part in parts:
        # As bytes: numpy has no bfloat16.
        state.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.digest()
