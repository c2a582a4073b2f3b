"""Which of the engine's pages are in the connector's hands: filled by a load, read by saves, or in quarantine.

Kept per layer group, in sets and counters of plain numbers: a reservation may have tens of thousands of pages, and is checked
on the engine's loop.
"""

from collections import Counter
from collections.abc import Iterable

from akv.values.messages import GroupPages, PagesPerGroup, PagesReleased


class Quarantine:
    """Pages of one incarnation that a store call still touches although nobody waits for it (M3)."""

    def __init__(self, groups: int) -> None:
        #: With the number of calls that touch each: a block may be saved and asked for again at the same time (S8).
        self.calls: list[Counter[int]] = [Counter() for _ in range(groups)]
        #: Those that the engine was told of: it keeps them out of use, and waits for their release.
        self.told: list[set[int]] = [set() for _ in range(groups)]


class PageBook:
    """The pages of one server's requests."""

    def __init__(self, groups: int) -> None:
        self._loading: list[set[int]] = [set() for _ in range(groups)]
        #: A page that several requests share may be read for each of them.
        self._saving: list[Counter[int]] = [Counter() for _ in range(groups)]
        #: By request id and incarnation.
        self._quarantine: dict[tuple[str, int], Quarantine] = {}
        self._quarantined: list[Counter[int]] = [Counter() for _ in range(groups)]

    @property
    def loading(self) -> set[tuple[int, int]]:
        """(group, page) of each page that a load fills."""
        return {(group, page) for group, pages in enumerate(self._loading) for page in pages}

    @property
    def saving(self) -> Counter[tuple[int, int]]:
        """(group, page) of each page that saves read, with their number."""
        return Counter({(group, page): n for group, pages in enumerate(self._saving) for page, n in pages.items()})

    @property
    def quarantined(self) -> Counter[tuple[int, int]]:
        """(group, page) of each page in quarantine, with the number of incarnations that keep it there."""
        return Counter({(group, page): n for group, pages in enumerate(self._quarantined) for page, n in pages.items()})

    def in_use(self, groups: Iterable[GroupPages]) -> tuple[int, int, int, str] | None:
        """The first of these pages that a load fills, a save reads or a given-up call touches: its block, group, number, and
        which of these it is.
        """
        for columns in groups:
            users = (
                (self._loading[columns.group], "another load fills"),
                (self._saving[columns.group].keys(), "a save reads"),
                (self._quarantined[columns.group].keys(), "a store call that was given up still touches"),
            )
            if all(pages.isdisjoint(columns.pages) for pages, _ in users):
                continue
            return next(
                (block, columns.group, page, what)
                for block, page in zip(columns.blocks, columns.pages, strict=True)
                for pages, what in users
                if page in pages
            )
        return None

    def is_filled(self, group: int, page: int) -> bool:
        """Whether a load fills this page, or a call that was given up may still."""
        return page in self._loading[group] or page in self._quarantined[group]

    def quarantine(self, who: tuple[str, int], pages: PagesPerGroup) -> None:
        """Given-up calls of this incarnation touch these pages, a page once for each of them, until `release`."""
        if not pages:
            return
        kept = self._quarantine.setdefault(who, Quarantine(len(self._quarantined)))
        for group, some in enumerate(pages):
            self._quarantined[group].update(set(some) - kept.calls[group].keys())
            kept.calls[group].update(some)

    def tell(self, who: tuple[str, int]) -> PagesPerGroup:
        """Name to the engine what of this incarnation is in quarantine now: each page once, so that it is released once."""
        kept = self._quarantine.get(who)
        if kept is None:
            return ()
        named = tuple(tuple(sorted(calls.keys() - told)) for calls, told in zip(kept.calls, kept.told, strict=True))
        for told, pages in zip(kept.told, named, strict=True):
            told.update(pages)
        return named if any(named) else ()

    def release(self, message: PagesReleased) -> PagesReleased | None:
        """A call returned. What the engine has to hear of it: the pages named to it that no other call touches, or None."""
        who = (message.request_id, message.incarnation)
        kept = self._quarantine[who]
        named: list[tuple[int, ...]] = []
        for group, pages in enumerate(message.pages):
            kept.calls[group].subtract(pages)
            free = [page for page in pages if not kept.calls[group][page]]
            for page in free:
                del kept.calls[group][page]
            self._quarantined[group] -= Counter(free)
            named.append(tuple(page for page in free if page in kept.told[group]))
            kept.told[group].difference_update(free)
        if not any(kept.calls):
            del self._quarantine[who]
        if not any(named):
            return None
        return PagesReleased(request_id=who[0], incarnation=who[1], pages=tuple(named))

    def lend(self, groups: Iterable[GroupPages]) -> None:
        """A load takes pages that are not in use."""
        for columns in groups:
            self._loading[columns.group].update(columns.pages)

    def returned(self, groups: Iterable[GroupPages]) -> None:
        """The load ended."""
        for columns in groups:
            self._loading[columns.group].difference_update(columns.pages)

    def pin(self, groups: Iterable[GroupPages]) -> None:
        """A save reads pages."""
        for columns in groups:
            self._saving[columns.group].update(columns.pages)

    def unpin(self, groups: Iterable[GroupPages]) -> None:
        """The save ended, or nothing of it touches the pages any more."""
        for columns in groups:
            saving = self._saving[columns.group]
            for page in columns.pages:
                saving[page] -= 1
                if not saving[page]:
                    del saving[page]
