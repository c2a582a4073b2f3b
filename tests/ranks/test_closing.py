"""What a rank has when it closes, loses the pool or goes on without a cache: saved in an orderly end, or given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from akv import BreakerState, DeviceError, PagesReleased
from akv.ports.calls import CallKind
from akv.values.messages import RankReport
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS, part
from akv_testing.window_server import window_layout

if TYPE_CHECKING:
    from tests.ranks.conftest import Post

pytestmark = pytest.mark.anyio

#: Of one store call, of which a long save or load has six.
CALL_S = 0.01


def slow(**arguments: Any) -> RankedServer:
    return RankedServer(slots=8, latency=Latency(get_s=CALL_S, put_s=CALL_S), **arguments)


async def test_O6_an_orderly_end_lets_the_saves_that_a_rank_was_told_of_run_out() -> None:
    server = slow()
    async with server.open() as kv:
        request, table = kv.open_request("r", LONG), server.allocate(LONG)
        await server.compute(kv, request, LONG, table)
        await anyio.sleep(CALL_S / 2)
    assert server.stored_blocks(LONG) == list(range(9))
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_O6_an_error_withdraws_the_saves_and_nothing_further_begins() -> None:
    server = slow()
    with pytest.RaisesGroup(ValueError):
        async with server.open() as kv:
            request, table = kv.open_request("r", LONG), server.allocate(LONG)
            await server.compute(kv, request, LONG, table)
            await anyio.sleep(CALL_S / 2)
            raise ValueError
    puts = [sum(call.operation == "put" for call in rank.pool.calls) for rank in server.ranks]
    assert 0 < max(puts) < 6
    assert len(server.stored_blocks(LONG)) < 9
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_O6_loads_are_of_no_use_to_anybody_when_a_rank_closes() -> None:
    server = slow()
    server.put_in_store(LONG)
    async with server.open() as kv:
        await server.load(kv, "r", LONG)
        await anyio.sleep(CALL_S / 2)
        server.still = True
        began = anyio.current_time()
    assert anyio.current_time() - began < 3 * CALL_S
    gets = [sum(call.operation == "get" for call in rank.pool.calls) for rank in server.ranks]
    assert max(gets) < 6
    assert server.left_behind() == []


async def test_O7_saves_that_wait_behind_a_put_that_hangs_end_when_the_rank_loses_the_pool() -> None:
    server = RankedServer()
    gate = server.ranks[1].runner.hold(CallKind.PUT)
    async with server.open() as kv:
        stuck = kv.open_request("stuck", LONG)
        await server.compute(kv, stuck, LONG, server.allocate(LONG))
        await gate.reached()
        waiting = kv.open_request("waits", TOKENS)
        await server.compute(kv, waiting, TOKENS, server.allocate(TOKENS))
        rank = server.workers[1]._rank
        rank.breaker._opened(rank.breaker._breaker.unavailable(rank.breaker.began(), anyio.current_time()))
        with anyio.fail_after(CALL_S):
            await waiting.finished()
        gate.release()
        await stuck.finished()
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_M3_slots_in_quarantine_past_their_bound_open_that_ranks_breaker() -> None:
    server = RankedServer(quarantine_max_bytes=1)
    server.put_in_store(TOKENS)
    gate = server.ranks[1].runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, _, _ = await server.load(kv, "r", TOKENS)
        await gate.reached()
        await request.cancel()
        # It is looked at when the next call is to begin.
        other = kv.open_request("other", LONG)
        await server.compute(kv, other, LONG, server.allocate(LONG))
        await other.finished()
        assert [worker._rank.breaker.state for worker in server.workers] == [BreakerState.CLOSED, BreakerState.OPEN]
        gate.release()
    assert server.left_behind() == []


async def test_D1_what_a_rank_reported_it_does_not_report_again(post: type[Post]) -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        by_hand = post(server, kv)
        worker = server.workers[0]
        rank = worker._rank
        said = []
        for number in range(2):
            await server.load(kv, f"r{number}", TOKENS)
            await by_hand.tell(0)
            await anyio.sleep(0.01)
            if number == 0:
                rank._on_pool_returned()
                assert worker.changed.is_set()
            said.append(msgspec.msgpack.decode(worker.take_report(), type=RankReport))
        assert [[load.request_id for load in report.report.loads] for report in said] == [["r0"], ["r1"]]
        assert [report.pool_returned for report in said] == [True, False]
    assert server.left_behind() == []


async def test_O7_a_rank_has_something_to_report_when_it_loses_the_pool_and_when_it_is_back(post: type[Post]) -> None:
    server = RankedServer()
    async with server.open() as kv:
        post(server, kv)
        worker = server.workers[0]
        breaker = worker._rank.breaker
        breaker._opened(breaker._breaker.unavailable(breaker.began(), anyio.current_time()))
        for gone in (True, False):
            with anyio.fail_after(1):
                await worker.changed.wait()
            report = msgspec.msgpack.decode(worker.take_report(), type=RankReport)
            assert (report.loads_nothing, report.pool_returned) == (gone, not gone)
    assert server.left_behind() == []


async def test_S3_window_pages_that_were_copied_go_back_where_the_pass_cannot_be_marked(
    post: type[Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RankedServer(layout=window_layout([(6, 0)]), rewind_tokens=0)
    async with server.open() as kv:
        by_hand = post(server, kv)
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        plan = kv.plan_pass([part(request, 0, len(TOKENS), table)])
        await by_hand.tell(0, 1)
        for rank in server.ranks:
            rank.write(TOKENS, table)
        await kv.after_forward(plan)
        device = server.ranks[1].device
        record = device.record

        def refused() -> object:
            monkeypatch.setattr(device, "record", record)
            raise DeviceError("planted")

        monkeypatch.setattr(device, "record", refused)
        await by_hand.go_on()
        # Long before the hold of its pages would be given up.
        with anyio.fail_after(0.1):
            await request.finished()
        ring = server.workers[1]._rank.worker._ring
        assert ring is not None
        assert ring.claims.host.free == ring.claims.host.count
        asks = kv.open_request("asks", TOKENS)
        assert (await asks.lookup()).tokens == 0
        await asks.cancel()
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_D2_pages_in_quarantine_on_one_rank_are_named_until_its_call_returned() -> None:
    server = RankedServer(host_pages=True)
    server.put_in_store(TOKENS)
    gate = server.ranks[1].runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, _, table = await server.load(kv, "r", TOKENS)
        await gate.reached()
        quarantined = await request.cancel()
        assert quarantined == kv.touched_pages
        assert set(quarantined[0]) <= set(table[0])
        assert any(quarantined)
        gate.release()
        await anyio.sleep(0.01)
        assert kv.touched_pages == ()
        assert [done.pages for done in kv.completed() if isinstance(done, PagesReleased)] == [quarantined]
    assert server.left_behind() == []


async def test_O8_S4_slots_go_back_on_every_rank_when_the_server_goes_on_without_a_cache(post: type[Post]) -> None:
    server = RankedServer(layout=window_layout([(6, 0)]), rewind_tokens=0, on_failure="degrade")
    async with server.open() as kv:
        by_hand = post(server, kv)
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        kv.plan_pass([part(request, 0, len(TOKENS), table)])
        await by_hand.tell(0, 1)
        rings = [worker._rank.worker._ring for worker in server.workers]
        assert [ring.claims.plans for ring in rings if ring is not None] == [1, 1]
        server.workers[1]._rank._fail("planted", RuntimeError("planted"))
        # It begins nothing itself, before anybody has told it.
        assert not server.workers[1]._rank.breaker.lets_through()
        with capture_logs() as logs:
            for _ in range(2):
                by_hand.hear(1)
                server.workers[1]._rank.changed.set()
        assert [log["event"] for log in logs] == ["akv.rank.degraded"], "told once"
        await by_hand.go_on()
        assert [ring.claims.plans for ring in rings if ring is not None] == [0, 0]
        await request.cancel()
    assert server.left_behind() == []


async def test_M8_a_pass_whose_copies_no_thread_queues_does_not_hold_a_rank_that_degraded(post: type[Post]) -> None:
    server = RankedServer(layout=window_layout([(6, 0)]), rewind_tokens=0, on_failure="degrade", shutdown_deadline_s=0.1)
    gate = server.ranks[1].runner.hold(CallKind.SNAPSHOT)
    async with server.open() as kv:
        by_hand = post(server, kv)
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        plan = kv.plan_pass([part(request, 0, len(TOKENS), table)])
        await by_hand.tell(0, 1)
        for rank in server.ranks:
            rank.write(TOKENS, table)
        await kv.after_forward(plan)
        began = anyio.current_time()
        with anyio.fail_after(1):
            async with anyio.create_task_group() as group:
                group.start_soon(by_hand.tell, 1)
                await gate.reached()
                server.workers[1]._rank._fail("planted", RuntimeError("planted"))
        assert anyio.current_time() - began == pytest.approx(0.1)
        gate.release()
        await by_hand.go_on()
        await anyio.sleep(0.01)
        await request.cancel()
    assert server.left_behind() == []


async def test_R6_ranks_that_load_hear_of_every_pass_and_others_of_those_that_save(
    post: type[Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, heard = RankedServer(), []
    server.put_in_store(TOKENS)
    gate = server.ranks[1].runner.hold(CallKind.GET)
    async with server.open() as kv:
        by_hand = post(server, kv)
        for number, worker in enumerate(server.workers):
            monkeypatch.setattr(worker._rank.worker, "pass_begins", lambda number=number: heard.append(number))
        decoding, table = kv.open_request("decodes", LONG), server.allocate(LONG)
        await server.compute(kv, decoding, LONG, table)
        await anyio.sleep(0.01)
        by_hand.hear(0, 1)
        assert heard == []
        loading, load, _ = await server.load(kv, "loads", TOKENS)
        for _ in range(2):
            await kv.after_forward(kv.plan_pass([part(decoding, len(LONG), 1, table)]))
            await by_hand.tell(0, 1)
        assert sorted(heard) == [0, 0, 1, 1]
        gate.release()
        await by_hand.go_on()
        await load.wait()
        kv.drop_pass(kv.plan_pass([part(decoding, len(LONG), 1, table)]))
        assert kv.take_orders() == b""
        await loading.finished()
        await decoding.cancel()
    assert server.left_behind() == []


async def test_S7_orders_that_come_behind_a_cancelled_call_join_what_it_left(post: type[Post]) -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    gate = server.ranks[0].device.script.hold("gather")
    async with server.open() as kv:
        by_hand = post(server, kv)
        request, table = kv.open_request("r", LONG), server.allocate(LONG)
        await server.compute(kv, request, LONG, table)
        await settle()
        kv._halves.preempt(request._record)
        loads = [(await server.load(kv, "first", TOKENS))[1]]
        with anyio.move_on_after(0.01) as scope:
            await by_hand.tell(0)
        assert scope.cancelled_caught
        loads.append((await server.load(kv, "second", TOKENS))[1])
        gate.release()
        await by_hand.go_on()
        with anyio.fail_after(0.1):
            for load in loads:
                await load.wait()
        await request.cancel()
    assert server.left_behind() == []
