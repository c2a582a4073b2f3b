"""What the thread runner promises beyond `CallRunnerConformance`: whose threads they are, and that none is left behind."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from akv.errors import NotOpenError
from akv.pool.exit_guard import ExitGuard
from akv.pool.threads import ThreadRunner
from akv.ports.calls import CallEnd, CallKind, CallRunner, CallSize
from akv_testing.conformance.calls import CallRunnerConformance, Ends, RunnerKit, serving

pytestmark = pytest.mark.anyio

SIZE = CallSize(keys=1)


def akv_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("akv-")]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Calls wait for it; it opens at the test's end at the latest."""
    made = threading.Event()
    yield made
    made.set()


class ThreadKit:
    """Makes thread runners, and calls that wait on a `threading.Event`."""

    def runner(self, limits: Mapping[CallKind, int]) -> CallRunner:
        return ThreadRunner(limits)

    def hold(
        self, runner: CallRunner, kind: CallKind, body: Callable[[], Any]
    ) -> tuple[Callable[[], Any], Callable[[], None]]:
        held_back = threading.Event()

        def held() -> Any:
            held_back.wait()
            return body()

        return held, held_back.set


class TestThreadRunner(CallRunnerConformance):
    @pytest.fixture
    def kit(self) -> RunnerKit:
        return ThreadKit()


async def test_M1_threads_are_daemons_start_when_needed_are_used_again_and_end() -> None:
    runner, ends = ThreadRunner({CallKind.GET: 2}), Ends()
    async with serving(runner):
        assert akv_threads() == []
        for number in range(3):
            runner.start(CallKind.GET, threading.current_thread, SIZE, ends["get"])
            await ends.wait(number + 1)
        assert akv_threads() == ["akv-get-0"]
        assert all(end.value.daemon and end.value.name == "akv-get-0" for _, end in ends.ends)
    assert akv_threads() == []
    assert runner.outstanding == 0


async def test_M1_no_more_calls_of_a_kind_run_than_its_limit(gate: threading.Event) -> None:
    runner, ends = ThreadRunner({CallKind.GET: 2}), Ends()
    entered = threading.Semaphore(0)

    def call() -> int:
        entered.release()
        gate.wait()
        return len(akv_threads())

    async with serving(runner):
        for _ in range(5):
            runner.start(CallKind.GET, call, SIZE, ends["get"])
        assert entered.acquire(timeout=5)
        assert entered.acquire(timeout=5)
        assert not entered.acquire(timeout=0.02)
        assert runner.outstanding == 5
        gate.set()
        await ends.wait(5)
        assert {end.value for _, end in ends.ends} == {2}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_M1_no_exception_ends_a_thread(error: BaseException) -> None:
    def fail() -> None:
        raise error

    runner, ends = ThreadRunner({CallKind.GET: 1}), Ends()
    async with serving(runner):
        runner.start(CallKind.GET, fail, SIZE, ends["fails"])
        runner.start(CallKind.GET, str, SIZE, ends["works"])
        await ends.wait(2)
    assert ends.ends == [("fails", CallEnd(error=error)), ("works", CallEnd(value=""))]


async def test_M1_a_call_that_hangs_keeps_its_thread_until_it_returns(gate: threading.Event) -> None:
    runner, ends = ThreadRunner({}), Ends()
    async with serving(runner):
        runner.start(CallKind.GET, gate.wait, SIZE, ends["hangs"])
        runner.start(CallKind.PUT, str, SIZE, ends["put"])
        await ends.wait(1)
        assert await runner.close(0.03) == 1
        assert akv_threads() == ["akv-get-0"]
        gate.set()
        await ends.wait(2)
    assert ends.names == ["put", "hangs"]
    assert akv_threads() == []


async def test_M1_a_cancelled_close_lets_the_threads_end_by_themselves(gate: threading.Event) -> None:
    runner = ThreadRunner({})
    runner.start(CallKind.GET, gate.wait, SIZE, Ends()["get"])
    (thread,) = runner._lanes[CallKind.GET].threads
    with anyio.move_on_after(0.02) as scope:
        await runner.close(60)
    assert scope.cancelled_caught
    gate.set()
    thread.join(5)
    assert not thread.is_alive()
    assert (runner.undelivered, runner.outstanding) == (1, 0)


async def test_O6_in_a_forked_child_nothing_starts() -> None:
    runner = ThreadRunner({})
    runner._pid = os.getpid() - 1  # What a child sees; a real fork is made in test_forked_child.py.
    with pytest.raises(NotOpenError):
        runner.start(CallKind.GET, str, SIZE, Ends()["get"])
    await checkpoint()


async def test_O6_calls_are_counted_for_the_end_of_the_process() -> None:
    guard = ExitGuard()
    runner, ends = ThreadRunner({}, guard), Ends()
    async with serving(runner):
        runner.start(CallKind.GET, lambda: guard.calls_running, SIZE, ends["get"])
        await ends.wait(1)
        assert ends.ends == [("get", CallEnd(value=1))]
        assert guard.calls_running == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_M1_an_end_stays_on_record_when_the_loop_is_gone(backend: str, gate: threading.Event) -> None:
    runner, ends = ThreadRunner({}), Ends()

    async def start_only() -> None:
        runner.start(CallKind.GET, gate.wait, SIZE, ends["get"])
        await checkpoint()

    anyio.run(start_only, backend=backend)
    lane = runner._lanes[CallKind.GET]
    (thread,) = lane.threads
    lane.dismiss()
    gate.set()
    thread.join(5)
    assert not thread.is_alive()
    assert (runner.undelivered, runner.outstanding, ends.ends) == (1, 0, [])


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one call of kind get"):
        ThreadRunner({CallKind.GET: 0})
