"""Reservations and loads: which pages are whose, in which order bytes move, and how a load ends."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from akv import (
    NO_PAGE,
    Connector,
    ConnectorBroken,
    EngineContractError,
    Load,
    LoadCompleted,
    LoadFailed,
    LoadState,
    Request,
    SavesCompleted,
    Scheduled,
)
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import UnorderedAccess, settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer, PageTable

pytestmark = pytest.mark.anyio

#: Four whole blocks and two tokens.
TOKENS = list(range(18))
#: Nine whole blocks and two tokens, so two batches and a bit with the test server's share of four slots.
LONG = list(range(100, 138))


def warm(tokens: Sequence[int] = TOKENS, **arguments: Any) -> FakeServer:
    """A server whose pool holds these tokens."""
    server = FakeServer(**arguments)
    server.put_in_store(tokens)
    return server


async def loading(
    server: FakeServer, kv: Connector, name: str = "r", tokens: Sequence[int] = TOKENS, local: int = 0
) -> tuple[Request, Load, PageTable]:
    """A request that takes up the whole of its offer."""
    request = kv.open_request(name, tokens)
    offer = await request.lookup(local)
    table = server.allocate(tokens)
    return request, request.reserve(offer, offer.tokens, table), table


def leaves(error: BaseException | None) -> list[type[BaseException]]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [] if error is None else [type(error)]


async def test_D2_a_load_fills_the_pages_of_every_group_and_leaves_the_local_match_alone() -> None:
    server = warm(LONG)
    async with server.open() as kv:
        request, load, table = await loading(server, kv, tokens=LONG, local=8)
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
    server = warm(LONG, slots=slots)
    async with server.open() as kv:
        _, load, table = await loading(server, kv, tokens=LONG)
        await load.wait()
        assert server.wrong_pages(LONG, table, 0, 9) == []
    assert max(len(call.keys) for call in server.pool.calls if call.operation == "get") <= slots // 2


async def test_D1_others_go_on_while_a_load_is_parked() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        _, parked, _ = await loading(server, kv, "parked")
        await gate.reached()
        other = kv.open_request("other", LONG)
        await server.compute(kv, other, LONG, server.allocate(LONG))
        await other.finished()
        assert server.stored_blocks(LONG) == list(range(9))
        _, second, _ = await loading(server, kv, "second")
        assert (await second.wait()).state is LoadState.LOADED
        assert parked.state is None
        gate.release()
        await parked.wait()


async def test_D1_two_loaders_work_at_the_same_time_and_a_third_load_waits() -> None:
    server = warm(latency=Latency(get_s=1.0))
    async with server.open() as kv:
        loads = [(await loading(server, kv, f"r{number}"))[1] for number in range(3)]
        await loads[0].wait()
        await loads[1].wait()
        assert anyio.current_time() < 2.1
        assert loads[2].state is None
        await loads[2].wait()
        assert anyio.current_time() > 3.9
    assert server.runner.most_running[CallKind.GET] == 2


async def test_D1_a_load_does_not_wait_for_passes_that_were_queued_after_its_reservation() -> None:
    server = warm()
    async with server.open() as kv:
        request, load, _ = await loading(server, kv)
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
    server = warm()
    async with server.open() as kv:
        await load_behind_a_kernel(server, kv)
        assert anyio.current_time() > 0.02


async def test_D5_without_the_fence_the_same_load_is_a_race_that_the_fake_device_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = warm()
    too_early = server.device.record()
    monkeypatch.setattr(server.device, "record", lambda: too_early)
    with pytest.raises(ConnectorBroken) as broken:
        async with server.open() as kv:
            await load_behind_a_kernel(server, kv)
    assert UnorderedAccess in leaves(broken.value.__cause__)


async def test_D5_M4_loaded_is_announced_only_after_the_copys_event_and_the_next_pass_may_read() -> None:
    server = warm()
    gate = server.device.script.hold("scatter")
    async with server.open() as kv:
        _, load, table = await loading(server, kv)
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
    server = warm(LONG)
    waited: list[object] = []
    monkeypatch.setattr(server.device, "execution_waits_for", waited.append)
    async with server.open() as kv:
        _, load, _ = await loading(server, kv, tokens=LONG)
        await load.wait()
    assert len(waited) == len(server.device.copies) == 6


# -- how loads end


async def test_D9_an_offer_honoured_with_nothing_completes_as_an_empty_load_at_once() -> None:
    server = warm()
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
    server = warm()
    gate = server.runner.hold_all(CallKind.GET)
    async with server.open() as kv:
        loads = [(await loading(server, kv, f"r{number}"))[1] for number in range(3)]
        await gate.reached()
        empty = kv.open_request("empty", TOKENS)
        offer = await empty.lookup()
        empty.reserve(offer, 0, [])
        gate.release()
        for load in loads:
            assert (await load.wait()).state is LoadState.LOADED


async def test_D9_what_was_loaded_is_not_listed_for_saving() -> None:
    server = warm(LONG)
    server.store.remove(server.keys_of(LONG)[1][8])
    async with server.open() as kv:
        request, load, table = await loading(server, kv, tokens=LONG)
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
    server = warm(LONG)
    key = server.keys_of(LONG)[1][5]
    server.pool.answer("get", fault, key=key)
    async with server.open() as kv:
        request, load, table = await loading(server, kv, tokens=LONG)
        server.put_in_store(TOKENS)
        _, other, other_table = await loading(server, kv, "other")
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
        # The pages can be lent again at once, and the slots with them.
        again = request.reserve(await request.lookup(), 36, table)
        assert (await again.wait()).tokens == 36
        assert server.wrong_pages(LONG, table, 0, 9) == []
    assert server.left_behind() == []


async def test_D3_what_landed_of_a_failed_load_is_discarded_and_no_pass_may_build_on_it() -> None:
    server = warm(LONG)
    server.pool.answer("get", KeyState.MISSING, key=server.keys_of(LONG)[0][8])
    async with server.open() as kv:
        request, load, table = await loading(server, kv, tokens=LONG, local=4)
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
    server = warm()
    server.pool.answer("get", KeyState.MISSING)
    async with server.open() as kv:
        request, load, table = await loading(server, kv)
        with pytest.raises(LoadFailed):
            await load.wait()
        await request.lookup(12)
        kv.drop_pass(kv.plan_pass([Scheduled(request=request, computed_before=12, tokens=6, pages=table)]))


@pytest.mark.parametrize("kind", [CallKind.GET, CallKind.COPY])
async def test_D3_a_load_has_a_deadline_from_its_dispatch(kind: CallKind) -> None:
    server = warm()
    async with server.open(load_deadline_s=0.02, loaders=1) as kv:
        gate = server.runner.hold(kind)
        _, load, table = await loading(server, kv)
        _, behind, _ = await loading(server, kv, "behind")
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
    server = warm()
    server.device.script.fail_copy("scatter", RuntimeError("ECC"), nth=2)
    async with server.open() as kv:
        request, load, _ = await loading(server, kv)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert failed.value.reason == "copy_failed"
        assert failed.value.key == server.keys_of(TOKENS)[1][0]
        await request.finished()
    assert server.left_behind() == []


async def test_D3_a_copy_that_is_refused_at_its_call_fails_the_load() -> None:
    server = warm()
    server.device.script.fail_call("scatter", RuntimeError("bad stream"))
    async with server.open() as kv:
        _, load, _ = await loading(server, kv)
        with pytest.raises(LoadFailed, match="copy_failed"):
            await load.wait()
    assert server.left_behind() == []


async def test_D2_waiting_may_be_cancelled_and_the_load_goes_on() -> None:
    server = warm(latency=Latency(get_s=1.0))
    async with server.open() as kv:
        _, load, _ = await loading(server, kv)
        with anyio.move_on_after(0.5):
            await load.wait()
        assert load.state is None
        assert (await load.wait()).state is LoadState.LOADED


# -- what the engine may not do


def bad_tables(table: PageTable) -> dict[str, Any]:
    short = [table[0], table[1][:3]]
    return {
        "block 3.*ends": short,
        "group 1, block 2.*no page": [table[0], [*table[1][:2], NO_PAGE, table[1][3]]],
        "group 0, block 1.*not in the cache": [[table[0][0], 64, *table[0][2:]], table[1]],
        "group 1, block 3.*earlier block": [table[0], [*table[1][:3], table[1][0]]],
        "integer": [["0", *table[0][1:]], table[1]],
        "1 page tables": [table[0]],
    }


@pytest.mark.parametrize("message", list(bad_tables([[0, 1, 2, 3], [0, 1, 2, 3]])))
async def test_L6_a_page_table_that_cannot_be_is_refused_and_nothing_is_taken(message: str) -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        table = server.allocate(TOKENS)
        with pytest.raises(EngineContractError, match=f"'r'.*{message}|{message}.*'r'"):
            request.reserve(offer, 16, bad_tables(table)[message])
        assert (await request.reserve(offer, 16, table).wait()).tokens == 16


@pytest.mark.parametrize("honoured", [-4, 3, 17, 20])
async def test_L6_an_honoured_count_that_is_no_part_of_the_offer_is_refused_and_nothing_is_taken(honoured: int) -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        table = server.allocate(TOKENS)
        with pytest.raises(EngineContractError, match="'r'"):
            request.reserve(offer, honoured, table)
        assert (await request.reserve(offer, 8, table).wait()).tokens == 8
        assert server.wrong_pages(TOKENS, table, 0, 2) == []
        assert len(server.wrong_pages(TOKENS, table, 2, 4)) == 4


async def test_L6_an_offer_of_another_request_or_of_an_earlier_use_of_the_id_is_refused() -> None:
    server = warm()
    async with server.open() as kv:
        first = kv.open_request("r", TOKENS)
        offer = await first.lookup()
        table = server.allocate(TOKENS)
        await first.cancel()
        second = kv.open_request("r", TOKENS)
        for request in (second, kv.open_request("other", TOKENS)):
            with pytest.raises(EngineContractError, match="offer"):
                request.reserve(offer, 16, table)
        with pytest.raises(EngineContractError, match="closed"):
            first.reserve(offer, 16, table)
        await second.reserve(await second.lookup(), 16, table).wait()


async def test_L6_a_second_reservation_and_a_page_in_use_are_refused_and_the_first_is_untouched() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, load, table = await loading(server, kv)
        with pytest.raises(EngineContractError, match="load under way"):
            request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
        other = kv.open_request("other", TOKENS)
        offer = await other.lookup()
        with pytest.raises(EngineContractError, match=r"'other', block 0, group 0.*another load fills"):
            other.reserve(offer, 16, table)
        gate.release()
        await load.wait()
        assert (await other.reserve(offer, 16, table).wait()).tokens == 16


async def test_D2_L6_pages_that_a_save_reads_cannot_be_lent() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.PUT)
    async with server.open() as kv:
        saving = kv.open_request("saving", LONG)
        table = server.allocate(LONG)
        await server.compute(kv, saving, LONG, table)
        await gate.reached()
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        with pytest.raises(EngineContractError, match="a save reads"):
            request.reserve(offer, 16, table)
        gate.release()
        await saving.finished()
        await request.reserve(offer, 16, table).wait()


async def test_L6_a_pass_over_a_request_that_loads_is_refused() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, load, table = await loading(server, kv)
        with pytest.raises(EngineContractError, match="load is under way"):
            kv.plan_pass([Scheduled(request=request, computed_before=16, tokens=2, pages=table)])
        gate.release()
        await load.wait()
        kv.drop_pass(kv.plan_pass([Scheduled(request=request, computed_before=16, tokens=2, pages=table)]))


# -- events


async def test_completed_is_level_triggered_and_wakes_a_batching_loop() -> None:
    server = warm(latency=Latency(get_s=1.0))
    async with server.open() as kv:
        request, _, _ = await loading(server, kv)
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
