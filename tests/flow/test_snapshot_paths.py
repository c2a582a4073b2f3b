"""Slots of the snapshot ring on every path that a pass can take: each gives them back, and none costs full-attention pages
(S2, S4, M6).
"""

import anyio
import pytest
from structlog.testing import capture_logs

from akv import Connector, Request, Scheduled
from akv.errors import DeviceError
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv.values.messages import PassPlan
from akv_testing.calls import Latency
from akv_testing.server import PageTable
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

TOKENS = tuple(range(22))
OTHERS = tuple(range(500, 522))


def free_slots(kv: Connector) -> tuple[int, int]:
    """Host slots of the ring that nobody holds, and slots in all."""
    ring = kv.pressure().ring
    assert ring is not None
    return ring.free, ring.slots


def planned(server: WindowServer, kv: Connector, request: Request, table: PageTable) -> PassPlan:
    """The closing pass of `TOKENS`, planned and run up to its forward."""
    server.prepare(table, 0, len(TOKENS))
    plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=len(TOKENS), pages=table)])
    server.forward(TOKENS, table, 0, len(TOKENS))
    return plan


def empty(server: WindowServer) -> PageTable:
    return [[] for _ in server.layout.groups]


async def goes_on(server: WindowServer, kv: Connector) -> None:
    """All slots are free, and another prompt is saved whole."""
    await anyio.sleep(0.1)
    free, count = free_slots(kv)
    assert free == count
    await server.serve(kv, "others", OTHERS, chunk=64)
    assert server.ends(OTHERS)[-1] == 5
    assert server.wrong_values() == []


def saved_whole(server: WindowServer) -> tuple[bool, bool]:
    """Whether the full-attention pages of `TOKENS` are stored, and whether its end is resumable."""
    keys = server.keys_of(TOKENS)
    return set(keys[0]) <= set(server.store.keys()), 5 in server.ends(TOKENS)


async def test_S2_a_dropped_plan_gives_its_slots_back_and_the_next_one_lists_the_same_pages() -> None:
    server = WindowServer()
    async with server.open() as kv:
        request, table = kv.open_request("r", TOKENS), empty(server)
        plan = planned(server, kv, request, table)
        assert free_slots(kv)[0] < free_slots(kv)[1]
        kv.drop_pass(plan)
        assert free_slots(kv)[0] == free_slots(kv)[1]
        await server.run_pass(kv, request, TOKENS, table, 0, len(TOKENS))
        await request.finished()
        assert saved_whole(server) == (True, True)
        await goes_on(server, kv)


async def test_S2_a_plan_that_a_later_one_supersedes_gives_its_slots_back() -> None:
    server = WindowServer()
    async with server.open() as kv:
        request, table = kv.open_request("r", TOKENS), empty(server)
        planned(server, kv, request, table)
        await server.run_pass(kv, request, TOKENS, table, 0, len(TOKENS))
        await request.finished()
        assert saved_whole(server) == (True, True)
        await goes_on(server, kv)


async def test_S2_closing_gives_back_the_slots_of_a_plan_that_is_open() -> None:
    server = WindowServer()
    async with server.open() as kv:
        planned(server, kv, kv.open_request("r", TOKENS), empty(server))
        worker = kv._halves.local_worker
        assert worker._ring is not None
    assert worker._ring.claims.plans == 0
    assert server.left_behind() == []


async def test_M6_a_gather_that_raises_drops_the_window_pages_and_nothing_else() -> None:
    server = WindowServer()
    server.device.script.fail_call("snapshot", DeviceError("no memory for an index"))
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.run_pass(kv, request, TOKENS, empty(server), 0, len(TOKENS))
        with capture_logs() as logs:
            await request.finished()
        assert [log["reason"] for log in logs if log["event"] == "akv.save.refused"] == ["copy_failed"]
        assert saved_whole(server) == (True, False)
        await goes_on(server, kv)


async def test_M6_the_second_of_two_gathers_raises_while_the_first_is_under_way() -> None:
    """Its slots may only go back when the first copy, which was queued, has ended."""
    server = WindowServer(windows=((10, 0), (6, 0)), latency=Latency(put_s=0.01))
    gate = server.device.script.hold("snapshot", nth=1)
    server.device.script.fail_call("snapshot", DeviceError("no memory for an index"), nth=2)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.run_pass(kv, request, TOKENS, empty(server), 0, len(TOKENS))
        await anyio.sleep(1)
        free, count = free_slots(kv)
        assert free < count
        gate.release()
        await anyio.sleep(0.1)
        assert free_slots(kv) == (count, count)
        await request.finished()
        assert saved_whole(server)[1] is False


async def test_M6_a_copy_that_fails_on_the_device_stores_nothing_of_it() -> None:
    server = WindowServer()
    server.device.script.fail_copy("snapshot", RuntimeError("ECC"))
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.run_pass(kv, request, TOKENS, empty(server), 0, len(TOKENS))
        await request.finished()
        assert saved_whole(server)[1] is False
        await goes_on(server, kv)


@pytest.mark.parametrize("state", [KeyState.NO_SPACE, KeyState.HOLDER_LOST])
async def test_S2_a_failed_put_loses_the_end_and_its_slots_come_back(state: KeyState) -> None:
    server = WindowServer()
    window_key = server.keys.prefix(1)
    server.pool.answer("put", state, key=lambda key: key.startswith(window_key), times=None)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.run_pass(kv, request, TOKENS, empty(server), 0, len(TOKENS))
        await anyio.sleep(0.1)
        assert saved_whole(server) == (True, False)
        server.pool._scripts.clear()
        # The live window is still held at the request's end, so `finish` brings what it can.
        await request.finished()
        await goes_on(server, kv)


async def test_D6_a_request_that_is_cancelled_before_its_pass_ran_stores_nothing() -> None:
    server = WindowServer()
    async with server.open() as kv:
        request, table = kv.open_request("r", TOKENS), empty(server)
        plan = planned(server, kv, request, table)
        await request.cancel()
        await kv.after_forward(plan)
        await anyio.sleep(0.1)
        assert server.store.keys() == []
        await goes_on(server, kv)


async def test_D6_a_request_that_is_cancelled_while_its_snapshot_waits_for_a_saver_gives_the_slots_back() -> None:
    server = WindowServer()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        await server.run_pass(kv, kv.open_request("first", OTHERS), OTHERS, empty(server), 0, len(OTHERS))
        await gate.reached()
        request = kv.open_request("r", TOKENS)
        await server.run_pass(kv, request, TOKENS, empty(server), 0, len(TOKENS))
        await anyio.sleep(0.1)
        held = free_slots(kv)[0]
        await request.cancel()
        assert free_slots(kv)[0] > held
        gate.release()
        await anyio.sleep(0.1)
        assert saved_whole(server) == (False, False)
        assert free_slots(kv)[0] == free_slots(kv)[1]


async def test_S4_cancelling_after_forward_while_it_waits_for_slots_saves_the_full_attention_pages_all_the_same() -> None:
    server = WindowServer(snapshot_slots=4, snapshot_wait_ms=60_000)
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        await server.run_pass(kv, kv.open_request("first", OTHERS), OTHERS, empty(server), 0, len(OTHERS))
        await gate.reached()
        request, table = kv.open_request("r", TOKENS), empty(server)
        plan = planned(server, kv, request, table)
        with anyio.move_on_after(1) as scope:
            await kv.after_forward(plan)
        assert scope.cancelled_caught
        gate.release()
        await request.finished()
        assert saved_whole(server)[0]
        assert free_slots(kv)[0] == free_slots(kv)[1]


async def test_M5_cancelling_after_forward_returns_only_when_the_copy_is_queued() -> None:
    """The engine may overwrite the pages as soon as it has control again, cancelled or not."""
    server = WindowServer(latency=Latency(snapshot_s=0.02))
    async with server.open() as kv:
        request, table = kv.open_request("r", TOKENS), empty(server)
        plan = planned(server, kv, request, table)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await kv.after_forward(plan)
        server.commit(table, len(TOKENS))
        await request.finished()
        assert server.wrong_values() == []
        assert saved_whole(server)[0]
        again, table = kv.open_request("again", OTHERS), empty(server)
        server.prepare(table, 0, len(OTHERS))
        plan = kv.plan_pass([Scheduled(request=again, computed_before=0, tokens=len(OTHERS), pages=table)])
        server.forward(OTHERS, table, 0, len(OTHERS))
        began = anyio.current_time()
        with anyio.move_on_after(0.01) as late:
            await kv.after_forward(plan)
        assert late.cancelled_caught
        assert anyio.current_time() >= began + 0.02
        server.commit(table, len(OTHERS))
        await again.finished()
        assert server.ends(OTHERS)[-1] == 5
        assert server.wrong_values() == []
        assert free_slots(kv)[0] == free_slots(kv)[1]
