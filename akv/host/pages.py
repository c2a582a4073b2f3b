"""Pages of full attention that are free; and what pages belong to: the block, and with a window group a page by itself."""

import sys
from collections import Counter
from collections.abc import Sequence

from akv.units import PageIndex
from akv.values.scope import Scope

#: Those of blocks in caches without window groups: one for all, since a list for each takes a tenth of a microsecond.
_NO_WINDOWS: "list[WindowPage | None]" = []


class WindowPage:
    """One page of a window group while anybody holds it, or while it rests with a block in the tree."""

    __slots__ = ("barred", "block", "holders", "page", "served")

    def __init__(self, page: PageIndex) -> None:
        self.page = page
        #: Sequences and holds that keep it from being evicted or freed.
        self.holders = 0
        #: The block in the tree that it belongs to; None while only its holders know the page.
        self.block: Block | None = None
        #: Whether a match found it. Then it is likely to be found again, and rests in the tree when a window leaves it behind.
        self.served = False
        #: Names of this page in quarantine: while there are any, it is not to be found in the tree (D2).
        self.barred = 0


class Block:
    """The pages of T consecutive tokens: the unit of reference counting, of reuse and of eviction.

    Its pages of full attention, one in each such layer group, live and die together: a block of which one is gone can serve
    nobody (L2), so there is nothing to gain from counting them one by one. Pages of window groups come and go by themselves.
    """

    __slots__ = ("barred", "children", "holders", "idle_since", "key", "pages", "parent", "windows")

    def __init__(self, pages: tuple[PageIndex, ...], windows: int) -> None:
        """`windows`: the number of window groups."""
        #: The page in each layer group of full attention, in the order of the layout.
        self.pages = pages
        #: The page in each window group, None where there is none to be found. Only blocks in the tree have any.
        self.windows: list[WindowPage | None] = [None] * windows if windows else _NO_WINDOWS
        #: Sequences and holds that keep this block from being evicted or freed.
        self.holders = 0
        #: Names of its pages in quarantine: while there are any, the block is nobody's prefix (D2).
        self.barred = 0
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
    """The free list of every layer group of full attention. Takes a page in each group or none at all (M6)."""

    def __init__(self, page_counts: Sequence[int], windows: int) -> None:
        """`page_counts`: of these groups, possibly none. `windows`: the number of the other ones."""
        # Descending, so that pop() hands out page 0 first: tables in logs and tests read in order.
        self._free = [[PageIndex(page) for page in range(count - 1, -1, -1)] for count in page_counts]
        self._windows = windows
        #: For each group the pages in quarantine, each as often as it was named.
        self._named: list[Counter[PageIndex]] = [Counter() for _ in page_counts]
        #: Those of them that were given back, and would be free.
        self.withheld: list[set[PageIndex]] = [set() for _ in page_counts]

    @property
    def blocks(self) -> int:
        """Blocks that can be made of free pages: the group with the fewest decides. Without such a group there is no bound."""
        return min((len(free) for free in self._free), default=sys.maxsize)

    def pages(self) -> list[list[PageIndex]]:
        """The free pages of each group."""
        return [list(free) for free in self._free]

    def take(self, blocks: int) -> list[Block]:
        """Make so many blocks. The caller has looked at `blocks` first: here are no half-taken blocks."""
        if not self._free:
            return [Block((), self._windows) for _ in range(blocks)]
        if blocks > self.blocks:
            raise IndexError(f"{blocks} blocks are to be taken of {self.blocks}")
        columns = [free[: -blocks - 1 : -1] for free in self._free]
        for free in self._free:
            del free[len(free) - blocks :]
        return [Block(pages, self._windows) for pages in zip(*columns, strict=True)]

    def give(self, blocks: Sequence[Block]) -> None:
        """Take the pages of blocks back, to be handed out next unless they are in quarantine. The blocks are dead."""
        for at, named in enumerate(self._named):
            pages = [block.pages[at] for block in blocks]
            if named:
                self.withheld[at].update(page for page in pages if page in named)
                pages = [page for page in pages if page not in named]
            self._free[at].extend(pages)

    def withhold(self, at: int, page: PageIndex) -> None:
        """A page that somebody has is in quarantine: given back, it will not be free. `at`: which of these groups."""
        self._named[at][page] += 1

    def restore(self, at: int, page: PageIndex) -> None:
        """One naming ended. After the last one the page is free, if it was given back."""
        self._named[at][page] -= 1
        if not self._named[at][page]:
            del self._named[at][page]
            if page in self.withheld[at]:
                self.withheld[at].remove(page)
                self._free[at].append(page)
