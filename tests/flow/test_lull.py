"""When long loads make their calls: beside decoding behind the beginning of a pass, and otherwise at once (R6)."""

from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest

from akv import Connector
from akv.flow import load as load_module
from akv.flow.ahead import ReadAhead
from akv.flow.lull import LATEST_S, PATIENCE_S, SETTLED_S, Lulls
from akv.flow.overlap import overlapping
from akv.flow.staging import Staging
from akv.ownership.slots import SlotPool
from akv.plan.batching import Batch
from akv.ports.calls import CallKind
from akv.values.messages import GroupPages
from akv_testing import settle
from akv_testing.calls import CallRecord
from akv_testing.memory import FakeHostBuffer
from akv_testing.segments import FakeHost
from akv_testing.server import FakeServer
from akv_testing.store import FakeStore
from akv_testing.traffic import LONG
from akv_testing.warm_segments import map_each, put_into_each

pytestmark = pytest.mark.anyio

#: Seconds of a step of decoding.
STEP_S = 0.008


async def decode(kv: Connector) -> None:
    """Passes, one after the other, until cancelled."""
    while True:
        plan = kv.plan_pass([])
        await anyio.sleep(STEP_S)
        await kv.after_forward(plan)


async def waited(lulls: Lulls) -> float:
    began = anyio.current_time()
    await lulls.wait()
    return anyio.current_time() - began


# -- the wait itself


@pytest.mark.parametrize(
    ("age", "wait"),
    [
        (0.0, SETTLED_S),
        (SETTLED_S / 2, SETTLED_S / 2),
        ((SETTLED_S + LATEST_S) / 2, 0.0),
        # The next pass begins a step behind the last one.
        (LATEST_S + 0.001, STEP_S - LATEST_S - 0.001 + SETTLED_S),
        (STEP_S - 0.0005, 0.0005 + SETTLED_S),
    ],
)
async def test_R6_a_call_begins_between_one_and_three_milliseconds_behind_a_pass(age: float, wait: float) -> None:
    lulls = Lulls(useful=True)

    async def passes() -> None:
        for _ in range(3):
            lulls.pass_begins()
            await anyio.sleep(STEP_S)

    async with anyio.create_task_group() as group:
        group.start_soon(passes)
        await anyio.sleep(STEP_S + age if age else STEP_S + 1e-9)
        assert await waited(lulls) == pytest.approx(wait, abs=1e-6)
        group.cancel_scope.cancel()


async def test_R6_nobody_waits_for_a_pass_where_none_is_or_where_it_takes_long() -> None:
    lulls = Lulls(useful=True)
    assert await waited(lulls) == 0
    lulls.pass_begins()
    await anyio.sleep(LATEST_S + 0.001)
    # The last pass there was.
    assert await waited(lulls) == pytest.approx(PATIENCE_S)
    await anyio.sleep(2 * PATIENCE_S)
    assert await waited(lulls) == 0


async def test_R6_calls_that_copy_themselves_wait_for_no_lull() -> None:
    lulls = Lulls(useful=False)
    lulls.pass_begins()
    assert not lulls.matter
    assert await waited(lulls) == 0


async def test_R6_a_wait_that_is_cancelled_leaves_the_others_waiting() -> None:
    lulls = Lulls(useful=True)
    lulls.pass_begins()
    await anyio.sleep(LATEST_S + 0.001)
    took: list[float] = []

    async def wait() -> None:
        took.append(await waited(lulls))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await settle()
        with anyio.move_on_after(0.001):
            await lulls.wait()
        lulls.pass_begins()
    assert took == [pytest.approx(0.001 + SETTLED_S)]


# -- in loads


class Scene:
    """A server whose long prompt lies in a segment of its host that is mapped."""

    def __init__(self) -> None:
        host = FakeHost()
        self.segment = host.lend(1 << 12)
        self.server = FakeServer(store=FakeStore(anyio.current_time), segments=host)
        put_into_each(self.server, [self.segment])
        self.server.put_in_store(LONG)

    async def calls_of_a_load(self, kv: Connector) -> list[CallRecord]:
        """Those that it makes for its pages."""
        await map_each(self.server, kv, [self.segment])
        before = len(self.server.runner.calls)
        async with anyio.create_task_group() as group:
            group.start_soon(decode, kv)
            await anyio.sleep(3 * STEP_S)
            began = anyio.current_time() - 3 * STEP_S
            _, load, table = await self.server.load(kv, "r", LONG)
            await load.wait()
            group.cancel_scope.cancel()
        assert self.server.wrong_pages(LONG, table, 0, 9) == []
        calls = [call for call in self.server.runner.calls[before:] if call.kind in {CallKind.READ, CallKind.DESCRIBE}]
        for call in calls:
            call.started_at -= began
        return calls


async def test_R6_beside_decoding_a_long_load_asks_in_short_stretches_and_only_behind_the_beginning_of_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Four blocks, which is a batch of the slots: nine are three stretches.
    monkeypatch.setattr(load_module, "MOST_PAGES_AT_A_TIME", 8)
    monkeypatch.setattr(load_module, "PATIENT_FROM", 3)
    scene = Scene()
    async with scene.server.open() as kv:
        calls = await scene.calls_of_a_load(kv)
    assert [call.size.keys for call in calls if call.kind is CallKind.READ] == [8, 8, 2]
    assert sum(call.size.keys for call in calls if call.kind is CallKind.DESCRIBE) == 18
    for call in calls:
        assert SETTLED_S - 1e-6 <= call.started_at % STEP_S <= LATEST_S + 1e-6
    assert scene.server.left_behind() == []


async def test_R6_a_load_of_few_stretches_waits_for_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MOST_PAGES_AT_A_TIME", 8)
    scene = Scene()
    async with scene.server.open() as kv:
        calls = await scene.calls_of_a_load(kv)
    # Those of three stretches, and the first of them at once.
    assert [call.size.keys for call in calls if call.kind is CallKind.READ] == [8, 8, 2]
    assert min(call.started_at for call in calls) == pytest.approx(3 * STEP_S, abs=SETTLED_S / 2)
    assert max(call.started_at for call in calls) < 4 * STEP_S


async def test_R6_a_load_that_is_one_stretch_waits_for_no_pass() -> None:
    scene = Scene()
    async with scene.server.open() as kv:
        read, describe = await scene.calls_of_a_load(kv)
    assert read.size.keys == describe.size.keys == 18
    assert read.started_at == pytest.approx(3 * STEP_S, abs=SETTLED_S / 2)


async def test_R6_where_nobody_decodes_a_long_load_comes_in_long_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MOST_PAGES_AT_A_TIME", 8)
    scene = Scene()
    async with scene.server.open() as kv:
        await map_each(scene.server, kv, [scene.segment])
        before = len(scene.server.runner.calls)
        _, load, _ = await scene.server.load(kv, "r", LONG)
        await load.wait()
        calls = scene.server.runner.calls[before:]
    assert [call.size.keys for call in calls if call.kind is CallKind.READ] == [18]


async def test_R6_stretches_take_their_turns_though_the_later_one_is_answered_first() -> None:
    begun: list[int] = []
    turns: list[tuple[int, float]] = []

    async def read(stretch: Sequence[Batch], turn: Callable[[], Awaitable[None]]) -> Sequence[Batch]:
        (number,) = stretch[0].blocks
        begun.append(number)
        await anyio.sleep([1.0, 0.1, 0.1, 0.1][number])
        await turn()
        turns.append((number, anyio.current_time()))
        return stretch

    stretches = [[GroupPages(0, (number,), (number,), (bytes(16),))] for number in range(4)]
    staging = Staging(buffer=FakeHostBuffer(16), slots=SlotPool(2, slot_bytes=8), slot_bytes=8, share=2)
    async with overlapping(staging) as transfer:
        ahead = ReadAhead(read, stretches, transfer)
        for number in range(4):
            assert await ahead.rest(number) == stretches[number]
            await settle()
            # The next one was begun with it, and no other: what is read ahead keeps pages, places and the bus.
            assert sorted(begun) == list(range(min(number + 2, 4)))
    assert turns == [(0, 1.0), (1, 1.0), (2, pytest.approx(1.1)), (3, pytest.approx(1.1))]
