"""A `CallRunner` without threads: calls take virtual time, and a test decides when, and whether, each of them returns.

    runner = FakeRunner(latency=Latency(get_s=0.002, per_byte_s=1e-9))
    gate = runner.hold(CallKind.GET, nth=2)       # the second get from now on hangs
    ...
    await gate.reached()                          # it was handed over
    gate.release()                                # or never: a call that does not return

The order of ends is determined: by virtual time, and at the same instant by the order in which the calls began.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskStatus

from akv.errors import NotOpenError
from akv.ports.calls import CallEnd, CallKind, CallSize
from akv_testing.errors import CallLimitExceeded, MisuseError

#: Calls of each kind that a runner runs at a time unless a test says otherwise: what akv's own defaults come to.
DEFAULT_LIMITS: Mapping[CallKind, int] = {
    CallKind.PROBE: 2,
    CallKind.GET: 2,
    CallKind.PUT: 1,
    CallKind.COPY: 3,
    CallKind.SNAPSHOT: 1,
    CallKind.READ: 4,
    CallKind.DESCRIBE: 2,
    CallKind.MAP: 1,
}


@dataclass(frozen=True, kw_only=True)
class Latency:
    """How long a call takes, in virtual seconds: a constant by kind, and something per key and per byte. All 0 by default."""

    probe_s: float = 0.0
    get_s: float = 0.0
    put_s: float = 0.0
    copy_s: float = 0.0
    describe_s: float = 0.0
    map_s: float = 0.0
    #: As `copy_s` if None.
    snapshot_s: float | None = None
    per_key_s: float = 0.0
    per_byte_s: float = 0.0

    def __call__(self, kind: CallKind, size: CallSize) -> float:
        """The duration of one call, in seconds."""
        base = {
            CallKind.PROBE: self.probe_s,
            CallKind.GET: self.get_s,
            CallKind.PUT: self.put_s,
            CallKind.COPY: self.copy_s,
            CallKind.SNAPSHOT: self.copy_s if self.snapshot_s is None else self.snapshot_s,
            CallKind.READ: self.describe_s,
            CallKind.DESCRIBE: self.describe_s,
            CallKind.MAP: self.map_s,
        }
        return base[kind] + size.keys * self.per_key_s + size.bytes * self.per_byte_s


@dataclass(eq=False)
class CallRecord:
    """One call, for assertions. Times are those of the runner's clock, in seconds."""

    kind: CallKind
    size: CallSize
    started_at: float
    #: When it left the queue for a thread; None while it waits for one.
    began_at: float | None = None
    #: When it returned; None while it is outstanding.
    ended_at: float | None = None


@dataclass(eq=False)
class _Call:
    record: CallRecord
    body: Callable[[], Any]
    done: Callable[[CallEnd], None]
    gate: "Gate | None" = None
    end: CallEnd | None = None


class Gate:
    """Holds calls back until `release()`. Made by `FakeRunner.hold()` and `hold_all()`."""

    def __init__(self, kind: CallKind, nth: int | None, after_body: bool) -> None:
        self._kind = kind
        self._left = nth
        self._after_body = after_body
        self._reached = anyio.Event()
        self._open = False
        self._held: list[Callable[[], None]] = []

    @property
    def holding(self) -> int:
        """How many calls it holds at this moment."""
        return len(self._held)

    async def reached(self) -> None:
        """Wait until a call hangs in the gate.

        **Cancellation:** the gate goes on holding what it holds.
        """
        await self._reached.wait()

    def release(self) -> None:
        """Let what is held go on, now, and hold nothing more. Idempotent."""
        self._open = True
        held, self._held = self._held, []
        for go_on in held:
            go_on()

    def _takes(self, kind: CallKind) -> bool:
        if self._open or kind is not self._kind or self._left == 0:
            return False
        if self._left is None:
            return True
        self._left -= 1
        return self._left == 0

    def _hold(self, go_on: Callable[[], None], *, after_body: bool) -> bool:
        if self._open or after_body is not self._after_body:
            return False
        self._held.append(go_on)
        self._reached.set()
        return True


@dataclass(order=True)
class _Due:
    at: float
    order: int
    call: _Call = field(compare=False)


class FakeRunner:
    """Implements `akv.ports.calls.CallRunner` under virtual time.

    `limits`: calls of each kind at a time. `latency`: the virtual duration of a call, in seconds. `body_at_start`: run the
    call's body when it begins instead of when its duration has passed; the first writes early, the second late, and code that
    is right works with both. `strict`: refuse what breaks the caller's own promise, more than one call of a kind waiting for
    a thread (`CallLimitExceeded`). `now`: the clock.

    What the body raises becomes the call's end, except a `MisuseError` of the fakes, which leaves through `serve()`.
    """

    def __init__(
        self,
        *,
        limits: Mapping[CallKind, int] = DEFAULT_LIMITS,
        latency: Callable[[CallKind, CallSize], float] | None = None,
        body_at_start: bool = False,
        strict: bool = True,
        now: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.latency: Callable[[CallKind, CallSize], float] = Latency() if latency is None else latency
        #: Every call since the runner was made, in the order of `start()`.
        self.calls: list[CallRecord] = []
        #: The most calls of each kind that ran at the same time.
        self.most_running: Counter[CallKind] = Counter()
        self._limits = dict(limits)
        self._body_at_start = body_at_start
        self._strict = strict
        self._now = now
        self._gates: list[Gate] = []
        self._waiting: dict[CallKind, deque[_Call]] = {kind: deque() for kind in CallKind}
        self._running: Counter[CallKind] = Counter()
        self._due: list[_Due] = []
        #: Ends that wait for `serve()`.
        self._ends: deque[tuple[Callable[[CallEnd], None], CallEnd]] = deque()
        self._order = 0
        self._serving = False
        self._closed = False
        self._changed = anyio.Event()

    @property
    def limits(self) -> dict[CallKind, int]:
        """How many calls of each kind run at a time."""
        return dict(self._limits)

    def outstanding(self, kind: CallKind | None = None) -> int:
        """Calls of a kind, or of all, that were started and have not returned."""
        kinds = list(CallKind) if kind is None else [kind]
        return sum(self._running[kind] + len(self._waiting[kind]) for kind in kinds)

    def hold(self, kind: CallKind, *, nth: int = 1, after_body: bool = False) -> Gate:
        """Hold the n-th call of a kind that is started from now on, 1 the next. `after_body`: let its effect happen first."""
        return self._gate(Gate(kind, nth, after_body))

    def hold_all(self, kind: CallKind, *, after_body: bool = False) -> Gate:
        """Hold every call of a kind that is started from now on, until the gate is released."""
        return self._gate(Gate(kind, None, after_body))

    def start(self, kind: CallKind, call: Callable[[], Any], size: CallSize, done: Callable[[CallEnd], None]) -> None:
        """Let `call` take its virtual time; `done` runs within `serve()`. Raises NotOpenError once `close()` was called."""
        if self._closed:
            raise NotOpenError(f"a {kind} call was started after the runner's close(): nothing runs it any more")
        if self._strict and self.outstanding(kind) > self._limits[kind]:
            raise CallLimitExceeded(
                f"a {kind} call was started while {self._running[kind]} run and {len(self._waiting[kind])} wait: the caller "
                f"keeps at most limits[{kind}] = {self._limits[kind]} running and one waiting"
            )
        new = _Call(CallRecord(kind, size, self._now()), call, done)
        new.gate = next((gate for gate in self._gates if gate._takes(kind)), None)
        self.calls.append(new.record)
        self._waiting[kind].append(new)
        self._begin(kind)

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Deliver ends until cancelled. What a `done` raises leaves through here, as does a fake's MisuseError.

        **Cancellation:** calls that have not returned stay outstanding, ends that were not delivered stay on record; another
        `serve()` delivers them.
        """
        self._serving = True
        try:
            task_status.started()
            while True:
                await self._turn(deliver=True)
        finally:
            self._serving = False
            self._notify()

    async def close(self, deadline_s: float) -> int:
        """Wait until all calls returned, at most `deadline_s` virtual seconds; return how many are still outstanding.

        Calls that wait for a thread at the deadline will not run: they end with NotOpenError. Without `serve()` beside it
        calls return all the same, and nobody hears of it.

        **Cancellation:** as at the deadline: what is outstanding stays so.
        """
        self._closed = True
        try:
            with anyio.move_on_after(deadline_s):
                await anyio.lowlevel.checkpoint()
                while self.outstanding():
                    if self._serving:
                        await self._changed.wait()
                    else:
                        await self._turn(deliver=False)
        finally:
            self._withdraw_unbegun()
        return self.outstanding()

    def _gate(self, gate: Gate) -> Gate:
        self._gates.append(gate)
        return gate

    def _begin(self, kind: CallKind) -> None:
        """Give threads to the calls that wait for one, in order."""
        while self._waiting[kind] and self._running[kind] < self._limits[kind]:
            call = self._waiting[kind].popleft()
            call.record.began_at = self._now()
            self._running[kind] += 1
            self.most_running[kind] = max(self.most_running[kind], self._running[kind])
            if call.gate is None or not call.gate._hold(partial(self._run, call), after_body=False):
                self._run(call)

    def _run(self, call: _Call) -> None:
        if self._body_at_start:
            call.end = _run_body(call.body)
        self._schedule(call, self.latency(call.record.kind, call.record.size))

    def _schedule(self, call: _Call, delay_s: float) -> None:
        self._order += 1
        heapq.heappush(self._due, _Due(self._now() + delay_s, self._order, call))
        self._notify()

    async def _turn(self, *, deliver: bool) -> None:
        """Deliver one end, or bring one call to its end if one is due, else wait for the next."""
        changed = self._changed
        if deliver and self._ends:
            done, end = self._ends.popleft()
            done(end)
            await anyio.lowlevel.checkpoint()
        elif self._due and self._due[0].at <= self._now():
            self._finish(heapq.heappop(self._due).call)
            await anyio.lowlevel.checkpoint()
        else:
            wait_s = self._due[0].at - self._now() if self._due else float("inf")
            with anyio.move_on_after(wait_s):
                await changed.wait()

    def _finish(self, call: _Call) -> None:
        if call.end is None:
            call.end = _run_body(call.body)
        if call.gate is not None and call.gate._hold(partial(self._schedule, call, 0), after_body=True):
            return
        kind = call.record.kind
        call.record.ended_at = self._now()
        self._running[kind] -= 1
        self._begin(kind)
        self._ends.append((call.done, call.end))
        self._notify()

    def _withdraw_unbegun(self) -> None:
        for waiting in self._waiting.values():
            while waiting:
                error = NotOpenError("the connector closed before this call could begin")
                self._ends.append((waiting.popleft().done, CallEnd(error=error)))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _run_body(body: Callable[[], Any]) -> CallEnd:
    try:
        return CallEnd(value=body())
    except Exception as error:
        if isinstance(error, MisuseError):
            raise
        return CallEnd(error=error)
