"""The backlog of saves, in the scheduler half: what was handed over and has not ended, in bytes and in passes (S6).

Kept here and not beside the savers: ranks that each dropped what they have no room for would leave blocks of which one rank's
page is missing, and a block that is dropped here was never handed over, so nobody pins its pages or waits for a result.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from akv.plan.backlog import BacklogBounds, Fit, fit_backlog, order_bytes
from akv.values.messages import SaveOrder


class Shed(NamedTuple):
    """An effect: one hand-over was more than the backlog has room for."""

    #: What was dropped of it.
    orders: tuple[SaveOrder, ...]
    #: What is under way, with the rest of it.
    under_way: BacklogBounds


class SaveBacklog:
    """The saves of every request, closed ones too: a put that nobody waits for is under way all the same."""

    def __init__(self, page_bytes: Sequence[int], bounds: BacklogBounds) -> None:
        #: Bytes of one page in each layer group.
        self._page_bytes = page_bytes
        self._bounds = bounds
        #: The bytes of each save that has not ended, and the number of its pass; 0 for what a request's end handed over.
        self._saves: dict[int, tuple[int, int]] = {}
        #: For each pass how many such saves it has.
        self._of_pass: dict[int, int] = {}
        self._last_pass = 0
        #: Bytes of the saves that have not ended.
        self.bytes = 0
        #: Blocks that were dropped, each time that one was. Those of window groups, which are no blocks of a chain, are not.
        self.refused_blocks = 0

    @property
    def passes(self) -> int:
        """Passes with a save that has not ended."""
        return len(self._of_pass)

    @property
    def under_way(self) -> BacklogBounds:
        """What is in it."""
        return BacklogBounds(self.bytes, self.passes)

    def admit(self, orders: Sequence[SaveOrder], shed: Mapping[int, Sequence[int]], *, is_pass: bool) -> Fit:
        """Take in what fits of one hand-over; its caller queues that. As `fit_backlog`."""
        fit = fit_backlog(orders, shed, self.under_way, self._bounds, self._page_bytes, is_pass=is_pass)
        number = 0
        if is_pass and fit.kept:
            number = self._last_pass = self._last_pass + 1
            self._of_pass[number] = len(fit.kept)
        for order in fit.kept:
            nbytes = order_bytes(order, self._page_bytes)
            self._saves[order.save_id] = (nbytes, number)
            self.bytes += nbytes
        for order in fit.dropped:
            if not order.window and not order.probe_first:
                self.refused_blocks += len(order.groups[0].blocks)
        return fit

    def ended(self, save_id: int) -> None:
        """A save ended. Without effect for one that was never taken in, or that has ended before."""
        nbytes, number = self._saves.pop(save_id, (0, 0))
        self.bytes -= nbytes
        if number:
            self._of_pass[number] -= 1
            if not self._of_pass[number]:
                del self._of_pass[number]
