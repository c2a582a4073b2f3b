"""Pages in segments of this host, read from there: which, how they mix with the staged ones, and what is told (R1, R2, R4)."""

import logging

import anyio
import pytest

from akv import Connector, Load, LoadFailed, LoadState, Request
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import settle
from akv_testing.calls import Gate, Latency
from akv_testing.events import events_in
from akv_testing.segments import FakeHost
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS
from akv_testing.warm_segments import ROOM, all_mapped, calls_of, read_since, server_on

pytestmark = pytest.mark.anyio


async def test_R1_pages_in_a_segment_of_this_host_come_without_a_get_and_without_a_slot() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM), tokens=LONG)
    async with server.open() as kv:
        before = await all_mapped(server, kv)
        _, load, table = await server.load(kv, "r", LONG)
        await load.wait()
        assert server.wrong_pages(LONG, table, 0, 9) == []
        assert calls_of(server, "get") == 0
        assert read_since(kv, before) == (18, 9 * (16 + 24), {})
        assert (before.segments, before.segment_bytes) == (1, ROOM)
    assert server.left_behind() == []


async def test_R1_one_load_mixes_pages_of_two_segments_and_pages_that_no_host_shares() -> None:
    host = FakeHost()
    # Room for some pages each: the others lie in memory of nobody here.
    server = server_on(host, host.lend(40 + 5 * 24), host.lend(40 + 3 * 24), tokens=LONG)
    async with server.open() as kv:
        before = await all_mapped(server, kv)
        _, load, table = await server.load(kv, "r", LONG)
        await load.wait()
        assert server.wrong_pages(LONG, table, 0, 9) == []
        direct, _, staged = read_since(kv, before)
        assert direct >= 8
        assert staged == {"no_replica": 18 - direct}
        assert calls_of(server, "get")


@pytest.mark.parametrize("read_path", ["auto", "staged"])
async def test_R1_the_event_of_a_load_says_which_way_its_pages_came(read_path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "akv")
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    async with server.open(read_path=read_path) as kv:
        await all_mapped(server, kv)
        _, load, _ = await server.load(kv, "r", TOKENS)
        await load.wait()
    *_, event = events_in(caplog.records, "akv.load.complete")
    bytes_of_all = 4 * (16 + 24)
    direct = (8, bytes_of_all, {}, {}) if read_path == "auto" else (0, 0, {"setting": 8}, {"setting": bytes_of_all})
    assert (event["direct_pages"], event["direct_bytes"], event["staged"], event["staged_bytes"]) == direct
    assert bool(calls_of(server, "describe")) == (read_path == "auto"), "nobody asks for what nobody wants"


async def test_R1_with_integrity_every_page_is_staged_and_checked_there() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM), integrity="checksum")
    async with server.open() as kv:
        before = await all_mapped(server, kv)
        _, load, table = await server.load(kv, "r", TOKENS)
        await load.wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        assert read_since(kv, before) == (0, 0, {"integrity": 8})


@pytest.mark.parametrize("copy_s", [0.0, 0.001])
async def test_R2_pages_are_asked_for_twice_whether_their_copy_ends_within_the_call_or_later(copy_s: float) -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    server.device.copy_s = lambda nbytes: copy_s
    async with server.open() as kv:
        await all_mapped(server, kv)
        _, load, _ = await server.load(kv, "r", TOKENS)
        await load.wait()
    assert calls_of(server, "describe") == 2


async def test_R2_a_page_of_another_size_and_one_that_is_missing_fail_as_staged_ones_do() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    key = server.keys_of(TOKENS)[1][2]
    async with server.open() as kv:
        await all_mapped(server, kv)
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        server.store.write(key, b"short")
        load = request.reserve(offer, offer.tokens, server.allocate(TOKENS))
        with pytest.raises(Exception, match="wrong_size"):
            await load.wait()


async def test_O7_a_pool_that_names_no_place_is_asked_for_the_pages_themselves() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    async with server.open() as kv:
        before = await all_mapped(server, kv)
        server.pool.answer("describe", KeyState.UNAVAILABLE, times=None)
        _, load, table = await server.load(kv, "r", TOKENS)
        assert (await load.wait()).state is LoadState.LOADED
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        assert read_since(kv, before) == (0, 0, {"no_replica": 8})


async def cancelled_while(server: FakeServer, kv: Connector, gate: Gate) -> tuple[Request, Load, list[list[int]]]:
    """Cancel a load that hangs in the gate."""
    request, load, table = await server.load(kv, "r", TOKENS)
    await gate.reached()
    with anyio.move_on_after(0.1):
        await request.cancel()
    return request, load, table


@pytest.mark.parametrize("copy_s", [0.0, 0.001])
async def test_D6_a_query_that_hangs_before_the_copy_holds_no_page_and_never_writes_one(copy_s: float) -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    server.device.copy_s = lambda nbytes: copy_s
    async with server.open() as kv:
        await all_mapped(server, kv)
        gate = server.runner.hold(CallKind.READ)
        _, load, table = await cancelled_while(server, kv, gate)
        assert load.state is LoadState.CANCELLED
        pages = [(group, page) for group, pages in enumerate(table) for page in pages]
        for group, page in pages:
            server.device.fill_page(group, page, 7)
        before = [server.device.read_page(group, page) for group, page in pages]
        gate.release()
        await settle()
        assert [server.device.read_page(group, page) for group, page in pages] == before
        server.free(table)
    assert server.left_behind() == []


@pytest.mark.parametrize(("copy_s", "kind"), [(0.0, CallKind.READ), (0.001, CallKind.DESCRIBE)])
async def test_D6_a_second_query_that_hangs_holds_no_page(copy_s: float, kind: CallKind) -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    server.device.copy_s = lambda nbytes: copy_s
    async with server.open() as kv:
        await all_mapped(server, kv)
        # A copy that has ended when the call would return is asked about in the same call.
        gate = server.runner.hold(kind, after_body=kind is CallKind.READ)
        _, load, table = await cancelled_while(server, kv, gate)
        assert load.state is LoadState.CANCELLED
        server.free(table)
        gate.release()
    assert server.left_behind() == []
    assert calls_of(server, "describe") == 2


async def test_D2_a_copy_under_way_keeps_the_pages_of_a_cancelled_load_until_its_end() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    async with server.open() as kv:
        await all_mapped(server, kv)
        gate = server.device.script.hold("scatter")
        request, load, table = await server.load(kv, "r", TOKENS)
        await settle()
        assert server.device.busy
        with anyio.move_on_after(0.1):
            await request.cancel()
        states = [load.state]
        gate.release()
        await request.cancel()
        assert [*states, load.state] == [None, LoadState.CANCELLED]
        server.free(table)
    assert server.left_behind() == []


@pytest.mark.parametrize("nth", [1, 2])
async def test_D2_one_of_several_copies_that_fails_leaves_the_others_their_pages_until_their_end(nth: int) -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    async with server.open() as kv:
        await all_mapped(server, kv)
        # Two layer groups are two copies: the device refuses one of them, and the other takes its time.
        server.device.copy_s = lambda nbytes: 1.0
        server.device.script.fail_call("scatter", RuntimeError("refused"), nth=nth)
        _, load, table = await server.load(kv, "r", TOKENS)
        began = anyio.current_time()
        with pytest.raises(LoadFailed, match="copy_failed"):
            await load.wait()
        assert (anyio.current_time() - began > 0.9) == (nth == 2)
        assert not server.device.busy
        server.free(table)
    assert server.left_behind() == []


async def test_R6_copies_from_segments_are_issued_by_a_reading_thread_and_never_by_the_loop() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    async with server.open() as kv:
        await all_mapped(server, kv)
        gate = server.runner.hold(CallKind.READ)
        _, load, _ = await server.load(kv, "r", TOKENS)
        await settle()
        assert (gate.holding, server.device.busy) == (1, 0)
        gate.release()
        await load.wait()


async def test_R6_a_long_load_asks_for_one_stretch_while_the_one_before_it_is_on_its_way() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM), tokens=LONG, latency=Latency(describe_s=1.0))
    server.device.copy_s = lambda nbytes: 0.0
    async with server.open(probe_chunk=10) as kv:
        before = await all_mapped(server, kv)
        began = anyio.current_time()
        _, load, table = await server.load(kv, "r", LONG)
        await load.wait()
        # Two stretches, a second each.
        assert anyio.current_time() - began == pytest.approx(1.0, abs=0.1)
        assert read_since(kv, before)[0] == 18
        assert server.wrong_pages(LONG, table, 0, 9) == []
    assert server.left_behind() == []


async def test_R6_D3_a_long_load_that_fails_in_one_stretch_waits_for_the_other_and_fails_once() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM), tokens=LONG, latency=Latency(describe_s=1.0))
    async with server.open(probe_chunk=10) as kv:
        await all_mapped(server, kv)
        server.device.script.fail_call("scatter", RuntimeError("refused"))
        _, load, table = await server.load(kv, "r", LONG)
        with pytest.raises(LoadFailed, match="copy_failed"):
            await load.wait()
        server.free(table)
    assert server.left_behind() == []


@pytest.mark.parametrize("copy_s", [0.0, 0.001])
async def test_M4_the_execution_stream_is_ordered_behind_every_copy_from_a_segment(
    copy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    server.device.copy_s = lambda nbytes: copy_s
    async with server.open() as kv:
        await all_mapped(server, kv)
        before = len(server.device.copies)
        waited: list[object] = []
        monkeypatch.setattr(server.device, "execution_waits_for", waited.append)
        _, load, _ = await server.load(kv, "r", TOKENS)
        await load.wait()
        # One for each layer group.
        assert len(waited) == len(server.device.copies) - before == 2
