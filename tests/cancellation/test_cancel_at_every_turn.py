"""Cancellation at every turn of the loop, anyio's and asyncio's own: whenever it comes, everything is given back."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import pytest

from akv import Connector, LoadState
from akv_testing import run_virtual, settle
from akv_testing.calls import Latency
from akv_testing.clock import BACKENDS
from akv_testing.server import FakeServer
from akv_testing.traffic import TOKENS

OTHER = list(range(100, 118))
#: More turns than the scenario below takes.
TURNS = 120


class Scenario:
    """One request that looks up, loads, computes and saves, in the block of a connector, with a deadline in no call."""

    def __init__(self) -> None:
        # Few slots, so that the load has four batches and the save two: copies and calls overlap.
        self.server = FakeServer(slots=4, latency=Latency(get_s=0.001, put_s=0.001))
        self.server.put_in_store(TOKENS[:8])
        self.kv: Connector | None = None
        self.ended = False

    async def run(self) -> None:
        async with self.server.open(shutdown_deadline_s=0.5) as kv:
            self.kv = kv
            await self.one_request(kv)
        self.ended = True

    async def one_request(self, kv: Connector, name: str = "r") -> None:
        async with kv.request(name, TOKENS) as request:
            offer = await request.lookup()
            table = self.server.allocate(TOKENS)
            load = request.reserve(offer, offer.tokens, table)
            await load.wait()
            assert load.state is LoadState.LOADED
            await self.server.compute(kv, request, TOKENS, table, 8)
            await request.finished()

    def check(self) -> None:
        assert self.server.left_behind() == []
        assert self.server.wrong_values() == []
        if self.kv is not None:
            assert self.kv._halves.calls.outstanding == 0
            assert len(self.kv._halves.scheduler.requests) == 0


async def at_turn(count: int) -> None:
    """Turns pass while the clock stands still, so every other count waits for a moment of the clock first."""
    if count % 2:
        await anyio.sleep(0.0002 * count)
    await turns(count // 2 if count % 2 == 0 else count % 5)


async def turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("backend", BACKENDS)
def test_M6_a_connectors_task_may_be_cancelled_at_every_turn(backend: str) -> None:
    async def main(count: int) -> bool:
        scenario = Scenario()
        async with anyio.create_task_group() as group:
            group.start_soon(scenario.run)
            await at_turn(count)
            began = anyio.current_time()
            group.cancel_scope.cancel()
        assert anyio.current_time() - began < 0.1
        scenario.check()
        return scenario.ended

    ended = [run_virtual(backend, main, count) for count in range(TURNS)]
    assert set(ended) == {False, True}


@pytest.mark.parametrize("times", [1, 2, 3])
def test_M6_asyncios_own_cancellation_at_every_turn(times: int) -> None:
    """`Task.cancel()`, as `asyncio.timeout()` and `wait_for()` do it, goes through shields, and may come again."""

    async def main(count: int) -> bool:
        scenario = Scenario()
        task = asyncio.ensure_future(scenario.run())
        await at_turn(count)
        began = anyio.current_time()
        for _ in range(times):
            task.cancel()
            await turns(2)
        outcome = await asyncio.wait({task})
        assert outcome[1] == set()
        assert scenario.ended or task.cancelled()
        assert anyio.current_time() - began < 0.1
        scenario.check()
        return scenario.ended

    ended = [run_virtual("asyncio", main, count) for count in range(TURNS)]
    assert set(ended) == {False, True}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_D6_a_requests_task_may_be_cancelled_at_every_turn_and_the_connector_goes_on(backend: str, native: bool) -> None:
    if native and backend == "trio":
        backend = "asyncio"

    async def main() -> None:
        scenario = Scenario()
        async with scenario.server.open() as kv:
            scenario.kv = kv
            for count in range(TURNS // 2):
                await in_a_task(partial(scenario.one_request, kv, f"r{count}"), count, native=native)
                free_again(scenario.server)
            await settle()
            await scenario.one_request(kv, "last")
            assert scenario.server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        scenario.check()

    run_virtual(backend, main)


async def in_a_task(work: Callable[[], Coroutine[Any, Any, None]], count: int, *, native: bool) -> None:
    if native:
        task = asyncio.ensure_future(work())
        await turns(count)
        task.cancel()
        await asyncio.wait({task})
        return
    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await turns(count)
        group.cancel_scope.cancel()


def free_again(server: FakeServer) -> None:
    """The engine takes back the pages of a request that has ended, and overwrites them: a race if anything still copies."""
    for group, free in enumerate(server._free):
        used = sorted(set(range(64)) - set(free))
        server.device.kernel(writes=[(group, page, 0xAA) for page in used])
        free.extend(used)
