"""Looks for segments that processes of this host lend, and maps them: in the background, until then their pages are staged.

It looks when the connector opens and whenever a load begins, at most once in `PAUSE_S`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from anyio import TASK_STATUS_IGNORED, CancelScope, Event, sleep
from anyio.abc import TaskStatus

from akv import observe
from akv.errors import DeviceError, SegmentUnusable
from akv.ownership.segments import Mapped, Segments
from akv.plan.direct import Staged
from akv.ports import Ports
from akv.ports.calls import CallKind, CallSize
from akv.ports.segments import HostSegments
from akv.values.segments import SegmentEntry

#: Runs a call of this kind and size elsewhere, and returns its value or raises what it raised.
Call: TypeAlias = Callable[[CallKind, Callable[[], Any], CallSize], Awaitable[Any]]

#: Seconds between two looks at the register. A process that joins is a matter of seconds, and a look costs a millisecond.
PAUSE_S = 1.0


class SegmentScout:
    """Keeps `segments` as the register has them."""

    def __init__(self, ports: Ports, call: Call, off: Staged | None) -> None:
        """`call`: runs a blocking call. `off`: why nothing is to be read directly, if so."""
        self._device = ports.device
        self._lent = ports.segments
        self._call = call
        self.segments = Segments()
        #: Why nothing is read directly; None if it may be.
        self.off = off if ports.segments is not None else off or Staged.NO_SEGMENT
        self._news = Event()
        self._news.set()
        self._looking = CancelScope()

    def look(self) -> None:
        """Look at the register soon."""
        self._news.set()

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled or `stop`. A look that is under way goes on and changes nothing."""
        task_status.started()
        with self._looking:
            while self._lent is not None:
                await self._news.wait()
                self._news = Event()
                entries = await self._call(CallKind.MAP, self._lent.entries, CallSize())
                for entry in self.segments.listed(entries):
                    await self._map(self._lent, entry)
                await sleep(PAUSE_S)

    def stop(self) -> None:
        """Look no more: the connector closes, and begins no call. What is mapped stays so."""
        self._looking.cancel()

    async def _map(self, lent: HostSegments, entry: SegmentEntry) -> None:
        def open_and_map() -> Mapped:
            file = lent.open(entry)
            return Mapped(entry, file, self._device.map_segment(file))

        try:
            mapped = await self._call(CallKind.MAP, open_and_map, CallSize(0, entry.size))
        except (SegmentUnusable, DeviceError, OSError, MemoryError, ValueError) as error:
            self.segments.refuse(entry, Staged.REFUSED)
            observe.emit(
                observe.SEGMENT_UNUSED,
                segment=entry.segment_id,
                owner_pid=entry.owner_pid,
                bytes=entry.size,
                reason=Staged.REFUSED.value,
                why=str(error),
            )
            return
        self.segments.use(mapped)
        observe.emit(observe.SEGMENT_MAPPED, segment=entry.segment_id, owner_pid=entry.owner_pid, bytes=entry.size)
