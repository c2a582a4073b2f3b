"""How many pages came which way, of one load and of all (R1)."""

from collections import Counter
from collections.abc import Mapping

from akv.plan.direct import Staged
from akv.values.messages import LoadResult


class ReadPaths:
    """A count. Adding to it never fails."""

    __slots__ = ("direct_bytes", "direct_pages", "staged", "staged_bytes")

    def __init__(self) -> None:
        self.direct_pages = 0
        self.direct_bytes = 0
        #: Pages, and their bytes, by the reason for which they were staged.
        self.staged: Counter[str] = Counter()
        self.staged_bytes: Counter[str] = Counter()

    def read_directly(self, pages: int, page_bytes: int) -> None:
        """Pages were copied straight from a segment."""
        self.direct_pages += pages
        self.direct_bytes += pages * page_bytes

    def are_staged(self, reasons: Mapping[Staged, int], page_bytes: int) -> None:
        """Pages go through the store's client."""
        for reason, pages in reasons.items():
            self.staged[reason] += pages
            self.staged_bytes[reason] += pages * page_bytes

    def add(self, load: LoadResult) -> None:
        """Count what a load counted."""
        self.direct_pages += load.direct_pages
        self.direct_bytes += load.direct_bytes
        self.staged.update(load.staged)
        self.staged_bytes.update(load.staged_bytes)


def in_order(by_reason: Mapping[str, int]) -> dict[str, int]:
    """A count by reason, as events and messages carry it."""
    return {str(reason): count for reason, count in sorted(by_reason.items())}
