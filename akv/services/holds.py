"""Lets go of the pages of finished requests whose saves took too long (S7).

`ownership/holds.py` keeps whose time comes when.
"""

from collections.abc import Callable

from anyio import TASK_STATUS_IGNORED, CancelScope, Event, current_time
from anyio.abc import TaskStatus

from akv import observe
from akv.ownership.holds import Holds
from akv.ownership.request_record import RequestRecord


class HoldClock:
    """One task that wakes when the next hold has lasted too long."""

    def __init__(self, longest_s: float, give_up: Callable[[RequestRecord], None]) -> None:
        self._holds = Holds(longest_s)
        self._give_up = give_up
        self._news = Event()

    def begin(self, record: RequestRecord) -> None:
        """A request finished, and its pages wait for its saves."""
        if self._holds.begin(record, current_time()):
            self._news.set()

    def end(self, request_id: str, incarnation: int) -> None:
        """The request closed, held or not."""
        self._holds.end((request_id, incarnation))

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Whoever was next when it went to sleep may have closed meanwhile: then it looks again."""
        task_status.started()
        while True:
            if self._news.is_set():
                self._news = Event()
            with CancelScope(deadline=self._holds.next_at):
                await self._news.wait()
            for record in self._holds.expired(current_time()):
                observe.emit(
                    observe.SAVE_HOLD_EXPIRED,
                    request_id=record.request_id,
                    incarnation=record.incarnation,
                    saves=len(record.saves),
                    held_s=self._holds.longest_s,
                )
                self._give_up(record)
