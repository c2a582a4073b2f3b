"""Store calls that answered trouble, told without a flood: a pool that is down answers thousands of them."""

import threading
import time
from collections.abc import Callable, Sequence

from akv.observe import POOL_CALL_FAILED, emit
from akv.ports.pool import KeyAnswer, KeyState

#: Seconds between two events of one kind. Long enough for a log that people read, short enough to see that it goes on.
INTERVAL_S = 10.0

#: What is no trouble: a missing key is an answer.
_GOOD = frozenset({KeyState.OK, KeyState.MISSING})

#: A call's name, its first trouble, and that one's code.
_Kind = tuple[str, KeyState, int]


class _Run:
    """Failures of one kind since their last event."""

    __slots__ = ("calls", "due", "duration_s", "failed", "keys")

    def __init__(self, due: float) -> None:
        self.due = due
        self.calls = self.keys = self.failed = 0
        self.duration_s = 0.0

    def add(self, keys: int, failed: int, duration_s: float) -> None:
        self.calls += 1
        self.keys += keys
        self.failed += failed
        self.duration_s = max(self.duration_s, duration_s)


class TroubleLog:
    """Emits `akv.pool.call_failed`: the first failure of a kind at once, further ones counted in one event per interval.

    Thread safe. `clock`: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[_Kind, _Run] = {}

    def look_at(self, call: str, began: float, answers: Sequence[KeyAnswer]) -> None:
        """See whether a call, begun at `began`, met trouble, and say so if its kind is due."""
        # Equal answers of a call are one object, so that a call without trouble costs nothing worth mentioning here.
        if all(answer.state in _GOOD for answer in dict(zip(map(id, answers), answers, strict=True)).values()):
            return
        trouble = [answer for answer in answers if answer.state not in _GOOD]
        now = self._clock()
        kind = (call, trouble[0].state, trouble[0].code)
        with self._lock:
            run = self._runs.setdefault(kind, _Run(now))
            run.add(len(answers), len(trouble), now - began)
            is_due = now >= run.due
            if is_due:
                run.due = now + INTERVAL_S
        if is_due:
            self._tell(kind)

    def flush(self) -> None:
        """Tell what has been counted and not told; before the pool is left."""
        for kind in list(self._runs):
            self._tell(kind)

    def _tell(self, kind: _Kind) -> None:
        call, state, code = kind
        with self._lock:
            told = self._runs[kind]
            self._runs[kind] = _Run(told.due)
        # Outside the lock: what listens to events may take its time.
        if told.calls:
            emit(
                POOL_CALL_FAILED,
                call=call,
                state=state.value,
                code=code,
                calls=told.calls,
                keys=told.keys,
                failed=told.failed,
                duration_s=told.duration_s,
            )
