"""Caches in host memory whose pages the store reads and writes itself: no copy of ours, pages in quarantine (D2, D6, M3)."""

from functools import partial

import anyio
import pytest

from akv import (
    Connector,
    EngineCapabilities,
    EngineContractError,
    LoadCancelled,
    LoadCompleted,
    LoadFailed,
    LoadState,
    PagesReleased,
    Request,
    SavesCompleted,
)
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio

warm = partial(FakeServer.warm, TOKENS, LONG, host_pages=True)


def named(table: PageTable, blocks: range) -> tuple[tuple[int, ...], ...]:
    """The pages of these blocks in the first of two layer groups."""
    return tuple(table[0][block] for block in blocks), ()


async def goes_on(server: FakeServer, kv: Connector) -> None:
    """Another request can still load, compute and save, whatever is in quarantine."""
    request, load, table = await server.load(kv, "later", LONG)
    await load.wait()
    assert server.wrong_pages(LONG, table, 0, 9) == []
    tokens = list(range(500, 530))
    fresh = kv.open_request("fresh", tokens)
    await server.compute(kv, fresh, tokens, server.allocate(tokens))
    assert await fresh.finished() == ()
    assert await request.finished() == ()
    assert server.stored_blocks(tokens) == list(range(7))
    assert server.wrong_values() == []


async def test_pages_move_without_a_copy_of_ours_and_are_the_same_bytes() -> None:
    server = warm()
    async with server.open() as kv:
        assert len(server.pool.registered) == 4
        await goes_on(server, kv)
        assert server.device.copies == []
    assert server.left_behind() == []


@pytest.mark.parametrize(
    ("capabilities", "lets_go"),
    [(EngineCapabilities(), True), (EngineCapabilities(keeps_quarantined_pages=True), False)],
    ids=["an engine that keeps no quarantine", "a pool whose peers may write after an error"],
)
async def test_M3_without_both_halves_of_the_promise_everything_goes_through_slots(
    capabilities: EngineCapabilities, lets_go: bool
) -> None:
    server = warm(capabilities=capabilities)
    server.pool.lets_go_at_return = lets_go
    async with server.open() as kv:
        assert len(server.pool.registered) == 2
        await goes_on(server, kv)
        assert {copy.kind for copy in server.device.copies} == {"gather", "scatter"}


async def test_D5_the_store_writes_behind_the_fence() -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        table = server.allocate(TOKENS)
        server.device.kernel(writes=[(g, page, 1) for g in range(2) for page in table[g]], duration_s=0.02)
        await request.reserve(offer, offer.tokens, table).wait()
        assert anyio.current_time() >= 0.02
        assert server.wrong_pages(TOKENS, table, 0, 4) == []


async def test_D5_the_store_reads_behind_the_pass() -> None:
    server = FakeServer(host_pages=True)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS), duration_s=0.02)
        await request.finished()
        assert anyio.current_time() >= 0.02
    assert server.stored_blocks(TOKENS) == list(range(4))
    assert server.wrong_values() == []


# -- a load that is given up


async def a_load_in_the_store(server: FakeServer, kv: Connector, request_id: str = "r"):  # type: ignore[no-untyped-def]
    gate = server.runner.hold(CallKind.GET)
    request, load, table = await server.load(kv, request_id, TOKENS)
    await gate.reached()
    return gate, request, load, table


async def test_D6_D2_a_cancel_beside_a_hung_get_returns_at_once_and_names_its_pages() -> None:
    server = warm()
    async with server.open() as kv:
        gate, request, load, table = await a_load_in_the_store(server, kv)
        began = anyio.current_time()
        quarantined = await request.cancel()
        assert anyio.current_time() == began
        assert request.closed
        assert load.state is LoadState.CANCELLED
        assert quarantined == named(table, range(4)) == request.quarantined == await request.cancel()
        assert kv.pressure().quarantined_page_bytes == 4 * server.layout.groups[0].bytes_per_page
        with pytest.raises(LoadCancelled) as cancelled:
            await load.wait()
        # Named once: whoever adds up what is named must not count a page twice.
        assert cancelled.value.quarantined == ()
        assert kv.completed() == []
        gate.release()
        await kv.changed.wait()
        assert kv.completed() == [PagesReleased(request_id="r", incarnation=request.incarnation, pages=quarantined)]
        assert kv.pressure().quarantined_page_bytes == 0
    assert server.left_behind() == []


async def test_D2_a_late_get_writes_into_quarantined_pages_and_into_no_others() -> None:
    """The pages that were given back are reused while the get still hangs; the ones in quarantine are not."""
    server = warm()
    async with server.open() as kv:
        gate, request, _, table = await a_load_in_the_store(server, kv)
        quarantined = await request.cancel()
        kept = [list(pages) for pages in quarantined]
        server.free([[page for page in pages if page not in kept[g]] for g, pages in enumerate(table)])
        await goes_on(server, kv)
        gate.release()
        await settle()
        [released] = [done for done in kv.completed() if isinstance(done, PagesReleased)]
        server.free([list(pages) for pages in released.pages])
        assert server.wrong_values() == []


async def test_M3_while_pages_are_in_quarantine_everything_goes_through_slots() -> None:
    server = warm()
    async with server.open() as kv:
        gate, request, _, _ = await a_load_in_the_store(server, kv)
        await request.cancel()
        await goes_on(server, kv)
        assert {copy.kind for copy in server.device.copies} == {"gather", "scatter"}
        before = len(server.device.copies)
        gate.release()
        await settle()
        again, load, _ = await server.load(kv, "again", TOKENS)
        await load.wait()
        await again.finished()
        assert len(server.device.copies) == before


async def test_L6_a_page_in_quarantine_is_no_destination() -> None:
    server = warm()
    async with server.open() as kv:
        gate, request, _, table = await a_load_in_the_store(server, kv)
        await request.cancel()
        other = kv.open_request("other", TOKENS)
        offer = await other.lookup()
        with pytest.raises(EngineContractError, match=r"request 'other', block 0, group 0: .* still touches"):
            other.reserve(offer, offer.tokens, table)
        gate.release()
        await settle()
        await other.reserve(offer, offer.tokens, table).wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []


async def test_S1_blocks_that_an_engine_computes_into_quarantined_pages_are_not_saved() -> None:
    server = warm()
    tokens = list(range(700, 718))
    async with server.open() as kv:
        _, request, _, table = await a_load_in_the_store(server, kv)
        await request.cancel()
        # An engine that does so has broken its word; the get that still hangs would race with its kernel.
        wrong = kv.open_request("wrong", tokens)
        await server.compute(kv, wrong, tokens, table)
        await wrong.finished()
        assert server.stored_blocks(tokens) == []


async def test_D2_D3_a_deadline_fails_the_load_at_once_and_names_the_pages_of_the_call() -> None:
    server = warm(load_deadline_s=1.5)
    async with server.open() as kv:
        gate, request, load, table = await a_load_in_the_store(server, kv)
        with pytest.raises(LoadFailed, match="deadline") as failed:
            await load.wait()
        assert anyio.current_time() == pytest.approx(1.5, abs=0.01)
        assert failed.value.quarantined == named(table, range(4))
        assert await request.finished() == ()
        gate.release()
        await settle()
        assert [type(done) for done in kv.completed()] == [PagesReleased]


async def test_D2_a_polling_engine_hears_of_quarantine_before_it_hears_of_its_end() -> None:
    server = warm()
    async with server.open() as kv:
        gate, request, _, table = await a_load_in_the_store(server, kv)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await request.cancel()
        await settle()
        first = kv.completed()
        assert [done.quarantined for done in first if not isinstance(done, PagesReleased)] == [named(table, range(4)), ()]
        assert [type(done) for done in first] == [LoadCompleted, SavesCompleted]
        gate.release()
        await settle()
        assert [type(done) for done in kv.completed()] == [PagesReleased]


async def test_D2_pages_that_left_quarantine_before_they_were_named_are_never_named() -> None:
    server = warm()
    async with server.open() as kv:
        gate, request, _, _ = await a_load_in_the_store(server, kv)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await request.cancel()
        await settle()
        gate.release()
        await settle()
        done = kv.completed()
        assert [type(one) for one in done] == [LoadCompleted, SavesCompleted]
        assert [one.quarantined for one in done if not isinstance(one, PagesReleased)] == [(), ()]
        assert await request.cancel() == ()


async def test_D3_a_page_that_is_missing_fails_the_load_and_leaves_nothing_in_quarantine() -> None:
    server = warm()
    server.pool.answer("get", KeyState.MISSING)
    async with server.open() as kv:
        _, load, _ = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed, match="missing") as failed:
            await load.wait()
        assert failed.value.quarantined == ()
        await goes_on(server, kv)


async def test_D3_a_device_that_failed_before_the_fence_fails_the_load() -> None:
    server = warm()
    async with server.open() as kv:
        failing = server.device.open_stream("failing")
        server.device.script.fail_copy("scatter", RuntimeError("lost"))
        buffer = server.device.host_buffer(64)
        event = server.device.scatter(failing, 0, [50], buffer, [0], server.device.record())
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        kv._halves.scheduler.worker.fence = lambda: event
        with pytest.raises(LoadFailed, match="copy_failed"):
            await request.reserve(offer, offer.tokens, server.allocate(TOKENS)).wait()


# -- a save that is given up


async def a_save_in_the_store(server: FakeServer, kv: Connector):  # type: ignore[no-untyped-def]
    gate = server.runner.hold(CallKind.PUT)
    request = kv.open_request("r", LONG)
    table = server.allocate(LONG)
    await server.compute(kv, request, LONG, table)
    await gate.reached()
    return gate, request, table


async def test_D6_a_cancel_beside_a_hung_put_returns_at_once_and_names_its_pages() -> None:
    server = FakeServer(host_pages=True)
    async with server.open() as kv:
        gate, request, table = await a_save_in_the_store(server, kv)
        began = anyio.current_time()
        quarantined = await request.cancel()
        assert anyio.current_time() == began
        assert quarantined == named(table, range(8))
        gate.release()
        await settle()
        assert [done for done in kv.completed() if isinstance(done, PagesReleased)] == [
            PagesReleased(request_id="r", incarnation=request.incarnation, pages=quarantined)
        ]
        await goes_on_saving(server, kv)
    assert server.left_behind() == []


async def goes_on_saving(server: FakeServer, kv: Connector) -> None:
    request = kv.open_request("more", TOKENS)
    await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
    await request.finished()
    assert server.stored_blocks(TOKENS) == list(range(4))
    assert server.wrong_values() == []


@pytest.mark.parametrize("heeded", [True, False], ids=["pages kept", "pages reused at once"])
async def test_M3_a_put_reads_the_pages_to_its_end_so_reusing_them_early_stores_wrong_bytes(heeded: bool) -> None:
    """What quarantine is for: the engine that ignores it is the control, and stores another prompt's bytes under our key."""
    server = FakeServer(host_pages=True)
    async with server.open() as kv:
        gate, request, table = await a_save_in_the_store(server, kv)
        quarantined = await request.cancel()
        reusable = table if not heeded else [[p for p in pages if p not in quarantined[g]] for g, pages in enumerate(table)]
        event = server.device.kernel(writes=[(g, page, 7) for g, pages in enumerate(reusable) for page in pages])
        assert event.query()
        gate.release()
        await settle()
        assert (server.wrong_values() == []) is heeded


async def test_S7_finished_waits_for_a_put_on_pages_and_names_nothing() -> None:
    server = FakeServer(host_pages=True, latency=Latency(put_s=1.0))
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        assert await request.finished() == ()
        assert anyio.current_time() >= 2.0
    assert server.stored_blocks(TOKENS) == list(range(4))


async def test_D6_the_block_of_a_request_leaves_what_it_named_with_the_request() -> None:
    server = warm()
    kept: list[Request] = []
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.GET)
        with pytest.raises(ZeroDivisionError):
            async with kv.request("r", TOKENS) as request:
                kept.append(request)
                assert request.quarantined == ()
                offer = await request.lookup()
                table = server.allocate(TOKENS)
                request.reserve(offer, offer.tokens, table)
                await gate.reached()
                raise ZeroDivisionError
        assert kept[0].quarantined == named(table, range(4))
        gate.release()


async def test_O6_closing_beside_a_hung_put_keeps_what_it_touches_registered() -> None:
    server = FakeServer(host_pages=True)
    async with server.open(shutdown_deadline_s=0.5) as kv:
        gate, _, _ = await a_save_in_the_store(server, kv)
    assert len(server.pool.registered) == 4
    gate.release()


@pytest.mark.parametrize("cancelled", [True, False])
async def test_O6_M3_pages_that_a_hung_call_was_left_with_are_named_after_the_end_of_the_connector(cancelled: bool) -> None:
    """Nobody delivers their release any more, so the engine goes on without them."""
    server = warm()
    async with server.open(shutdown_deadline_s=0.5) as kv:
        assert kv.touched_pages == ()
        gate, request, _, table = await a_load_in_the_store(server, kv)
        assert kv.touched_pages == named(table, range(4))
        if cancelled:
            await request.cancel()
    assert kv.touched_pages == named(table, range(4))
    gate.release()


async def test_O6_a_connector_that_ended_in_order_left_no_page_behind() -> None:
    server = warm()
    async with server.open() as kv:
        await goes_on(server, kv)
    assert kv.touched_pages == ()


async def test_D2_a_load_that_is_loaded_names_nothing_and_the_end_of_the_request_does() -> None:
    """Whoever polls late, after a cancel beside a hung put, must not find the put's pages in the good end of a load."""
    server = warm()
    tokens = (*TOKENS, *range(700, 708))
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        request, load, _ = await server.load(kv, "r", tokens)
        await settle()
        assert load.state is LoadState.LOADED
        page_table = server.allocate(tokens)
        await server.compute(kv, request, tokens, page_table, before=16)
        await gate.reached()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await request.cancel()
        await settle()
        loaded, ended = kv.completed()
        assert isinstance(loaded, LoadCompleted)
        assert isinstance(ended, SavesCompleted)
        assert (loaded.quarantined, ended.quarantined) == ((), (tuple(page_table[0][4:6]), ()))
        gate.release()
