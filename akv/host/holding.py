"""Who holds which block, and what becomes of a block that nobody holds: the one place where pages change hands."""

from collections.abc import Iterable, Sequence

from akv.host.booking import WindowRule
from akv.host.pages import Block, FreePages
from akv.host.tree import BlockTree
from akv.host.window_pool import WindowPool, WindowTable
from akv.units import PageIndex


class Holdings:
    """Every page is in one of three places: free, in a block that rests in the tree, or in a block that somebody holds."""

    def __init__(self, page_counts: Sequence[int], rules: Sequence[WindowRule] = ()) -> None:
        """`page_counts`: of every layer group; `rules`: of those that are window groups."""
        #: The window groups, in the order of the layout.
        self.pools = [WindowPool(rule, at, page_counts[rule.group]) for at, rule in enumerate(rules)]
        #: The layer groups of full attention, in the order of the layout.
        self.full = [group for group in range(len(page_counts)) if group not in {rule.group for rule in rules}]
        self.free = FreePages([page_counts[group] for group in self.full], len(self.pools))
        self.tree = BlockTree()
        self.page_counts = tuple(page_counts)
        #: The blocks and window pages of each live holder.
        self.held: dict[int, tuple[list[Block], list[WindowTable]]] = {}
        #: Blocks that each holder may still take, whatever others do (D7). Counts, not pages: those change hands meanwhile.
        self.rests: dict[int, int] = {}
        #: All rests together. Never more than `available`: that is what makes them worth anything.
        self.booked = 0
        self._next = 0

    @property
    def available(self) -> int:
        """Blocks that can be had now: free, or idle in the tree."""
        return self.free.blocks + self.tree.idle

    @property
    def unbooked(self) -> int:
        """Of these, the blocks that are nobody's rest."""
        return self.available - self.booked

    def free_pages(self) -> tuple[tuple[PageIndex, ...], ...]:
        """The free pages of every layer group."""
        by_group = dict(zip(self.full, self.free.pages(), strict=True)) | {pool.rule.group: pool.free for pool in self.pools}
        return tuple(tuple(by_group[group]) for group in range(len(self.page_counts)))

    def register(self, blocks: list[Block], tables: list[WindowTable]) -> int:
        """Note that somebody holds these blocks (each once, each after the one it follows) and tables; returns the holder."""
        self._next += 1
        self.held[self._next] = blocks, tables
        return self._next

    def is_live(self, holder: int) -> bool:
        """Whether that holder has not let go."""
        return holder in self.held

    def release(self, holder: int) -> None:
        """End a holder: let go of all its blocks and window pages. Idempotent."""
        blocks, tables = self.held.pop(holder, ([], []))
        self.book(holder, 0)
        for table in tables:
            table.release()
        self.let_go(blocks)

    def book(self, holder: int, blocks: int) -> None:
        """Have `blocks` as a holder's rest from here on; the caller has looked that so many are unbooked."""
        self.booked += blocks - self.rests.pop(holder, 0)
        if blocks:
            self.rests[holder] = blocks

    def take(self, blocks: int, *, own: int = 0, beside: int = 0) -> list[Block] | None:
        """New blocks, held once, from free pages, then from evicted ones; None, and nothing changed, if there are too few.

        What others booked does not count as there. `own`: how many of them are the caller's rest, which it books less of next.
        `beside`: how many more there have to be, for the caller to book.
        """
        # Looked at before anything is evicted: an admission that fails must not have emptied the cache.
        if blocks + beside - own > self.unbooked:
            return None
        missing = blocks - self.free.blocks
        if missing > 0:
            self.evict(missing)
        taken = self.free.take(blocks)
        for block in taken:
            block.holders = 1
        return taken

    def evict(self, blocks: int) -> None:
        """Free the pages of so many idle blocks; the caller has looked that there are as many."""
        evicted = self.tree.evict(blocks)
        for pool in self.pools:
            for block in evicted:
                page = block.windows[pool.position]
                if page is not None:  # idle as its block is: whoever holds a page in the tree holds the block too
                    pool.forget(page)
        self.free.give(evicted)

    def hold(self, blocks: Iterable[Block]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            if block.cached and not block.holders:
                self.tree.woken(block)
            block.holders += 1

    def let_go(self, blocks: Sequence[Block]) -> None:
        """Take a holder from each block: a computed one rests in the tree, any other is free."""
        dead: list[Block] = []
        for block in blocks:
            block.holders -= 1
            if block.holders:
                continue
            if block.cached:
                self.tree.rested(block)
            else:
                dead.append(block)
        self.free.give(dead)
        if not self.full:
            self.tree.prune()
