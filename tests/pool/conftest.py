"""One real master and one real client for the whole session; every test uses keys of its own."""

import ctypes
import itertools
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from akv.pool import MooncakePool, set_up_store
from akv.pool.exit_guard import PROCESS_GUARD
from akv.settings import CLIENT_VARIABLES, StoreSettings
from akv_testing.hosts import can_make_hosts
from akv_testing.master import running_master
from akv_testing.pytest_backends import real_backends

anyio_backend = real_backends

# Where a user may not make namespaces, as in most containers, there are no two hosts.
collect_ignore = [] if can_make_hosts() else ["test_two_hosts.py"]


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


class MemoryClient:
    """A store's client that keeps values in a dictionary. `codes`: answers of the calls named, in turn, before it works."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.codes: dict[str, list[int]] = {}
        #: The names and first keys of the calls.
        self.calls: list[tuple[str, str]] = []
        self.buffers: dict[int, int] = {}
        #: Of each put, the segment that was to take it.
        self.preferred: list[str] = []
        self.setup_code = 0
        self.setup_arguments: tuple[object, ...] | None = None
        self.closes = 0

    def ReplicateConfig(self) -> SimpleNamespace:
        return SimpleNamespace(preferred_segment="")

    def get_hostname(self) -> str:
        return "here:1"

    def MooncakeDistributedStore(self) -> "MemoryClient":
        """The module and its class in one."""
        return self

    def setup(self, *arguments: object) -> int:
        self.setup_arguments = arguments
        return self.setup_code

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int], config: Any = None) -> list[int]:
        self.preferred.append("" if config is None else config.preferred_segment)
        pieces = zip(keys, pointers, sizes, strict=True)
        return [self._answer("put", key, partial(self._put, key, pointer, size)) for key, pointer, size in pieces]

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        pieces = zip(keys, pointers, sizes, strict=True)
        return [self._answer("get", key, partial(self._get, key, pointer, size)) for key, pointer, size in pieces]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self._answer("probe", key, partial(int, key in self.values)) for key in keys]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        return [self._answer("remove", key, partial(self._remove, key)) for key in keys]

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:
        assert force
        gone = [key for key in self.values if re.search(regex_pattern, key)]
        return self._answer("remove", regex_pattern, lambda: len([self.values.pop(key) for key in gone]))

    def register_buffer(self, pointer: int, size: int) -> int:
        self.buffers[pointer] = size
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        del self.buffers[pointer]
        return 0

    def close(self) -> int:
        self.closes += 1
        return 0

    def _answer(self, call: str, key: str, work: Callable[[], int]) -> int:
        self.calls.append((call, key))
        codes = self.codes.get(call)
        return codes.pop(0) if codes else work()

    def _put(self, key: str, pointer: int, size: int) -> int:
        self.values.setdefault(key, ctypes.string_at(pointer, size))
        return 0

    def _get(self, key: str, pointer: int, size: int) -> int:
        if key not in self.values:
            return -704
        ctypes.memmove(pointer, self.values[key], size)
        return len(self.values[key])

    def _remove(self, key: str) -> int:
        return 0 if self.values.pop(key, None) is not None else -704


@pytest.fixture
def memory_client() -> MemoryClient:
    return MemoryClient()


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Callable[..., list[dict[str, Any]]]:
    """What akv said, as mappings: `events("akv.pool.open")`."""
    caplog.set_level(logging.DEBUG, "akv")

    def of(name: str, **fields: object) -> list[dict[str, Any]]:
        said = [record.__dict__["akv_fields"] for record in caplog.records if getattr(record, "akv_event", "") == name]
        return [one for one in said if fields.items() <= one.items()]

    return of


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in shared memory, of this test alone."""
    with TemporaryDirectory(prefix="akv-test-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def memory() -> Callable[..., Memory]:
    return Memory


@pytest.fixture(scope="session")
def master() -> Iterator[str]:
    """The address of a healthy master, "host:port"."""
    with running_master() as (address, _):
        yield address


@pytest.fixture
def own_master() -> Iterator[tuple[str, int]]:
    """A master that a test may stop or kill: its address and its process id."""
    with running_master() as started:
        yield started


@pytest.fixture
def hasty_master() -> Iterator[str]:
    """The address of a master whose leases end after a millisecond."""
    with running_master("--default_kv_lease_ttl=1") as (address, _):
        yield address


@pytest.fixture
def brief_master() -> Iterator[str]:
    """The address of a master whose leases end after a second."""
    with running_master("--default_kv_lease_ttl=1000") as (address, _):
        yield address


@pytest.fixture(scope="session")
def pool(master: str) -> Iterator[MooncakePool]:
    """A client of it that lends 64 MiB."""
    made = set_up_store(StoreSettings(master_address=master, segment_bytes=64 << 20))
    PROCESS_GUARD.hold(made)
    yield made
    made.close()
    PROCESS_GUARD.release(made)


@pytest.fixture(scope="session")
def begin_write(pool: MooncakePool) -> Callable[[str], None]:
    """Begin to write a key and never finish: a put session of the client, which akv does not use."""

    def begin(key: str) -> None:
        client: Any = pool._client
        assert client.batch_put_session_start([key], [100]) == [0]

    return begin


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
        # A pool of an earlier test has set what the store's client reads, which a child would take for its operator's own.
        own = {name: value for name, value in os.environ.items() if name not in CLIENT_VARIABLES.values()}
        return subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False, env=own
        )

    return run


@pytest.fixture
def lender() -> Callable[..., AbstractContextManager[subprocess.Popen[str]]]:
    """Run a script beside the test, from its first line of output until its standard input is closed; it lends memory, say."""

    @contextmanager
    def run(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", script, *arguments]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline(), "it ended before it began"
            yield process
            process.stdin.close()

    return run
