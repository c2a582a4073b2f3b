"""The work of a fake device in virtual time: what runs on a stream, behind what, from when to when.

Nothing happens by itself: whoever looks calls `settle()`, which first lets happen what has happened by now, in order of time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from akv.errors import DeviceError
from akv_testing.races import Actor, Stamp

WorkKind = Literal["gather", "scatter", "snapshot", "carry", "kernel", "wait"]


@dataclass(eq=False)
class Work:
    """One piece of work in a stream. Its bytes move at its end; while it runs its destination holds garbage."""

    kind: WorkKind
    stream: str
    #: When the host queued it.
    queued_at: float
    duration_s: float
    behind: Sequence["Work"]
    at_start: Callable[[], None] = field(repr=False)
    at_end: Callable[[], None] = field(repr=False)
    #: When it began and will have ended; None while that is not known, because something before it is held.
    begins_at: float | None = None
    ends_at: float | None = None
    began: bool = False
    ended: bool = False
    #: Before this moment it does not begin; None for never, until a gate opens.
    not_before: float | None = 0.0
    #: What its event's DeviceError is caused by once it ended; its destination keeps the garbage then.
    error: Exception | None = None

    def place_in_time(self) -> None:
        """Work out when it runs, as far as that is known."""
        if self.begins_at is not None or self.not_before is None:
            return
        earliest = max(self.queued_at, self.not_before)
        for other in self.behind:
            if other.ends_at is None:
                return
            earliest = max(earliest, other.ends_at)
        self.begins_at = earliest
        self.ends_at = earliest + self.duration_s
        # What came before is of no more use, and the chain of it would keep all work of the device alive.
        self.behind = ()


class Timeline:
    """All work of a device, in the order in which the host queued it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._pending: list[Work] = []
        self._settling = False

    def add(self, work: Work) -> None:
        """Queue work behind what it names."""
        self._pending.append(work)
        self.settle()

    def pending(self, *kinds: WorkKind) -> list[Work]:
        """Work of some kinds that is queued or running."""
        self.settle()
        return [work for work in self._pending if work.kind in kinds]

    def settle(self) -> None:
        """Let begin and end what has begun and ended by now. Hooks that look at the device see it as it stands then."""
        if self._settling:
            return
        self._settling = True
        try:
            self._settle_all()
        finally:
            self._settling = False

    def _settle_all(self) -> None:
        now = self._now()
        moments: list[tuple[float, int, int, Work]] = []
        for order, work in enumerate(self._pending):
            work.place_in_time()
            if work.begins_at is not None and work.begins_at <= now and not work.began:
                moments.append((work.begins_at, order, 0, work))
            if work.ends_at is not None and work.ends_at <= now:
                moments.append((work.ends_at, order, 1, work))
        for _, _, is_end, work in sorted(moments, key=lambda moment: moment[:3]):
            if is_end:
                work.ended = True
                work.at_end()
            else:
                work.began = True
                work.at_start()
        self._pending = [work for work in self._pending if not work.ended]


class FakeEvent:
    """Implements `akv.ports.device.PassEvent`: a point in a stream's work."""

    def __init__(self, work: Work | None, stamp: Stamp, host: Actor, timeline: Timeline) -> None:
        self.work = work
        self.stamp = stamp
        self.timeline = timeline
        #: For events of kernels: what the pages held that the kernel read, by (group, page), once it began.
        self.seen: dict[tuple[int, int], bytes] = {}
        self._host = host

    def query(self) -> bool:
        """As the port says. True also orders the host, and what it queues afterwards, behind this point."""
        self.timeline.settle()
        if self.work is not None and not self.work.ended:
            return False
        self._host.join(self.stamp.clock)
        if self.work is not None and self.work.error is not None:
            raise DeviceError(f"a {self.work.kind} on {self.work.stream} failed: {self.work.error}") from self.work.error
        return True


class FakeStream:
    """Implements `akv.ports.device.CopyStream`."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        #: The work that was queued last.
        self.last: Work | None = None

    @property
    def name(self) -> str:
        """For errors and records."""
        return self.actor.name


class CopyGate:
    """Holds one copy before it begins, and with it all that is queued behind it. Made by `FakeDevice.hold()`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._work: Work | None = None
        self._open = False

    @property
    def holds(self) -> bool:
        """Whether a copy stands before it now."""
        return self._work is not None and not self._open

    def release(self) -> None:
        """Let the copy begin now. Idempotent."""
        if not self._open and self._work is not None:
            self._work.not_before = self._now()
        self._open = True

    def take(self, work: Work) -> None:
        """Stand before a copy."""
        if not self._open:
            self._work = work
            work.not_before = None
