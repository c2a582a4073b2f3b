"""The circuit breaker before the pool (O7). `plan/breaker.py` decides; this tells it what happens and does what it says.

It hears of every store call's end from the desk of calls, and of waits in vain from the flows. While it is open its one task
asks the pool for one key, with a back-off, until there is an answer.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from anyio import TASK_STATUS_IGNORED, CancelScope, Event, current_time, sleep
from anyio.abc import TaskStatus

from akv import observe
from akv.plan.breaker import Breaker, Waited
from akv.ports.calls import CallKind
from akv.ports.pool import KeyAnswer, KeyState
from akv.values.pressure import BreakerState

#: Whose patience an answer of this kind of call restores.
_WAITED = {CallKind.PROBE: Waited.LOOKUP, CallKind.GET: Waited.LOAD}
_STORE_CALLS = frozenset({CallKind.PROBE, CallKind.GET, CallKind.PUT})


class PoolBreaker:
    """Implements `flow/gate.py`'s PoolGate and `flow/calls.py`'s CallWatch."""

    def __init__(self) -> None:
        self._breaker = Breaker()
        self._news = Event()
        self._waits: dict[CancelScope, None] = {}
        self._probing = CancelScope()
        self._shut = False
        # Set before it runs; whoever carries these out asks the breaker itself.
        #: Says whether given-up calls hold too much memory at this moment (M3).
        self.quarantine_full: Callable[[], bool] = _no
        #: Called when it opened: what is queued for the pool is not to wait.
        self.on_open: Callable[[], None] = _nothing
        #: Called when it closed: the pool may be another one than before.
        self.on_close: Callable[[], None] = _nothing

    @property
    def state(self) -> BreakerState:
        """Closed, as a rule."""
        return self._breaker.state

    def lets_through(self) -> bool:
        """Whether a store call may begin now."""
        if self._shut:
            return False
        # Memory goes into quarantine without any call's end, so it is looked at here.
        if self.state is BreakerState.CLOSED and self.quarantine_full():
            self._opened(self._breaker.quarantine_full(current_time()))
        return self.state is BreakerState.CLOSED

    def timed_out(self, waited: Waited) -> None:
        """A deadline passed while a store call was under way."""
        self._opened(self._breaker.timed_out(waited, current_time()))

    @contextmanager
    def ending_waits(self) -> Iterator[CancelScope]:
        """A scope that is cancelled when the breaker opens."""
        with CancelScope() as scope:
            self._waits[scope] = None
            try:
                yield scope
            finally:
                del self._waits[scope]

    def began(self) -> int:
        """A call begins. Returns what `ended` is to be given."""
        return self._breaker.generation

    def ended(self, began: int, kind: CallKind, value: Any, *, given_up: bool) -> None:
        """A call returned a value; `given_up`: nobody waited for it any more."""
        if kind not in _STORE_CALLS:
            return
        if _in_vain(value):
            self._opened(self._breaker.unavailable(began, current_time()))
        elif kind in _WAITED and not given_up:
            # An answer that came too late is none: a pool that is always late would never open it.
            self._breaker.answered(_WAITED[kind])

    async def run(
        self, ask: Callable[[], Awaitable[Sequence[KeyAnswer]]], *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
    ) -> None:
        """While it is open, probe until there is an answer; `ask` asks the pool for a key that does not exist.

        Until cancelled or `stop`. **Cancellation:** a probe that is under way touches nothing.
        """
        task_status.started()
        with self._probing:
            while True:
                while self.state is BreakerState.CLOSED:
                    self._news = Event()
                    await self._news.wait()
                await sleep(max(0.0, self._breaker.next_probe_at - current_time()))
                self._breaker.probe_begins()
                answered = not _in_vain(await ask())
                full = self.quarantine_full()
                if self._breaker.probe_ended(current_time(), answered=answered, quarantine_full=full):
                    self._closed()

    def shut(self) -> None:
        """Let nothing through any more, whatever the pool does: the connector goes on without it (O8)."""
        self._shut = True
        self.stop()
        self._end_waits()

    def stop(self) -> None:
        """Probe no more: the connector closes, and waits for the calls that are under way."""
        self._probing.cancel()

    def _opened(self, opened: bool) -> None:
        if opened:
            observe.emit(observe.BREAKER_OPEN, reason=self._breaker.trouble.value)
            self._news.set()
            self._end_waits()
            self.on_open()

    def _end_waits(self) -> None:
        for scope in self._waits:
            scope.cancel()

    def _closed(self) -> None:
        observe.emit(
            observe.BREAKER_CLOSED,
            reason=self._breaker.trouble.value,
            probes=self._breaker.in_vain + 1,
            duration_s=current_time() - self._breaker.opened_at,
        )
        self.on_close()


def _in_vain(answers: Sequence[KeyAnswer]) -> bool:
    """Whether the pool could be reached for no key."""
    return bool(answers) and all(answer.state is KeyState.UNAVAILABLE for answer in answers)


def _no() -> bool:
    """Until somebody knows."""
    return False


def _nothing() -> None:
    """Until somebody listens."""
