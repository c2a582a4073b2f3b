"""Direct reads whose copies end within their call, as on a CPU, and those whose copies run on behind it (R1, R2, R6)."""

import anyio
import pytest

from akv.errors import LoadFailed
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.segments import FakeHost
from akv_testing.traffic import LONG, TOKENS
from akv_testing.warm_segments import ROOM, all_mapped, calls_of, read_since, server_on

pytestmark = pytest.mark.anyio


async def test_R2_a_call_that_saw_its_copies_end_and_took_longer_than_the_lease_is_a_failed_get() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM), latency=Latency(describe_s=3.0))
    server.device.copy_s = lambda nbytes: 0.0
    async with server.open(lease_s=2.0, load_deadline_s=60.0) as kv:
        await all_mapped(server, kv)
        _, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed, match="lease_expired"):
            await load.wait()
        server.free(table)
    assert server.left_behind() == []


async def test_R1_R6_what_is_staged_of_a_load_is_fetched_beside_a_copy_that_runs_behind_its_call() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(40 + 5 * 24), tokens=LONG)
    server.device.copy_s = lambda nbytes: 0.1
    async with server.open(lease_s=60.0) as kv:
        before = await all_mapped(server, kv)
        gets = calls_of(server, "get")
        _, load, table = await server.load(kv, "r", LONG)
        await settle()
        assert calls_of(server, "get") > gets, "nobody waits for the copy before"
        await load.wait()
        direct, _, staged = read_since(kv, before)
        assert direct > 0
        assert staged == {"no_replica": 18 - direct}
        assert server.wrong_pages(LONG, table, 0, 9) == []
    assert server.left_behind() == []


async def test_R6_a_read_that_ended_within_its_call_takes_no_call_more() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    server.device.copy_s = lambda nbytes: 0.0
    async with server.open() as kv:
        await all_mapped(server, kv)
        began = anyio.current_time()
        calls = len(server.runner.calls)
        _, load, _ = await server.load(kv, "r", TOKENS)
        await load.wait()
        kinds = [call.kind for call in server.runner.calls[calls:]]
        assert kinds.count(CallKind.READ) == 1
        assert CallKind.DESCRIBE not in kinds
        assert anyio.current_time() == began


async def test_R3_where_nothing_is_read_in_place_nobody_looks_at_the_register() -> None:
    host = FakeHost()
    server = server_on(host, host.lend(ROOM))
    async with server.open(read_path="staged") as kv:
        for number in range(3):
            await anyio.sleep(2.0)
            _, load, _ = await server.load(kv, f"r{number}", TOKENS)
            await load.wait()
        await anyio.sleep(2.0)
        assert host.looks == 0
