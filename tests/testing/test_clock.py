"""Virtual time: the clock jumps when everybody waits, and only then."""

import time

import anyio
import pytest

from akv_testing.clock import ManualClock, run_virtual, settle, virtual_backend

pytestmark = pytest.mark.anyio


async def test_an_hour_of_timeout_takes_under_a_second() -> None:
    began = time.monotonic()
    with anyio.move_on_after(3600) as scope:
        await anyio.Event().wait()
    assert scope.cancelled_caught
    assert anyio.current_time() == pytest.approx(3600)
    assert time.monotonic() - began < 1


async def test_every_test_starts_at_time_zero() -> None:
    assert anyio.current_time() == 0
    await anyio.sleep(7)


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    woken: list[float] = []

    async def sleeper(seconds: float) -> None:
        await anyio.sleep(seconds)
        woken.append(anyio.current_time())

    async with anyio.create_task_group() as group:
        for seconds in (3.0, 1.0, 2.0):
            group.start_soon(sleeper, seconds)
    assert woken == pytest.approx([1, 2, 3])


async def test_time_stands_still_while_a_task_can_run() -> None:
    for _ in range(200):
        await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == 0


async def test_settle_runs_the_others_and_moves_no_time() -> None:
    steps: list[str] = []

    async def worker() -> None:
        for step in range(20):
            await anyio.lowlevel.checkpoint()
            steps.append(str(step))
        await anyio.sleep(1)
        steps.append("woken")

    async with anyio.create_task_group() as group:
        group.start_soon(worker)
        await settle()
        assert len(steps) == 20
        assert anyio.current_time() == 0
    assert steps[-1] == "woken"


async def test_a_cancelled_settle_leaves_the_clock_working() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await settle()
    await anyio.sleep(5)
    assert anyio.current_time() == pytest.approx(5)


@pytest.mark.parametrize("name", ["asyncio", "trio"])
def test_run_virtual_gives_each_run_a_clock_of_its_own(name: str) -> None:
    async def two_seconds() -> float:
        await anyio.sleep(2)
        return anyio.current_time()

    assert [run_virtual(name, two_seconds) for _ in range(2)] == pytest.approx([2, 2])


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="curio"):
        virtual_backend("curio")


def test_the_manual_clock_moves_only_forwards() -> None:
    clock = ManualClock()
    clock.advance(1.5)
    assert clock() == 1.5
    with pytest.raises(ValueError, match="forwards"):
        clock.advance(-1)
