"""Calls whose waits are cut short: those on the engine's pages begin and end once, a snapshot's is waited for (D2, M1, M5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from akv import NotOpenError
from akv.flow.calls import CallDesk
from akv.flow.uncut import uncut
from akv.ownership.slots import SlotPool
from akv.ownership.store_calls import StoreCalls
from akv.ports.calls import CallKind, CallSize
from akv.services.poller import StreamPoller
from akv_testing import FakeDevice, FakeRunner, run_virtual, settle, tiny_layout
from akv_testing.calls import Latency
from akv_testing.clock import BACKENDS

if TYPE_CHECKING:
    from akv.ports.device import PassEvent
    from akv_testing.cancelling import Cancelling

SIZE = CallSize(1, 1)
#: (backend, whether by asyncio's own cancellation, at how many waits in a row)
WAYS = [*((backend, False, 1) for backend in BACKENDS), ("asyncio", True, 1), ("asyncio", True, 4)]


class Pages:
    """What stands for the pages of a call: how often it began and ended, and whether it may begin."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.began = self.ended = 0
        self._refuses = refuses

    def begin(self) -> bool:
        self.began += not self._refuses
        return not self._refuses

    def end(self) -> None:
        self.ended += 1
        assert self.ended <= self.began


class Desk:
    """A desk with one place for gets and one for snapshots, and what it hangs on."""

    def __init__(self) -> None:
        limits = dict.fromkeys(CallKind, 1)
        self.runner = FakeRunner(limits=limits, latency=Latency(get_s=0.001, snapshot_s=0.001))
        self.records = StoreCalls()
        self.poller = StreamPoller(0.0005)
        self.desk = CallDesk(self.runner, self.records, self.poller)
        self.device = FakeDevice(tiny_layout(), (8,), anyio.current_time)
        self.slots = SlotPool(2)
        self.queued: list[PassEvent] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            await group.start(self.runner.serve)
            await group.start(self.poller.run)
            yield
            group.cancel_scope.cancel()

    async def get(self, pages: Pages, call: Callable[[], Any] = lambda: 7) -> Any:
        return await self.desk.run(CallKind.GET, call, SIZE, begin=pages.begin, end=pages.end)

    async def snapshot(self, call: Callable[[], PassEvent] | None = None) -> None:
        with self.slots.request(1, lambda: None) as ticket:
            await self.desk.issue(call or self.device.record, SIZE, [ticket], self.queued.append)

    async def is_idle(self) -> bool:
        await anyio.sleep(0.1)
        places = sum(place.borrowed_tokens for place in self.desk._places.values())
        return (self.records.outstanding, self.slots.free, places) == (0, 2, 0)


def fails() -> Any:
    raise KeyError("planted")


# -- on pages


@pytest.mark.parametrize("call", [lambda: 7, fails], ids=["returns", "raises"])
@pytest.mark.parametrize("busy", [False, True], ids=["a free place", "no free place"])
@pytest.mark.parametrize(("backend", "native", "times"), WAYS)
def test_D2_M1_a_call_on_pages_ends_once_for_each_beginning_wherever_its_wait_is_cut_short(
    backend: str, native: bool, times: int, busy: bool, call: Callable[[], Any], cancelling: type[Cancelling]
) -> None:
    async def main(at: int) -> bool:
        desk, first, pages = Desk(), Pages(), Pages()
        async with desk.running(), anyio.create_task_group() as group:
            if busy:
                group.start_soon(desk.get, first)
                await settle()

            async def work() -> None:
                with_error = call is fails
                try:
                    await desk.get(pages, call)
                except KeyError:
                    assert with_error

            ended = await cancelling(native=native, times=times).run(work, at)
            assert await desk.is_idle()
            assert pages.began == pages.ended == len(desk.runner.calls) - busy
            assert ended is False or pages.ended == 1
            assert await desk.get(pages) == 7
        return ended

    at = 1
    while not run_virtual(backend, main, at):
        at += 1
    assert at > 1


@pytest.mark.anyio
async def test_D2_a_call_that_may_not_begin_gives_its_place_back_and_does_not_end() -> None:
    desk, pages = Desk(), Pages(refuses=True)
    async with desk.running():
        for _ in range(3):
            assert await desk.get(pages) is None
        assert (desk.runner.calls, pages.ended) == ([], 0)
        assert await desk.is_idle()


@pytest.mark.anyio
async def test_M6_a_call_on_pages_that_the_runner_refuses_has_ended() -> None:
    desk, pages = Desk(), Pages()
    async with desk.running():
        await desk.runner.close(0)
        for _ in range(3):
            with pytest.raises(NotOpenError):
                await desk.get(pages)
        assert (pages.began, pages.ended) == (3, 3)
        assert await desk.is_idle()


@pytest.mark.anyio
async def test_D2_a_call_cut_short_ends_when_it_returns_and_not_before() -> None:
    desk, pages = Desk(), Pages()
    gate = desk.runner.hold(CallKind.GET)
    async with desk.running():
        with anyio.move_on_after(1):
            await desk.get(pages)
        assert (pages.began, pages.ended, desk.records.given_up) == (1, 0, 1)
        gate.release()
        assert await desk.is_idle()
        assert pages.ended == 1


# -- a snapshot


@pytest.mark.parametrize("fault", [False, True], ids=["queued", "refused by the device"])
@pytest.mark.parametrize("busy", [False, True], ids=["a free place", "no free place"])
@pytest.mark.parametrize(("backend", "native", "times"), WAYS)
def test_M5_a_snapshot_that_began_is_waited_for_however_it_is_cut_short(
    backend: str, native: bool, times: int, busy: bool, fault: bool, cancelling: type[Cancelling]
) -> None:
    async def main(at: int) -> bool:
        desk = Desk()
        async with desk.running(), anyio.create_task_group() as group:
            if busy:
                group.start_soon(desk.snapshot)
                await settle()
            seen: list[tuple[int, int]] = []

            async def work() -> None:
                try:
                    await desk.snapshot(fails if fault else None)
                except KeyError:
                    assert fault
                finally:
                    seen.append((len(desk.runner.calls) - busy, desk.runner.outstanding(CallKind.SNAPSHOT)))

            ended = await cancelling(native=native, times=times).run(work, at)
            [(began, outstanding)] = seen
            # Nobody had control while it was on its way.
            assert outstanding == (0 if began or not busy else 1)
            assert len(desk.queued) == (began and not fault) + (busy and not outstanding)
            assert await desk.is_idle()
            await desk.snapshot()
        return ended

    at = 1
    while not run_virtual(backend, main, at):
        at += 1
    assert at > 1


@pytest.mark.anyio
async def test_M6_a_snapshot_that_the_runner_refuses_gives_its_slots_and_its_place_back() -> None:
    desk = Desk()
    async with desk.running():
        await desk.runner.close(0)
        for _ in range(3):
            with pytest.raises(NotOpenError):
                await desk.snapshot()
        assert desk.queued == []
        assert await desk.is_idle()


@pytest.mark.anyio
async def test_M8_once_nobody_delivers_ends_a_snapshot_returns_and_what_comes_late_is_not_taken_for_one() -> None:
    desk = Desk()
    gate = desk.runner.hold(CallKind.SNAPSHOT)
    async with desk.running(), anyio.create_task_group() as group:
        group.start_soon(desk.snapshot)
        await gate.reached()
        desk.desk.no_more_ends()
        await settle()
        # It may still write its slots.
        assert (desk.records.outstanding, desk.slots.free) == (1, 1)
        gate.release()
        assert await desk.is_idle()
    assert desk.queued == []


# -- uncut


@pytest.mark.parametrize("times", [1, 2, 5])
def test_M5_uncut_raises_asyncios_own_cancellation_once_it_is_done(times: int) -> None:
    async def main() -> None:
        done = anyio.Event()
        task = asyncio.ensure_future(uncut(done.wait, done.is_set))
        await settle()
        for _ in range(times):
            task.cancel()
            await settle()
        assert not task.done()
        done.set()
        await asyncio.wait({task})
        assert task.cancelled()

    run_virtual("asyncio", main)


@pytest.mark.parametrize("native", [False, True])
def test_M5_uncut_that_is_done_and_cancelled_at_the_same_instant_is_cancelled(native: bool) -> None:
    async def main() -> None:
        done = anyio.Event()
        with anyio.CancelScope() as scope:
            task = asyncio.current_task()
            assert task is not None

            async def wait() -> None:
                done.set()
                (task.cancel if native else scope.cancel)()
                await anyio.lowlevel.checkpoint()

            with pytest.raises(asyncio.CancelledError):
                await uncut(wait, done.is_set)
            task.uncancel()

    run_virtual("asyncio", main)


@pytest.mark.anyio
async def test_M5_uncut_raises_what_the_wait_raises() -> None:
    async def wait() -> None:
        await anyio.lowlevel.checkpoint()
        fails()

    with pytest.raises(KeyError, match="planted"):
        await uncut(wait, lambda: False)
