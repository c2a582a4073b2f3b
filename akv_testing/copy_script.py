"""What a test does to a fake device's copies: fail, delay, hold, or watch the n-th one of a kind from now on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from akv_testing.timeline import CopyGate, Work

#: "snapshot" is a snapshot's copy on the execution stream, which the next kernels wait for. Through device slots it is
#: followed by "carry", the way from there to the host on another stream.
CopyKind = Literal["gather", "scatter", "snapshot", "carry"]


@dataclass(frozen=True)
class CopyRecord:
    """One gather, scatter or snapshot, for assertions."""

    kind: CopyKind
    stream: str
    group: int
    pages: tuple[int, ...]
    offsets: tuple[int, ...]
    #: When it was queued, in seconds.
    at: float
    #: Of a snapshot through device slots: where these are; else empty.
    via: tuple[int, ...] = ()


@dataclass(eq=False)
class _Line:
    kind: CopyKind
    left: int
    apply: Callable[[Work], None]
    #: Raised at the call, so that nothing is queued.
    refusal: Exception | None = None


class CopyScript:
    """The script of one `FakeDevice`, its attribute `script`. `nth` counts copies of a kind from now on, 1 the next."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lines: list[_Line] = []

    def fail_call(self, kind: CopyKind, error: Exception, *, nth: int = 1) -> None:
        """It raises at the call; nothing of it is queued."""
        self._lines.append(_Line(kind, nth, lambda work: None, error))

    def fail_copy(self, kind: CopyKind, error: Exception, *, nth: int = 1) -> None:
        """It fails as it runs: its event then raises a DeviceError caused by `error`, its destination keeps garbage."""

        def apply(work: Work) -> None:
            work.error = error

        self._lines.append(_Line(kind, nth, apply))

    def delay(self, kind: CopyKind, by_s: float, *, nth: int = 1) -> None:
        """It takes this much longer, in seconds."""

        def apply(work: Work) -> None:
            work.duration_s += by_s

        self._lines.append(_Line(kind, nth, apply))

    def hold(self, kind: CopyKind, *, nth: int = 1) -> CopyGate:
        """It does not begin before the gate is released, and nothing behind it does."""
        gate = CopyGate(self._now)
        self._lines.append(_Line(kind, nth, gate.take))
        return gate

    def before(self, kind: CopyKind, hook: Callable[[], None], *, nth: int = 1) -> None:
        """`hook` is called when it begins, by whoever looks at the device next."""

        def apply(work: Work) -> None:
            begin = work.at_start

            def at_start() -> None:
                hook()
                begin()

            work.at_start = at_start

        self._lines.append(_Line(kind, nth, apply))

    def next_copy(self, kind: CopyKind) -> Callable[[Work], None]:
        """For the device: a copy is about to be queued. Returns what to do to it, or raises what it was told to."""
        fitting = [line for line in self._lines if line.kind == kind]
        for line in fitting:
            line.left -= 1
        due = [line for line in fitting if line.left == 0]
        self._lines = [line for line in self._lines if line.left > 0]
        for line in due:
            if line.refusal is not None:
                raise line.refusal

        def apply(work: Work) -> None:
            for line in due:
                line.apply(work)

        return apply


def failing_with(previous: Work | None, apply: Callable[[Work], None]) -> Callable[[Work], None]:
    """What is done to a copy whose event tells of the one before it, too."""
    if previous is None:
        return apply

    def apply_both(work: Work) -> None:
        apply(work)
        end = work.at_end

        def at_end() -> None:
            work.error = work.error or previous.error
            end()

        work.at_end = at_end

    return apply_both
