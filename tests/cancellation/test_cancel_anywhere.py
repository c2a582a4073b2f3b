"""Cancelling one request in each state of its life: its pages come back, what still runs touches nobody's pages."""

from functools import partial

import anyio
import pytest

from akv import Connector, LoadCancelled, LoadState, Request, Scheduled
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


warm = partial(FakeServer.warm, TOKENS, LONG)


async def cancelled_at_once(request: Request) -> None:
    """Cancel and assert that nothing was waited for in time."""
    began = anyio.current_time()
    await request.cancel()
    assert anyio.current_time() == began
    assert request.closed


async def goes_on(server: FakeServer, kv: Connector) -> None:
    """Another request can still load, compute and save: no place, slot, page or task was lost."""
    request, load, table = await server.load(kv, "later", LONG)
    assert (await load.wait()).state is LoadState.LOADED
    assert server.wrong_pages(LONG, table, 0, 9) == []
    tokens = list(range(500, 530))
    fresh = kv.open_request("fresh", tokens)
    await server.compute(kv, fresh, tokens, server.allocate(tokens))
    await fresh.finished()
    await request.finished()
    assert server.stored_blocks(tokens) == list(range(7))
    assert server.wrong_values() == []


async def test_D6_before_anything_began() -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await cancelled_at_once(request)
        await request.cancel()
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_while_a_lookup_probes_the_lookup_ends_on_its_own_and_holds_nothing() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.PROBE)
    async with server.open() as kv, anyio.create_task_group() as group:
        request = kv.open_request("r", TOKENS)
        group.start_soon(request.lookup)
        await gate.reached()
        await cancelled_at_once(request)
        gate.release()
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_D9_a_queued_load_is_withdrawn_undispatched() -> None:
    server = warm()
    async with server.open(loaders=1) as kv:
        gate = server.runner.hold(CallKind.GET)
        _, ahead, _ = await server.load(kv, "ahead", TOKENS)
        await gate.reached()
        request, load, table = await server.load(kv, "r", TOKENS)
        await cancelled_at_once(request)
        assert load.state is LoadState.CANCELLED
        with pytest.raises(LoadCancelled):
            await load.wait()
        server.free(table)
        gate.release()
        assert (await ahead.wait()).state is LoadState.LOADED
        assert len([call for call in server.pool.calls if call.operation == "get"]) == 2
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_M3_in_the_store_call_the_pages_are_free_at_once_and_the_slots_when_it_returned() -> None:
    server = warm(slots=8)
    async with server.open(loaders=2) as kv:
        gate = server.runner.hold(CallKind.GET)
        request, load, table = await server.load(kv, "r", TOKENS)
        await gate.reached()
        await cancelled_at_once(request)
        assert load.state is LoadState.CANCELLED
        server.free(table)
        # The stuck call still owns two of the eight slots. The others serve everybody else meanwhile.
        await settle()
        staging = kv._halves.local_worker.memory.stagings[0]
        slots = staging.slots
        assert (slots.free, slots.quarantined) == (6, 2)
        [stuck] = slots._out
        await goes_on(server, kv)
        assert (slots.free, slots.quarantined) == (6, 2)
        used = {offset for copy in server.device.copies if copy.kind == "scatter" for offset in copy.offsets}
        assert used
        assert used.isdisjoint(staging.offsets(stuck))
        gate.release()
        await settle()
        assert (slots.free, slots.quarantined) == (8, 0)
    assert server.left_behind() == []


async def test_D6_waiting_for_slots_the_claim_is_withdrawn() -> None:
    server = warm(slots=2)
    async with server.open(loaders=2) as kv:
        gate = server.runner.hold_all(CallKind.GET)
        stuck = [(await server.load(kv, f"stuck{number}", TOKENS))[0] for number in range(2)]
        await gate.reached()
        await settle()
        waiting = kv.open_request("waiting", TOKENS)
        offer, table = await waiting.lookup(), server.allocate(TOKENS)
        for request in stuck:
            await cancelled_at_once(request)
        # Both shares are in quarantine, so the next load waits for slots.
        load = waiting.reserve(offer, offer.tokens, table)
        await settle()
        assert load.state is None
        assert len(kv._halves.local_worker.memory.stagings[0].slots._waiting) == 1
        await cancelled_at_once(waiting)
        server.free(table)
        gate.release()
        await settle()
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_M2_in_a_device_copy_it_waits_for_the_copys_event_and_for_nothing_else() -> None:
    server = warm()
    async with server.open() as kv:
        server.device.script.delay("scatter", 0.02)
        request, load, table = await server.load(kv, "r", TOKENS)
        await settle()
        began = anyio.current_time()
        with anyio.move_on_after(0.01) as scope:
            await request.cancel()
        assert scope.cancelled_caught
        assert (load.state, request.closed) == (None, False)
        await request.cancel()
        assert anyio.current_time() - began == pytest.approx(0.02, abs=0.003)
        assert load.state is LoadState.CANCELLED
        server.free(table)
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_between_two_batches_no_further_copy_begins() -> None:
    server = warm()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.GET, nth=2)
        request, load, table = await server.load(kv, "r", LONG)
        await gate.reached()
        # The first batch has landed meanwhile.
        await anyio.sleep(0.01)
        copies = len(server.device.copies)
        await cancelled_at_once(request)
        server.free(table)
        gate.release()
        await settle()
        assert len(server.device.copies) == copies
        assert load.state is LoadState.CANCELLED
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_M2_beside_a_store_call_that_hangs_it_waits_for_the_copy_of_the_batch_before_and_for_nothing_else() -> None:
    server = warm()
    async with server.open() as kv:
        server.device.script.delay("scatter", 0.02)
        gate = server.runner.hold(CallKind.GET, nth=2)
        request, load, table = await server.load(kv, "r", LONG)
        await gate.reached()
        await settle()
        began = anyio.current_time()
        await request.cancel()
        assert anyio.current_time() - began == pytest.approx(0.02, abs=0.003)
        assert load.state is LoadState.CANCELLED
        server.free(table)
        gate.release()
        await settle()
        assert len(server.device.copies) == 1
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_waiting_for_a_place_among_the_copies() -> None:
    server = warm()
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.COPY)
        tokens = list(range(700, 709))
        await server.compute(kv, kv.open_request("saving", tokens), tokens, server.allocate(tokens))
        first, _, _ = await server.load(kv, "first", TOKENS)
        second, load, table = await server.load(kv, "second", TOKENS)
        await gate.reached()
        await settle()
        # Three copies hang: nothing can end before the gate opens, so both cancels wait for exactly that.
        with anyio.move_on_after(0.02) as scope:
            await second.cancel()
        assert scope.cancelled_caught
        gate.release()
        await second.cancel()
        await first.cancel()
        assert load.state is LoadState.CANCELLED
        server.free(table)
        await goes_on(server, kv)
    assert server.left_behind() == []


@pytest.mark.parametrize("finishing", [False, True])
async def test_D6_a_queued_save_is_dropped_unread(finishing: bool) -> None:
    server = warm()
    tokens = list(range(900, 918))
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        busy = kv.open_request("busy", list(range(800, 818)))
        await server.compute(kv, busy, list(range(800, 818)), server.allocate(18))
        await gate.reached()
        request = kv.open_request("r", tokens)
        table = server.allocate(tokens)
        await server.compute(kv, request, tokens, table)
        if finishing:
            request.finish()
        await cancelled_at_once(request)
        server.free(table)
        gate.release()
        await busy.finished()
        assert server.stored_blocks(tokens) == []
        assert len(server.device.copies) == 2  # the groups of `busy`
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_a_save_whose_pass_still_runs_is_dropped_unread() -> None:
    server = warm()
    tokens = list(range(900, 918))
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        await server.compute(kv, request, tokens, server.allocate(tokens), duration_s=0.01)
        await settle()
        await cancelled_at_once(request)
        await anyio.sleep(0.02)
        assert server.stored_blocks(tokens) == []
        assert server.device.copies == []
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_in_a_gather_it_waits_for_the_gathers_event() -> None:
    server = warm()
    tokens = list(range(900, 918))
    async with server.open() as kv:
        server.device.script.delay("gather", 0.02)
        request = kv.open_request("r", tokens)
        table = server.allocate(tokens)
        await server.compute(kv, request, tokens, table)
        await settle()
        began = anyio.current_time()
        await request.cancel()
        assert anyio.current_time() - began == pytest.approx(0.02, abs=0.003)
        server.free(table)
        await settle()
        # What was read before the cancel may be put, from its slots; the second group was not read any more.
        assert len(server.device.copies) == 1
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_M3_in_a_put_the_pages_are_free_at_once_and_its_slots_are_not_reused_before_it_returned() -> None:
    server = warm(slots=4)
    tokens = list(range(900, 918))
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("r", tokens)
        table = server.allocate(tokens)
        await server.compute(kv, request, tokens, table)
        await gate.reached()
        # The next batch has been gathered meanwhile.
        await anyio.sleep(0.01)
        await cancelled_at_once(request)
        # The put reads slots. Overwriting the pages cannot harm what it stores.
        server.free(table)
        await settle()
        assert kv._halves.local_worker.memory.stagings[1].slots.free == 0
        gate.release()
        await settle()
        # What was read before the cancel is put, from its slots; nothing more was read.
        assert len(server.device.copies) == len([call for call in server.pool.calls if call.operation == "put"]) == 2
        await goes_on(server, kv)
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_D6_M3_beside_a_put_that_hangs_it_waits_for_the_gather_of_the_next_batch_and_for_nothing_else() -> None:
    server = warm(slots=4)
    tokens = list(range(900, 918))
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        server.device.script.delay("gather", 0.02, nth=2)
        request = kv.open_request("r", tokens)
        table = server.allocate(tokens)
        await server.compute(kv, request, tokens, table)
        await gate.reached()
        await settle()
        began = anyio.current_time()
        await request.cancel()
        assert anyio.current_time() - began == pytest.approx(0.02, abs=0.003)
        server.free(table)
        gate.release()
        await settle()
        assert len(server.device.copies) == 2
        await goes_on(server, kv)
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_D6_in_the_middle_of_prefill_with_a_plan_open() -> None:
    server = warm()
    tokens = list(range(900, 938))
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        table = server.allocate(tokens)
        await server.compute(kv, request, tokens[:20], table)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=20, tokens=18, pages=table)])
        await request.cancel()
        server.free(table)
        await kv.after_forward(plan)
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_a_finishing_request_with_a_load_keeps_nothing() -> None:
    server = warm()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.GET)
        request, load, table = await server.load(kv, "r", TOKENS)
        await gate.reached()
        await request.finished()
        assert load.state is LoadState.CANCELLED
        with pytest.raises(LoadCancelled):
            await load.wait()
        server.free(table)
        gate.release()
        await goes_on(server, kv)
    assert server.left_behind() == []


# -- the same instant


async def test_D6_cancel_and_completion_in_the_same_instant_a_thousand_times() -> None:
    server = FakeServer(pages=8)
    server.put_in_store(TOKENS)
    states = set()
    async with server.open() as kv:
        table = server.allocate(TOKENS)
        for number in range(1000):
            request = kv.open_request("r", TOKENS)
            load = request.reserve(await request.lookup(), 16, table)
            # One turn more each time: the cancel meets the load in every state, and the moment of its end too.
            for _ in range(number % 40):
                await anyio.lowlevel.checkpoint()
            if number % 3 == 0:
                await anyio.sleep(0.0005 * (number % 7))
            await request.cancel()
            assert load.state is not None
            states.add(load.state)
            assert request.closed
            assert server.device.busy == 0
        assert kv.completed() == []
    assert states == {LoadState.LOADED, LoadState.CANCELLED}
    assert server.left_behind() == []
