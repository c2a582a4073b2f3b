"""A pool that does not answer: lookups miss at once, nothing queues up for it, and it is used again when it is back (O7)."""

import logging

import anyio
import pytest
from anyio.abc import TaskStatus

from akv import BreakerState, Connector, LoadFailed, LookupOutcome, Request
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import settle
from akv_testing.events import events_in
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio

#: Virtual seconds after which a pool that is back has been found.
FOUND_S = 2.5


async def outcome(request: Request) -> LookupOutcome:
    return (await request.lookup()).outcome


async def held(lock: anyio.Lock, *, task_status: TaskStatus[None]) -> None:
    async with lock:
        task_status.started()
        await anyio.sleep_forever()


async def pool_dies(server: FakeServer, kv: Connector) -> None:
    """One lookup finds out."""
    server.store.down = True
    assert await outcome(kv.open_request("finds out", TOKENS)) is LookupOutcome.UNAVAILABLE
    assert kv.pressure().breaker is BreakerState.OPEN


async def pool_is_back(server: FakeServer, kv: Connector) -> None:
    server.store.down = False
    await anyio.sleep(FOUND_S)
    assert kv.pressure().breaker is BreakerState.CLOSED


async def test_O7_after_a_master_error_lookups_miss_at_once_and_ask_nobody() -> None:
    server = FakeServer.warm(TOKENS, latency=lambda kind, size: 4.5)
    async with server.open(lookup_deadline_s=9.0) as kv:
        await pool_dies(server, kv)
        asked, began = len(server.pool.calls), anyio.current_time()
        for number in range(10):
            assert await outcome(kv.open_request(str(number), TOKENS)) is LookupOutcome.UNAVAILABLE
        assert (len(server.pool.calls), anyio.current_time()) == (asked, began)


async def test_O7_a_pool_that_is_back_is_found_by_one_probe_at_a_time_and_used_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "akv")
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        await pool_dies(server, kv)
        asked = len(server.pool.calls)
        await anyio.sleep(20)
        probes = server.pool.calls[asked:]
        # 0.05, 0.1, ... 1.6, then every 2 seconds.
        assert len(probes) == 14
        assert {call.keys for call in probes} == {(f"{server.keys.space}/breaker",)}
        await pool_is_back(server, kv)
        assert await outcome(kv.open_request("r", TOKENS)) is LookupOutcome.FULL
    assert events_in(caplog.records, "akv.breaker.open") == [{"reason": "unavailable"}]
    (closed,) = events_in(caplog.records, "akv.breaker.closed")
    assert (closed["reason"], closed["probes"]) == ("unavailable", 15)
    assert 20 < closed["duration_s"] < 20 + FOUND_S


async def test_V4_pressure_tells_that_a_probe_is_under_way_and_there_is_one_of_them() -> None:
    server = FakeServer()
    async with server.open() as kv:
        assert kv.pressure().breaker is BreakerState.CLOSED
        await pool_dies(server, kv)
        gate = server.runner.hold_all(CallKind.PROBE)
        await anyio.sleep(10)
        assert kv.pressure().breaker is BreakerState.PROBING
        assert server.runner.outstanding(CallKind.PROBE) == 1
        assert await outcome(kv.open_request("r", TOKENS)) is LookupOutcome.UNAVAILABLE
        gate.release()
        await pool_is_back(server, kv)


@pytest.mark.parametrize(("late", "state"), [(1, BreakerState.CLOSED), (2, BreakerState.OPEN)])
async def test_O7_two_lookups_past_their_deadline_open_it(late: int, state: BreakerState) -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.PROBE)
        for number in range(late):
            assert await outcome(kv.open_request(str(number), TOKENS)) is LookupOutcome.DEADLINE
        assert kv.pressure().breaker is state
        gate.release()


async def test_O7_an_answer_in_time_forgives_a_time_out_and_one_that_nobody_waited_for_does_not() -> None:
    server = FakeServer.warm(TOKENS)
    late = LookupOutcome.DEADLINE
    async with server.open() as kv:
        for number, in_between in enumerate([True, False]):
            gate = server.runner.hold(CallKind.PROBE)
            assert await outcome(kv.open_request(f"{number}a", TOKENS)) is late
            gate.release()
            await settle()
            if in_between:
                assert await outcome(kv.open_request(f"{number}b", TOKENS)) is LookupOutcome.FULL
        assert kv.pressure().breaker is BreakerState.CLOSED
        gate = server.runner.hold(CallKind.PROBE)
        assert await outcome(kv.open_request("c", TOKENS)) is late
        assert kv.pressure().breaker is BreakerState.OPEN
        gate.release()


async def test_O7_a_lookup_whose_deadline_passes_while_it_asks_nobody_is_no_sign_of_the_pool() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        async with anyio.create_task_group() as group:
            await group.start(held, kv._halves.scheduler._lookup.turn)
            for number in range(3):
                assert await outcome(kv.open_request(str(number), TOKENS)) is LookupOutcome.DEADLINE
            group.cancel_scope.cancel()
        assert kv.pressure().breaker is BreakerState.CLOSED


async def test_O7_lookups_that_were_answered_and_wait_for_their_turn_are_no_sign_of_the_pool_either() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open(probe_head=2) as kv:
        gate = server.runner.hold_all(CallKind.PROBE)
        async with anyio.create_task_group() as turns, anyio.create_task_group() as lookups:
            for number in range(2):
                lookups.start_soon(outcome, kv.open_request(str(number), TOKENS))
            await settle()
            assert server.runner.outstanding(CallKind.PROBE) == 2
            await turns.start(held, kv._halves.scheduler._lookup.turn)
            gate.release()
            await anyio.sleep(1.01)
            assert kv.pressure().breaker is BreakerState.CLOSED
            turns.cancel_scope.cancel()


async def test_O7_lookups_under_way_end_when_it_opens() -> None:
    server = FakeServer.warm(TOKENS)
    ended: list[float] = []

    async def waits(request: Request) -> None:
        assert await outcome(request) is LookupOutcome.UNAVAILABLE
        ended.append(anyio.current_time())

    async with server.open(lookup_deadline_s=5.0) as kv:
        gate = server.runner.hold(CallKind.PROBE)
        async with anyio.create_task_group() as group:
            group.start_soon(waits, kv.open_request("hangs", TOKENS))
            await settle()
            await pool_dies(server, kv)
        assert ended == [0.0]
        gate.release()


async def test_O7_two_loads_past_their_deadline_in_a_store_call_open_it_and_queued_loads_fail_at_once() -> None:
    server = FakeServer.warm(TOKENS, loaders=2)
    async with server.open(load_deadline_s=1.0) as kv:
        gate = server.runner.hold_all(CallKind.GET)
        loads = [(await server.load(kv, str(number), TOKENS))[1] for number in range(5)]
        reasons, at = [], []
        for load in loads:
            with pytest.raises(LoadFailed) as failed:
                await load.wait()
            reasons.append(failed.value.reason)
            at.append(anyio.current_time())
        assert reasons == ["deadline"] * 2 + ["breaker_open"] * 3
        assert at == pytest.approx([1.0] * 5)
        assert kv.pressure().breaker is not BreakerState.CLOSED
        gate.release()
    assert server.left_behind() == []


async def test_O7_loads_past_their_deadline_behind_the_devices_own_work_are_no_sign_of_the_pool() -> None:
    server = FakeServer.warm(TOKENS, loaders=2)
    async with server.open(load_deadline_s=0.01) as kv:
        holds = [server.device.script.hold("scatter", nth=nth) for nth in (1, 2)]
        loads = [(await server.load(kv, str(number), TOKENS))[1] for number in range(2)]
        await anyio.sleep(0.015)
        for hold in holds:
            hold.release()
        for load in loads:
            with pytest.raises(LoadFailed, match="deadline"):
                await load.wait()
        assert kv.pressure().breaker is BreakerState.CLOSED


async def test_O7_an_offer_taken_up_while_it_is_open_fails_at_once_and_names_no_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "akv")
    server = FakeServer.warm(TOKENS, loaders=1)
    async with server.open(load_deadline_s=60.0) as kv:
        # The one loader has work, which hangs.
        gate = server.runner.hold(CallKind.GET)
        hanging = (await server.load(kv, "hangs", TOKENS))[1]
        await gate.reached()
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        await pool_dies(server, kv)
        asked = len(server.pool.calls)
        load = request.reserve(offer, offer.tokens, server.allocate(TOKENS))
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert (failed.value.reason, failed.value.key) == ("breaker_open", "")
        assert len(server.pool.calls) == asked
        assert [said["request_id"] for said in events_in(caplog.records, "akv.load.failed")] == ["r"]
        assert events_in(caplog.records, "akv.load.failed_key") == []
        await request.finished()
        gate.release()
        with pytest.raises(LoadFailed):
            await hanging.wait()


async def test_O7_saves_are_refused_while_it_is_open_and_their_pages_go_back_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "akv")
    server = FakeServer()
    async with server.open() as kv:
        await pool_dies(server, kv)
        asked, began = len(server.pool.calls), anyio.current_time()
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        assert (kv.pressure().backlog_bytes, kv.pressure().saving.free) == (0, kv.pressure().saving.slots)
        await request.finished()
        assert (len(server.pool.calls), anyio.current_time()) == (asked, began)
    # The pass's, and those that `finish` tries once more.
    assert [(said["blocks"], said["reason"]) for said in events_in(caplog.records, "akv.save.refused")] == [
        (4, "breaker_open")
    ] * 2


async def test_O7_blocks_that_were_refused_meanwhile_are_saved_when_the_pool_is_back() -> None:
    server = FakeServer()
    async with server.open() as kv:
        await pool_dies(server, kv)
        request, table = kv.open_request("r", TOKENS), server.allocate(8)
        await server.compute(kv, request, TOKENS, table)
        await pool_is_back(server, kv)
        request.append([1, 2])
        await server.compute(kv, request, [*TOKENS, 1, 2], table, len(TOKENS))
        await settle()
        await anyio.sleep(0.1)
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        await request.finished()
    assert server.wrong_values() == []


async def test_O7_queued_saves_end_when_it_opens_and_of_the_one_under_way_nothing_further_begins() -> None:
    server = FakeServer(slots=4)
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        requests = [kv.open_request(name, [*range(at, at + len(LONG))]) for name, at in (("a", 0), ("b", 1000), ("c", 2000))]
        for number, request in enumerate(requests):
            tokens = [*range(1000 * number, 1000 * number + len(LONG))]
            await server.compute(kv, request, tokens, server.allocate(tokens))
        await gate.reached()
        assert kv.pressure().backlog_saves == 3
        await pool_dies(server, kv)
        assert kv.pressure().backlog_saves == 1
        read = len(server.device.copies)
        gate.release()
        await anyio.sleep(0.1)
        assert kv.pressure().backlog_saves == 0
        assert len([call for call in server.pool.calls if call.operation == "put"]) == 1
        assert len(server.device.copies) == read
        for request in requests:
            await request.cancel()
    assert server.left_behind() == []


async def test_O7_a_put_that_reaches_nobody_opens_it() -> None:
    server = FakeServer()
    async with server.open() as kv:
        server.store.down = True
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await anyio.sleep(0.02)
        assert kv.pressure().breaker is BreakerState.OPEN
        await request.finished()


@pytest.mark.parametrize("state", [state for state in KeyState if state is not KeyState.UNAVAILABLE])
async def test_O7_any_other_answer_leaves_it_closed(state: KeyState) -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        for operation in ("probe", "get", "put"):
            server.pool.answer(operation, state, times=None)
        request = kv.open_request("r", TOKENS)
        await request.lookup()
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await request.finished()
        assert kv.pressure().breaker is BreakerState.CLOSED


async def test_O7_one_key_that_could_be_asked_for_leaves_it_closed() -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.answer("probe", KeyState.UNAVAILABLE, skip=1, times=None)
    async with server.open() as kv:
        await kv.open_request("r", TOKENS).lookup()
        assert kv.pressure().breaker is BreakerState.CLOSED


async def test_S13_a_pool_that_was_lost_gets_what_it_held_again_also_of_requests_that_went_on() -> None:
    server = FakeServer()
    async with server.open() as kv:
        going_on, table = kv.open_request("goes on", LONG), server.allocate(LONG)
        await server.compute(kv, going_on, LONG, table)
        await anyio.sleep(0.1)
        assert server.stored_blocks(LONG) == [*range(9)]
        server.store.clear()
        await pool_dies(server, kv)
        await pool_is_back(server, kv)
        # Matched locally: known to be in the pool that was lost, listed in the one that is there now.
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, [row[:5] for row in table], 16)
        await request.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        await server.compute(kv, going_on, LONG, table, len(LONG) - 1)
        await going_on.finished()
        assert server.stored_blocks(LONG) == [*range(9)]


@pytest.mark.parametrize(("most", "state"), [(1, BreakerState.OPEN), (0, BreakerState.CLOSED)])
async def test_M3_slots_in_quarantine_past_their_bound_open_it_until_the_calls_returned(
    most: int, state: BreakerState, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "akv")
    server = FakeServer.warm(TOKENS)
    async with server.open(quarantine_max_bytes=most) as kv:
        gate = server.runner.hold(CallKind.GET)
        request, _, _ = await server.load(kv, "r", TOKENS)
        await gate.reached()
        await request.cancel()
        await settle()
        found = await outcome(kv.open_request("s", TOKENS))
        assert found is (LookupOutcome.UNAVAILABLE if most else LookupOutcome.FULL)
        assert kv.pressure().breaker is state
        await anyio.sleep(10)
        # The pool answers every probe; it is the memory that is missing.
        assert kv.pressure().breaker is state
        gate.release()
        await anyio.sleep(FOUND_S)
        assert await outcome(kv.open_request("t", TOKENS)) is LookupOutcome.FULL
    assert [said["reason"] for said in events_in(caplog.records, "akv.breaker.open")] == ["quarantine"] * most


async def test_M3_pages_in_quarantine_count_too() -> None:
    server = FakeServer.warm(TOKENS, host_pages=True)
    async with server.open(quarantine_max_bytes=1) as kv:
        gate = server.runner.hold(CallKind.GET)
        request, _, _ = await server.load(kv, "r", TOKENS)
        await gate.reached()
        assert await request.cancel() != ()
        assert await outcome(kv.open_request("s", TOKENS)) is LookupOutcome.UNAVAILABLE
        gate.release()


async def test_O6_a_connector_that_closes_begins_no_further_probe() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open(shutdown_deadline_s=5.0) as kv:
        # Closing waits for this call, which never returns.
        gate = server.runner.hold(CallKind.GET)
        request, _, _ = await server.load(kv, "r", TOKENS)
        await gate.reached()
        await request.cancel()
        await pool_dies(server, kv)
        asked, began = len(server.pool.calls), anyio.current_time()
    assert anyio.current_time() - began >= 5
    assert len(server.pool.calls) == asked
    gate.release()


async def test_O6_a_connector_closes_within_its_deadline_beside_a_probe_that_hangs() -> None:
    server = FakeServer()
    async with server.open(shutdown_deadline_s=1.0) as kv:
        await pool_dies(server, kv)
        gate = server.runner.hold(CallKind.PROBE)
        await gate.reached()
        began = anyio.current_time()
    assert anyio.current_time() - began <= 2.0
    gate.release()
