"""How busy a connector says it is, and what an engine that listens is spared (V4)."""

from typing import Any

import anyio
import pytest

from akv import LoadState, LookupOutcome, Request
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.server import FakeServer
from akv_testing.traffic import TOKENS

pytestmark = pytest.mark.anyio


async def parked(server: FakeServer, request: Request, **how: Any) -> Any:
    offer = await request.lookup()
    return request.reserve(offer, offer.tokens, server.allocate(TOKENS), **how)


async def test_V4_an_idle_connector_is_under_no_pressure() -> None:
    server = FakeServer(max_parked_loads=7)
    async with server.open() as kv:
        pressure = kv.pressure()
    assert (pressure.backlog_bytes, pressure.backlog_saves) == (0, 0)
    assert (pressure.queued_loads, pressure.parked_loads, pressure.loads_left) == (0, 0, 7)
    assert pressure.loading.free == pressure.loading.slots > 0
    assert pressure.saving.free == pressure.saving.slots > 0
    assert (pressure.outstanding_calls, pressure.given_up_calls) == (0, 0)
    assert pressure.ring is None
    assert pressure.quarantined_page_bytes == 0


async def test_V4_loads_under_way_are_counted_and_given_up_calls_hold_slots() -> None:
    server = FakeServer.warm(TOKENS, loaders=1)
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.GET)
        requests = [kv.open_request(str(number), TOKENS) for number in range(3)]
        loads = [await parked(server, request) for request in requests]
        await settle()
        busy = kv.pressure()
        assert (busy.queued_loads, busy.parked_loads) == (2, 3)
        assert (busy.outstanding_calls, busy.given_up_calls) == (1, 0)
        held = busy.loading.slots - busy.loading.free
        assert held > 0 == busy.loading.quarantined
        await requests[0].cancel()
        await settle()
        assert kv.pressure().given_up_calls == 1
        assert kv.pressure().loading.quarantined == held
        gate.release()
        for load in loads[1:]:
            assert (await load.wait()).state is LoadState.LOADED
        await settle()
        assert (kv.pressure().parked_loads, kv.pressure().loading.quarantined, kv.pressure().given_up_calls) == (0, 0, 0)


async def test_V4_the_backlog_is_the_bytes_of_saves_that_have_not_ended() -> None:
    server = FakeServer()
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.PUT)
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await settle()
        page_bytes = sum(group.bytes_per_page for group in server.layout.groups)
        assert (kv.pressure().backlog_bytes, kv.pressure().backlog_saves) == (4 * page_bytes, 1)
        gate.release()
        await request.finished()
        assert (kv.pressure().backlog_bytes, kv.pressure().backlog_saves) == (0, 0)


async def test_V4_beyond_the_limit_of_parked_loads_a_lookup_offers_nothing_and_asks_nobody() -> None:
    server = FakeServer.warm(TOKENS, max_parked_loads=2)
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.GET)
        requests = [kv.open_request(str(number), TOKENS) for number in range(3)]
        loads = [await parked(server, request) for request in requests[:2]]
        asked = len(server.pool.calls)
        assert kv.pressure().loads_left == 0
        offer = await requests[2].lookup()
        assert (offer.tokens, offer.outcome) == (0, LookupOutcome.OVERLOADED)
        assert len(server.pool.calls) == asked
        gate.release()
        await loads[0].wait()
        assert (await requests[2].lookup()).tokens == 16
        await loads[1].wait()


async def test_V4_of_queued_loads_the_larger_priority_goes_first_and_equal_ones_in_order() -> None:
    server = FakeServer.warm(TOKENS, loaders=1)
    ended: list[str] = []

    async def waited(name: str, load: Any) -> None:
        await load.wait()
        ended.append(name)

    async with server.open() as kv, anyio.create_task_group() as group:
        gate = server.runner.hold(CallKind.GET)
        for name, priority in (("running", 0), ("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)):
            load = await parked(server, kv.open_request(name, TOKENS), priority=priority)
            group.start_soon(waited, name, load)
            await settle()
        gate.release()
    assert ended == ["running", "b", "d", "a", "c", "e"]
