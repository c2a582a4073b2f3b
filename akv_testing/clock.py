"""Virtual time on both backends: a test that waits an hour takes a millisecond, and takes the same way each time.

The clock starts at 0.0 and moves only when every task waits: then it jumps to the next timer. On trio this is `MockClock`, on
asyncio the event loop below. Both jump while a *thread* still works, because they cannot see it, so tests under virtual time
use the thread-free fakes (`FakeRunner` instead of threads). Tests that need threads or sockets ask for real time, see
`akv_testing.pytest_backends`.

`anyio.current_time()` is the virtual time, and what the fakes take as `now`.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

Result = TypeVar("Result")

#: The backends that every asynchronous test of akv runs on.
BACKENDS = ("asyncio", "trio")


class ManualClock:
    """A clock for tests without an event loop: it moves when told to. Call it to read it, as the fakes' `now`."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Seconds since it was made."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, which is not negative: no clock that the fakes stand in for goes backwards."""
        if seconds < 0:
            raise ValueError(f"time goes forwards, not by {seconds} s")
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Asks for ready files without waiting; where the loop wanted to wait for a timer, tells it that the time has come."""

    def __init__(self, idle: Callable[[float | None], bool]) -> None:
        super().__init__()
        self._idle = idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0) or self._idle(timeout):
            return ready
        return super().select(None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose clock jumps to the next timer when no task can run.

    Without a timer it waits for files as any loop does, so a test that deadlocks hangs until its own time limit.
    """

    def __init__(self) -> None:
        self._virtual_now = 0.0
        self._settling: list[asyncio.Future[None]] = []
        super().__init__(_JumpingSelector(self._idle))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_now

    async def settled(self) -> None:
        """Wait until no other task can run. The clock stands still meanwhile."""
        waiter = self.create_future()
        self._settling.append(waiter)
        await waiter

    def _idle(self, timeout: float | None) -> bool:
        """No task can run. Wake those who waited for just that, else jump; False if there is nothing to jump to."""
        waiters, self._settling = self._settling, []
        awaited = [waiter for waiter in waiters if not waiter.done()]
        for waiter in awaited:
            waiter.set_result(None)
        if awaited:
            return True
        if timeout is None:
            return False
        self._virtual_now += timeout
        return True


def virtual_backend(name: str) -> tuple[str, dict[str, Any]]:
    """Name and options of an anyio backend under a fresh virtual clock: a value for the fixture `anyio_backend`."""
    if name == "asyncio":
        return name, {"loop_factory": VirtualLoop}
    if name == "trio":
        from trio.testing import MockClock  # noqa: PLC0415 - akv_testing is importable without trio

        return name, {"clock": MockClock(autojump_threshold=0)}
    raise ValueError(f"no virtual clock for backend {name!r}; there is one for each of {', '.join(BACKENDS)}")


def run_virtual(name: str, function: Callable[..., Awaitable[Result]], *args: Any) -> Result:
    """`anyio.run()` under a fresh virtual clock, for examples of property tests and for scripts."""
    backend, options = virtual_backend(name)
    return anyio.run(function, *args, backend=backend, backend_options=options)


async def settle() -> None:
    """Let every other task run until all of them wait, without moving the virtual clock.

    The way to say "and now everybody had their turn" in a test; `anyio.wait_all_tasks_blocked()` sleeps on asyncio and so
    moves the clock. Works under real time too, where it is anyio's.

    **Cancellation:** nothing is held; the others have run as far as they came.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    if isinstance(loop, VirtualLoop):
        await loop.settled()
    else:
        await anyio.wait_all_tasks_blocked()
