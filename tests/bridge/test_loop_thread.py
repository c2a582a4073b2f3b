"""A loop in a thread: what is put over there runs once, in order, or is refused; nothing hangs, whoever ends first (M8)."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from typing import Literal

import anyio
import anyio.lowlevel
import pytest

from akv import NotOpenError
from akv.bridge import LoopThread

#: Seconds after which something that must happen counts as not happening.
LONG_S = 20.0


class Served:
    """What the loops of these tests have open; tells what became of it."""

    def __init__(self) -> None:
        self.left = False
        self.leave = threading.Event()
        self.leave.set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Served"]:
        try:
            yield self
        finally:
            # A thread of the test lets it go: the end of something that takes its time.
            while not self.leave.is_set():
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.001)
            self.left = True


@pytest.fixture(params=["asyncio", "trio"])
def loop(request: pytest.FixtureRequest) -> Iterator[LoopThread[Served]]:
    backend: Literal["asyncio", "trio"] = request.param
    thread = LoopThread(Served().open, name="test-loop", backend=backend)
    yield thread
    thread.served.leave.set()
    assert thread.close(LONG_S)


def test_a_function_runs_on_the_loop_and_its_result_comes_back(loop: LoopThread[Served]) -> None:
    async def later(value: int) -> int:
        await anyio.lowlevel.checkpoint()
        return value + 1

    assert loop.call(threading.get_ident) != threading.get_ident()
    assert loop.call(later, 1) == 2
    assert loop.begin(later, 2).result(LONG_S) == 3


@pytest.mark.parametrize("error", [ValueError("told"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_function_raises_is_raised_at_its_caller_and_nowhere_else(
    loop: LoopThread[Served], error: BaseException
) -> None:
    def fails() -> None:
        raise error

    async def fails_later() -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    for function in (fails, fails_later):
        with pytest.raises(type(error)) as caught:
            loop.call(function)
        assert caught.value is error
    assert loop.call(abs, -1) == 1


def test_functions_run_in_the_order_of_the_calls(loop: LoopThread[Served]) -> None:
    seen: list[int] = []
    for number in range(200):
        if number % 2:
            loop.post(seen.append, number)
        else:
            loop.begin(seen.append, number)
    loop.call(abs, 0)
    assert seen == list(range(200))


def test_coroutines_run_up_to_their_first_wait_in_the_order_of_the_calls_too(loop: LoopThread[Served]) -> None:
    seen: list[int] = []
    held = threading.Event()

    async def sees(number: int) -> None:
        seen.append(number)
        await anyio.lowlevel.checkpoint()

    # All of them lie in the inbox when the loop looks.
    loop.post(held.wait, LONG_S)
    for number in range(100):
        if number % 3:
            loop.begin(sees, number)
        else:
            loop.begin(seen.append, number)
    held.set()
    loop.call(abs, 0)
    assert seen == list(range(100))


def test_what_may_wait_runs_before_whatever_comes_behind_it(loop: LoopThread[Served]) -> None:
    seen: list[int] = []
    late = loop.begin_within(100 * LONG_S, seen.append, 1)
    with pytest.raises(TimeoutError):
        late.result(0.02)
    loop.call(seen.append, 2)
    assert seen == [1, 2]
    assert late.done()


def test_what_may_wait_runs_when_somebody_says_so_or_its_time_has_come(loop: LoopThread[Served]) -> None:
    late = loop.begin_within(100 * LONG_S, abs, -1)
    loop.hurry()
    assert late.result(LONG_S) == 1
    later, soon = loop.begin_within(100 * LONG_S, abs, -2), loop.begin_within(0.01, abs, -3)
    assert (later.result(LONG_S), soon.result(LONG_S)) == (2, 3)
    later, soon = loop.begin_within(0.01, abs, -4), loop.begin_within(100 * LONG_S, abs, -5)
    assert (later.result(LONG_S), soon.result(LONG_S)) == (4, 5)


def test_giving_a_future_up_cancels_what_it_waits_for(loop: LoopThread[Served]) -> None:
    ended: Future[str] = Future()

    async def waits() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.set_result("cancelled")

    future = loop.begin(waits)
    loop.call(abs, 0)
    assert future.cancel()
    assert ended.result(LONG_S) == "cancelled"
    with pytest.raises(CancelledError):
        future.result(LONG_S)


def test_a_future_that_was_given_up_before_its_turn_never_runs(loop: LoopThread[Served]) -> None:
    turn, seen = threading.Event(), list[int]()
    loop.post(turn.wait, LONG_S)
    future = loop.begin(seen.append, 1)
    assert future.cancel()
    turn.set()
    loop.call(abs, 0)
    assert seen == []


def test_an_interrupt_of_a_call_cancels_what_runs(loop: LoopThread[Served]) -> None:
    ended: Future[str] = Future()
    main = threading.main_thread().ident
    assert main is not None

    async def waits() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await anyio.sleep_forever()
        finally:
            ended.set_result("cancelled")

    # A shell may have started this process with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.call(waits)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.result(LONG_S) == "cancelled"


def test_the_end_of_the_loop_ends_every_wait(loop: LoopThread[Served]) -> None:
    begun, started = loop.begin(anyio.sleep_forever), threading.Event()

    async def waits_then_closes() -> None:
        started.set()
        await anyio.sleep_forever()

    other = loop.begin(waits_then_closes)
    assert started.wait(LONG_S)
    assert loop.close(LONG_S)
    assert loop.served.left
    for future in (begun, other):
        with pytest.raises(NotOpenError, match="has ended"):
            future.result(LONG_S)
    for put in (loop.call, loop.begin, loop.post):
        with pytest.raises(NotOpenError, match="has ended"):
            put(abs, 0)
    assert loop.close(LONG_S)


def test_what_is_put_over_while_the_loop_ends_runs_or_is_refused(loop: LoopThread[Served]) -> None:
    futures: list[Future[int]] = []
    refused = threading.Event()

    def puts() -> None:
        try:
            while True:
                futures.append(loop.begin(abs, -1))
        except NotOpenError:
            refused.set()

    putter = threading.Thread(target=puts)
    putter.start()
    while len(futures) < 50:
        loop.call(abs, 0)
    assert loop.close(LONG_S)
    assert refused.wait(LONG_S)
    putter.join()
    ends = [future.exception(LONG_S) for future in futures]
    assert all(end is None or isinstance(end, NotOpenError) for end in ends)
    assert ends[0] is None


def test_a_loop_that_takes_longer_than_its_limit_says_so(loop: LoopThread[Served]) -> None:
    loop.served.leave.clear()
    assert not loop.close(0.01)
    with pytest.raises(NotOpenError):
        loop.call(abs, 0)
    loop.served.leave.set()
    assert loop.close(LONG_S)


def test_a_posted_function_that_raises_ends_the_loop_and_is_kept(loop: LoopThread[Served]) -> None:
    def fails() -> None:
        raise ValueError("told")

    loop.post(fails)
    assert loop.close(LONG_S)
    assert loop.served.left
    with pytest.raises(NotOpenError, match=r"has ended after .*told"):
        loop.call(abs, 0)


def test_on_its_own_loop_it_refuses_to_wait_for_itself(loop: LoopThread[Served]) -> None:
    with pytest.raises(NotOpenError, match="own loop"):
        loop.call(lambda: loop.call(abs, 0))


def test_in_a_forked_child_it_refuses_what_no_thread_would_run(
    loop: LoopThread[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.getpid() + 1
    with monkeypatch.context() as patch:
        patch.setattr("akv.bridge.os.getpid", lambda: child)
        with pytest.raises(NotOpenError, match="forked child"):
            loop.call(abs, 0)
        assert loop.close(0.0)
    assert loop.call(abs, -1) == 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_fails_to_open_is_raised_and_leaves_no_thread(backend: Literal["asyncio", "trio"]) -> None:
    @asynccontextmanager
    async def opening() -> AsyncIterator[int]:
        await anyio.lowlevel.checkpoint()
        yield int("told")

    with pytest.raises(ValueError, match="told"):
        LoopThread(opening, name="test-fails", backend=backend)
    for thread in threading.enumerate():
        if thread.name == "test-fails":
            thread.join(LONG_S)
            assert not thread.is_alive()
