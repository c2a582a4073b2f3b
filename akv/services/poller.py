"""The stream poller: the one place that asks device events whether they completed.

An event is asked when it is handed over (on a CPU, and for short copies, it has completed by then), then once per tick. With
nothing outstanding the poller parks. A tick is no shorter than a timer's resolution: shorter sleeps spin on some loops.
"""

from collections import deque
from collections.abc import Callable

from anyio import TASK_STATUS_IGNORED, Event, sleep
from anyio.abc import TaskStatus

from akv.errors import DeviceError
from akv.ports.device import PassEvent

Reached = Callable[[BaseException | None], None]


class StreamPoller:
    """Watches events for the flows of one worker half."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._watched: list[tuple[PassEvent, Reached]] = []
        self._work = Event()

    @property
    def outstanding(self) -> int:
        """Events that have not completed."""
        return len(self._watched)

    def watch(self, event: PassEvent, reached: Reached) -> None:
        """Call `reached` once: now if the event has completed, else from the poller's task."""
        if not _asked(event, reached):
            self._watched.append((event, reached))
            self._work.set()

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Poll until cancelled. What `reached` raises is a crash of the connector and leaves through here.

        So does what an event raises that is no DeviceError. The other events stay on record; another `run()` goes on with
        them.
        """
        task_status.started()
        while True:
            if not self._watched:
                self._work = Event()
                await self._work.wait()
            await sleep(self._tick_s)
            self._ask_each()

    def _ask_each(self) -> None:
        # In a frame of its own: while the poller parks, nothing of what it polled last may be kept alive.
        watched, self._watched = deque(self._watched), []
        still: list[tuple[PassEvent, Reached]] = []
        try:
            while watched:
                pair = watched.popleft()
                if not _asked(*pair):
                    still.append(pair)
        finally:
            # Events handed over by a `reached` above are in the new list already.
            self._watched = [*still, *watched, *self._watched]


def _asked(event: PassEvent, reached: Reached) -> bool:
    try:
        completed = event.query()
    except DeviceError as failure:
        # It belongs to the copy or the save that waits for this event, not to the poller.
        reached(failure)
        return True
    if completed:
        reached(None)
    return completed
