"""The threads that run blocking calls, on every event loop in real time."""

import os
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from akv.errors import NotOpenError
from akv.pool.exit_guard import ExitGuard
from akv.pool.threads import ThreadRunner
from akv.ports.calls import CallEnd, CallKind, CallSize

pytestmark = pytest.mark.anyio

SIZE = CallSize(keys=1)


async def end_of(runner: ThreadRunner, call: Callable[[], Any], kind: CallKind = CallKind.GET) -> CallEnd:
    """Start a call and wait for its end."""
    ends: list[CallEnd] = []
    ended = anyio.Event()

    def done(end: CallEnd) -> None:
        ends.append(end)
        ended.set()

    runner.start(kind, call, SIZE, done)
    with anyio.fail_after(5):
        await ended.wait()
    return ends[0]


def akv_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("akv-")]


async def test_M1_a_call_runs_on_an_own_daemon_thread_and_ends_on_the_loop() -> None:
    runner = ThreadRunner({})
    async with anyio.create_task_group() as group:
        await group.start(runner.serve)
        threads: list[threading.Thread] = []

        def call() -> int:
            threads.append(threading.current_thread())
            return 7

        delivered_on: list[threading.Thread] = []
        ended = anyio.Event()

        def done(end: CallEnd) -> None:
            delivered_on.append(threading.current_thread())
            assert end == CallEnd(value=7)
            ended.set()

        runner.start(CallKind.PROBE, call, SIZE, done)
        with anyio.fail_after(5):
            await ended.wait()
        assert threads[0].daemon
        assert threads[0] is not threading.current_thread()
        assert delivered_on == [threading.current_thread()]
        assert await runner.close(5) == 0
        group.cancel_scope.cancel()
    assert akv_threads() == []


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
async def test_M1_what_a_call_raises_is_its_end_and_the_thread_goes_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    runner = ThreadRunner({CallKind.GET: 1})
    async with anyio.create_task_group() as group:
        await group.start(runner.serve)
        assert (await end_of(runner, fail)).error is error
        assert (await end_of(runner, lambda: 1)).value == 1
        assert len(akv_threads()) == 1
        assert await runner.close(5) == 0
        group.cancel_scope.cancel()


async def test_M1_threads_start_when_needed_and_stay_within_the_limit_of_their_kind() -> None:
    runner = ThreadRunner({CallKind.GET: 2, CallKind.PUT: 1})
    assert runner.limits == {CallKind.PROBE: 1, CallKind.GET: 2, CallKind.PUT: 1, CallKind.COPY: 1}
    lock = threading.Lock()
    running, most = 0, 0
    gate = threading.Event()
    entered = threading.Semaphore(0)

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        entered.release()
        gate.wait(5)
        with lock:
            running -= 1

    async with anyio.create_task_group() as group:
        await group.start(runner.serve)
        assert akv_threads() == []
        ends: list[CallEnd] = []
        for _ in range(3):
            runner.start(CallKind.GET, call, SIZE, ends.append)
        assert entered.acquire(timeout=5)
        assert entered.acquire(timeout=5)
        assert runner.outstanding == 3
        # Gets that hang hold up no put.
        assert (await end_of(runner, lambda: "put", CallKind.PUT)).value == "put"
        gate.set()
        assert await runner.close(5) == 0
        while len(ends) < 3:
            await checkpoint()
        assert most == 2
        group.cancel_scope.cancel()
    assert akv_threads() == []


async def test_M8_a_callback_that_raises_is_a_crash_of_the_service() -> None:
    def done(end: CallEnd) -> None:
        raise ZeroDivisionError

    runner = ThreadRunner({})

    async def scenario() -> None:
        async with anyio.create_task_group() as group:
            await group.start(runner.serve)
            runner.start(CallKind.GET, lambda: 1, SIZE, done)

    with pytest.raises(BaseExceptionGroup) as caught:
        await scenario()
    assert caught.group_contains(ZeroDivisionError)
    assert await runner.close(5) == 0


async def test_M1_a_call_that_hangs_stays_on_record_past_the_deadline_and_is_delivered_when_it_returns() -> None:
    gate = threading.Event()
    runner = ThreadRunner({CallKind.GET: 1})
    ends: list[CallEnd] = []
    queued: list[CallEnd] = []
    async with anyio.create_task_group() as group:
        await group.start(runner.serve)
        runner.start(CallKind.GET, lambda: gate.wait(5), SIZE, ends.append)
        runner.start(CallKind.GET, lambda: pytest.fail("it must not begin after the close"), SIZE, queued.append)
        await end_of(runner, lambda: 1, CallKind.PROBE)
        assert await runner.close(0.05) == 1
        assert [thread.name for thread in akv_threads()] == ["akv-get-0"]
        while not queued:
            await checkpoint()
        assert isinstance(queued[0].error, NotOpenError)
        assert ends == []
        gate.set()
        assert await runner.close(5) == 0
        while not ends:
            await checkpoint()
        assert ends == [CallEnd(value=True)]
        group.cancel_scope.cancel()
    assert akv_threads() == []


async def test_M1_a_cancelled_close_lets_the_threads_end_by_themselves() -> None:
    gate = threading.Event()
    runner = ThreadRunner({})
    runner.start(CallKind.GET, lambda: gate.wait(5), SIZE, lambda _: None)
    with anyio.move_on_after(0.02) as scope:
        await runner.close(60)
    assert scope.cancelled_caught
    threads = akv_threads()
    gate.set()
    for thread in threads:
        thread.join(5)
    assert akv_threads() == []
    assert runner.undelivered == 1


async def test_M1_ends_wait_for_a_server_that_comes_later() -> None:
    runner = ThreadRunner({})
    ends: list[CallEnd] = []
    runner.start(CallKind.GET, lambda: 1, SIZE, ends.append)
    assert await runner.close(5) == 0
    assert (ends, runner.undelivered) == ([], 1)
    async with anyio.create_task_group() as group:
        await group.start(runner.serve)
        while not ends:
            await checkpoint()
        group.cancel_scope.cancel()
    assert ends == [CallEnd(value=1)]


async def test_O6_after_close_and_in_a_forked_child_nothing_starts() -> None:
    runner = ThreadRunner({})
    assert await runner.close(1) == 0
    with pytest.raises(NotOpenError):
        runner.start(CallKind.GET, lambda: 1, SIZE, lambda _: None)
    forked = ThreadRunner({})
    forked._pid = os.getpid() - 1  # What a child sees; a real fork is made in test_forked_child.py.
    with pytest.raises(NotOpenError):
        forked.start(CallKind.GET, lambda: 1, SIZE, lambda _: None)


async def test_O6_calls_are_counted_for_the_end_of_the_process() -> None:
    guard = ExitGuard()
    seen: list[int] = []
    runner = ThreadRunner({}, guard)
    async with anyio.create_task_group() as group:
        await group.start(runner.serve)
        await end_of(runner, lambda: seen.append(guard.calls_running))
        assert seen == [1]
        assert guard.calls_running == 0
        assert await runner.close(5) == 0
        group.cancel_scope.cancel()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_M1_a_completion_stays_on_record_when_the_loop_is_gone(backend: str) -> None:
    gate = threading.Event()
    runner = ThreadRunner({})

    async def start_only() -> None:
        runner.start(CallKind.GET, lambda: gate.wait(5), SIZE, lambda _: pytest.fail("there is no loop to run this on"))
        await checkpoint()

    anyio.run(start_only, backend=backend)
    (thread,) = akv_threads()
    gate.set()
    while runner.undelivered == 0:
        thread.join(0.01)
    assert thread.is_alive()  # It waits for a next call, and holds up no exit: it is a daemon.
    runner._lanes[CallKind.GET].dismiss()
    thread.join(5)
    assert akv_threads() == []


def test_M1_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one call of kind get"):
        ThreadRunner({CallKind.GET: 0})
