"""The desk of blocking calls: what stays on record when a wait ends early, and that nothing stays when nothing ran (M1)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from akv import NotOpenError
from akv.flow.calls import CallDesk, CopyFailed, event_reached, slots_granted
from akv.ownership.slots import SlotPool
from akv.ownership.store_calls import StoreCalls
from akv.ports.calls import CallKind, CallSize
from akv.ports.device import PassEvent
from akv.services.poller import StreamPoller
from akv_testing import FakeDevice, FakeRunner, settle, tiny_layout

pytestmark = pytest.mark.anyio

SIZE = CallSize(1, 1)


class Desk:
    """A desk with everything that it hangs on."""

    def __init__(self) -> None:
        self.runner = FakeRunner()
        self.records = StoreCalls()
        self.poller = StreamPoller(0.001)
        self.desk = CallDesk(self.runner, self.records, self.poller)
        self.device = FakeDevice(tiny_layout(), (8,), anyio.current_time)
        self.slots = SlotPool(4)
        self.ends: list[PassEvent | None] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            await group.start(self.runner.serve)
            await group.start(self.poller.run)
            yield
            group.cancel_scope.cancel()

    async def copy(self, *, begin: bool = True, count: int = 1) -> bool:
        with await slots_granted(lambda wake: self.slots.request(count, wake)) as ticket:
            return await self.desk.copy(self.device.record, SIZE, ticket, begin=lambda: begin, end=self.ends.append)

    async def get(self) -> int:
        with await slots_granted(lambda wake: self.slots.request(1, wake)) as ticket:
            value: int = await self.desk.run(CallKind.GET, lambda: 7, SIZE, ticket)
            return value

    def idle(self) -> bool:
        return self.records.outstanding == 0 and self.slots.free == self.slots.count


async def test_M1_a_wait_ends_at_once_and_the_call_keeps_its_slots_until_it_returned() -> None:
    desk = Desk()
    gate = desk.runner.hold(CallKind.GET)
    async with desk.running():
        with anyio.move_on_after(1) as scope:
            await desk.get()
        assert scope.cancelled_caught
        assert anyio.current_time() == 1
        assert (desk.records.outstanding, desk.records.given_up, desk.slots.free) == (1, 1, 3)
        gate.release()
        await settle()
        assert desk.idle()
        assert await desk.get() == 7


async def test_M1_a_wait_for_a_place_that_is_cancelled_never_started_anything() -> None:
    desk = Desk()
    gate = desk.runner.hold_all(CallKind.GET)
    async with desk.running(), anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(desk.get)
        await settle()
        with anyio.move_on_after(1):
            await desk.get()
        assert len(desk.runner.calls) == desk.records.outstanding == 2
        gate.release()
        await settle()
        assert desk.idle()


async def test_M1_a_call_begins_in_the_turn_that_asks_for_it_where_a_place_is_free_and_nobody_cancelled() -> None:
    desk = Desk()
    async with desk.running():
        with anyio.CancelScope() as scope:
            scope.cancel()
            await desk.desk.run(CallKind.GET, lambda: 7, SIZE)
        assert scope.cancelled_caught
        assert (desk.runner.calls, desk.desk.places_taken) == ([], 0)
        asking = desk.desk.run(CallKind.GET, lambda: 7, SIZE)
        # One step of the coroutine, with no loop around it.
        asking.send(None)
        assert len(desk.runner.calls) == 1
        await settle()
        asking.close()
        await settle()
        assert desk.desk.places_taken == 0


async def test_M1_what_a_call_raises_is_raised_to_who_waits() -> None:
    desk = Desk()

    def fails() -> None:
        raise KeyError("planted")

    async with desk.running():
        with pytest.raises(KeyError, match="planted"):
            await desk.desk.run(CallKind.PROBE, fails, SIZE)
        assert desk.idle()


async def test_M6_a_call_that_the_runner_refuses_stays_on_nobodys_record() -> None:
    desk = Desk()
    async with desk.running():
        await desk.runner.close(0)
        for _ in range(6):
            with pytest.raises(NotOpenError):
                await desk.get()
            with pytest.raises(NotOpenError):
                await desk.copy()
        assert desk.idle()
        # Each copy that was begun has ended, as one that failed.
        assert desk.ends == [None] * 6


async def test_M6_a_copy_that_may_not_begin_gives_its_place_back() -> None:
    desk = Desk()
    async with desk.running():
        for _ in range(2 * desk.runner.limits[CallKind.COPY]):
            assert not await desk.copy(begin=False)
        assert (desk.runner.calls, desk.ends) == ([], [])
        assert await desk.copy()
        assert len(desk.ends) == 1
        assert desk.idle()


async def test_M2_a_copys_end_comes_with_its_event_even_if_nobody_waits_for_it_any_more() -> None:
    desk = Desk()
    async with desk.running():
        desk.device.kernel(writes=[(0, 0, 1)], duration_s=0.01)
        with anyio.move_on_after(0.002):
            await desk.copy()
        assert (desk.ends, desk.slots.free, desk.records.given_up) == ([], 3, 1)
        await anyio.sleep(0.01)
        assert len(desk.ends) == 1
        assert desk.idle()


async def test_M6_a_claim_on_slots_that_is_cancelled_is_withdrawn() -> None:
    desk = Desk()
    held = desk.slots.request(3, lambda: None)
    with anyio.move_on_after(1) as scope:
        await slots_granted(lambda wake: desk.slots.request(2, wake))
    assert scope.cancelled_caught
    held.leave()
    assert desk.idle()


@pytest.mark.parametrize("turns", range(4))
async def test_M6_a_claim_that_is_granted_and_cancelled_in_the_same_instant_is_given_back_or_kept(turns: int) -> None:
    desk = Desk()
    held = desk.slots.request(3, lambda: None)

    async def claims() -> None:
        with await slots_granted(lambda wake: desk.slots.request(2, wake)):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(claims)
        await settle()
        held.leave()
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert desk.idle()


async def test_an_event_whose_work_failed_is_a_failed_copy_for_who_waits() -> None:
    desk = Desk()
    desk.device.script.fail_copy("gather", RuntimeError("ECC"))
    stream, buffer = desk.device.open_stream("s"), desk.device.host_buffer(16)
    event = desk.device.gather(stream, 0, [0], buffer, [0], desk.device.record())
    async with desk.running():
        with pytest.raises(CopyFailed) as failed:
            await event_reached(desk.poller, event)
    assert isinstance(failed.value.__cause__, Exception)


async def test_drained_returns_when_the_last_end_was_delivered() -> None:
    desk = Desk()
    gate = desk.runner.hold(CallKind.GET)
    async with desk.running(), anyio.create_task_group() as group:
        group.start_soon(desk.get)
        await gate.reached()
        with anyio.move_on_after(1) as scope:
            await desk.desk.drained()
        assert scope.cancelled_caught
        gate.release()
        await desk.desk.drained()
        assert desk.records.outstanding == 0
