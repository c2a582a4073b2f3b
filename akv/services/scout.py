"""Knows which segments processes of this host lend, and maps those that pages lie in: in the background, until then these are
staged.

It looks at the register when the connector opens, when a load finds no segment, and behind every other load; at most once in
`PAUSE_S`.
"""

from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, TypeAlias

from anyio import TASK_STATUS_IGNORED, CancelScope, Event, current_time, move_on_after
from anyio.abc import TaskStatus

from akv import observe
from akv.errors import DeviceError, SegmentNotReady, SegmentUnusable
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
#: Seconds from the end of a load to the look behind it: in the first of them the engine computes what was loaded for, and the
#: look would take the interpreter from it.
BEHIND_S = 0.05


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
        self._news, self._at_once = Event(), Event()
        self.look()
        self._looking = CancelScope()
        #: When the register may be read again.
        self._next_look = -inf

    def look(self) -> None:
        """Look at the register now, unless that was done just now; map what is wanted."""
        self._news.set()
        self._at_once.set()

    def look_behind(self) -> None:
        """The same in a moment: a load has ended, and nothing waits for the look."""
        if current_time() >= self._next_look:
            self._news.set()

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled or `stop`. A look that is under way goes on and changes nothing."""
        task_status.started()
        with self._looking:
            while self._lent is not None:
                await self._news.wait()
                with move_on_after(BEHIND_S):
                    await self._at_once.wait()
                self._news, self._at_once = Event(), Event()
                if current_time() >= self._next_look:
                    self._next_look = current_time() + PAUSE_S
                    await self._read(self._lent)
                for entry in self.segments.to_map():
                    await self._map(self._lent, entry)

    def stop(self) -> None:
        """Look no more: the connector closes, and begins no call. What is mapped stays so."""
        self._looking.cancel()

    async def _read(self, lent: HostSegments) -> None:
        try:
            self.segments.listed(await self._call(CallKind.MAP, lent.entries, CallSize()))
        except OSError as error:
            # As an empty one, which costs speed and nothing else.
            self.segments.listed([])
            observe.emit(observe.REGISTER_UNREADABLE, error=error)

    async def _map(self, lent: HostSegments, entry: SegmentEntry) -> None:
        def open_and_map() -> Mapped:
            file = lent.open(entry)
            return Mapped(entry, file, self._device.map_segment(file))

        try:
            mapped = await self._call(CallKind.MAP, open_and_map, CallSize(0, entry.size))
        except SegmentNotReady:
            # The next load that sees a page in it wants it again.
            return
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
