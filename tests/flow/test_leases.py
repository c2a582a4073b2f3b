"""What a lease that has passed makes of a load: it asks again before it reads, and what came too late did not come (D4)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from akv import Connector, Load, LoadFailed, LoadState, SavesCompleted
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio

LEASE_S = 1.0


def operations(server: FakeServer, since: int = 0) -> list[str]:
    return [call.operation for call in server.pool.calls[since:]]


@asynccontextmanager
async def queued_behind(
    server: FakeServer, tokens: tuple[int, ...] = TOKENS, **settings: float
) -> AsyncIterator[tuple[Connector, Load, PageTable]]:
    """A load that waits in the queue behind one whose get hangs, until that one's deadline at two seconds."""
    async with server.open(loaders=1, lease_s=LEASE_S, load_deadline_s=2.0, **settings) as kv:
        gate = server.runner.hold(CallKind.GET)
        _, hung, _ = await server.load(kv, "hung", tokens)
        await gate.reached()
        _, load, table = await server.load(kv, "queued", tokens)
        yield kv, load, table
        assert hung.state is LoadState.FAILED
        gate.release()


async def test_D4_a_load_that_waited_behind_a_hung_one_for_longer_than_the_lease_asks_again_and_loads() -> None:
    server = FakeServer.warm(LONG)
    async with queued_behind(server, LONG, probe_chunk=4) as (_, load, table):
        asked = len(server.pool.calls)
        await load.wait()
        # Each key once, in calls of a lookup's size, then the gets.
        assert operations(server, asked) == ["probe"] * 6 + ["get"] * 4
        probed = [key for call in server.pool.calls[asked:] if call.operation == "probe" for key in call.keys]
        assert sorted(probed) == sorted(key for keys in server.keys_of(LONG) for key in keys)
        assert server.wrong_pages(LONG, table, 0, 9) == []
    assert server.left_behind() == []


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("block", [0, 2, 3])
async def test_D4_what_was_evicted_while_a_load_waited_fails_it_before_anything_is_read(block: int, group: int) -> None:
    server = FakeServer.warm(TOKENS)
    key = server.keys_of(TOKENS)[group][block]
    async with queued_behind(server) as (kv, load, _):
        server.store.remove(key)
        asked = len(server.pool.calls)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert (failed.value.key, failed.value.reason) == (key, "missing")
        assert operations(server, asked) == ["probe"] * (group + 1)
        # No get of it failed: once somebody stored it again it is offered at once (L8).
        server.put_in_store(TOKENS, [block])
        assert (await kv.open_request("next", TOKENS).lookup()).tokens == 16


async def test_D4_a_pool_that_cannot_be_asked_again_fails_the_load_and_no_key() -> None:
    server = FakeServer.warm(TOKENS)
    async with queued_behind(server) as (kv, load, _):
        server.pool.answer("probe", KeyState.UNAVAILABLE)
        with pytest.raises(LoadFailed, match="unavailable"):
            await load.wait()
        assert (await kv.open_request("next", TOKENS).lookup()).tokens == 16


async def test_D4_a_load_that_waited_no_longer_than_the_lease_asks_nobody_again() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open(loaders=1, lease_s=LEASE_S) as kv:
        await anyio.sleep(10 * LEASE_S)
        gate = server.runner.hold(CallKind.GET)
        _, first, _ = await server.load(kv, "first", TOKENS)
        _, second, _ = await server.load(kv, "second", TOKENS)
        asked = len(server.pool.calls)
        await anyio.sleep(LEASE_S - 0.01)
        gate.release()
        await first.wait()
        await second.wait()
        assert operations(server, asked) == ["get"] * 4


async def test_D4_D3_asking_again_is_part_of_what_the_deadline_bounds() -> None:
    server = FakeServer.warm(TOKENS)
    async with queued_behind(server) as (_, load, _):
        gate = server.runner.hold(CallKind.PROBE)
        began = anyio.current_time()
        with pytest.raises(LoadFailed, match="deadline"):
            await load.wait()
        assert anyio.current_time() - began == pytest.approx(4.0, abs=0.01)
        gate.release()
    assert server.left_behind() == []


async def test_D4_D6_a_cancel_while_it_asks_again_ends_the_load_at_once() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open(loaders=1, lease_s=LEASE_S, load_deadline_s=2.0) as kv:
        get = server.runner.hold(CallKind.GET)
        await server.load(kv, "hung", TOKENS)
        await get.reached()
        request, load, _ = await server.load(kv, "queued", TOKENS)
        probe = server.runner.hold(CallKind.PROBE)
        await probe.reached()
        began = anyio.current_time()
        await request.cancel()
        assert (load.state, anyio.current_time()) == (LoadState.CANCELLED, began)
        get.release()
        probe.release()
        await settle()
    assert server.left_behind() == []


@pytest.mark.parametrize("host_pages", [False, True])
@pytest.mark.parametrize(("get_s", "arrives"), [(LEASE_S, True), (LEASE_S + 0.01, False)])
async def test_D4_a_get_that_took_longer_than_the_lease_has_failed_though_bytes_came(
    host_pages: bool, get_s: float, arrives: bool
) -> None:
    server = FakeServer.warm(TOKENS, host_pages=host_pages, latency=Latency(get_s=get_s))
    async with server.open(lease_s=LEASE_S) as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        if arrives:
            await load.wait()
            assert server.wrong_pages(TOKENS, table, 0, 4) == []
            return
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert (failed.value.key, failed.value.reason) == (server.keys_of(TOKENS)[0][0], "lease_expired")
        assert server.device.copies == [], "nothing of it reaches a page through slots"
        # It was slow; its keys are as good as before (L8).
        assert (await request.lookup()).tokens == 16


async def test_D4_of_a_late_get_the_keys_that_failed_by_themselves_are_bad() -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(get_s=LEASE_S + 0.01))
    server.pool.answer("get", KeyState.HOLDER_LOST, key=server.keys_of(TOKENS)[0][2])
    async with server.open(lease_s=LEASE_S) as kv:
        request, load, _ = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed, match="lease_expired"):
            await load.wait()
        assert (await request.lookup()).tokens == 8


async def test_D4_each_get_has_a_lease_of_its_own_and_waiting_for_a_place_is_no_part_of_it() -> None:
    server = FakeServer.warm(LONG, slots=24, latency=Latency(get_s=0.6 * LEASE_S))
    # Three loaders, and two calls at a time: with each batch somebody waits for as long as a call takes.
    async with server.open(lease_s=LEASE_S, loaders=3, load_deadline_s=60.0) as kv:
        loads = [(await server.load(kv, f"r{number}", LONG))[1] for number in range(3)]
        for load in loads:
            assert (await load.wait()).state is LoadState.LOADED
    assert server.runner.most_running[CallKind.GET] == 2
    assert anyio.current_time() > 3 * LEASE_S


async def test_D4_no_lease_is_asked_of_a_put() -> None:
    server = FakeServer(latency=Latency(put_s=3 * LEASE_S))
    async with server.open(lease_s=LEASE_S) as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        request.finish()
        await kv.changed.wait()
        assert kv.completed() == [
            SavesCompleted(request_id="r", incarnation=request.incarnation, stored_blocks=4, refused_blocks=0)
        ]
