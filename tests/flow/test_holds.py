"""How long a slow pool keeps the pages of finished requests (S7)."""

from typing import Any

import anyio
import pytest

from akv import SavesCompleted
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


async def test_S7_a_hold_ends_after_save_hold_max_s_and_the_pages_may_be_overwritten() -> None:
    server = FakeServer()
    async with server.open(save_hold_max_s=7.0) as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("r", LONG)
        table = server.allocate(LONG)
        await server.compute(kv, request, LONG, table)
        await gate.reached()
        await anyio.sleep(100)
        began = anyio.current_time()
        await request.finished()
        assert anyio.current_time() - began == pytest.approx(7.0), "counted from its end"
        server.free(table)
        gate.release()
        await settle()
        # What was in slots was put; the rest was not read any more.
        assert 0 < len(server.stored_blocks(LONG)) < 9
        assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S7_each_hold_has_its_own_time_and_those_that_end_in_time_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeServer()
    ended: dict[str, float] = {}
    async with server.open(save_hold_max_s=5.0) as kv:
        quick = kv.open_request("quick", TOKENS)
        await server.compute(kv, quick, TOKENS, server.allocate(TOKENS))
        quick.finish()
        await anyio.sleep(1)
        assert [done.stored_blocks for done in kv.completed() if isinstance(done, SavesCompleted)] == [4]
        gates = server.runner.hold_all(CallKind.PUT)
        async with anyio.create_task_group() as group:

            async def serve(name: str, first: int) -> None:
                tokens = list(range(first, first + 18))
                request = kv.open_request(name, tokens)
                await server.compute(kv, request, tokens, server.allocate(tokens))
                await request.finished()
                ended[name] = anyio.current_time()

            begin = anyio.current_time()
            group.start_soon(serve, "a", 1000)
            await anyio.sleep(2)
            group.start_soon(serve, "b", 2000)
        assert ended == {"a": pytest.approx(begin + 5), "b": pytest.approx(begin + 7)}
        gates.release()
    assert server.left_behind() == []
    told = [record.getMessage() for record in caplog.records if "akv.save.hold_expired" in record.getMessage()]
    assert len(told) == 2


async def test_S7_a_hold_that_was_given_up_is_told_once_with_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    async with server.open(save_hold_max_s=1.0) as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await request.finished()
        assert await request.cancel() == ()
        gate.release()
    told = [record for record in caplog.records if "akv.save.hold_expired" in record.getMessage()]
    assert [("saves=1" in record.getMessage(), "held_s=1.0" in record.getMessage()) for record in told] == [(True, True)]


async def test_S7_a_hold_counts_against_no_deadline_of_a_load() -> None:
    server = FakeServer.warm(TOKENS)
    settings: dict[str, Any] = {"save_hold_max_s": 50.0, "load_deadline_s": 1.0, "lookup_deadline_s": 1.0}
    async with server.open(**settings) as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("r", LONG)
        await server.compute(kv, request, LONG, server.allocate(LONG))
        request.finish()
        await anyio.sleep(40)
        assert not request.closed
        gate.release()
        await request.finished()
        assert len(server.stored_blocks(LONG)) == 9
