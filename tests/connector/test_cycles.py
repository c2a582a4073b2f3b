"""Opening and closing again and again leaves everything as it was (M6, O6)."""

import gc
import os
import sys
import threading

import anyio
import pytest

from akv_testing.clock import BACKENDS, run_virtual
from akv_testing.server import FakeServer
from akv_testing.store import FakeStore
from akv_testing.traffic import TOKENS


async def one_life(store: FakeStore) -> None:
    # A server of its own each time: what the fakes note for assertions grows with every call, and goes with them.
    server = FakeServer(store=store)
    async with server.open() as kv, kv.request("r", TOKENS) as request:
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", BACKENDS)
def test_O6_a_thousand_lives_on_the_fakes_leave_threads_descriptors_and_memory_as_they_were(backend: str) -> None:
    async def lives() -> None:
        store = FakeStore(anyio.current_time)
        for number in range(1000):
            await one_life(store)
            # trio forgets a deadline that nothing waits for any more when its time comes, or a thousand of them later.
            await anyio.sleep(100)
            if number in (99, 999):
                gc.collect()
                seen.append((threading.active_count(), len(os.listdir("/proc/self/fd")), sys.getallocatedblocks()))  # noqa: PTH208

    seen: list[tuple[int, int, int]] = []
    run_virtual(backend, lives)
    (threads, files, blocks), (threads_after, files_after, blocks_after) = seen
    assert (threads_after, files_after) == (threads, files)
    # Blocks of Python's allocator, over 900 lives: a leak of one object in each would be more than this.
    assert blocks_after - blocks < 450
