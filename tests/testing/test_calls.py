"""FakeRunner: virtual durations, gates, limits, and an end for every call that returns."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from akv.errors import NotOpenError
from akv.ports.calls import CallEnd, CallKind, CallRunner, CallSize
from akv_testing.calls import FakeRunner, Latency
from akv_testing.clock import settle
from akv_testing.errors import CallLimitExceeded, MisuseError

pytestmark = pytest.mark.anyio

ONE = CallSize(keys=1, bytes=100)


@asynccontextmanager
async def serving(runner: FakeRunner) -> AsyncIterator[FakeRunner]:
    port: CallRunner = runner
    async with anyio.create_task_group() as group:
        await group.start(port.serve)
        yield runner
        group.cancel_scope.cancel()


def noting(ends: list[tuple[Any, float]]) -> Callable[[CallEnd], None]:
    return lambda end: ends.append((end.value if end.error is None else end.error, round(anyio.current_time(), 6)))


def giving(value: str) -> Callable[[], str]:
    return lambda: value


async def test_a_call_takes_its_virtual_time_and_ends_once() -> None:
    ends: list[tuple[Any, float]] = []
    async with serving(FakeRunner(latency=Latency(get_s=2, per_key_s=1, per_byte_s=0.01))) as runner:
        runner.start(CallKind.GET, lambda: "value", ONE, noting(ends))
        assert not ends
        await anyio.sleep(100)
    assert ends == [("value", 4)]
    assert runner.outstanding() == 0


@pytest.mark.parametrize(("at_start", "seen"), [(True, 0.0), (False, 3.0)])
async def test_the_body_runs_at_the_end_or_at_the_start(at_start: bool, seen: float) -> None:
    ends: list[tuple[Any, float]] = []
    async with serving(FakeRunner(latency=Latency(put_s=3), body_at_start=at_start)) as runner:
        runner.start(CallKind.PUT, anyio.current_time, ONE, noting(ends))
        await anyio.sleep(10)
    assert ends == [(seen, 3)]


async def test_ends_come_by_time_then_by_order_of_start() -> None:
    ends: list[tuple[Any, float]] = []
    async with serving(FakeRunner(latency=lambda kind, _: 2 if kind is CallKind.PROBE else 1)) as runner:
        for name, kind in [("a", CallKind.PROBE), ("b", CallKind.GET), ("c", CallKind.PUT), ("d", CallKind.COPY)]:
            runner.start(kind, giving(name), ONE, noting(ends))
        await anyio.sleep(10)
    assert [value for value, _ in ends] == ["b", "c", "d", "a"]


async def test_what_a_body_raises_is_its_end() -> None:
    ends: list[tuple[Any, float]] = []
    error = OSError("store")

    def body() -> None:
        raise error

    async with serving(FakeRunner()) as runner:
        runner.start(CallKind.GET, body, ONE, noting(ends))
        await settle()
    assert ends == [(error, 0)]


@pytest.mark.parametrize("culprit", ["body", "done"])
async def test_misuse_in_a_body_and_a_raising_done_leave_through_serve(culprit: str) -> None:
    def fail(*_: object) -> None:
        raise MisuseError("seen")

    async def scenario() -> None:
        async with serving(FakeRunner()) as runner:
            body, done = (fail, ended.append) if culprit == "body" else (str, fail)
            runner.start(CallKind.GET, body, ONE, done)
            await anyio.sleep(1)

    ended: list[CallEnd] = []
    seen: list[BaseException] = []
    try:
        await scenario()
    except* MisuseError as group:
        seen.extend(group.exceptions)
    assert [str(error) for error in seen] == ["seen"]
    assert not ended


async def test_limits_hold_and_one_more_may_wait() -> None:
    ends: list[tuple[Any, float]] = []
    async with serving(FakeRunner(limits=dict.fromkeys(CallKind, 2), latency=Latency(get_s=1))) as runner:
        for name in "abc":
            runner.start(CallKind.GET, giving(name), ONE, noting(ends))
        assert (runner.outstanding(CallKind.GET), runner.outstanding(CallKind.PUT)) == (3, 0)
        with pytest.raises(CallLimitExceeded, match="get"):
            runner.start(CallKind.GET, str, ONE, noting(ends))
        await anyio.sleep(10)
    assert ends == [("a", 1), ("b", 1), ("c", 2)]
    assert runner.most_running[CallKind.GET] == 2


async def test_a_gate_holds_the_nth_call_until_released() -> None:
    ends: list[tuple[Any, float]] = []
    ran: list[str] = []
    async with serving(FakeRunner(latency=Latency(get_s=1))) as runner:
        gate = runner.hold(CallKind.GET, nth=2)

        def ran_as(name: str) -> str:
            ran.append(name)
            return name

        for name in "abc":
            runner.start(CallKind.GET, partial(ran_as, name), ONE, noting(ends))
        await gate.reached()
        await anyio.sleep(10)
        assert (ran, gate.holding, runner.outstanding()) == (["a", "c"], 1, 1)
        gate.release()
        gate.release()
        await anyio.sleep(10)
    assert ends == [("a", 1), ("c", 2), ("b", 11)]


async def test_a_gate_behind_the_body_lets_the_effect_happen() -> None:
    ends: list[tuple[Any, float]] = []
    ran: list[str] = []
    async with serving(FakeRunner()) as runner:
        gate = runner.hold(CallKind.PUT, after_body=True)
        runner.start(CallKind.PUT, lambda: ran.append("put"), ONE, noting(ends))
        await gate.reached()
        assert ran == ["put"]
        assert not ends
        gate.release()
        await settle()
    assert len(ends) == 1


async def test_a_gate_for_all_holds_every_call_of_its_kind() -> None:
    ends: list[tuple[Any, float]] = []
    async with serving(FakeRunner()) as runner:
        gate = runner.hold_all(CallKind.GET)
        runner.start(CallKind.GET, str, ONE, noting(ends))
        runner.start(CallKind.GET, str, ONE, noting(ends))
        runner.start(CallKind.PROBE, str, ONE, noting(ends))
        await settle()
        assert (gate.holding, len(ends)) == (2, 1)
        gate.release()
        runner.start(CallKind.GET, str, ONE, noting(ends))
        await settle()
    assert len(ends) == 4


@pytest.mark.parametrize("served", [True, False])
async def test_close_waits_within_its_deadline_and_counts_what_hangs(served: bool) -> None:
    ends: list[tuple[Any, float]] = []
    runner = FakeRunner(latency=Latency(get_s=1))
    runner.hold(CallKind.GET, nth=2)
    async with serving(runner):
        runner.start(CallKind.GET, str, ONE, noting(ends))
        runner.start(CallKind.GET, str, ONE, noting(ends))
        if served:
            assert await runner.close(5) == 1
            assert anyio.current_time() == 5
    assert await runner.close(5) == 1
    assert len(ends) == (1 if served else 0)
    with pytest.raises(NotOpenError):
        runner.start(CallKind.GET, str, ONE, noting(ends))


async def test_close_returns_at_once_when_nothing_is_outstanding() -> None:
    async with serving(FakeRunner()) as runner:
        assert await runner.close(5) == 0
    assert anyio.current_time() == 0


def test_S3_a_snapshot_takes_as_long_as_another_copy_unless_said() -> None:
    assert FakeRunner().limits[CallKind.SNAPSHOT] == 1
    assert Latency(copy_s=3)(CallKind.SNAPSHOT, ONE) == 3
    assert Latency(copy_s=3, snapshot_s=0, per_key_s=1)(CallKind.SNAPSHOT, ONE) == 1
