"""A request whose pages the engine takes away, and that goes on with others (S2, S7, D6, D8, M7)."""

from functools import partial

import anyio
import pytest

from akv import (
    EngineContractError,
    LoadCancelled,
    LoadCompleted,
    LoadFailed,
    LoadState,
    LookupOutcome,
    Offer,
    PagesReleased,
    SavesCompleted,
    Scheduled,
)
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import settle
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

warm = partial(FakeServer.warm, TOKENS, LONG)


async def test_S7_pages_are_overwritten_while_their_save_is_queued_and_no_wrong_byte_is_stored() -> None:
    server = FakeServer()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        other = kv.open_request("other", LONG)
        await server.compute(kv, other, LONG, server.allocate(LONG))
        await gate.reached()
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        began = anyio.current_time()
        assert await request.preempted() == ()
        assert anyio.current_time() == began, "nobody waits for the store"
        server.free(table)
        gate.release()
        await other.finished()
        assert server.stored_blocks(TOKENS) == []
        # It goes on with other pages, and what was withdrawn is saved then.
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await request.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        assert server.wrong_values() == []
        assert kv.completed() == []
    assert server.left_behind() == []


async def test_D6_a_gather_that_runs_is_waited_for() -> None:
    server = FakeServer()
    async with server.open() as kv:
        gate = server.device.script.hold("gather")
        request = kv.open_request("r", TOKENS)
        was, table = request.incarnation, server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await settle()
        with anyio.move_on_after(5) as scope:
            await request.preempted()
        assert scope.cancelled_caught
        request.append([1])
        with pytest.raises(EngineContractError, match="preempting; await preempted"):
            await request.lookup()
        assert request.incarnation == was
        gate.release()
        await request.preempted()
        assert request.incarnation > was
        server.free(table)
        await request.cancel()
    assert server.wrong_values() == []


async def test_D6_a_load_under_way_is_cancelled_and_its_pages_are_free_at_once() -> None:
    server = warm()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.GET)
        request, load, table = await server.load(kv, "r", TOKENS)
        await gate.reached()
        assert await request.preempted() == ()
        assert load.state is LoadState.CANCELLED
        with pytest.raises(LoadCancelled):
            await load.wait()
        server.free(table)
        # Its next incarnation finds everything, while the get of the last one still hangs.
        table = server.allocate(TOKENS)
        offer = await request.lookup()
        assert offer.incarnation == request.incarnation
        assert (await request.reserve(offer, offer.tokens, table).wait()).tokens == 16
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        gate.release()
        await settle()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        await request.finished()
    assert server.left_behind() == []


@pytest.mark.parametrize("ends", ["after_forward", "drop_pass"])
async def test_M7_a_pass_that_was_planned_for_the_old_pages_saves_nothing(ends: str) -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=len(TOKENS), pages=table)])
        await request.preempted()
        server.free(table)
        if ends == "after_forward":
            await kv.after_forward(plan)
        else:
            kv.drop_pass(plan)
        request.finish()
        await settle()
        assert [(type(done), done.stored_blocks) for done in kv.completed() if isinstance(done, SavesCompleted)] == [
            (SavesCompleted, 0)
        ]
        assert server.store.keys() == []
    assert server.left_behind() == []


async def test_M7_a_finish_behind_such_a_pass_publishes_nothing_of_the_old_pages() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", LONG)
        old, new = server.allocate(LONG), server.allocate(LONG)
        first = Scheduled(request=request, computed_before=0, tokens=len(LONG), pages=old)
        plan = kv.plan_pass([first])
        await request.preempted()
        server.free(old)
        half = Scheduled(request=request, computed_before=0, tokens=8, pages=new)
        second = kv.plan_pass([half])
        server.write(LONG, new, 0, 2)
        await kv.after_forward(plan)
        await kv.after_forward(second)
        await request.finished()
        assert server.stored_blocks(LONG) == [0, 1]
        assert server.wrong_values() == []


async def test_L6_an_offer_from_before_is_refused_and_so_is_one_that_was_on_its_way() -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        before = await request.lookup()
        gate = server.runner.hold(CallKind.PROBE)
        offers = []
        async with anyio.create_task_group() as group:

            async def look_up() -> None:
                offers.append(await request.lookup(4))

            group.start_soon(look_up)
            await gate.reached()
            await request.preempted()
            gate.release()
        for offer in (before, *offers):
            assert offer.tokens
            with pytest.raises(EngineContractError, match="an offer belongs to the"):
                request.reserve(offer, offer.tokens, server.allocate(TOKENS))
        assert (await request.lookup()).tokens == 16


async def test_S1_a_late_lookup_vouches_for_no_page_of_the_next_incarnation() -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        gate = server.runner.hold(CallKind.PROBE)
        async with anyio.create_task_group() as group:
            group.start_soon(request.lookup, 8)
            await gate.reached()
            await request.preempted()
            server.pool.answer("get", KeyState.MISSING)
            table = server.allocate(TOKENS)
            offer = Offer(
                request_id="r",
                incarnation=request.incarnation,
                local_tokens=0,
                tokens=16,
                outcome=LookupOutcome.FULL,
                tokens_per_block=4,
            )
            with pytest.raises(LoadFailed):
                await request.reserve(offer, 16, table).wait()
            gate.release()
        with pytest.raises(EngineContractError, match="its pages hold KV for 0 tokens only"):
            kv.plan_pass([Scheduled(request=request, computed_before=8, tokens=10, pages=table)])


async def test_a_lookup_covers_what_was_appended_before() -> None:
    server = FakeServer()
    answer = list(range(500, 506))
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate([*TOKENS, *answer])
        await server.compute(kv, request, TOKENS, table)
        request.append(answer)
        await server.compute(kv, request, [*TOKENS, *answer], table, before=len(TOKENS))
        # Everything that is queued reaches the store first.
        await settle()
        await anyio.sleep(1)
        await request.preempted()
        server.free(table)
        offer = await request.lookup()
        assert offer.tokens == (len(TOKENS) + len(answer) - 1) // 4 * 4
        table = server.allocate([*TOKENS, *answer])
        await request.reserve(offer, offer.tokens, table).wait()
        assert server.wrong_pages([*TOKENS, *answer], table, 0, offer.tokens // 4) == []
        await request.finished()


async def test_D8_an_engine_that_polls_learns_which_incarnation_ended() -> None:
    server = warm()
    async with server.open() as kv:
        request, _, _ = await server.load(kv, "r", TOKENS)
        was = request.incarnation
        with anyio.CancelScope() as scope:
            scope.cancel()
            await request.preempted()
        await settle()
        load, ended = kv.completed()
        assert isinstance(load, LoadCompleted)
        assert (load.state, load.incarnation) == (LoadState.CANCELLED, was)
        assert ended == SavesCompleted(request_id="r", incarnation=was, stored_blocks=0, refused_blocks=0)
        assert request.incarnation > was
        assert not request.closed
        await request.cancel()


async def test_D6_pages_that_a_store_call_touches_are_named_once_and_released() -> None:
    server = FakeServer(host_pages=True)
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("r", TOKENS)
        was, table = request.incarnation, server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await gate.reached()
        named = await request.preempted()
        assert {*named[0], *named[1]} <= {*table[0], *table[1]}
        assert any(named)
        assert await request.preempted() == ()
        gate.release()
        await settle()
        assert kv.completed() == [PagesReleased(request_id="r", incarnation=was, pages=named)]
        # Each incarnation names its own.
        gate = server.runner.hold(CallKind.PUT)
        await server.compute(kv, request, TOKENS, table)
        await gate.reached()
        assert await request.preempted() == named
        assert await request.cancel() == ()
        gate.release()


async def test_D6_what_a_cancelled_wait_did_not_name_the_next_one_does() -> None:
    server = FakeServer(host_pages=True)
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await gate.reached()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await request.preempted()
        assert any(await request.preempted())
        assert await request.cancel() == ()
        gate.release()


async def test_S4_the_slots_of_an_end_that_is_not_copied_any_more_go_back() -> None:
    server = WindowServer(snapshot_slots=4, snapshot_wait_ms=50)
    tokens = list(range(22))
    async with server.open() as kv:
        request, _, table = await server.resume(kv, "r", tokens)
        server.prepare(table, 0, len(tokens))
        plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=len(tokens), pages=table)])
        await request.preempted()
        server.free(table)
        await kv.after_forward(plan)
        ring = kv.pressure().ring
        assert ring is not None
        assert ring.free == ring.slots
        # The whole prompt again: its end is stored by the pass that completes it again.
        table = [[] for _ in server.layout.groups]
        await server.prefill(kv, request, tokens, table, start=0, chunk=8)
        await request.finished()
        assert server.ends(tokens)[-1] == 5
        assert server.wrong_values() == []


async def test_W3_a_prompt_that_is_completed_again_stores_what_its_first_end_lost() -> None:
    server = WindowServer()
    tokens = list(range(22))
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("r", tokens)
        table: list[list[int]] = [[] for _ in server.layout.groups]
        await server.prefill(kv, request, tokens, table, start=0, chunk=22)
        await gate.reached()
        await request.preempted()
        server.free(table)
        gate.release()
        table = [[] for _ in server.layout.groups]
        await server.prefill(kv, request, tokens, table, start=0, chunk=22)
        await request.finished()
        assert server.ends(tokens)[-1] == 5
        assert server.wrong_values() == []


async def test_O6_a_connector_that_closes_ends_a_preemption() -> None:
    server = FakeServer()
    async with server.open() as kv:
        gate = server.device.script.hold("gather")
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await settle()
        with anyio.move_on_after(1):
            await request.preempted()
        gate.release()
    assert request.closed
    assert server.left_behind() == []
