"""Reservations and loads: which pages are whose, in which order bytes move, and how a load ends."""

import anyio
import pytest

from akv import (
    Connector,
    ConnectorBroken,
    EngineContractError,
    LoadCompleted,
    LoadFailed,
    LoadState,
    SavesCompleted,
    Scheduled,
)
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import UnorderedAccess, settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


async def test_D2_a_load_fills_the_pages_of_every_group_and_leaves_the_local_match_alone() -> None:
    server = FakeServer.warm(LONG)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", LONG, 8)
        assert [load.state] == [None]
        done = await load.wait()
        assert done == LoadCompleted(
            request_id="r", incarnation=request.incarnation, state=LoadState.LOADED, tokens=28, reason=""
        )
        assert load.state is LoadState.LOADED
        assert server.wrong_pages(LONG, table, 2, 9) == []
        assert len(server.wrong_pages(LONG, table, 0, 2)) == 4
        assert await load.wait() == done
        assert kv.completed() == []
    assert server.left_behind() == []


@pytest.mark.parametrize("slots", [2, 4, 6, 40])
async def test_D2_a_load_is_cut_into_batches_that_fit_the_slots(slots: int) -> None:
    server = FakeServer.warm(LONG, slots=slots)
    async with server.open() as kv:
        _, load, table = await server.load(kv, "r", LONG)
        await load.wait()
        assert server.wrong_pages(LONG, table, 0, 9) == []
    assert max(len(call.keys) for call in server.pool.calls if call.operation == "get") <= slots // 2


async def test_D1_others_go_on_while_a_load_is_parked() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        _, parked, _ = await server.load(kv, "parked", TOKENS)
        await gate.reached()
        other = kv.open_request("other", LONG)
        await server.compute(kv, other, LONG, server.allocate(LONG))
        await other.finished()
        assert server.stored_blocks(LONG) == list(range(9))
        _, second, _ = await server.load(kv, "second", TOKENS)
        assert (await second.wait()).state is LoadState.LOADED
        assert parked.state is None
        gate.release()
        await parked.wait()


async def test_D1_two_loaders_work_at_the_same_time_and_a_third_load_waits() -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(get_s=1.0))
    async with server.open() as kv:
        loads = [(await server.load(kv, f"r{number}", TOKENS))[1] for number in range(3)]
        await loads[0].wait()
        await loads[1].wait()
        assert anyio.current_time() < 2.1
        assert loads[2].state is None
        await loads[2].wait()
        assert anyio.current_time() > 3.9
    assert server.runner.most_running[CallKind.GET] == 2


async def test_D1_a_load_does_not_wait_for_passes_that_were_queued_after_its_reservation() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        request, load, _ = await server.load(kv, "r", TOKENS)
        server.device.kernel(writes=[(0, 60, 1)], duration_s=1.0)
        await load.wait()
        assert anyio.current_time() < 0.1
        await request.finished()


# -- order of accesses


async def load_behind_a_kernel(server: FakeServer, kv: Connector) -> None:
    """The pages' previous owner still computes when they are handed over."""
    request = kv.open_request("r", TOKENS)
    offer = await request.lookup()
    table = server.allocate(TOKENS)
    server.device.kernel(writes=[(g, page, 1) for g in range(2) for page in table[g]], duration_s=0.02)
    load = request.reserve(offer, offer.tokens, table)
    await load.wait()
    assert server.wrong_pages(TOKENS, table, 0, 4) == []


async def test_D5_no_copy_into_a_page_runs_before_its_previous_owners_kernels() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        await load_behind_a_kernel(server, kv)
        assert anyio.current_time() > 0.02


async def test_D5_without_the_fence_the_same_load_is_a_race_that_the_fake_device_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FakeServer.warm(TOKENS)
    too_early = server.device.record()
    monkeypatch.setattr(server.device, "record", lambda: too_early)
    with pytest.raises(ConnectorBroken) as broken:
        async with server.open() as kv:
            await load_behind_a_kernel(server, kv)
    cause = broken.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert cause.subgroup(UnorderedAccess)


async def test_D5_M4_loaded_is_announced_only_after_the_copys_event_and_the_next_pass_may_read() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.device.script.hold("scatter")
    async with server.open() as kv:
        _, load, table = await server.load(kv, "r", TOKENS)
        await settle()
        await anyio.sleep(0.02)
        assert gate.holds
        assert load.state is None
        assert not kv.changed.is_set()
        gate.release()
        await load.wait()
        seen = server.device.kernel(reads=[(g, page) for g in range(2) for page in table[g][:4]]).seen
        hashes = server.hashes(TOKENS)
        assert seen == {(g, table[g][b]): server.content(hashes[b], g) for g in range(2) for b in range(4)}


async def test_M4_the_execution_stream_is_ordered_behind_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer.warm(LONG)
    waited: list[object] = []
    monkeypatch.setattr(server.device, "execution_waits_for", waited.append)
    async with server.open() as kv:
        _, load, _ = await server.load(kv, "r", LONG)
        await load.wait()
    assert len(waited) == len(server.device.copies) == 6


# -- how loads end


async def test_D9_an_offer_honoured_with_nothing_completes_as_an_empty_load_at_once() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        load = request.reserve(offer, 0, [])
        assert load.state is LoadState.LOADED
        assert kv.changed.is_set()
        assert kv.completed() == [
            LoadCompleted(request_id="r", incarnation=request.incarnation, state=LoadState.LOADED, tokens=0)
        ]
        assert (await load.wait()).tokens == 0
    assert [call.operation for call in server.pool.calls] == ["probe"]


async def test_D9_a_load_of_nothing_takes_no_queued_loads_turn() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold_all(CallKind.GET)
    async with server.open() as kv:
        loads = [(await server.load(kv, f"r{number}", TOKENS))[1] for number in range(3)]
        await gate.reached()
        empty = kv.open_request("empty", TOKENS)
        offer = await empty.lookup()
        empty.reserve(offer, 0, [])
        gate.release()
        for load in loads:
            assert (await load.wait()).state is LoadState.LOADED


async def test_D9_what_was_loaded_is_not_listed_for_saving() -> None:
    server = FakeServer.warm(LONG)
    server.store.remove(server.keys_of(LONG)[1][8])
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", LONG)
        await load.wait()
        server.write(LONG, table, 8, 9)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=32, tokens=6, pages=table)])
        assert [group.blocks for order in plan.saves for group in order.groups] == [(8,), (8,)]
        await kv.after_forward(plan)
    assert server.stored_blocks(LONG) == list(range(9))
    assert server.wrong_values() == []


FAULTS = [state for state in KeyState if state not in {KeyState.OK, KeyState.NO_SPACE}]


@pytest.mark.parametrize("fault", FAULTS)
async def test_D3_D2_a_get_that_fails_fails_its_request_alone_and_gives_everything_back(fault: KeyState) -> None:
    server = FakeServer.warm(LONG)
    key = server.keys_of(LONG)[1][5]
    server.pool.answer("get", fault, key=key)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", LONG)
        server.put_in_store(TOKENS)
        _, other, other_table = await server.load(kv, "other", TOKENS)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert (failed.value.request_id, failed.value.key, failed.value.reason) == ("r", key, fault.value)
        assert load.state is LoadState.FAILED
        assert (await other.wait()).state is LoadState.LOADED
        assert server.wrong_pages(TOKENS, other_table, 0, 4) == []
        # Nothing of the failed batch reached a page, and nothing behind it was asked for (X4).
        scattered = [(copy.group, page) for copy in server.device.copies for page in copy.pages]
        assert (1, table[1][5]) not in scattered
        assert (0, table[0][8]) not in scattered
        # The pages can be lent again at once, and the slots with them; the key is asked for again in time (L8).
        await anyio.sleep(15.0)
        again = request.reserve(await request.lookup(), 36, table)
        assert (await again.wait()).tokens == 36
        assert server.wrong_pages(LONG, table, 0, 9) == []
    assert server.left_behind() == []


async def test_D3_what_landed_of_a_failed_load_is_discarded_and_no_pass_may_build_on_it() -> None:
    server = FakeServer.warm(LONG)
    server.pool.answer("get", KeyState.MISSING, key=server.keys_of(LONG)[0][8])
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", LONG, 4)
        with pytest.raises(LoadFailed):
            await load.wait()

        def scheduled(before: int) -> list[Scheduled]:
            return [Scheduled(request=request, computed_before=before, tokens=38 - before, pages=table)]

        with pytest.raises(EngineContractError, match="'r'.*computed_before = 32.*4 tokens"):
            kv.plan_pass(scheduled(32))
        server.write(LONG, table, 0, 1)
        plan = kv.plan_pass(scheduled(4))
        server.write(LONG, table, 1)
        await kv.after_forward(plan)
        # Nothing was marked as stored by the load that failed.
        assert [order.groups[0].blocks for order in plan.saves] == [tuple(range(9))]
        # And once computed, later passes may build on it.
        kv.drop_pass(kv.plan_pass([Scheduled(request=request, computed_before=38, tokens=1, pages=table)]))


async def test_D3_a_longer_local_match_after_a_failed_load_may_be_built_on() -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.answer("get", KeyState.MISSING)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed):
            await load.wait()
        await request.lookup(12)
        kv.drop_pass(kv.plan_pass([Scheduled(request=request, computed_before=12, tokens=6, pages=table)]))


@pytest.mark.parametrize("kind", [CallKind.GET, CallKind.COPY])
async def test_D3_a_load_has_a_deadline_from_its_dispatch(kind: CallKind) -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open(load_deadline_s=0.02, loaders=1) as kv:
        gate = server.runner.hold(kind)
        _, load, table = await server.load(kv, "r", TOKENS)
        _, behind, _ = await server.load(kv, "behind", TOKENS)
        with pytest.raises(LoadFailed) as failed:
            with anyio.fail_after(10):
                if kind is CallKind.COPY:
                    # The verdict is passed at the deadline; the pages come back when the copy has ended.
                    await anyio.sleep(0.03)
                    assert load.state is None
                    gate.release()
                await load.wait()
        assert failed.value.reason == "deadline"
        assert failed.value.key == server.keys_of(TOKENS)[0][0]
        assert anyio.current_time() == pytest.approx(0.02 if kind is CallKind.GET else 0.03, abs=0.003)
        # The load that waited behind it is dispatched then, with a deadline of its own.
        gate.release()
        await behind.wait()
        assert len(server.wrong_pages(TOKENS, table, 0, 4)) >= 4


async def test_D3_a_copy_that_fails_fails_the_load() -> None:
    server = FakeServer.warm(TOKENS)
    server.device.script.fail_copy("scatter", RuntimeError("ECC"), nth=2)
    async with server.open() as kv:
        request, load, _ = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert failed.value.reason == "copy_failed"
        assert failed.value.key == server.keys_of(TOKENS)[1][0]
        await request.finished()
    assert server.left_behind() == []


async def test_D3_a_copy_that_is_refused_at_its_call_fails_the_load() -> None:
    server = FakeServer.warm(TOKENS)
    server.device.script.fail_call("scatter", RuntimeError("bad stream"))
    async with server.open() as kv:
        _, load, _ = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed, match="copy_failed"):
            await load.wait()
    assert server.left_behind() == []


async def test_D2_waiting_may_be_cancelled_and_the_load_goes_on() -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(get_s=1.0))
    async with server.open() as kv:
        _, load, _ = await server.load(kv, "r", TOKENS)
        with anyio.move_on_after(0.5):
            await load.wait()
        assert load.state is None
        assert (await load.wait()).state is LoadState.LOADED


# -- events


async def test_completed_is_level_triggered_and_wakes_a_batching_loop() -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(get_s=1.0))
    async with server.open() as kv:
        request, _, _ = await server.load(kv, "r", TOKENS)
        assert kv.completed() == []
        with anyio.fail_after(3):
            await kv.changed.wait()
            await kv.changed.wait()
        assert kv.changed.is_set()
        assert [type(done) for done in kv.completed()] == [LoadCompleted]
        assert not kv.changed.is_set()
        request.finish()
        await kv.changed.wait()
        assert kv.completed() == [
            SavesCompleted(request_id="r", incarnation=request.incarnation, stored_blocks=0, refused_blocks=0)
        ]
        assert not kv.changed.is_set()
        with anyio.move_on_after(1) as scope:
            await kv.changed.wait()
        assert scope.cancelled_caught
