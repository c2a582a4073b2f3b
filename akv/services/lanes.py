"""Loaders and savers: tasks that take queued work, oldest first, one piece at a time.

The queue is in `ownership/`; what passes here is only the news that there is work, so nothing is lost when a task is cancelled
in the moment of taking.
"""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from anyio import TASK_STATUS_IGNORED, Event
from anyio.abc import TaskStatus

Work = TypeVar("Work")


class Lanes(Generic[Work]):
    """Hands work to its tasks."""

    def __init__(self, take: Callable[[], Work | None]) -> None:
        #: Takes the next piece of work from its owner, None if there is none.
        self._take = take
        self._news = Event()

    def wake(self) -> None:
        """There is work."""
        self._news.set()

    async def run(
        self, work_on: Callable[[Work], Awaitable[None]], *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
    ) -> None:
        """One task: take work and do it, until cancelled."""
        task_status.started()
        while True:
            work = self._take()
            if work is None:
                if self._news.is_set():
                    self._news = Event()
                await self._news.wait()
            else:
                await work_on(work)
