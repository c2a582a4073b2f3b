"""An engine's book of pages in quarantine: it reuses every page as soon as it is told that it may, overwriting it first."""

from collections.abc import Callable

from akv.connector import Connector
from akv.values.messages import PagesPerGroup, PagesReleased

PageTable = list[list[int]]


class QuarantineBook:
    """`groups`: layer groups. `free`: the server's own release of pages, which poisons them."""

    def __init__(self, groups: int, free: Callable[[PageTable], None]) -> None:
        self._free = free
        #: Pages that were named, per group, and have not been released.
        self.pages: list[set[int]] = [set() for _ in range(groups)]
        #: How many times pages were named.
        self.named = 0

    def name(self, pages: PagesPerGroup) -> None:
        """These stay out of use. Raises AssertionError for a page that is named twice."""
        self.named += bool(pages)
        for group, some in enumerate(pages):
            if not self.pages[group].isdisjoint(some):
                raise AssertionError("a page is named once until it is released")
            self.pages[group].update(some)

    def fetch(self, kv: Connector) -> None:
        """Poll, as a batching loop does. Raises AssertionError for a release of what was not named."""
        for done in kv.completed():
            if isinstance(done, PagesReleased):
                for group, pages in enumerate(done.pages):
                    if not self.pages[group].issuperset(pages):
                        raise AssertionError("only what was named is released")
                    self.pages[group].difference_update(pages)
                self._free([list(pages) for pages in done.pages])
            else:
                self.name(done.quarantined)

    def give_back(self, table: PageTable) -> None:
        """Overwrite and reuse all pages of a request that has closed, but for those in quarantine. Empties the table."""
        held = [[page for page in pages if page not in self.pages[group]] for group, pages in enumerate(table)]
        table[:] = [[] for _ in table]
        self._free(held)
