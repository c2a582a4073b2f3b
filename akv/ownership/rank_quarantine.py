"""Pages that given-up store calls of some rank touch: who above the ranks was told of them, and when it hears of their end.

A page index means one page on every rank, so the page is out of use until the last rank's last call on it returned (D2).
Kept in sets and counters of plain numbers: a call that was given up may touch thousands.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from akv.values.messages import GroupPages, PagesPerGroup, PagesReleased

#: Request id and incarnation.
Who: TypeAlias = tuple[str, int]


class Kept:
    """What ranks keep back of one incarnation."""

    __slots__ = ("calls", "told")

    def __init__(self) -> None:
        #: By rank and layer group: how many calls touch each page. By rank, so that none releases what another's call touches.
        self.calls: dict[tuple[int, int], Counter[int]] = {}
        #: By layer group those that a merged report named and none released: each is named, and released, once.
        self.told: dict[int, set[int]] = {}

    def in_group(self, group: int) -> set[int]:
        """The pages of one layer group that a call of any rank touches."""
        return set[int]().union(*(calls for (_, own), calls in self.calls.items() if own == group))

    def returned(self, rank: int, group: int, pages: Iterable[int]) -> set[int]:
        """Calls of this rank returned. Those of these pages that no call of any rank touches any more."""
        # A difference of counters has none below zero: what is not its own stays.
        left = self.calls.get((rank, group), Counter()) - Counter(pages)
        if left:
            self.calls[rank, group] = left
        else:
            self.calls.pop((rank, group), None)
        return set(pages) - self.in_group(group)


class RankQuarantine:
    """The pages in quarantine on any rank."""

    def __init__(self) -> None:
        self._kept: dict[Who, Kept] = {}

    @property
    def columns(self) -> list[GroupPages]:
        """These pages, told or not. Nobody knows their blocks any more, so those columns are empty."""
        groups = sorted({group for kept in self._kept.values() for _, group in kept.calls})
        tables = [set[int]().union(*(kept.in_group(group) for kept in self._kept.values())) for group in groups]
        return [GroupPages(group, (), tuple(sorted(pages)), ()) for group, pages in zip(groups, tables, strict=True)]

    def keep(self, rank: int, who: Who, pages: PagesPerGroup) -> None:
        """Given-up calls of this rank touch these pages, a page once for each of them, until `release`."""
        for group, some in enumerate(pages):
            if some:
                self._kept.setdefault(who, Kept()).calls.setdefault((rank, group), Counter()).update(some)

    def tell(self, who: Who, tables: Iterable[PagesPerGroup]) -> PagesPerGroup:
        """Of the pages in these tables those that are in quarantine at this moment and were not named yet; they are now."""
        kept = self._kept.get(who)
        if kept is None:
            return ()
        named: list[tuple[int, ...]] = []
        for group, columns in enumerate(zip(*filter(None, tables), strict=True)):
            told = kept.told.setdefault(group, set())
            new = (set[int]().union(*columns) & kept.in_group(group)) - told
            told |= new
            named.append(tuple(sorted(new)))
        return tuple(named) if any(named) else ()

    def release(self, rank: int, message: PagesReleased) -> PagesReleased | None:
        """A call of this rank returned. What is to be told of it: the pages named before that no call of any rank touches any
        more, or None. What this rank does not keep back was never told, so nothing is said of it either.
        """
        who = (message.request_id, message.incarnation)
        kept = self._kept.get(who)
        if kept is None:
            return None
        ended: list[tuple[int, ...]] = []
        for group, pages in enumerate(message.pages):
            told = kept.told.get(group, set())
            free = kept.returned(rank, group, pages) & told
            told -= free
            ended.append(tuple(sorted(free)))
        if not kept.calls:
            del self._kept[who]
        if not any(ended):
            return None
        return PagesReleased(request_id=who[0], incarnation=who[1], pages=tuple(ended))

    def clear(self) -> None:
        """Nobody will release them."""
        self._kept.clear()
