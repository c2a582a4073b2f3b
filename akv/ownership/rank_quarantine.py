"""Pages that given-up store calls of some rank touch: who above the ranks was told of them, and when it hears of their end.

A page index means one page on every rank, so the page is out of use until the last rank's last call on it returned (D2).
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from akv.values.messages import GroupPages, PagesPerGroup, PagesReleased, pages_per_group

#: Request id and incarnation.
Who: TypeAlias = tuple[str, int]


class Kept:
    """What ranks keep back of one incarnation, each page by its group and number."""

    __slots__ = ("calls", "told")

    def __init__(self) -> None:
        #: How many calls of each rank touch it. Of each rank, so that no rank can release what another's call still touches.
        self.calls: dict[tuple[int, int], Counter[int]] = {}
        #: Those that a merged report named, and none released: each is named, and released, once.
        self.told: set[tuple[int, int]] = set()


class RankQuarantine:
    """The pages in quarantine on any rank."""

    def __init__(self) -> None:
        self._kept: dict[Who, Kept] = {}

    @property
    def columns(self) -> list[GroupPages]:
        """These pages, told or not. Nobody knows their blocks any more, so those columns are empty."""
        pages = sorted({page for kept in self._kept.values() for page in kept.calls})
        return [
            GroupPages(number, (), tuple(page for group, page in pages if group == number), ())
            for number in sorted({group for group, _ in pages})
        ]

    def keep(self, rank: int, who: Who, pages: PagesPerGroup) -> None:
        """Given-up calls of this rank touch these pages, a page once for each of them, until `release`."""
        if not any(pages):
            return
        calls = self._kept.setdefault(who, Kept()).calls
        for group, some in enumerate(pages):
            for page in some:
                calls.setdefault((group, page), Counter())[rank] += 1

    def tell(self, who: Who, tables: Iterable[PagesPerGroup]) -> PagesPerGroup:
        """Of the pages in these tables those that are in quarantine at this moment and were not named yet; they are now."""
        kept = self._kept.get(who)
        if kept is None:
            return ()
        named = {
            (group, page) for table in tables for group, pages in enumerate(table) for page in pages
        } & kept.calls.keys() - kept.told
        kept.told |= named
        return _per_group(named, max((len(table) for table in tables), default=0))

    def release(self, rank: int, message: PagesReleased) -> PagesReleased | None:
        """A call of this rank returned. What is to be told of it: the pages named before that no call of any rank touches any
        more, or None. What this rank does not keep back was never told, so nothing is said of it either.
        """
        who = (message.request_id, message.incarnation)
        kept = self._kept.get(who)
        if kept is None:
            return None
        freed: set[tuple[int, int]] = set()
        for page in [(group, page) for group, pages in enumerate(message.pages) for page in pages]:
            ranks = kept.calls.get(page, Counter())
            if ranks[rank]:
                ranks -= Counter([rank])
                if not ranks:
                    del kept.calls[page]
                    freed.add(page)
        told = freed & kept.told
        kept.told -= told
        if not kept.calls:
            del self._kept[who]
        if not told:
            return None
        return PagesReleased(request_id=who[0], incarnation=who[1], pages=_per_group(told, len(message.pages)))

    def clear(self) -> None:
        """Nobody will release them."""
        self._kept.clear()


def _per_group(pages: Iterable[tuple[int, int]], groups: int) -> PagesPerGroup:
    ordered = sorted(pages)
    return pages_per_group([GroupPages(group, (), (page,), ()) for group, page in ordered], groups)
