"""Leaving `kv.request()`: the pages are free by then, however often its task is cancelled (D6, M6)."""

import asyncio
from functools import partial

import anyio
import pytest

from akv import Request
from akv_testing import settle
from akv_testing.clock import run_virtual
from akv_testing.server import FakeServer
from akv_testing.traffic import TOKENS

warm = partial(FakeServer.warm, TOKENS)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_D6_asyncios_own_cancellation_however_often_leaves_no_copy_behind(times: int) -> None:
    async def main() -> None:
        server = warm()
        left: list[tuple[bool, int]] = []
        async with server.open() as kv:
            hold, table = server.device.script.hold("scatter"), server.allocate(TOKENS)

            async def one() -> None:
                try:
                    async with kv.request("r", TOKENS) as request:
                        offer = await request.lookup()
                        await request.reserve(offer, 16, table).wait()
                finally:
                    left.append((request.closed, server.device.busy))
                    server.free(table)

            task = asyncio.ensure_future(one())
            await settle()
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0.01)
            assert left == []
            hold.release()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert left == [(True, 0)]
            assert kv.completed() == []
        assert server.left_behind() == []

    run_virtual("asyncio", main)


@pytest.mark.anyio
async def test_D6_a_copy_that_outlasts_the_grace_is_reported_and_the_pages_are_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr("akv.observe.emit", lambda event, **fields: told.append(event.name))
    server, requests = warm(shutdown_deadline_s=1.0), list[Request]()
    async with server.open() as kv:
        hold, table = server.device.script.hold("scatter"), server.allocate(TOKENS)
        with anyio.move_on_after(0.5):
            async with kv.request("r", TOKENS) as request:
                requests.append(request)
                offer = await request.lookup()
                await request.reserve(offer, 16, table).wait()
        assert anyio.current_time() == pytest.approx(1.5)
        closed = [requests[0].closed]
        assert "akv.request.unreleased" in told
        hold.release()
        await settle()
        await anyio.sleep(0.1)
        closed.append(requests[0].closed)
        assert closed == [False, True]
    assert server.left_behind() == []


@pytest.mark.anyio
async def test_D6_a_block_that_ends_in_time_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("akv.observe.emit", lambda event, **fields: told.append(event.name))
    server = warm()
    async with server.open() as kv:
        with pytest.raises(KeyError):
            async with kv.request("r", TOKENS) as request:
                await request.reserve(await request.lookup(), 16, server.allocate(TOKENS)).wait()
                raise KeyError
        assert request.closed
    assert "akv.load.complete" in told
    assert "akv.request.unreleased" not in told


def test_D6_a_cancellation_that_comes_while_an_error_leaves_takes_its_place() -> None:
    async def main() -> None:
        server = warm()
        async with server.open() as kv:
            hold, table = server.device.script.hold("scatter"), server.allocate(TOKENS)

            async def one() -> None:
                async with kv.request("r", TOKENS) as request:
                    request.reserve(await request.lookup(), 16, table)
                    await settle()
                    raise ValueError("mine")

            task = asyncio.ensure_future(one())
            await settle()
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            hold.release()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await task
            assert isinstance(cancelled.value.__context__ or cancelled.value.__cause__, ValueError)
        assert server.left_behind() == []

    run_virtual("asyncio", main)
