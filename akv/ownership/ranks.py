"""Stub: replaced by the real one."""

from collections.abc import Iterable

from akv.values.messages import GroupPages, LoadOrder, PagesUnread, PassReport, SaveOrder, Withdrawal


class RankLedger:
    """What all ranks were told."""

    def __init__(self, world: int) -> None:
        self.touched: list[GroupPages] = []
        self.quarantined: list[GroupPages] = []

    def load_sent(self, order: LoadOrder) -> None:
        """Sent."""

    def saves_sent(self, orders: Iterable[SaveOrder]) -> None:
        """Sent."""

    def withdrawn(self, message: Withdrawal) -> PagesUnread | None:
        """Withdrawn."""

    def reported(self, rank: int, report: PassReport) -> PassReport:
        """Reported."""
        return report
