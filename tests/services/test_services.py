"""The connector's long-lived parts, each alone: the poller, the lanes, the latch, the notices."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

from akv import ConnectorBroken, NotOpenError
from akv.errors import DeviceError
from akv.services.health import HealthLatch
from akv.services.lanes import Lanes
from akv.services.notices import Changed, Notices
from akv.services.poller import StreamPoller
from akv_testing import settle

pytestmark = pytest.mark.anyio

TICK_S = 0.001


class Signal:
    """A PassEvent that counts how often it is asked."""

    def __init__(self, completes_at: float | None = 0.0, error: Exception | None = None) -> None:
        self.asked: list[float] = []
        self.completes_at = completes_at
        self.error = error

    def query(self) -> bool:
        self.asked.append(anyio.current_time())
        if self.error is not None:
            raise self.error
        return self.completes_at is not None and anyio.current_time() >= self.completes_at


class Seen:
    """Collects what a poller tells."""

    def __init__(self) -> None:
        self.told: list[tuple[float, BaseException | None]] = []

    def __call__(self, failure: BaseException | None) -> None:
        self.told.append((anyio.current_time(), failure))


# -- the poller


async def test_the_poller_asks_at_once() -> None:
    poller, seen = StreamPoller(TICK_S), Seen()
    await anyio.lowlevel.checkpoint()
    poller.watch(Signal(0.0), seen)
    assert seen.told == [(0.0, None)]
    assert poller.outstanding == 0


async def test_the_poller_asks_once_per_tick_and_tells_once() -> None:
    poller = StreamPoller(TICK_S)
    signals = [Signal(0.0035), Signal(0.0015)]
    seen = [Seen(), Seen()]
    async with anyio.create_task_group() as group:
        await group.start(poller.run)
        for signal, one in zip(signals, seen, strict=True):
            poller.watch(signal, one)
        await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    assert [[round(at, 6) for at, _ in one.told] for one in seen] == [[0.004], [0.002]]
    assert [round(at, 6) for at in signals[0].asked] == [0.0, 0.001, 0.002, 0.003, 0.004]
    assert poller.outstanding == 0


async def test_the_poller_parks_without_a_timer_when_nothing_is_outstanding() -> None:
    poller, seen = StreamPoller(TICK_S), Seen()
    async with anyio.create_task_group() as group:
        await group.start(poller.run)
        poller.watch(Signal(0.002), seen)
        await anyio.sleep(0.01)
        # Virtual time moves from timer to timer: with one pending, an hour would take 3.6 million turns.
        with anyio.fail_after(3601):
            await anyio.sleep(3600)
        late = Seen()
        poller.watch(Signal(anyio.current_time() + 0.0005), late)
        await anyio.sleep(0.01)
        assert len(late.told) == 1
        group.cancel_scope.cancel()


async def test_an_event_that_fails_reaches_only_who_waits_for_it() -> None:
    poller, at_once, later, well = StreamPoller(TICK_S), Seen(), Seen(), Seen()
    fault = DeviceError("ECC")
    signal = Signal(None)
    async with anyio.create_task_group() as group:
        await group.start(poller.run)
        poller.watch(Signal(error=fault), at_once)
        poller.watch(signal, later)
        poller.watch(Signal(0.003), well)
        signal.error = fault
        await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert [failure for _, failure in at_once.told] == [fault]
    assert [failure for _, failure in later.told] == [fault]
    assert [failure for _, failure in well.told] == [None]


async def test_an_event_that_is_handed_over_while_events_are_told_is_not_lost() -> None:
    poller, seen = StreamPoller(TICK_S), Seen()

    def hand_over(_: BaseException | None) -> None:
        poller.watch(Signal(0.005), seen)

    async with anyio.create_task_group() as group:
        await group.start(poller.run)
        poller.watch(Signal(0.001), hand_over)
        await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    assert len(seen.told) == 1


async def test_M8_what_a_listener_raises_is_a_crash_and_leaves_through_the_poller() -> None:
    poller = StreamPoller(TICK_S)
    told: list[BaseException | None] = []

    def fails(failure: BaseException | None) -> None:
        told.append(failure)
        raise RuntimeError("planted")

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="planted")):
        async with anyio.create_task_group() as group:
            await group.start(poller.run)
            poller.watch(Signal(0.001), fails)
            await anyio.sleep(1)
    # At once, and once: it ends whatever else its group does, and is not told again.
    assert anyio.current_time() == pytest.approx(TICK_S)
    assert told == [None]
    assert poller.outstanding == 0


# -- lanes


class Jobs:
    """A queue with one owner, as `ownership/` is."""

    def __init__(self) -> None:
        self.queue: deque[int] = deque()
        self.done: list[int] = []

    def take(self) -> int | None:
        return self.queue.popleft() if self.queue else None


async def test_lanes_take_the_oldest_first_one_at_a_time_each() -> None:
    jobs, most = Jobs(), [0, 0]
    lanes = Lanes(jobs.take)

    async def work(job: int) -> None:
        most[0] += 1
        most[1] = max(most)
        await anyio.sleep(1)
        most[0] -= 1
        jobs.done.append(job)

    async with anyio.create_task_group() as group:
        for _ in range(2):
            await group.start(lanes.run, work)
        for job in range(6):
            jobs.queue.append(job)
            lanes.wake()
        await anyio.sleep(3.5)
        assert [sorted(jobs.done[at : at + 2]) for at in (0, 2, 4)] == [[0, 1], [2, 3], [4, 5]]
        assert most[1] == 2
        group.cancel_scope.cancel()


@pytest.mark.parametrize("turns", range(6))
async def test_no_news_is_lost_whenever_it_comes(turns: int) -> None:
    jobs = Jobs()
    lanes = Lanes(jobs.take)

    async def work(job: int) -> None:
        for _ in range(job % 3):
            await anyio.lowlevel.checkpoint()
        jobs.done.append(job)

    async with anyio.create_task_group() as group:
        for _ in range(2):
            await group.start(lanes.run, work)
        for job in range(12):
            jobs.queue.append(job)
            lanes.wake()
            for _ in range((turns + job) % 6):
                await anyio.lowlevel.checkpoint()
        await settle()
        assert sorted(jobs.done) == list(range(12))
        group.cancel_scope.cancel()


@pytest.mark.parametrize("turns", range(4))
async def test_M6_no_work_is_lost_when_a_lane_is_cancelled_in_the_moment_of_the_news(turns: int) -> None:
    jobs = Jobs()
    lanes = Lanes(jobs.take)

    async def work(job: int) -> None:
        begun.append(job)
        await anyio.lowlevel.checkpoint()

    begun: list[int] = []
    async with anyio.create_task_group() as others:
        async with anyio.create_task_group() as group:
            await group.start(lanes.run, work)
            await settle()
            await others.start(lanes.run, work)
            await settle()
            jobs.queue.append(1)
            lanes.wake()
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await settle()
        # Either the cancelled lane has begun with it, or the other one has: it is in nobody's hands between.
        assert (begun, list(jobs.queue)) == ([1], [])
        jobs.queue.append(2)
        lanes.wake()
        await settle()
        assert begun == [1, 2]
        others.cancel_scope.cancel()


# -- the latch


def test_M8_the_first_reason_stands_and_every_listener_hears_it_once() -> None:
    latch = HealthLatch()
    heard: list[int] = []
    latch.on_trip(lambda: heard.append(1))
    latch.check()
    assert [latch.tripped] == [False]
    latch.break_("a service failed")
    latch.close()
    latch.break_("another")
    assert latch.tripped
    assert heard == [1]
    with pytest.raises(ConnectorBroken, match="a service failed"):
        latch.check()


def test_a_closed_latch_says_so() -> None:
    latch = HealthLatch()
    latch.close()
    with pytest.raises(NotOpenError, match="closed"):
        latch.check()


def test_a_latch_in_another_process_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    latch = HealthLatch()
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(NotOpenError, match="forked"):
        latch.check()


async def test_M8_a_wait_under_the_latch_ends_at_once_when_it_trips() -> None:
    latch = HealthLatch()

    async def waits() -> None:
        with pytest.raises(ConnectorBroken):
            with latch.ending_waits():
                await anyio.sleep(3600)

    async with anyio.create_task_group() as group:
        group.start_soon(waits)
        await anyio.sleep(1)
        latch.break_("planted")
    assert anyio.current_time() == 1
    assert latch._waits == {}


async def test_M8_a_wait_under_the_latch_leaves_other_cancellations_and_errors_alone() -> None:
    latch = HealthLatch()
    with anyio.move_on_after(1) as scope:
        with latch.ending_waits():
            await anyio.sleep(3600)
    assert scope.cancelled_caught
    with pytest.raises(KeyError):
        with latch.ending_waits():
            raise KeyError
    with latch.ending_waits():
        await anyio.sleep(1)
    assert latch._waits == {}


# -- notices


async def waits_for(notices: Notices, holds: Callable[[], bool], ends: list[object], key: int = 1) -> None:
    try:
        await notices.until(key, holds)
    except (ConnectorBroken, NotOpenError) as error:
        ends.append(type(error))
    else:
        ends.append(None)


async def test_notices_wake_whoever_waits_for_the_key_and_look_again() -> None:
    notices, true = Notices(HealthLatch()), [False]
    ends: list[object] = []
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(waits_for, notices, lambda: true[0], ends)
        group.start_soon(waits_for, notices, lambda: true[0], ends, 2)
        await settle()
        notices.wake(1)
        await settle()
        assert ends == []
        true[0] = True
        notices.wake(1)
        await settle()
        assert ends == [None, None]
        notices.wake(2)
    assert notices._waiting == {}


async def test_M8_notices_end_with_the_connector_even_if_the_condition_holds_by_then() -> None:
    latch = HealthLatch()
    notices, true = Notices(latch), [False]
    ends: list[object] = []
    async with anyio.create_task_group() as group:
        group.start_soon(waits_for, notices, lambda: true[0], ends)
        await settle()
        true[0] = True
        latch.break_("planted")
    assert ends == [ConnectorBroken]
    # What held before anybody waited is told all the same.
    await waits_for(notices, lambda: True, ends)
    await waits_for(notices, lambda: False, ends)
    assert ends == [ConnectorBroken, None, ConnectorBroken]


async def test_a_wait_that_is_cancelled_leaves_others_waiting() -> None:
    notices, true = Notices(HealthLatch()), [False]
    ends: list[object] = []
    async with anyio.create_task_group() as group:
        group.start_soon(waits_for, notices, lambda: true[0], ends)
        with anyio.move_on_after(1):
            await notices.until(1, lambda: true[0])
        true[0] = True
        notices.wake(1)
    assert ends == [None]


async def test_changed_is_level_triggered_and_trips_with_the_latch() -> None:
    latch = HealthLatch()
    changed = Changed(latch)
    assert not changed.is_set()
    changed.set()
    await changed.wait()
    await changed.wait()
    changed.clear()
    assert not changed.is_set()
    changed.clear()
    async with anyio.create_task_group() as group:

        async def waits() -> None:
            with suppress(NotOpenError):
                await changed.wait()
                raise AssertionError("nothing changed")

        group.start_soon(waits)
        await settle()
        latch.close()
    # From now on it stays set, so that no loop parks on a connector that is gone.
    changed.clear()
    assert changed.is_set()
    with pytest.raises(NotOpenError):
        await changed.wait()
