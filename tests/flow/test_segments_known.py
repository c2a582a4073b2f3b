"""Which segments of this host a connector knows, when it looks at the register, and what it maps (R3, R4, X5)."""

import anyio
import pytest

from akv.errors import SegmentNotReady
from akv.ports.calls import CallKind
from akv.services.scout import BEHIND_S, PAUSE_S
from akv.values.pressure import Reads
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.events import events_in
from akv_testing.segments import FakeHost
from akv_testing.traffic import LONG, TOKENS
from akv_testing.warm_segments import ROOM, all_mapped, read_since, server_on

pytestmark = pytest.mark.anyio


async def test_R4_pages_of_a_process_that_is_not_in_the_register_are_staged() -> None:
    host = FakeHost()
    remote = host.lend(ROOM, registered=False)
    server = server_on(host, host.lend(40 + 60), remote)
    async with server.open() as kv:
        before = await all_mapped(server, kv)
        _, load, table = await server.load(kv, "r", TOKENS)
        await load.wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        direct, _, staged = read_since(kv, before)
        assert staged == {"not_shared": 8 - direct}
        assert 0 < direct < 8


async def test_R3_until_a_segment_is_mapped_its_pages_are_staged_and_no_load_waits_for_it() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM), latency=Latency(map_s=30.0))
    async with server.open() as kv:
        await anyio.sleep(31.0)
        for name in ("early", "too early"):
            began = anyio.current_time()
            _, load, _ = await server.load(kv, name, TOKENS)
            await load.wait()
            assert anyio.current_time() < began + 1.0
        assert read_since(kv, Reads()) == (0, 0, {"not_mapped": 16})
        await anyio.sleep(61.0)
        _, load, table = await server.load(kv, "late", TOKENS)
        await load.wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        assert read_since(kv, Reads())[0] >= 8


async def test_R3_a_segment_that_no_page_lies_in_is_not_mapped() -> None:
    host = FakeHost()
    lent = host.lend(ROOM)
    # Of another pool on the same host.
    host.lend(ROOM)
    server = server_on(host, lent)
    async with server.open() as kv:
        await all_mapped(server, kv)
        assert kv.pressure().reads.segments == 1


async def test_R3_a_process_that_lends_later_is_found_when_loads_begin() -> None:
    host = FakeHost()
    server = server_on(host)
    async with server.open() as kv:
        await settle()
        server.store.places.append(host.lend(ROOM))
        server.put_in_store(TOKENS)
        for number in range(3):
            await anyio.sleep(2.0)
            _, load, _ = await server.load(kv, f"r{number}", TOKENS)
            await load.wait()
        # The first has the register read, the second learns that pages lie there, the third reads them.
        assert read_since(kv, Reads())[0] >= 8


async def test_R3_a_process_that_joins_others_is_found_when_a_page_is_seen_that_none_of_them_lends() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    async with server.open() as kv:
        await all_mapped(server, kv)
        server.store.places = [host.lend(ROOM)]
        server.put_in_store(LONG)
        for number in range(3):
            await anyio.sleep(2.0)
            _, load, _ = await server.load(kv, f"r{number}", LONG)
            await load.wait()
        before = kv.pressure().reads
        assert before.segments == 2
        _, load, _ = await server.load(kv, "last", LONG)
        await load.wait()
        assert read_since(kv, before) == (18, 9 * (16 + 24), {})


async def test_R3_a_register_that_cannot_be_read_is_an_empty_one(caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    host.register_errors.append(PermissionError("no"))
    async with server.open() as kv:
        await settle()
        _, load, _ = await server.load(kv, "r", TOKENS)
        await load.wait()
        assert read_since(kv, Reads()) == (0, 0, {"no_segment": 8})
        await anyio.sleep(2.0)
        for number in range(3):
            _, load, _ = await server.load(kv, f"r{number}", TOKENS)
            await load.wait()
        assert read_since(kv, Reads())[0] >= 8
    assert len(events_in(caplog.records, "akv.segment.register_unreadable")) == 1


@pytest.mark.parametrize("lie", [{"base": -64}, {"base": 8}, {"size": 64}, {"size": -64}])
async def test_X5_R4_an_entry_that_lies_is_not_used_and_said_so(lie: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost()
    segment = host.lend(ROOM)
    ((field, by),) = lie.items()
    host.lies(segment, **{field: getattr(segment.entry, field) + by})
    server = server_on(host, segment)
    async with server.open() as kv:
        await all_mapped(server, kv)
        _, load, table = await server.load(kv, "r", TOKENS)
        await load.wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        assert kv.pressure().reads.direct_pages == 0
    (event,) = events_in(caplog.records, "akv.segment.unused")
    assert (event["segment"], event["reason"]) == ("segment-1", "refused")


async def test_R3_a_segment_that_is_not_ready_is_tried_again_when_a_page_is_seen_in_it() -> None:
    host = FakeHost()
    host.open_errors += [SegmentNotReady("being allocated")] * 2
    server = server_on(host, host.lend(ROOM))
    async with server.open() as kv:
        await settle()
        for number in range(4):
            _, load, _ = await server.load(kv, f"r{number}", TOKENS)
            await load.wait()
            await settle()
        assert kv.pressure().reads.direct_pages >= 8


@pytest.mark.parametrize("error", [OSError("no such file"), MemoryError("cannot be pinned")])
async def test_R3_a_segment_that_cannot_be_mapped_is_staged_for_good(error: Exception) -> None:
    host = FakeHost()
    host.open_errors.append(error)
    server = server_on(host, host.lend(ROOM))
    async with server.open() as kv:
        for number in range(3):
            await anyio.sleep(2.0)
            _, load, _ = await server.load(kv, f"r{number}", TOKENS)
            await load.wait()
        assert kv.pressure().reads.direct_pages == 0


async def test_R3_the_register_is_looked_at_behind_a_load_and_not_beside_it() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    async with server.open() as kv:
        await all_mapped(server, kv)
        await anyio.sleep(2 * PAUSE_S)
        looks = host.looks
        gate = server.runner.hold(CallKind.READ)
        _, load, _ = await server.load(kv, "r", TOKENS)
        await anyio.sleep(2 * PAUSE_S)
        assert host.looks == looks
        gate.release()
        await load.wait()
        await anyio.sleep(BEHIND_S / 2)
        assert host.looks == looks, "whoever waited for the load goes first"
        await anyio.sleep(BEHIND_S)
        assert host.looks == looks + 1
        # One of many that end has it looked at.
        for number in range(3):
            _, load, _ = await server.load(kv, f"r{number}", TOKENS)
            await load.wait()
            await anyio.sleep(2 * BEHIND_S)
        assert host.looks == looks + 1


async def test_R3_a_load_that_finds_no_segment_has_the_register_looked_at_at_once() -> None:
    host = FakeHost()
    server = server_on(host)
    async with server.open() as kv:
        await anyio.sleep(2 * PAUSE_S)
        looks = host.looks
        gate = server.runner.hold(CallKind.GET)
        _, load, _ = await server.load(kv, "r", TOKENS)
        await settle()
        assert host.looks == looks + 1
        gate.release()
        await load.wait()
