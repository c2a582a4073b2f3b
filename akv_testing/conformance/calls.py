"""What a `CallRunner` promises, with threads or without. Asynchronous: runs on each `anyio_backend` of the module."""

# ruff: noqa: D102, N802 - a test's name says what holds, and by which rule

import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import pytest

from akv.errors import NotOpenError
from akv.ports.calls import CallEnd, CallKind, CallRunner, CallSize

#: What every call here is said to move.
SIZE = CallSize(keys=1, bytes=1)
#: Seconds after which something that must happen counts as not happening, and that something that must not is given.
LONG_S, SHORT_S = 5.0, 0.03


class RunnerKit(Protocol):
    """How the suite makes runners, and calls that take as long as it wants."""

    def runner(self, limits: Mapping[CallKind, int]) -> CallRunner:
        """A new runner; all five seconds of `close()` are there for its calls."""
        ...

    def hold(
        self, runner: CallRunner, kind: CallKind, body: Callable[[], Any]
    ) -> tuple[Callable[[], Any], Callable[[], None]]:
        """A body for the next call of a kind that is started, whose call does not return before the second part is called.

        For runners with threads: a function that waits on a `threading.Event` first, and the event's `set`.
        """
        ...


class Ends:
    """Collects the ends of calls, in order, with the thread that they came on."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, CallEnd]] = []
        self.threads: set[int] = set()
        self._changed = anyio.Event()

    def __getitem__(self, name: str) -> Callable[[CallEnd], None]:
        """A `done` for the call of that name."""

        def done(end: CallEnd) -> None:
            self.ends.append((name, end))
            self.threads.add(threading.get_ident())
            self._changed.set()

        return done

    @property
    def names(self) -> list[str]:
        """The names of the calls that ended."""
        return [name for name, _ in self.ends]

    async def wait(self, count: int) -> None:
        """Wait until so many ends came."""
        with anyio.fail_after(LONG_S):
            while len(self.ends) < count:
                self._changed = anyio.Event()
                await self._changed.wait()


class CallRunnerConformance:
    """Fixture to supply: `kit`, a `RunnerKit`. The module is marked `anyio` and says on which backends it runs."""

    async def test_M1_a_call_ends_once_on_the_loop_and_not_within_start(self, kit: RunnerKit) -> None:
        runner, ends = kit.runner({CallKind.GET: 1}), Ends()
        async with serving(runner):
            runner.start(CallKind.GET, lambda: "value", SIZE, ends["a"])
            assert not ends.ends
            await ends.wait(1)
            await anyio.sleep(SHORT_S)
        assert ends.ends == [("a", CallEnd(value="value"))]
        assert ends.threads == {threading.get_ident()}

    async def test_what_a_call_raises_is_its_end_and_the_next_call_runs(self, kit: RunnerKit) -> None:
        runner, ends, error = kit.runner({CallKind.PUT: 1}), Ends(), OSError("store")

        def body() -> None:
            raise error

        async with serving(runner):
            runner.start(CallKind.PUT, body, SIZE, ends["fails"])
            await ends.wait(1)
            runner.start(CallKind.PUT, lambda: 1, SIZE, ends["works"])
            await ends.wait(2)
        assert [end.error for _, end in ends.ends] == [error, None]

    def test_it_tells_its_limit_of_every_kind(self, kit: RunnerKit) -> None:
        limits = {kind: number for number, kind in enumerate(CallKind, 1)}
        assert kit.runner(limits).limits == limits

    async def test_calls_of_a_kind_run_up_to_the_limit_and_one_waits(self, kit: RunnerKit) -> None:
        runner, ends = kit.runner({CallKind.GET: 2}), Ends()
        async with serving(runner):
            releases = []
            for name in ("a", "b"):
                body, release = kit.hold(runner, CallKind.GET, str)
                runner.start(CallKind.GET, body, SIZE, ends[name])
                releases.append(release)
            runner.start(CallKind.GET, str, SIZE, ends["c"])
            await anyio.sleep(SHORT_S)
            assert ends.names == []
            releases[1]()
            await ends.wait(2)
            assert ends.names == ["b", "c"]
            releases[0]()
            await ends.wait(3)

    async def test_a_call_that_hangs_holds_up_no_other_kind(self, kit: RunnerKit) -> None:
        runner, ends = kit.runner(dict.fromkeys(CallKind, 1)), Ends()
        async with serving(runner):
            body, release = kit.hold(runner, CallKind.PUT, str)
            runner.start(CallKind.PUT, body, SIZE, ends["put"])
            for kind in (CallKind.PROBE, CallKind.GET, CallKind.COPY):
                runner.start(kind, str, SIZE, ends[kind])
            await ends.wait(3)
            assert set(ends.names) == {"probe", "get", "copy"}
            release()
            await ends.wait(4)

    async def test_a_done_that_raises_leaves_through_serve(self, kit: RunnerKit) -> None:
        runner = kit.runner({CallKind.GET: 1})

        def done(end: CallEnd) -> None:
            raise LookupError("a crash of akv")

        async def scenario() -> None:
            async with anyio.create_task_group() as group:
                await group.start(runner.serve)
                runner.start(CallKind.GET, str, SIZE, done)
                with anyio.fail_after(LONG_S):
                    await anyio.sleep_forever()

        crashes: list[BaseException] = []
        try:
            await scenario()
        except* LookupError as group:
            crashes.extend(group.exceptions)
        assert len(crashes) == 1
        assert await runner.close(LONG_S) == 0

    async def test_ends_that_nobody_served_wait_for_the_next_serve(self, kit: RunnerKit) -> None:
        runner, ends = kit.runner({CallKind.GET: 1}), Ends()
        async with serving(runner, close=False):
            body, release = kit.hold(runner, CallKind.GET, str)
            runner.start(CallKind.GET, body, SIZE, ends["a"])
            await anyio.sleep(SHORT_S)
        release()
        await anyio.sleep(SHORT_S)
        assert ends.names == []
        async with serving(runner):
            await ends.wait(1)

    async def test_close_waits_for_calls_that_return_in_time(self, kit: RunnerKit) -> None:
        runner, ends = kit.runner({CallKind.GET: 1}), Ends()
        async with serving(runner):
            body, release = kit.hold(runner, CallKind.GET, str)
            runner.start(CallKind.GET, body, SIZE, ends["a"])
            async with anyio.create_task_group() as group:
                group.start_soon(_later, release)
                assert await runner.close(LONG_S) == 0
            await ends.wait(1)

    async def test_M1_close_counts_what_hangs_and_its_end_still_comes(self, kit: RunnerKit) -> None:
        runner, ends = kit.runner({CallKind.GET: 1}), Ends()
        async with serving(runner):
            body, release = kit.hold(runner, CallKind.GET, str)
            begun = threading.Event()

            def hangs() -> Any:
                begun.set()
                return body()

            runner.start(CallKind.GET, hangs, SIZE, ends["hangs"])
            runner.start(CallKind.GET, str, SIZE, ends["unbegun"])
            # A thread takes it up when the machine lets it. Without threads it has begun, though its body may come last.
            with anyio.move_on_after(LONG_S):
                while not begun.is_set():  # noqa: ASYNC110 - a thread sets it
                    await anyio.sleep(SHORT_S)
            began = anyio.current_time()
            assert await runner.close(SHORT_S) == 1
            assert anyio.current_time() - began < LONG_S / 2
            await ends.wait(1)
            assert [(name, type(end.error)) for name, end in ends.ends] == [("unbegun", NotOpenError)]
            release()
            await ends.wait(2)
            assert await runner.close(LONG_S) == 0

    async def test_nothing_starts_after_close(self, kit: RunnerKit) -> None:
        runner = kit.runner({CallKind.GET: 1})
        async with serving(runner):
            assert await runner.close(LONG_S) == 0
            assert await runner.close(LONG_S) == 0
            with pytest.raises(NotOpenError):
                runner.start(CallKind.GET, str, SIZE, Ends()["late"])


async def _later(action: Callable[[], None]) -> None:
    await anyio.sleep(SHORT_S)
    action()


@asynccontextmanager
async def serving(runner: CallRunner, *, close: bool = True) -> AsyncIterator[None]:
    """Serve a runner for the length of the block; then close it, unless it will be served again."""
    async with anyio.create_task_group() as group:
        await group.start(runner.serve)
        yield
        if close:
            assert await runner.close(LONG_S) == 0
        group.cancel_scope.cancel()
