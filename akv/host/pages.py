"""Which pages are free, in every layer group, and the block that is made of one page in each."""

from collections.abc import Sequence

from akv.units import PageIndex
from akv.values.scope import Scope


class Block:
    """The pages of T consecutive tokens, one in each layer group. The unit of reference counting, of reuse and of eviction.

    A block's pages live and die together: a block of which one group's page is gone can serve nobody (L2), so there is
    nothing to gain from counting pages one by one.
    """

    __slots__ = ("children", "holders", "idle_since", "key", "pages", "parent")

    def __init__(self, pages: tuple[PageIndex, ...]) -> None:
        #: The page in each layer group, in the order of the layout.
        self.pages = pages
        #: Sequences and holds that keep this block from being evicted or freed.
        self.holders = 0
        #: The tokens of the block, encoded; empty until the block stands in the tree.
        self.key = b""
        #: The block before it, or the root of its scope; None while only its holders know the block.
        self.parent: Node | None = None
        self.children: dict[bytes, Block] = {}
        #: The tree's tick at which the last holder let go. Orders eviction; meaningless while held.
        self.idle_since = 0

    @property
    def cached(self) -> bool:
        """Whether the block stands in the tree, where later sequences find it."""
        return self.parent is not None


class Root:
    """Where the blocks of one scope begin. Holds no page."""

    __slots__ = ("children", "scope")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.children: dict[bytes, Block] = {}


Node = Block | Root


class FreePages:
    """The free list of every layer group. Takes a page in each group or none at all (M6)."""

    def __init__(self, page_counts: Sequence[int]) -> None:
        # Descending, so that pop() hands out page 0 first: tables in logs and tests read in order.
        self._free = [[PageIndex(page) for page in range(count - 1, -1, -1)] for count in page_counts]

    @property
    def blocks(self) -> int:
        """Blocks that can be made of free pages: the group with the fewest decides."""
        return min(len(free) for free in self._free)

    def counts(self) -> tuple[int, ...]:
        """Free pages in each group."""
        return tuple(len(free) for free in self._free)

    def pages(self) -> list[list[PageIndex]]:
        """The free pages of each group, for consistency checks."""
        return [list(free) for free in self._free]

    def take(self, blocks: int) -> list[Block]:
        """Make so many blocks. The caller has looked at `blocks` first: here are no half-taken blocks."""
        return [Block(tuple(free.pop() for free in self._free)) for _ in range(blocks)]

    def give(self, block: Block) -> None:
        """Take a block's pages back. The block is dead."""
        for free, page in zip(self._free, block.pages, strict=True):
            free.append(page)
