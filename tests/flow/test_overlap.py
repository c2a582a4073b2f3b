"""Two batches at a time: what it gains, what it may hold, and how it ends when one of the two steps fails."""

from functools import partial
from itertools import pairwise
from typing import Any

import anyio
import pytest

from akv import Connector, ConnectorBroken, LoadFailed, LoadState
from akv.flow.overlap import overlapping
from akv.flow.staging import Staging
from akv.ownership.slots import SlotPool
from akv.ports.calls import CallKind, CallSize
from akv.ports.pool import KeyState
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.memory import FakeHostBuffer
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG

pytestmark = pytest.mark.anyio

#: Of `LONG` in two groups: three stretches of at most four blocks.
BATCHES = 6
#: Copies of seconds need no poll every millisecond. A copy's end is seen this much late at most.
TICK_S = 0.05


def slow(call_s: float, copy_s: float, **arguments: Any) -> FakeServer:
    """A server whose pool holds `LONG`, with shares of eight slots, whose calls and copies take this long."""
    server = FakeServer(latency=Latency(get_s=call_s, put_s=call_s), poll_tick_s=TICK_S, **arguments)
    server.put_in_store(LONG)
    server.device.copy_s = lambda nbytes: copy_s
    return server


async def time_of_load(server: FakeServer, **settings: Any) -> float:
    async with server.open(load_deadline_s=600.0, **settings) as kv:
        _, load, table = await server.load(kv, "r", LONG)
        began = anyio.current_time()
        await load.wait()
        assert server.wrong_pages(LONG, table, 0, 9) == []
        return anyio.current_time() - began


async def time_of_save(server: FakeServer) -> float:
    tokens = [7, *LONG]
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        await server.compute(kv, request, tokens, server.allocate(tokens))
        began = anyio.current_time()
        await request.finished()
        assert server.stored_blocks(tokens) == list(range(9))
        assert server.wrong_values() == []
        return anyio.current_time() - began


def gets(server: FakeServer) -> int:
    return len([call for call in server.runner.calls if call.kind is CallKind.GET])


# -- what it gains


@pytest.mark.parametrize(("get_s", "copy_s"), [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0), (1.0, 0.0)])
async def test_D1_a_load_takes_the_slower_step_of_each_batch_and_not_both(get_s: float, copy_s: float) -> None:
    server = slow(get_s, copy_s)
    took = await time_of_load(server)
    assert took == pytest.approx(BATCHES * max(get_s, copy_s) + min(get_s, copy_s), abs=(BATCHES + 1) * TICK_S)
    assert gets(server) == len(server.device.copies) == BATCHES


@pytest.mark.parametrize(("put_s", "copy_s"), [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0), (1.0, 0.0)])
async def test_S7_a_save_takes_the_slower_step_of_each_batch_and_not_both(put_s: float, copy_s: float) -> None:
    server = slow(put_s, copy_s, slots=8)
    took = await time_of_save(server)
    assert took == pytest.approx(BATCHES * max(put_s, copy_s) + min(put_s, copy_s), abs=(BATCHES + 1) * TICK_S)
    assert server.runner.most_running[CallKind.PUT] == 1


async def test_D1_a_stream_has_one_copy_at_a_time_issued_in_the_order_of_the_batches() -> None:
    server = slow(0.1, 1.0)
    await time_of_load(server)
    copies = [copy for copy in server.device.copies if copy.kind == "scatter"]
    assert [(copy.group, len(copy.pages)) for copy in copies] == [(0, 4), (1, 4), (0, 4), (1, 4), (0, 1), (1, 1)]
    assert all(later.at - earlier.at >= 1.0 for earlier, later in pairwise(copies))


async def test_D1_shares_of_one_slot_take_one_step_after_the_other() -> None:
    # Eighteen pages, one at a time.
    assert await time_of_load(slow(1.0, 1.0, slots=2)) == pytest.approx(36.0, abs=19 * TICK_S)


async def test_S7_a_share_of_one_slot_takes_one_step_after_the_other() -> None:
    assert await time_of_save(slow(1.0, 1.0, slots=1, loaders=1)) == pytest.approx(36.0, abs=19 * TICK_S)


# -- what it may hold


@pytest.mark.parametrize("slots", [2, 3, 4, 6, 7, 16])
@pytest.mark.parametrize("copy_s", [0.1, 2.0])
async def test_M6_a_loader_holds_no_more_than_its_share_however_slow_the_copies_are(slots: int, copy_s: float) -> None:
    server = slow(1.0, copy_s, slots=slots)
    held: list[int] = []

    def latency(kind: CallKind, _: CallSize) -> float:
        if kind in {CallKind.GET, CallKind.COPY} and connectors:
            pool = connectors[0]._halves.local_worker.memory.stagings[0].slots
            held.append(pool.count - pool.free)
        return 1.0 if kind is CallKind.GET else 0.0

    connectors: list[Connector] = []
    server.runner.latency = latency
    async with server.open(load_deadline_s=600.0) as kv:
        connectors.append(kv)
        _, load, table = await server.load(kv, "r", LONG)
        await load.wait()
        assert server.wrong_pages(LONG, table, 0, 9) == []
    share = slots // 2
    assert max(held) == (share if share == 1 else share // 2 * 2)


async def test_D1_a_loader_whose_copies_hang_keeps_nobody_elses_slots() -> None:
    server = slow(0.01, 0.01)
    async with server.open(load_deadline_s=600.0) as kv:
        gate = server.device.script.hold("scatter")
        _, stuck, _ = await server.load(kv, "stuck", LONG)
        await anyio.sleep(1)
        for number in range(2):
            _, other, table = await server.load(kv, f"other{number}", LONG)
            assert (await other.wait()).state is LoadState.LOADED
            assert server.wrong_pages(LONG, table, 0, 9) == []
        assert stuck.state is None
        gate.release()
        await stuck.wait()
    assert server.left_behind() == []


# -- when a step fails


@pytest.mark.parametrize(("get_s", "copy_s"), [(1.0, 0.5), (1.0, 3.0)])
async def test_D3_a_scatter_that_fails_stops_the_gets_and_the_load_fails_at_once(get_s: float, copy_s: float) -> None:
    server = slow(get_s, copy_s)
    server.device.script.fail_copy("scatter", RuntimeError("ECC"))
    async with server.open() as kv:
        request, load, _ = await server.load(kv, "r", LONG)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert (failed.value.reason, failed.value.key) == ("copy_failed", server.keys_of(LONG)[0][0])
        assert anyio.current_time() == pytest.approx(get_s + copy_s, abs=1.1 * TICK_S)
        await anyio.sleep(10)
        assert (gets(server), len(server.device.copies)) == (2, 1)
        await request.finished()
    assert server.left_behind() == []


async def test_D2_a_get_that_fails_beside_a_scatter_ends_the_load_only_with_the_copys_event() -> None:
    server = slow(0.01, 0.0)
    server.device.script.delay("scatter", 1.0)
    first, later = server.keys_of(LONG)[1][2], server.keys_of(LONG)[0][5]
    for key in (first, later):
        server.pool.answer("get", KeyState.MISSING, key=key)
    async with server.open() as kv:
        _, load, table = await server.load(kv, "r", LONG)
        await anyio.sleep(0.5)
        assert (gets(server), server.device.busy, load.state) == (2, 1, None)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert (failed.value.reason, failed.value.key) == ("missing", first)
        assert anyio.current_time() == pytest.approx(1.01, abs=1.1 * TICK_S)
        assert server.device.busy == 0
        server.free(table)
        await anyio.sleep(1)
        assert (gets(server), len(server.device.copies)) == (2, 1)
    assert server.left_behind() == []


async def test_S2_a_gather_that_fails_beside_a_put_costs_its_own_blocks_alone() -> None:
    server = slow(1.0, 0.1, slots=8)
    server.device.script.fail_copy("gather", RuntimeError("ECC"), nth=4)
    tokens = [7, *LONG]
    async with server.open(save_backoff_s=600.0) as kv:
        request = kv.open_request("r", tokens)
        await server.compute(kv, request, tokens, server.allocate(tokens))
        await anyio.sleep(60)
        # The fourth gather: the second group's pages of blocks 4 to 7.
        assert server.stored_blocks(tokens) == [0, 1, 2, 3, 8]
        await request.cancel()
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S2_M6_gathers_that_fail_give_their_slots_back_at_once() -> None:
    server = slow(1.0, 0.1, slots=8)
    for nth in range(1, BATCHES):
        server.device.script.fail_copy("gather", RuntimeError("ECC"), nth=nth)
    tokens = [7, *LONG]
    async with server.open(save_backoff_s=600.0) as kv:
        request = kv.open_request("r", tokens)
        await server.compute(kv, request, tokens, server.allocate(tokens))
        await anyio.sleep(60)
        assert len(server.device.copies) == BATCHES
        await request.cancel()
    assert server.stored_blocks(tokens) == []
    assert server.left_behind() == []


async def test_M8_a_crash_in_a_put_is_told_at_once_beside_a_gather_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    server = slow(0.01, 0.01, slots=8)
    fault = IndexError("planted")

    def fails(*_: object) -> None:
        raise fault

    monkeypatch.setattr(server.pool, "put", fails)
    gate = server.device.script.hold("gather", nth=2)
    with pytest.raises(ConnectorBroken) as broken:
        async with server.open(shutdown_deadline_s=0.5) as kv:
            tokens = [7, *LONG]
            request = kv.open_request("r", tokens)
            await server.compute(kv, request, tokens, server.allocate(tokens))
            with pytest.raises(ConnectorBroken, match="IndexError: planted"):
                await request.finished()
            assert anyio.current_time() < 0.2
    cause = broken.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert cause.exceptions == (fault,)
    gate.release()


# -- the block itself


def staging(share: int = 4) -> Staging:
    buffer = FakeServer().device.host_buffer(8 * share)
    return Staging(buffer=buffer, slots=SlotPool(share), slot_bytes=8, share=share)


async def fails_with(error: Exception) -> None:
    await anyio.sleep(1)
    raise error


@pytest.mark.parametrize("in_the_block", [False, True])
async def test_M8_one_error_is_raised_as_it_is_and_ends_the_wait_of_the_other_step(in_the_block: bool) -> None:
    room, error = staging(), ValueError("planted")
    error.__cause__ = KeyError("why")
    with pytest.raises(ValueError, match="planted") as raised:
        async with overlapping(room) as transfer:
            slots = await transfer.take(2)
            await transfer.then(slots, anyio.sleep_forever if in_the_block else partial(fails_with, error))
            await (fails_with(error) if in_the_block else anyio.sleep_forever())
    assert raised.value is error
    assert isinstance(error.__cause__, KeyError)
    assert anyio.current_time() == 1.0
    assert room.slots.free == 4


async def test_M8_of_two_errors_neither_is_lost() -> None:
    room = staging()

    async def fails_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise KeyError("second")

    with pytest.RaisesGroup(KeyError, ValueError):
        async with overlapping(room) as transfer:
            await transfer.then(await transfer.take(2), fails_when_cancelled)
            await settle()
            raise ValueError("first")
    assert room.slots.free == 4


async def test_M6_a_step_that_is_cancelled_before_it_began_gives_its_slots_back() -> None:
    room = staging()
    ran = []

    async def step() -> None:
        await anyio.lowlevel.checkpoint()
        ran.append(1)

    with anyio.CancelScope() as scope:
        async with overlapping(room) as transfer:
            await transfer.then(await transfer.take(2), step)
            await transfer.take(2)
            assert room.slots.free == 0 or ran
            scope.cancel()
    assert scope.cancelled_caught
    assert room.slots.free == 4


async def test_M6_slots_come_back_when_the_second_step_ended_and_the_block_waits_for_it() -> None:
    room = staging()
    async with overlapping(room) as transfer:
        await transfer.then(await transfer.take(2), partial(anyio.sleep, 1))
        await transfer.then(await transfer.take(2), partial(anyio.sleep, 1))
        assert (anyio.current_time(), room.slots.free) == (1.0, 2)
    assert (anyio.current_time(), room.slots.free) == (2.0, 4)


async def test_D1_second_steps_come_one_by_one_whoever_starts_them() -> None:
    running, most = 0, 0

    async def step() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(1.0)
        running -= 1

    staging = Staging(buffer=FakeHostBuffer(16), slots=SlotPool(2, slot_bytes=8), slot_bytes=8, share=2)
    async with overlapping(staging) as transfer, anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(transfer.then, None, step)
    assert (running, most) == (0, 1)
