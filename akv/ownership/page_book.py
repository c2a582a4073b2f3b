"""Which of the engine's pages are in the connector's hands: filled by a load, or read by saves.

Kept per layer group, in sets and counters of plain numbers: a reservation may have tens of thousands of pages, and is checked
on the engine's loop.
"""

from collections import Counter
from collections.abc import Iterable

from akv.values.messages import GroupPages


class PageBook:
    """The pages of one server's requests."""

    def __init__(self, groups: int) -> None:
        self._loading: list[set[int]] = [set() for _ in range(groups)]
        #: A page that several requests share may be read for each of them.
        self._saving: list[Counter[int]] = [Counter() for _ in range(groups)]

    @property
    def loading(self) -> set[tuple[int, int]]:
        """(group, page) of each page that a load fills."""
        return {(group, page) for group, pages in enumerate(self._loading) for page in pages}

    @property
    def saving(self) -> Counter[tuple[int, int]]:
        """(group, page) of each page that saves read, with their number."""
        return Counter({(group, page): n for group, pages in enumerate(self._saving) for page, n in pages.items()})

    def in_use(self, groups: Iterable[GroupPages]) -> tuple[int, int, int, str] | None:
        """The first of these pages that a load fills or a save reads: its block, group, number, and which of the two."""
        for columns in groups:
            loading, saving = self._loading[columns.group], self._saving[columns.group]
            if loading.isdisjoint(columns.pages) and saving.keys().isdisjoint(columns.pages):
                continue
            for block, page in zip(columns.blocks, columns.pages, strict=True):
                if page in loading or page in saving:
                    return block, columns.group, page, "another load fills" if page in loading else "a save reads"
        return None

    def is_filled(self, group: int, page: int) -> bool:
        """Whether a load fills this page."""
        return page in self._loading[group]

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
