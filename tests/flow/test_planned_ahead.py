"""Engines that plan a pass before the one ahead of it ran, and engines with drafts: what was computed counts (S1, W3, S12)."""

import asyncio

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from akv import EngineContractError, LoadCancelled, LoadFailed, Scheduled
from akv.errors import DeviceError
from akv.ports.device import PassEvent
from akv.ports.pool import KeyState
from akv_testing.calls import Latency
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import TOKENS, part
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Ten whole blocks of four tokens, and two tokens more.
PROMPT = tuple(range(42))


def empty(server: WindowServer) -> PageTable:
    return [[] for _ in server.layout.groups]


async def test_W3_a_closing_pass_that_is_planned_ahead_knows_where_its_request_began() -> None:
    """Planned before the first pass ran, it must not take its own start for the place where the request resumed."""
    server = WindowServer(windows=((10, 0),), retention_tokens=24, rewind_tokens=24)
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        server.prepare(table, 0, len(PROMPT))
        spans = [(0, 24), (24, 42)]
        plans = [
            kv.plan_pass([Scheduled(request=request, computed_before=before, tokens=end - before, pages=table)])
            for before, end in spans
        ]
        for (before, end), plan in zip(spans, plans, strict=True):
            server.forward(PROMPT, table, before, end)
            await kv.after_forward(plan)
        await request.finished()
    assert server.ends(PROMPT) == [4, 5, 6, 7, 8, 9, 10]
    assert server.wrong_values() == []


async def test_S12_tokens_that_are_told_behind_the_plan_are_part_of_the_end() -> None:
    """An engine that schedules ahead of its sampler tells the token that a pass feeds only when the pass was planned."""
    server = WindowServer(windows=((10, 0),), retention_tokens=4)
    answer = (100, 101)
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        await server.run_pass(kv, request, PROMPT, table, 0, 42)
        tokens = PROMPT + answer
        for before in (42, 43):
            server.prepare(table, before, before + 1)
            plan = kv.plan_pass([Scheduled(request=request, computed_before=before, tokens=1, pages=table)])
            request.append([tokens[before]])
            server.forward(tokens, table, before, before + 1)
            await kv.after_forward(plan)
            server.commit(table, before + 1)
        with capture_logs() as logs:
            await request.finished()
    assert [log["event"] for log in logs if log["event"] == "akv.window.tail_missing"] == []
    assert server.ends((*tokens, *range(200, 210)))[-1] == 11
    assert server.wrong_values() == []


async def failed_load(server: FakeServer, kv, table: PageTable):  # type: ignore[no-untyped-def]
    server.pool.answer("get", KeyState.MISSING)
    request = kv.open_request("r", TOKENS)
    offer = await request.lookup()
    with pytest.raises(LoadFailed):
        await request.reserve(offer, offer.tokens, table).wait()
    return request


async def test_D3_after_a_failed_load_a_pass_that_is_planned_ahead_is_right() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        table = server.allocate(TOKENS)
        request = await failed_load(server, kv, table)
        first = kv.plan_pass([part(request, 0, 8, table)])
        second = kv.plan_pass([part(request, 8, 10, table)])
        with pytest.raises(EngineContractError, match="computed_before = 19"):
            kv.plan_pass([part(request, 19, 1, table)])
        server.write(TOKENS, table, 0, 2)
        await kv.after_forward(first)
        server.write(TOKENS, table, 2)
        await kv.after_forward(second)
        await request.finished()
    assert server.stored_blocks(TOKENS) == list(range(4))


async def test_D3_a_dropped_plan_computed_nothing_that_another_may_build_on() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        table = server.allocate(TOKENS)
        request = await failed_load(server, kv, table)
        kv.drop_pass(kv.plan_pass([part(request, 0, 8, table)]))
        with pytest.raises(EngineContractError, match="hold KV for 0 tokens only"):
            kv.plan_pass([part(request, 8, 10, table)])


async def test_D3_after_a_failed_load_accepted_drafts_are_right() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        table = server.allocate(8)
        request = await failed_load(server, kv, table)
        await server.compute(kv, request, TOKENS, table)
        request.append([50, 51, 52])
        plan = kv.plan_pass([part(request, 18, 1, table, drafts=2)])
        await kv.after_forward(plan)
        # Both drafts were accepted.
        await kv.after_forward(kv.plan_pass([part(request, 21, 1, table)]))
        with pytest.raises(EngineContractError, match="hold KV for 22 tokens only"):
            kv.plan_pass([part(request, 23, 1, table)])


async def test_D6_pages_of_a_request_that_was_cancelled_before_after_forward_are_not_touched() -> None:
    """`cancel()` said that they are free: the engine may have lent them to anybody."""
    server = WindowServer()
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        server.prepare(table, 0, 42)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=42, pages=table)])
        server.forward(PROMPT, table, 0, 42)
        await request.cancel()
        with capture_logs() as logs:
            await kv.after_forward(plan)
        ring = kv.pressure().ring
        assert ring is not None
        assert ring.free == ring.slots
    assert server.device.copies == []
    assert [log for log in logs if log["event"] == "akv.snapshot.dropped"] == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_D6_a_native_cancellation_is_not_lost_behind_a_device_that_fails() -> None:
    server = WindowServer(latency=Latency(snapshot_s=0.02))
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        server.prepare(table, 0, 42)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=42, pages=table)])
        server.forward(PROMPT, table, 0, 42)

        def fails() -> None:
            raise DeviceError("gone")

        task = asyncio.get_running_loop().create_task(kv.after_forward(plan))
        await anyio.sleep(0.001)
        fence = kv._halves.scheduler.worker.fence
        kv._halves.scheduler.worker.fence = fails  # type: ignore[assignment]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        kv._halves.scheduler.worker.fence = fence
        await anyio.sleep(0.1)
        ring = kv.pressure().ring
        assert ring is not None
        assert ring.free == ring.slots


async def test_S2_a_device_that_fails_behind_the_copies_surfaces_and_gives_the_slots_back() -> None:
    server = WindowServer()
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        server.prepare(table, 0, 42)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=42, pages=table)])
        server.forward(PROMPT, table, 0, 42)
        fence, calls = kv._halves.scheduler.worker.fence, iter((True, False))

        def second_fails() -> PassEvent:
            if next(calls):
                return fence()
            raise DeviceError("gone")

        kv._halves.scheduler.worker.fence = second_fails
        with pytest.raises(DeviceError):
            await kv.after_forward(plan)
        await anyio.sleep(0.1)
        ring = kv.pressure().ring
        assert ring is not None
        assert ring.free == ring.slots
        await request.cancel()


async def test_D2_an_error_with_pages_in_quarantine_does_not_say_that_all_are_free() -> None:
    failed = LoadFailed("r", "key", "deadline", ((1, 2), ()))
    assert "but for 2 pages" in str(failed)
    assert "PagesReleased" in str(LoadCancelled("r", ((3,), (4,))))
    assert "but for" not in str(LoadCancelled("r"))
    await anyio.lowlevel.checkpoint()


async def test_W3_each_request_of_a_plan_is_read_beside_its_own_parts_ahead() -> None:
    """Another request's pass that is planned ahead says nothing about where this one began."""
    server = WindowServer(windows=((10, 0),), retention_tokens=24, rewind_tokens=24)
    others = tuple(range(500, 542))
    async with server.open() as kv:
        prompts = (PROMPT, others)
        requests = [(kv.open_request(str(at), tokens), tokens, empty(server)) for at, tokens in enumerate(prompts)]
        for _, _, table in requests:
            server.prepare(table, 0, 42)
        spans = [(0, 24), (24, 42)]
        plans = [
            kv.plan_pass(
                [
                    Scheduled(request=request, computed_before=before, tokens=end - before, pages=table)
                    for request, _, table in requests
                ]
            )
            for before, end in spans
        ]
        for (before, end), plan in zip(spans, plans, strict=True):
            for _, tokens, table in requests:
                server.forward(tokens, table, before, end)
            await kv.after_forward(plan)
        for request, tokens, _ in requests:
            await request.finished()
            assert server.ends(tokens) == [4, 5, 6, 7, 8, 9, 10]
    assert server.wrong_values() == []
