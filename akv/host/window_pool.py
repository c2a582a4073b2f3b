"""The pages of one window group: free, in somebody's hands, or resting with a block in the tree until they are needed.

They live and die apart from their block: its full-attention pages are read as long as anything behind it is, while a window
moves on. So each page has holders of its own, and an order of eviction of its own.
"""

from collections import OrderedDict

from akv.host.booking import WindowRule
from akv.host.pages import Block, WindowPage
from akv.units import PageIndex


class WindowPool:
    """Which page of a window group is whose, and how many are booked.

    Invariant that makes advancing safe: each holder has at most as many pages as it booked, and nobody is admitted unless all
    bookings together are at most what there is. A page that two hold counts twice, so whoever has fewer than it booked finds
    one free or idle.
    """

    def __init__(self, rule: WindowRule, position: int, count: int) -> None:
        """`position`: where this group's page stands in `Block.windows`. `count`: pages in all."""
        self.rule = rule
        self.position = position
        self.count = count
        #: The free list. Descending, so that page 0 is handed out first.
        self.free = [PageIndex(page) for page in range(count - 1, -1, -1)]
        #: Pages in the tree that nobody holds, the least recently used first.
        self.idle: OrderedDict[WindowPage, None] = OrderedDict()
        #: Pages that holders may have at one time, all together.
        self.booked = 0

    @property
    def unbooked(self) -> int:
        """Pages that an admission can book at this moment."""
        return max(0, self.count - self.booked)  # holds of live sequences book the same pages again

    def take(self) -> WindowPage:
        """A page that nobody holds, held once. There is one for whoever has fewer than it booked."""
        if self.free:
            taken = WindowPage(self.free.pop())
        elif self.idle:
            evicted, _ = self.idle.popitem(last=False)
            self._detach(evicted)
            taken = WindowPage(evicted.page)
        else:
            raise AssertionError(f"layer group {self.rule.group} has no page left for a sequence that booked one")
        taken.holders = 1
        return taken

    def hold(self, page: WindowPage) -> None:
        """Add a holder to a page that is held, or rests in the tree."""
        if not page.holders:
            del self.idle[page]
        page.holders += 1

    def let_go(self, page: WindowPage, *, keep: bool) -> None:
        """Take a holder away. The last one leaves the page free; or idle, if it stands in the tree and `keep`."""
        page.holders -= 1
        if page.holders:
            return
        if keep and page.block is not None:
            self.idle[page] = None
        else:
            self._detach(page)
            self.free.append(page.page)

    def attach(self, page: WindowPage, block: Block) -> None:
        """Let a block in the tree, which has no page of this group, have this one: later sequences find it there."""
        page.block = block
        block.windows[self.position] = page

    def bar(self, page: WindowPage) -> None:
        """Let nobody find a held page any more."""
        self._detach(page)

    def forget(self, page: WindowPage) -> None:
        """Free an idle page, whose block leaves the tree or whose content is not wanted any more."""
        del self.idle[page]
        self._detach(page)
        self.free.append(page.page)

    def forget_idle(self) -> None:
        """Free every idle page."""
        for page in list(self.idle):
            self.forget(page)

    def _detach(self, page: WindowPage) -> None:
        if page.block is not None:
            page.block.windows[self.position] = None
            page.block = None


class WindowTable:
    """What one holder has of a window group: pages by block, at most as many as it booked."""

    def __init__(self, pool: WindowPool, booked: int) -> None:
        """Books; the caller has looked that so many are unbooked, or has the pages already."""
        self.pool = pool
        self.pages: dict[int, WindowPage] = {}
        self.booked = 0
        #: Whether no page is taken any more, because a hold shares those that there are.
        self.frozen = False
        self.book(booked)

    def book(self, pages: int) -> None:
        """Have `pages` booked in all, no fewer than before."""
        self.pool.booked += pages - self.booked
        self.booked = pages

    def share(self, blocks: range, matched: list[Block]) -> None:
        """Hold the pages that rest with these blocks of a match."""
        for number in blocks:
            page = matched[number].windows[self.pool.position]
            if page is None:
                raise AssertionError(f"block {number} was matched without its page of layer group {self.pool.rule.group}")
            self.pool.hold(page)
            page.served = True
            self.pages[number] = page

    def lacking(self, blocks: range) -> list[int]:
        """Those of the blocks that have no page here."""
        return [number for number in blocks if number not in self.pages]

    def fill(self, blocks: range) -> None:
        """Take a page for each of the blocks that has none."""
        lacking = self.lacking(blocks)
        if len(self.pages) + len(lacking) > self.booked:
            raise AssertionError(
                f"layer group {self.pool.rule.group}: {len(self.pages)} pages and {len(lacking)} more, {self.booked} booked"
            )
        for number in lacking:
            self.pages[number] = self.pool.take()

    def retire(self, blocks: range) -> None:
        """Give back the pages of blocks that the window has left. Free at once, but for pages that a match proved of use."""
        # From the few pages there are, not from the blocks: a window leaves a long sequence behind block by block.
        for number in [number for number in self.pages if number in blocks]:
            page = self.pages.pop(number)
            self.pool.let_go(page, keep=page.served)
        self._book_no_more()

    def rewind(self, block: int) -> None:
        """Give back the pages from a block on: what is in them is no KV, or will be computed again."""
        for number in [number for number in self.pages if number >= block]:
            self.pool.let_go(self.pages.pop(number), keep=False)
        self._book_no_more()

    def offer(self, number: int, block: Block) -> None:
        """Let later sequences find our page of a block with the block in the tree, unless that has one."""
        page = self.pages.get(number)
        if page is not None and page.block is None and not page.barred and block.windows[self.pool.position] is None:
            self.pool.attach(page, block)

    def copy(self) -> "WindowTable":
        """A second holder of the same pages, which books just these. Neither of the two takes any more.

        Else a page that this one gives back, and the other still has, would count as there for the next one that it takes.
        """
        self.frozen = True
        self._book_no_more()
        twin = WindowTable(self.pool, len(self.pages))
        for number, page in self.pages.items():
            self.pool.hold(page)
            twin.pages[number] = page
        return twin

    def split(self, number: int) -> "WindowTable":
        """Hand one block's page over to a holder of its own; nobody finds it in the tree. The rest is released next."""
        page = self.pages.pop(number)
        self.pool.bar(page)
        one = WindowTable(self.pool, 1)
        one.pages[number] = page
        return one

    def release(self) -> None:
        """Give everything back: pages in the tree rest there, the others are free."""
        # Sinks last, so that they are evicted last: without them no end of the sequence can be resumed at.
        sinks = self.pool.rule.stale(self.pool.rule.sink_tokens).start
        for number in sorted(self.pages, key=lambda number: (number < sinks, number)):
            self.pool.let_go(self.pages.pop(number), keep=True)
        self.book(0)

    def _book_no_more(self) -> None:
        if self.frozen:
            self.book(len(self.pages))
