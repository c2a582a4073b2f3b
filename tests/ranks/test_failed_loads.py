"""A load that fails, or hangs, on one rank alone: it has failed for all of them, and no page of it is used (D3)."""

import anyio
import pytest

from akv import DeviceError, LoadCancelled, LoadFailed, LoadState, LookupOutcome
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import settle
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


def warm(**arguments: object) -> RankedServer:
    server = RankedServer(**arguments)  # type: ignore[arg-type]
    server.put_in_store(TOKENS)
    return server


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("state", [KeyState.MISSING, KeyState.UNAVAILABLE])
async def test_D3_a_get_that_fails_on_one_rank_fails_the_load_and_the_request_is_computed(
    failing: int, state: KeyState
) -> None:
    server = warm()
    server.ranks[failing].pool.answer("get", state)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed):
            await load.wait()
        assert load.state is LoadState.FAILED
        server.free(table)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        await request.finished()
        assert kv.completed() == []
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_D3_the_pages_are_the_engines_when_the_last_rank_has_ended_too() -> None:
    server = warm()
    server.ranks[0].pool.answer("get", KeyState.MISSING)
    server.ranks[1].device.script.delay("scatter", 0.02)
    async with server.open() as kv:
        began = anyio.current_time()
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert anyio.current_time() - began >= 0.02
        assert "missing" in str(failed.value)
        server.free(table)
        await request.cancel()
    assert server.left_behind() == []


async def test_D3_after_the_attempts_of_a_life_nothing_is_offered_whichever_rank_failed() -> None:
    server = warm()
    async with server.open(negative_ttl_s=0.001) as kv:
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        # A get that fails on both ranks at a time is one load that failed.
        for failing in (server.ranks, server.ranks[1:]):
            for rank in failing:
                rank.pool.answer("get", KeyState.MISSING)
            with pytest.raises(LoadFailed):
                await request.reserve(await request.lookup(), 16, table).wait()
            await anyio.sleep(0.002)
        assert (await request.lookup()).outcome is LookupOutcome.LOADS_FAILED
        await request.cancel()
    assert server.left_behind() == []


async def test_L8_a_page_that_one_rank_did_not_get_counts_as_missing_until_all_have_stored_it() -> None:
    server = warm()
    server.ranks[1].pool.answer("get", KeyState.MISSING)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed):
            await load.wait()
        assert (await request.lookup()).tokens == 0
        await server.compute(kv, request, TOKENS, table)
        await request.finished()
        again = kv.open_request("again", TOKENS)
        assert (await again.lookup()).tokens == 16
        await again.cancel()
    assert server.left_behind() == []


async def test_D3_a_device_that_fails_on_one_rank_fails_the_load() -> None:
    server = warm()
    server.ranks[1].device.script.fail_copy("scatter", RuntimeError("planted"))
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed):
            await load.wait()
        server.free(table)
        await request.cancel()
    assert server.left_behind() == []


async def test_D5_D3_a_rank_whose_stream_cannot_be_marked_fails_the_load_before_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = warm()
    async with server.open() as kv:
        server.still = True
        request, load, table = await server.load(kv, "r", TOKENS)
        with_no_mark(server, 1, monkeypatch)
        server.still = False
        with pytest.raises(LoadFailed):
            await load.wait()
        assert load._hold.completed is not None
        assert load._hold.completed.reason == "device"
        server.free(table)
        await request.cancel()
    assert server.left_behind() == []


def with_no_mark(server: RankedServer, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of a rank refuses to mark its execution stream, once."""
    device = server.ranks[rank].device
    record = device.record

    def refused() -> object:
        monkeypatch.setattr(device, "record", record)
        raise DeviceError("planted")

    monkeypatch.setattr(device, "record", refused)


async def test_D3_M2_a_get_that_hangs_on_one_rank_ends_the_load_with_its_deadline() -> None:
    server = warm()
    gate = server.ranks[1].runner.hold(CallKind.GET)
    async with server.open(load_deadline_s=0.05) as kv:
        began = anyio.current_time()
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed, match="deadline"):
            await load.wait()
        assert anyio.current_time() - began == pytest.approx(0.05, abs=0.005)
        server.free(table)
        await request.cancel()
        gate.release()
        await settle()
    assert server.left_behind() == []


async def test_O7_while_every_get_of_one_rank_stands_still_lookups_offer_nothing() -> None:
    server = warm()
    server.put_in_store(LONG)
    gate = server.ranks[1].runner.hold_all(CallKind.GET)
    async with server.open() as kv:
        for name, tokens in (("r", TOKENS), ("s", LONG)):
            request, _, table = await server.load(kv, name, tokens)
            await anyio.sleep(0.005)
            await request.cancel()
            server.free(table)
        request = kv.open_request("r", TOKENS)
        await anyio.sleep(0.005)
        assert (await request.lookup()).outcome is LookupOutcome.UNAVAILABLE
        gate.release()
        await anyio.sleep(0.005)
        assert (await request.lookup()).tokens == 16
        await request.cancel()
    assert server.left_behind() == []


@pytest.mark.parametrize("loaded", [0, 1])
async def test_D6_a_cancel_when_one_rank_has_loaded_and_the_other_hangs_gives_the_pages_back(loaded: int) -> None:
    server = warm()
    gate = server.ranks[1 - loaded].runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        await gate.reached()
        await anyio.sleep(0.01)
        assert load.state is None
        began = anyio.current_time()
        await request.cancel()
        assert anyio.current_time() - began < 0.005
        with pytest.raises(LoadCancelled):
            await load.wait()
        server.free(table)
        gate.release()
        await settle()
    assert server.left_behind() == []
