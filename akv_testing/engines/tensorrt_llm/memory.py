"""The stand-in's KV cache: real memory, and a page's right content worked out from the tokens alone, with no help of akv's.

A page of block b in group g holds what a model with fixed weights would have written there: bytes that follow from everything
that the block's KV depends on. A free page is poisoned, so whoever reads or stores it afterwards is seen.
"""

from collections.abc import Sequence
from hashlib import shake_128

import numpy as np

from akv_testing.engines.tensorrt_llm.interface import (
    BAD_PAGE_INDEX,
    BufferRef,
    CacheLayout,
    CacheRegion,
    LayerGroupLayout,
)

#: What free pages hold.
POISON = 0xAA
#: Bytes of a page's two regions, and of what lies between pages and belongs to nobody.
REGION_BYTES, GAP_BYTES = 16, 8


class GroupShape:
    """One layer group: `window` tokens, None for full attention, and sinks."""

    def __init__(self, window: int | None = None, sinks: int = 0) -> None:
        self.window = window
        self.sinks = sinks


class StandInCache:
    """Pages of some layer groups. Page i of a group is the same page in each of its regions."""

    def __init__(self, groups: Sequence[GroupShape], *, tokens_per_block: int, pages: int) -> None:
        self.groups = tuple(groups)
        #: Pages of each group.
        self.pages = pages
        self.tokens_per_block = tokens_per_block
        stride = 2 * REGION_BYTES + GAP_BYTES
        self._memory = [np.full((pages, stride), POISON, dtype=np.uint8) for _ in groups]
        self.free: list[list[int]] = [list(range(pages)) for _ in groups]

    @property
    def page_bytes(self) -> int:
        """Of one page in all its regions."""
        return 2 * REGION_BYTES

    def layout(self) -> CacheLayout:
        """The description that a connector gets."""
        groups = []
        for number, (shape, memory) in enumerate(zip(self.groups, self._memory, strict=True)):
            base, stride = int(memory.ctypes.data), int(memory.strides[0])
            regions = tuple(
                CacheRegion(base + part * REGION_BYTES, REGION_BYTES, stride, self.pages, (BufferRef(number, role),))
                for part, role in enumerate(("key", "value"))
            )
            groups.append(LayerGroupLayout(number, (number,), shape.window, shape.sinks, regions))
        return CacheLayout(self.tokens_per_block, "bfloat16", tuple(groups))

    def read(self, group: int, page: int) -> bytes:
        """What a page holds."""
        return self._memory[group][page, : self.page_bytes].tobytes()

    def write(self, group: int, page: int, content: bytes) -> None:
        """What a kernel does."""
        self._memory[group][page, : self.page_bytes] = np.frombuffer(content, dtype=np.uint8)

    def take(self, group: int) -> int:
        """A free page, the one that was freed last. Raises IndexError if there is none."""
        return self.free[group].pop()

    def give_back(self, group: int, page: int) -> None:
        """Free a page, and poison it."""
        if page == BAD_PAGE_INDEX:
            return
        if page in self.free[group]:
            raise AssertionError(f"page {page} of group {group} is freed twice")
        self.write(group, page, bytes([POISON]) * self.page_bytes)
        self.free[group].append(page)

    def content(self, identity: bytes, tokens: Sequence[int], group: int) -> bytes:
        """What a page has to hold: `tokens` are all that its KV depends on, `identity` all else."""
        seen = np.asarray(tokens, dtype=np.int64).tobytes()
        return shake_128(bytes([group]) + identity + seen).digest(self.page_bytes)

    def kept(self, group: int, history: int) -> list[range]:
        """The blocks of a group that a request with so many tokens of history reads or may still read."""
        size, shape = self.tokens_per_block, self.groups[group]
        blocks = -(-history // size)
        if shape.window is None:
            return [range(blocks)]
        sinks = min(blocks, -(-shape.sinks // size))
        return [range(sinks), range(max(sinks, (history + 1 - shape.window) // size), blocks)]

    def is_kept(self, group: int, history: int, block: int) -> bool:
        """Whether a block is among them."""
        return any(block in blocks for blocks in self.kept(group, history))
