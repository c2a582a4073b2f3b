"""What comes after a cancel: late ends, the block of a request, and lists that nobody fetches."""

from functools import partial

import anyio
import pytest

from akv import LoadCompleted, LoadState, SavesCompleted
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


warm = partial(FakeServer.warm, TOKENS, LONG)


# -- late ends


async def test_D8_M7_a_late_end_changes_nothing_of_the_next_use_of_the_id() -> None:
    server = warm()
    async with server.open() as kv:
        get, put = server.runner.hold(CallKind.GET), server.runner.hold(CallKind.PUT)
        first, _, table = await server.load(kv, "r", TOKENS)
        await get.reached()
        await first.cancel()
        tokens = list(range(900, 918))
        second = kv.open_request("r", tokens)
        await server.compute(kv, second, tokens, server.allocate(tokens))
        await put.reached()
        await second.cancel()
        third = kv.open_request("r", TOKENS)
        assert first.incarnation < second.incarnation < third.incarnation
        load = third.reserve(await third.lookup(), 16, table)
        get.release()
        put.release()
        done = await load.wait()
        assert (done.incarnation, done.state) == (third.incarnation, LoadState.LOADED)
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        third.finish()
        await settle()
        assert kv.completed() == [
            SavesCompleted(request_id="r", incarnation=third.incarnation, stored_blocks=0, refused_blocks=0)
        ]
    assert server.left_behind() == []


async def test_D8_completions_name_the_incarnation_that_they_belong_to() -> None:
    server = warm()
    async with server.open() as kv:
        request, _, _ = await server.load(kv, "r", TOKENS)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await request.cancel()
        await settle()
        done = kv.completed()
        assert [type(one) for one in done] == [LoadCompleted, SavesCompleted]
        assert {one.incarnation for one in done} == {request.incarnation}
        assert isinstance(done[0], LoadCompleted)
        assert done[0].state is LoadState.CANCELLED
    assert server.left_behind() == []


async def test_nothing_grows_when_nobody_fetches_but_waits_return() -> None:
    server = warm()
    async with server.open() as kv:
        for number in range(20):
            request, load, table = await server.load(kv, f"r{number % 3}", TOKENS)
            if number % 2:
                await load.wait()
                await request.finished()
            else:
                await request.cancel()
            server.free(table)
        assert not kv.changed.is_set()
        assert kv.completed() == []
        assert len(kv._halves.notices._waiting) == 0
        assert len(kv._halves.scheduler.requests) == 0


# -- the block of a request


async def test_D6_the_block_of_a_request_finishes_it_at_its_end() -> None:
    server = warm(latency=Latency(put_s=1.0))
    tokens = list(range(900, 918))
    async with server.open() as kv:
        async with kv.request("r", tokens) as request:
            await server.compute(kv, request, tokens, server.allocate(tokens))
        assert request.closed
        assert server.stored_blocks(tokens) == [0, 1, 2, 3]


async def test_D6_the_block_of_a_request_cancels_it_when_it_raises() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        with pytest.raises(ZeroDivisionError):
            async with kv.request("r", TOKENS) as request:
                load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
                await gate.reached()
                raise ZeroDivisionError
        assert request.closed
        assert load.state is LoadState.CANCELLED
        gate.release()


@pytest.mark.parametrize("copy_s", [0.0, 0.01])
async def test_D6_the_block_of_a_request_cancels_it_when_its_task_is_cancelled(copy_s: float) -> None:
    server = warm()
    server.device.copy_s = lambda nbytes: copy_s
    gate = server.runner.hold(CallKind.GET, nth=2)
    async with server.open() as kv:
        with anyio.move_on_after(0.2) as scope:
            async with kv.request("r", TOKENS) as request:
                load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
                await load.wait()
        assert scope.cancelled_caught
        assert request.closed
        assert load.state is LoadState.CANCELLED
        assert server.device.busy == 0
        gate.release()


async def test_D6_the_block_of_a_request_waits_for_its_pages_no_longer_than_the_grace() -> None:
    server = warm()
    gate = server.device.script.hold("scatter")
    async with server.open(shutdown_deadline_s=0.03) as kv:
        with anyio.move_on_after(0.01):
            async with kv.request("r", TOKENS) as request:
                await request.reserve(await request.lookup(), 16, server.allocate(TOKENS)).wait()
        assert anyio.current_time() == pytest.approx(0.04, abs=0.003)
        assert not request.closed
        gate.release()
        await request.cancel()
    assert server.left_behind() == []


async def test_D6_the_block_of_a_request_that_is_cancelled_while_it_finishes() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.PUT)
    tokens = list(range(900, 918))
    async with server.open() as kv:
        with anyio.move_on_after(0.2) as scope:
            async with kv.request("r", tokens) as request:
                await server.compute(kv, request, tokens, server.allocate(tokens))
        assert scope.cancelled_caught
        assert request.closed
        gate.release()
    assert server.left_behind() == []
