"""Cancelled at any moment of a save whose puts are tried again: slots, places and calls are back, no byte wrong (S5, M6)."""

import asyncio
from typing import Any

import anyio
import pytest

from akv import Connector
from akv.plan.put_attempts import RETRY_WINDOW_S
from akv.ports.pool import KeyState
from akv_testing import run_virtual
from akv_testing.calls import Latency
from akv_testing.clock import BACKENDS
from akv_testing.server import FakeServer
from akv_testing.window_server import WindowServer

PROMPT = tuple(range(22))
#: Moments at which it is cancelled. Between two calls, of a millisecond each, lie several.
MOMENTS = 80
MOMENT_S = RETRY_WINDOW_S * 1.5 / MOMENTS


class Scenario:
    """One prompt whose first puts, window pages and others, find the pool full twice."""

    def __init__(self, *, windows: bool, host_pages: bool) -> None:
        arguments: dict[str, Any] = {"slots": 8, "latency": Latency(put_s=0.001, probe_s=0.001, copy_s=0.001)}
        self.server = WindowServer(**arguments) if windows else FakeServer(host_pages=host_pages, **arguments)
        self.server.pool.answer("put", KeyState.NO_SPACE, times=8)
        self.pools: list[Any] = []
        self.kv: Connector | None = None
        self.ended = False

    async def run(self) -> None:
        async with self.server.open(shutdown_deadline_s=0.5) as kv:
            self.kv = kv
            worker = kv._halves.local_worker
            self.pools = [staging.slots for staging in worker.memory.stagings]
            if worker._ring is not None:
                self.pools.append(worker._ring.claims.host)
            request = kv.open_request("r", PROMPT)
            if isinstance(self.server, WindowServer):
                await self.server.run_pass(kv, request, PROMPT, [[] for _ in self.server.layout.groups], 0, len(PROMPT))
            else:
                await self.server.compute(kv, request, PROMPT, self.server.allocate(PROMPT))
            await request.finished()
        self.ended = True

    def check(self) -> None:
        assert self.server.left_behind() == []
        assert self.server.wrong_values() == []
        assert [pool.count - pool.free for pool in self.pools] == [0] * len(self.pools)
        assert self.kv is None or self.kv._halves.calls.outstanding == 0


@pytest.mark.parametrize(
    ("windows", "host_pages"), [(False, False), (False, True), (True, False)], ids=["in slots", "in pages", "snapshots"]
)
@pytest.mark.parametrize(("backend", "native"), [*((backend, False) for backend in BACKENDS), ("asyncio", True)])
def test_S5_M6_a_save_that_tries_again_may_be_cancelled_at_any_moment(
    backend: str, windows: bool, host_pages: bool, native: bool
) -> None:
    async def main(count: int) -> bool:
        scenario = Scenario(windows=windows, host_pages=host_pages)
        if native:
            task = asyncio.ensure_future(scenario.run())
            await moment(count)
            task.cancel()
            assert (await asyncio.wait({task}))[1] == set()
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(scenario.run)
                await moment(count)
                group.cancel_scope.cancel()
        scenario.check()
        return scenario.ended

    ended = [run_virtual(backend, main, count) for count in range(MOMENTS)]
    assert set(ended) == {False, True}


async def moment(count: int) -> None:
    await anyio.sleep(MOMENT_S * count)
    for _ in range(count % 4):
        await anyio.lowlevel.checkpoint()
