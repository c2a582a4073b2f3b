"""Pages that an engine takes away: once a rank has carried out that order, nothing of it touches them (S7, D6, M2)."""

import anyio
import pytest

from akv import EngineContractError, LoadCancelled, LoadState
from akv.ports.calls import CallKind
from akv.ranks import Scheduler
from akv.request import Request
from akv_testing import settle
from akv_testing.ranked_server import RankedServer
from akv_testing.server import PageTable
from akv_testing.traffic import LONG, TOKENS, part

pytestmark = pytest.mark.anyio

HELD_S = 0.02


def begin_preempting(kv: Scheduler, request: Request) -> bytes:
    """What the ranks are told when the engine takes a request's pages away."""
    kv._halves.preempt(request._record)
    return kv.take_orders()


async def saving(server: RankedServer, kv: Scheduler, tokens: tuple[int, ...] = TOKENS) -> tuple[Request, PageTable]:
    """A request whose save is under way; from here on the test carries the messages itself."""
    server.still = True
    request, table = kv.open_request("r", tokens), server.allocate(tokens)
    await server.compute(kv, request, tokens, table)
    await settle()
    return request, table


async def carried_out_after(server: RankedServer, rank: int, orders: bytes) -> float:
    began = anyio.current_time()
    await server.workers[rank].carry_out(orders)
    return anyio.current_time() - began


async def test_S7_a_rank_that_reads_them_lets_go_before_it_says_so_though_nothing_follows() -> None:
    server = RankedServer()
    server.ranks[1].device.script.delay("gather", HELD_S)
    async with server.open() as kv:
        request, table = await saving(server, kv)
        orders = begin_preempting(kv, request)
        assert await carried_out_after(server, 1, orders) == pytest.approx(HELD_S, abs=0.003)
        assert await carried_out_after(server, 0, orders) < 0.002
        server.free(table)
        server.still = False
        await request.preempted()
        await request.cancel()
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S7_what_follows_waits_too_and_an_empty_call_does() -> None:
    server = RankedServer()
    server.ranks[0].device.script.delay("gather", HELD_S)
    async with server.open() as kv:
        request, table = await saving(server, kv)
        with anyio.move_on_after(HELD_S / 2) as scope:
            await server.workers[0].carry_out(begin_preempting(kv, request))
        assert scope.cancelled_caught
        assert 0 < await carried_out_after(server, 0, b"") < HELD_S
        server.ranks[0].free(table)
    assert server.left_behind() == []


async def test_S7_a_load_of_others_gets_them_once_every_rank_has_let_go_and_no_sooner() -> None:
    server = RankedServer()
    server.put_in_store(LONG)
    gates = [rank.device.script.hold("gather") for rank in server.ranks]
    async with server.open() as kv:
        request, table = await saving(server, kv)
        orders = begin_preempting(kv, request)
        other = kv.open_request("other", LONG)
        offer = await other.lookup()
        # Of the pages that the first one held, and others.
        pages = [[*held, *range(40, 40 + 10 - len(held))] for held in table]
        async with anyio.create_task_group() as group:
            for worker in server.workers:
                group.start_soon(worker.carry_out, orders)
            for gate, worker in zip(gates, server.workers, strict=True):
                with pytest.raises(EngineContractError, match="in use"):
                    other.reserve(offer, offer.tokens, pages)
                gate.release()
                await anyio.sleep(0.01)
                kv.take_report(worker.take_report())
        load = other.reserve(offer, offer.tokens, pages)
        server.still = False
        assert (await load.wait()).state is LoadState.LOADED
        assert server.wrong_pages(LONG, pages, 0, 9) == []
        await other.finished()
        await request.cancel()
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S7_a_rank_begins_nothing_that_follows_before_it_has_let_go() -> None:
    server = RankedServer()
    server.put_in_store(LONG)
    gate = server.ranks[1].device.script.hold("gather")
    async with server.open() as kv:
        request, _ = await saving(server, kv)
        orders = begin_preempting(kv, request)
        server.still = True
        other, load, table = await server.load(kv, "other", LONG)
        later = kv.take_orders()
        async with anyio.create_task_group() as group:
            for worker in server.workers:
                for told in (orders, later):
                    group.start_soon(worker.carry_out, told)
                    await settle()
            await anyio.sleep(HELD_S)
            gets = [sum(call.operation == "get" for call in rank.pool.calls) for rank in server.ranks]
            assert gets == [gets[0], 0]
            assert gets[0] > 0
            gate.release()
        server.still = False
        await load.wait()
        assert server.wrong_pages(LONG, table, 0, 9) == []
        await other.finished()
        await request.cancel()
    assert server.left_behind() == []


async def test_D6_M2_a_load_whose_copy_runs_is_waited_for_and_its_call_is_not() -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    gate = server.ranks[0].runner.hold(CallKind.GET)
    server.ranks[1].device.script.delay("scatter", HELD_S)
    async with server.open() as kv:
        server.still = True
        request, load, table = await server.load(kv, "r", TOKENS)
        await server.carry(kv)
        await gate.reached()
        await settle()
        orders = begin_preempting(kv, request)
        assert await carried_out_after(server, 0, orders) == 0
        assert await carried_out_after(server, 1, orders) == pytest.approx(HELD_S, abs=0.003)
        server.free(table)
        server.still = False
        with pytest.raises(LoadCancelled):
            await load.wait()
        await request.preempted()
        gate.release()
        # It goes on with others.
        offer = await request.lookup()
        table = server.allocate(TOKENS)
        await request.reserve(offer, offer.tokens, table).wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        await request.finished()
    assert server.left_behind() == []


@pytest.mark.parametrize("carried", ["nothing", "the plan", "its end"])
async def test_S2_a_request_is_preempted_wherever_the_messages_of_its_pass_are(carried: str) -> None:
    server = RankedServer()
    async with server.open() as kv:
        server.still = True
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        plan = kv.plan_pass([part(request, 0, len(TOKENS), table)])
        if carried != "nothing":
            await server.carry(kv)
        for rank in server.ranks:
            rank.write(TOKENS, table)
        if carried == "its end":
            await kv.after_forward(plan)
            await server.carry(kv)
            kv._halves.preempt(request._record)
        else:
            kv._halves.preempt(request._record)
            await kv.after_forward(plan)
        await server.carry(kv)
        server.free(table)
        server.still = False
        await request.preempted()
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await request.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []
    assert server.left_behind() == []
