"""What is no report of its ranks changes nothing on a scheduler's side; what comes late or twice counts once (L6, D2)."""

from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest

from akv import EngineContractError, LoadState
from akv.ports.calls import CallKind
from akv.ranks import Scheduler
from akv.values.messages import (
    MESSAGE_VERSION,
    LoadResult,
    PagesReleased,
    PagesUnread,
    PassReport,
    RankOrders,
    RankReport,
    SaveResult,
)
from akv_testing import settle
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


def warm() -> RankedServer:
    server = RankedServer()
    server.put_in_store(TOKENS)
    return server


def encoded(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(RankReport(**{"rank": 0, **fields}))


LOADED = LoadResult(load_id=2, request_id="r", incarnation=1, state=LoadState.LOADED)
NO_REPORTS = {
    "garbage": b"garbage",
    "orders": msgspec.msgpack.encode(RankOrders()),
    "a cut one": encoded(report=PassReport(loads=(LOADED,)))[:-9],
    "another version": encoded(report=PassReport(loads=(LOADED,)), version=MESSAGE_VERSION + 1, degraded="gone"),
    "rank 2": encoded(rank=2, report=PassReport(loads=(LOADED,)), degraded="gone"),
    "rank -1": encoded(rank=-1, report=PassReport(loads=(LOADED,)), loads_nothing=True),
}


@pytest.mark.parametrize("report", NO_REPORTS.values(), ids=NO_REPORTS)
async def test_L6_what_is_no_report_of_a_rank_is_refused_and_changes_nothing(report: bytes) -> None:
    server = warm()
    async with server.open() as kv:
        server.still = True
        request, load, table = await server.load(kv, "r", TOKENS)
        assert (load._hold.load_id, request.incarnation) == (LOADED.load_id, LOADED.incarnation)
        with pytest.raises(EngineContractError):
            kv.take_report(report)
        assert kv.failure is None
        assert not kv.pressure().degraded
        server.still = False
        await load.wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        await request.finished()
    assert server.left_behind() == []


NO_ORDERS = {
    "garbage": b"garbage",
    "a report": encoded(),
    "another version": msgspec.msgpack.encode(RankOrders(version=MESSAGE_VERSION + 1)),
}


@pytest.mark.parametrize("orders", NO_ORDERS.values(), ids=NO_ORDERS)
async def test_L6_what_is_no_order_is_refused_and_changes_nothing(orders: bytes) -> None:
    server = warm()
    async with server.open() as kv:
        with pytest.raises(EngineContractError):
            await server.workers[0].carry_out(orders)
        request, load, _ = await server.load(kv, "r", TOKENS)
        await load.wait()
        await request.finished()
    assert server.left_behind() == []


async def test_L6_a_hello_is_no_report() -> None:
    server = warm()
    async with server.open() as kv:
        with pytest.raises(EngineContractError):
            kv.take_report(server.workers[0].hello)


async def test_L6_what_rank_0_says_alone_ends_nothing() -> None:
    server = warm()
    async with server.open() as kv:
        server.still = True
        _, load, _ = await server.load(kv, "r", TOKENS)
        await server.carry(kv)
        await anyio.sleep(0.01)
        report = server.workers[0].take_report()
        for _ in range(2):
            # The second time it is the same rank, again.
            kv.take_report(report)
            assert load.state is None
        kv.take_report(b"")
        kv.take_report(server.workers[1].take_report())
        assert load.state is LoadState.LOADED
        kv.take_report(report)
        assert len(kv.completed()) == 1
    assert server.left_behind() == []


async def test_D8_reports_of_what_has_ended_or_never_was_are_ignored(
    left_open: Callable[[RankedServer, Scheduler], list[str]],
) -> None:
    server = warm()
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        await load.wait()
        late = PassReport(
            loads=(LOADED, LoadResult(load_id=99, request_id="x", incarnation=9, state=LoadState.FAILED)),
            saves=(SaveResult(save_id=99, request_id="r", incarnation=1, stored=(0, 1)),),
            unread=(PagesUnread(request_id="r", incarnation=1, quarantined=((0,), ())),),
            released=(PagesReleased(request_id="r", incarnation=1, pages=((0,), ())),),
        )
        for rank in (0, 1):
            kv.take_report(encoded(rank=rank, report=late))
        assert kv.completed() == []
        assert not request.closed
        await request.finished()
        server.free(table)
        kv.take_report(encoded(report=late))
        assert left_open(server, kv) == []
    assert server.left_behind() == []


async def test_V4_how_busy_a_server_is_shows_what_has_not_ended_on_every_rank() -> None:
    server = warm()
    gate = server.ranks[1].runner.hold(CallKind.GET)
    async with server.open(max_parked_loads=3) as kv:
        request, load, _ = await server.load(kv, "r", TOKENS)
        await gate.reached()
        await anyio.sleep(0.01)
        busy = kv.pressure()
        assert (busy.parked_loads, busy.loads_left, busy.backlog_saves) == (1, 2, 0)
        gate.release()
        await load.wait()
        saving = kv.open_request("s", LONG)
        await server.compute(kv, saving, LONG, server.allocate(LONG))
        assert (kv.pressure().parked_loads, kv.pressure().backlog_saves) == (0, 1)
        await saving.finished()
        await request.finished()
        idle = kv.pressure()
        assert (idle.parked_loads, idle.loads_left, idle.backlog_saves, idle.backlog_bytes) == (0, 3, 0, 0)
        assert sum(idle.reads.staged.values()) == 2 * 4 * 2
    assert server.left_behind() == []


async def test_D1_a_rank_says_that_it_has_something_to_report_and_says_it_once() -> None:
    server = warm()
    async with server.open() as kv:
        server.still = True
        worker = server.workers[0]
        assert not worker.changed.is_set()
        assert worker.take_report() == b""
        await server.load(kv, "r", TOKENS)
        await server.carry(kv)
        with anyio.fail_after(0.1):
            await worker.changed.wait()
        assert worker.take_report()
        assert not worker.changed.is_set()
        assert worker.take_report() == b""
        await settle()
    assert server.left_behind() == []


async def test_D1_nothing_is_said_twice_and_everything_in_order() -> None:
    server = warm()
    async with server.open() as kv:
        server.still = True
        assert kv.take_orders() == b""
        request, _, _ = await server.load(kv, "r", TOKENS)
        kv._halves.cancel(request._record)
        said = msgspec.msgpack.decode(kv.take_orders(), type=RankOrders)
        assert [type(order).__name__ for order in said.orders] == ["LoadOrder", "Withdrawal"]
        assert kv.take_orders() == b""
        await server.workers[0].carry_out(b"")
        # The ranks were never told: it is heard of when they are.
        for worker in server.workers:
            await worker.carry_out(msgspec.msgpack.encode(said))
        server.still = False
        await request.cancel()
    assert server.left_behind() == []
