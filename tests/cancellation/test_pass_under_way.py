"""`after_forward` beside everything else that may happen meanwhile: it ends, gives slots back, and stores no wrong byte
(S2, S3, S4, M5, M8, O6).
"""

from collections.abc import Callable, Sequence

import anyio
import pytest

from akv import Connector, ConnectorBroken, EngineContractError, NotOpenError, Request, Scheduled
from akv.errors import DeviceError
from akv.ports.calls import CallKind
from akv.values.messages import PassPlan
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import TOKENS
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Five whole blocks and two tokens; and what is decoded behind them.
PROMPT = tuple(range(22))
LONG = tuple(range(60))
OTHER = tuple(range(500, 522))


def empty(server: WindowServer) -> PageTable:
    return [[] for _ in server.layout.groups]


def planned(
    server: WindowServer, kv: Connector, request: Request, tokens: Sequence[int], table: PageTable, before: int, end: int
) -> PassPlan:
    """One pass, planned and run up to its forward."""
    server.prepare(table, before, end)
    plan = kv.plan_pass([Scheduled(request=request, computed_before=before, tokens=end - before, pages=table)])
    server.forward(tokens, table, before, end)
    return plan


async def a_full_ring(server: WindowServer, kv: Connector):  # type: ignore[no-untyped-def]
    """Another request's window pages have every slot, until the gate opens."""
    gate = server.runner.hold(CallKind.PUT)
    other = kv.open_request("other", OTHER)
    await server.run_pass(kv, other, OTHER, empty(server), 0, len(OTHER))
    await gate.reached()
    return gate, other


def small() -> WindowServer:
    return WindowServer(windows=((10, 0),), snapshot_slots=4, snapshot_wait_ms=60_000)


# -- the connector ends


async def test_O6_closing_ends_a_wait_for_slots_at_once() -> None:
    server = small()
    ends: list[float] = []
    async with anyio.create_task_group() as group:
        async with server.open(shutdown_deadline_s=5) as kv:
            gate, _ = await a_full_ring(server, kv)
            plan = planned(server, kv, kv.open_request("r", PROMPT), PROMPT, empty(server), 0, len(PROMPT))

            async def pass_ends() -> None:
                with pytest.raises(NotOpenError, match="closed"):
                    await kv.after_forward(plan)
                ends.append(anyio.current_time())
                gate.release()

            group.start_soon(pass_ends)
            await settle()
            began = anyio.current_time()
    assert ends == [began]
    assert server.left_behind() == []
    assert server.wrong_values() == []


async def test_O6_a_copy_that_is_never_queued_holds_nobody_beyond_the_shutdown_deadline() -> None:
    server = WindowServer()
    gate = server.runner.hold(CallKind.SNAPSHOT)
    async with anyio.create_task_group() as group:
        async with server.open(shutdown_deadline_s=0.5) as kv:
            plan = planned(server, kv, kv.open_request("r", PROMPT), PROMPT, empty(server), 0, len(PROMPT))

            async def pass_ends() -> None:
                with pytest.raises(NotOpenError, match="closed"):
                    await kv.after_forward(plan)

            group.start_soon(pass_ends)
            await gate.reached()
    assert anyio.current_time() == pytest.approx(0.5, abs=0.01)
    # What it may still write stays registered (M1).
    assert server.pool.registered != []


async def test_M8_a_copy_whose_end_nobody_delivers_any_more_is_not_waited_for() -> None:
    """The service that delivers ends crashes, the block is cancelled, and nothing cuts the wait short but that."""
    server = WindowServer(latency=Latency(snapshot_s=0.02))

    def crash(_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ConnectorBroken):
        async with server.open(shutdown_deadline_s=0.5) as kv:
            plan = planned(server, kv, kv.open_request("r", PROMPT), PROMPT, empty(server), 0, len(PROMPT))
            async with anyio.create_task_group() as group:
                group.start_soon(kv.after_forward, plan)
                await anyio.sleep(0.01)
                server.runner._ends.append((crash, None))  # type: ignore[arg-type]
                server.runner._notify()
    assert server.wrong_values() == []


async def test_S1_closing_with_a_pass_under_way_stores_no_window_page_that_it_may_have_released() -> None:
    server = WindowServer(windows=((10, 0),))
    async with server.open() as kv:
        request, table = kv.open_request("r", LONG[:47]), empty(server)
        await server.run_pass(kv, request, LONG, table, 0, 22)
        planned(server, kv, request, LONG, table, 22, 47)
        # The engine ends its pass as its connector closes, and cannot say so any more.
        server.commit(table, 47)
    assert server.wrong_values() == []
    assert server.left_behind() == []


# -- the device fails


@pytest.mark.parametrize("failing", [1, 2], ids=["the pass's event", "the event behind the copies"])
async def test_S1_a_pass_that_fails_to_be_noted_leaves_no_released_page_to_the_requests_end(failing: int) -> None:
    """The engine has released window pages that the pass before it still held: `finish` must not read them."""
    server = WindowServer(windows=((10, 0),))
    async with server.open() as kv:
        request, table = kv.open_request("r", LONG[:47]), empty(server)
        await server.run_pass(kv, request, LONG, table, 0, 22)
        server.prepare(table, 22, 47)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=22, tokens=25, pages=table)])
        server.forward(LONG, table, 22, 47)
        real, calls = kv._halves.scheduler.worker.fence, iter(range(1, 100))

        def fence():  # type: ignore[no-untyped-def]
            if next(calls) == failing:
                raise DeviceError("lost")
            return real()

        kv._halves.scheduler.worker.fence = fence
        with pytest.raises(DeviceError, match="lost"):
            await kv.after_forward(plan)
        server.commit(table, 47)
        await request.finished()
    assert server.wrong_values() == []
    assert server.left_behind() == []


# -- two at once


async def test_S2_a_pass_that_waits_for_slots_does_not_undo_what_later_passes_noted() -> None:
    """Twenty passes of a request run while the copy of its prompt's end still waits: its end is that of the last one."""
    server = small()
    async with server.open() as kv:
        gate, other = await a_full_ring(server, kv)
        request, table = kv.open_request("r", PROMPT), empty(server)
        closing = planned(server, kv, request, LONG, table, 0, 22)
        async with anyio.create_task_group() as group:
            group.start_soon(kv.after_forward, closing)
            await settle()
            for before in range(22, 44):
                request.append([LONG[before]])
                plan = planned(server, kv, request, LONG, table, before, before + 1)
                assert [order for order in plan.saves if order.snapshot] == [], "the prompt's end is copied once"
                await kv.after_forward(plan)
            gate.release()
        server.commit(table, 44)
        await request.finished()
        await other.finished()
    assert server.wrong_values() == []
    assert server.ends((*LONG[:44], 0)) == [5, 11]


async def test_S2_a_plan_ends_once_whatever_is_under_way() -> None:
    server = WindowServer(latency=Latency(snapshot_s=0.01))
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        plan = planned(server, kv, request, PROMPT, table, 0, len(PROMPT))
        async with anyio.create_task_group() as group:
            group.start_soon(kv.after_forward, plan)
            await settle()
            with pytest.raises(EngineContractError, match="has ended already"):
                kv.drop_pass(plan)
            with pytest.raises(EngineContractError, match="has ended already"):
                await kv.after_forward(plan)
        server.commit(table, len(PROMPT))
        await request.finished()
    assert server.ends(PROMPT)[-1] == 5
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S2_two_requests_end_in_two_passes_whose_copies_wait_for_each_other(
    left_open: Callable[[Connector], list[str]],
) -> None:
    server = WindowServer(latency=Latency(snapshot_s=0.01))
    async with server.open() as kv:

        async def one(name: str, tokens: Sequence[int]) -> None:
            request, table = kv.open_request(name, tokens), empty(server)
            plan = planned(server, kv, request, tokens, table, 0, len(tokens))
            await kv.after_forward(plan)
            server.commit(table, len(tokens))
            await request.finished()
            server.free(table)

        async with anyio.create_task_group() as group:
            group.start_soon(one, "r", PROMPT)
            await settle()
            group.start_soon(one, "other", OTHER)
        assert [server.ends(tokens)[-1] for tokens in (PROMPT, OTHER)] == [5, 5]
        assert left_open(kv) == []
    assert server.wrong_values() == []


async def test_M5_D6_pages_come_back_only_behind_the_copies_that_a_pass_is_about_to_queue() -> None:
    """Before that a load could fill them again, and nothing would order its copies behind these."""
    server = WindowServer()
    async with server.open() as kv:
        for way in ("cancel", "preempted"):
            gate = server.runner.hold(CallKind.SNAPSHOT)
            request = kv.open_request(way, PROMPT)
            incarnation = request.incarnation
            plan = planned(server, kv, request, PROMPT, empty(server), 0, len(PROMPT))
            async with anyio.create_task_group() as group:
                group.start_soon(kv.after_forward, plan)
                await gate.reached()
                group.start_soon(getattr(request, way))
                await settle()
                assert not request.closed
                assert request.incarnation == incarnation
                gate.release()
            assert request.closed or request.incarnation != incarnation
            await request.cancel()
    assert server.wrong_values() == []


# -- the block of a request


async def test_D2_a_block_that_is_cancelled_as_its_request_closes_names_its_pages_all_the_same() -> None:
    server = FakeServer.warm(TOKENS, host_pages=True)
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.GET)
        with anyio.CancelScope() as scope:
            async with kv.request("r", TOKENS) as request:
                offer = await request.lookup()
                table = server.allocate(TOKENS)
                request.reserve(offer, offer.tokens, table)
                await gate.reached()
                # Finishing withdraws the load, and the request has closed before anybody is told.
                request.finish()
                scope.cancel()
                await request.finished()
        assert request.closed
        assert request.quarantined == (tuple(table[0][:4]), ())
        assert kv.completed() == [], "who uses a block does not poll"
        gate.release()


async def test_D6_what_the_block_of_a_connector_raises_leaves_no_slot_of_an_open_pass() -> None:
    server = WindowServer()
    with pytest.raises(ZeroDivisionError):
        async with server.open() as kv:
            planned(server, kv, kv.open_request("r", PROMPT), PROMPT, empty(server), 0, len(PROMPT))
            raise ZeroDivisionError
    assert server.left_behind() == []
    assert server.store.keys() == []
