"""Over RDMA a peer may touch slots after a transfer that failed: they stay out of use, and are counted (M3)."""

import logging

import anyio
import pytest

from akv import BreakerState, Connector, LoadFailed, LookupOutcome
from akv.plan.put_attempts import MOST_ATTEMPTS
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv.values.pressure import StagingPressure
from akv_testing.events import events_in
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS, part
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Answers behind which a transfer may go on. A master that does not answer is none: nobody was told any address then, and a
#: pool that is away for a while would cost all slots.
UNSETTLED = {KeyState.HOLDER_LOST, KeyState.REFUSED}

RDMA = pytest.mark.parametrize("rdma", [True, False], ids=["rdma", "tcp"])


async def load_fails(server: FakeServer, kv: Connector, name: str, tokens: tuple[int, ...] = TOKENS) -> str:
    """Why a load that takes the whole offer failed."""
    request = kv.open_request(name, tokens)
    offer = await request.lookup()
    assert offer.outcome is LookupOutcome.FULL
    with pytest.raises(LoadFailed) as failed:
        await request.reserve(offer, offer.tokens, server.allocate(tokens)).wait()
    await request.cancel()
    await anyio.sleep(0.01)
    return failed.value.reason


def counts(pressure: StagingPressure) -> tuple[int, int, int]:
    return pressure.free, pressure.quarantined, pressure.withheld


@RDMA
@pytest.mark.parametrize("state", KeyState)
async def test_M3_of_a_get_the_slots_behind_which_a_transfer_may_go_on_stay_out_of_use(
    caplog: pytest.LogCaptureFixture, rdma: bool, state: KeyState
) -> None:
    server = FakeServer.warm(TOKENS, LONG)
    server.pool.lets_go_at_return = not rdma
    bad = server.keys_of(TOKENS)[0][2]
    if state is not KeyState.OK:
        server.pool.answer("get", state, key=bad)
    withheld = 1 if rdma and state in UNSETTLED else 0
    async with server.open(negative_ttl_s=0.001) as kv:
        slots = kv.pressure().loading.slots
        if state is not KeyState.OK:
            await load_fails(server, kv, "r")
        assert counts(kv.pressure().loading) == (slots - withheld, withheld, withheld)
        assert server.pool.unsettled_bytes == withheld * server.layout.groups[0].bytes_per_page
        # The others serve on: the fake refuses a call that names the withheld one.
        for number in range(3):
            request = kv.open_request(f"next{number}", LONG)
            offer = await request.lookup()
            await request.reserve(offer, 36, server.allocate(LONG)).wait()
            await request.cancel()
        assert kv.pressure().loading.withheld == withheld
    assert server.left_behind() == []
    assert server.pool.unsettled_bytes == 0
    told = [(event["slots"], event["state"]) for event in events_in(caplog.records, "akv.slots.withheld")]
    assert told == ([(1, state.value)] if withheld else [])


@RDMA
async def test_M3_of_a_put_too_and_the_event_tells_the_first_of_a_buffer(caplog: pytest.LogCaptureFixture, rdma: bool) -> None:
    server = FakeServer()
    server.pool.lets_go_at_return = not rdma
    for key in server.keys_of(TOKENS)[1][:2]:
        server.pool.answer("put", KeyState.HOLDER_LOST, key=key, times=MOST_ATTEMPTS)
    async with server.open() as kv:
        for name, tokens in (("r", TOKENS), ("s", LONG)):
            request = kv.open_request(name, tokens)
            await server.compute(kv, request, tokens, server.allocate(tokens))
            await anyio.sleep(1)
        saving = kv.pressure().saving
        assert counts(saving) == ((saving.slots - 2, 2, 2) if rdma else (saving.slots, 0, 0))
        assert server.stored_blocks(TOKENS) == [2, 3]
        assert server.stored_blocks(LONG) == list(range(9))
        server.pool.answer("put", KeyState.REFUSED, key=server.keys_of((7, *LONG))[0][0])
        request = kv.open_request("t", (7, *LONG))
        await server.compute(kv, request, (7, *LONG), server.allocate((7, *LONG)))
        await anyio.sleep(1)
        assert kv.pressure().saving.withheld == (3 if rdma else 0)
    assert server.wrong_values() == []
    assert server.left_behind() == []
    assert len(events_in(caplog.records, "akv.slots.withheld")) == (1 if rdma else 0)


@RDMA
async def test_M3_of_a_call_that_nobody_waits_for_any_more_too(rdma: bool) -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.lets_go_at_return = not rdma
    server.pool.answer("get", KeyState.HOLDER_LOST, key=server.keys_of(TOKENS)[0][0])
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.GET)
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        load = request.reserve(offer, 16, server.allocate(TOKENS))
        await anyio.sleep(0.01)
        await request.cancel()
        await anyio.sleep(0.01)
        held = kv.pressure().loading
        assert (held.quarantined, held.withheld) == (held.slots - held.free, 0)
        gate.release()
        await anyio.sleep(0.01)
        withheld = 1 if rdma else 0
        assert counts(kv.pressure().loading) == (held.slots - withheld, withheld, withheld)
        assert load.state is not None
    assert server.left_behind() == []


async def test_M3_window_pages_stay_in_the_ring_and_count_in_the_quarantine() -> None:
    server = WindowServer(windows=((6, 0),), snapshot_slots=3)
    server.pool.lets_go_at_return = False
    prompt = tuple(range(13))
    for key in server.keys_of(prompt)[1]:
        server.pool.answer("put", KeyState.HOLDER_LOST, key=key, times=None)
    page = server.layout.groups[1].bytes_per_page
    async with server.open(quarantine_max_bytes=2 * page - 1) as kv:
        request, _, table = await server.resume(kv, "r", prompt)
        await server.prefill(kv, request, prompt, table, chunk=64)
        await anyio.sleep(1)
        ring = kv.pressure().ring
        assert ring is not None
        assert counts(ring) == (1, 2, 2)
        assert kv._halves.worker.quarantine_full()
        # The next end needs two slots, and one is left.
        other, _, table = await server.resume(kv, "s", (7, *prompt))
        await server.prefill(kv, other, (7, *prompt), table, chunk=64)
        assert kv.pressure().breaker is BreakerState.OPEN
    assert server.left_behind() == []


async def test_M3_a_copy_into_the_ring_that_hangs_counts_in_the_quarantine() -> None:
    server = WindowServer(windows=((6, 0),))
    prompt = tuple(range(13))
    page = server.layout.groups[1].bytes_per_page
    server.device.script.delay("snapshot", 5.0)
    gate = server.runner.hold(CallKind.SNAPSHOT)
    async with server.open(quarantine_max_bytes=2 * page - 1) as kv:
        request, _, table = await server.resume(kv, "r", prompt)
        server.prepare(table, 0, 13)
        worker = kv._halves.worker
        plan = kv.plan_pass([part(request, 0, 13, table)])
        server.forward(prompt, table, 0, 13)
        async with anyio.create_task_group() as group:
            group.start_soon(kv.after_forward, plan)
            await gate.reached()
            # It returns when the copies are queued.
            group.start_soon(request.cancel)
            await anyio.sleep(0.01)
            gate.release()
        await anyio.sleep(0.01)
        ring = kv.pressure().ring
        assert ring is not None
        assert (ring.quarantined, ring.withheld) == (2, 0)
        assert worker.quarantine_full()
        await anyio.sleep(6)
        assert not worker.quarantine_full()
    assert server.left_behind() == []


async def test_M3_past_the_bound_the_pool_is_not_asked_any_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "akv")
    server = FakeServer.warm(TOKENS, slots=16)
    server.pool.lets_go_at_return = False
    server.pool.answer("get", KeyState.HOLDER_LOST, times=None)
    slot = server.layout.largest_page_bytes
    async with server.open(quarantine_max_bytes=7 * slot, negative_ttl_s=0.001) as kv:
        assert await load_fails(server, kv, "a") == "holder_lost"
        assert (kv.pressure().loading.withheld, kv.pressure().breaker) == (4, BreakerState.CLOSED)
        assert await load_fails(server, kv, "b") == "holder_lost"
        assert kv.pressure().loading.withheld == 8
        assert (await kv.open_request("c", TOKENS).lookup()).outcome is LookupOutcome.UNAVAILABLE
        await anyio.sleep(10)
        assert kv.pressure().breaker is BreakerState.OPEN, "they do not come back"
    assert [event["reason"] for event in events_in(caplog.records, "akv.breaker.open")] == ["quarantine"]
    assert server.left_behind() == []


async def test_M3_a_direction_without_room_for_a_batch_asks_nobody_and_nothing_waits_for_ever() -> None:
    server = FakeServer(slots=4)
    server.pool.lets_go_at_return = False
    server.pool.answer("put", KeyState.HOLDER_LOST, times=None)
    async with server.open(loaders=1) as kv:
        # Two slots a batch: the first withholds two of four, so that the second one is the last that has room.
        request = kv.open_request("r", LONG)
        await server.compute(kv, request, LONG, server.allocate(LONG))
        await request.finished()
        assert kv.pressure().saving.withheld == 4
        assert (await kv.open_request("s", LONG).lookup()).outcome is LookupOutcome.UNAVAILABLE
        assert kv.pressure().breaker is BreakerState.OPEN
    assert server.store.keys() == []
    assert server.left_behind() == []


async def test_M3_a_load_without_room_for_a_batch_fails_at_once() -> None:
    server = FakeServer.warm(LONG, slots=4)
    server.pool.lets_go_at_return = False
    async with server.open(loaders=1, quarantine_max_bytes=1 << 30) as kv:
        slots = kv._halves.local_worker.memory.stagings[0].slots
        with slots.request(3, lambda: None) as taken:
            taken.withhold(server.layout.largest_page_bytes * slot for slot in taken.slots)
        kv._halves.breaker.quarantine_full = lambda: False
        began = anyio.current_time()
        assert await load_fails(server, kv, "r", LONG) == "no_slots"
        assert anyio.current_time() - began < 0.1
    assert server.left_behind() == []


async def test_M3_at_the_end_buffers_are_unregistered_and_what_the_store_keeps_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.lets_go_at_return = False
    server.pool.answer("get", KeyState.HOLDER_LOST, key=server.keys_of(TOKENS)[0][0])
    async with server.open() as kv:
        await load_fails(server, kv, "r")
        buffers = [staging.buffer for staging in kv._halves.local_worker.memory.stagings]
        server.pool.refuses_unregister = True
    assert server.pool.registered == buffers, "each was tried, and none is lost"
    assert [event["bytes"] for event in events_in(caplog.records, "akv.memory.kept")] == [buffer.nbytes for buffer in buffers]
