"""A module asks for real time by one line, and gets asyncio, uvloop and trio with it."""

import asyncio
import threading
import time

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from akv_testing.clock import VirtualLoop, settle
from akv_testing.pytest_backends import real_backends

anyio_backend = real_backends
pytestmark = pytest.mark.anyio


async def test_time_is_real(anyio_backend_name: str) -> None:
    began = time.monotonic()
    await anyio.sleep(0.01)
    assert time.monotonic() - began >= 0.009
    if anyio_backend_name == "asyncio":
        assert not isinstance(asyncio.get_running_loop(), VirtualLoop)


async def test_threads_reach_the_loop() -> None:
    here = threading.get_ident()
    assert await anyio.to_thread.run_sync(threading.get_ident) != here
    assert await anyio.to_thread.run_sync(lambda: anyio.from_thread.run_sync(threading.get_ident)) == here


async def test_settle_works_in_real_time() -> None:
    steps: list[int] = []

    async def worker() -> None:
        await anyio.lowlevel.checkpoint()
        steps.append(1)

    async with anyio.create_task_group() as group:
        group.start_soon(worker)
        await settle()
        assert steps == [1]
