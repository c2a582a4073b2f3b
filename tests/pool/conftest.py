"""One real master and one real client for the whole session; every test uses keys of its own."""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from akv.errors import PoolError
from akv.pool import MooncakePool, embedded, set_up_store
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.reach import reach_master
from akv.settings import StoreSettings
from akv_testing.pytest_backends import real_backends

anyio_backend = real_backends


class Memory:
    """Host memory as the pool port wants it."""

    def __init__(self, nbytes: int, fill: int = 0) -> None:
        self._bytes = ctypes.create_string_buffer(nbytes)
        ctypes.memset(self._bytes, fill, nbytes)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._bytes)

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    def view(self) -> memoryview:
        return memoryview(self._bytes).cast("B")


@pytest.fixture(scope="session")
def memory() -> Callable[..., Memory]:
    return Memory


@contextmanager
def _running_master() -> Iterator[tuple[str, int]]:
    """A master under the watcher, without an event loop: its address and its process id."""
    rpc_port, metrics_port = embedded.free_ports(2)
    command = embedded.watched_command(embedded.find_master(), rpc_port, metrics_port)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as watcher:
        assert watcher.stdin is not None
        address = f"{embedded.LOOPBACK}:{rpc_port}"
        anyio.run(_wait_for, address)
        (child,) = Path(f"/proc/{watcher.pid}/task/{watcher.pid}/children").read_text().split()
        yield address, int(child)
        watcher.stdin.close()


async def _wait_for(address: str) -> None:
    with anyio.fail_after(10):
        while True:
            try:
                return await reach_master(address, 1.0)
            except PoolError:
                await anyio.sleep(0.01)


@pytest.fixture(scope="session")
def master() -> Iterator[str]:
    """The address of a healthy master, "host:port"."""
    with _running_master() as (address, _):
        yield address


@pytest.fixture
def own_master() -> Iterator[tuple[str, int]]:
    """A master that a test may stop or kill: its address and its process id."""
    with _running_master() as started:
        yield started


@pytest.fixture
def freeze() -> Callable[[int], None]:
    """Stop a process, and return when each of its threads stands still: the signal alone only asks for it."""

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            while (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)

    return stop


@pytest.fixture(scope="session")
def pool(master: str) -> Iterator[MooncakePool]:
    """A client of it that lends 64 MiB."""
    made = set_up_store(StoreSettings(master_address=master, segment_bytes=64 << 20))
    PROCESS_GUARD.hold(made)
    yield made
    made.close()
    PROCESS_GUARD.release(made)


@pytest.fixture(scope="session")
def closed_pool(master: str) -> MooncakePool:
    """A client that was closed."""
    made = set_up_store(StoreSettings(master_address=master, segment_bytes=0, local_buffer_bytes=0))
    made.close()
    return made


@pytest.fixture
def new_key() -> Callable[[], str]:
    """Keys that no other test uses."""
    numbers = itertools.count()
    prefix = f"akv-test/{next(_TESTS)}"
    return lambda: f"{prefix}/{next(numbers)}"


_TESTS = itertools.count()


@pytest.fixture
def run_script() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python script as a process of its own, which is how the end of a process can be looked at."""

    def run(script: str, *arguments: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run
