"""Segments in shared memory on a real pool: another process reads them, own puts prefer them, they end with their owner."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest

from akv.errors import PoolError
from akv.pool import MooncakePool, embedded, open_pool, set_up_store
from akv.pool.register import lent_segments, open_segment, read_register, register_directory
from akv.ports.pool import KeyState
from akv.settings import Settings, StoreSettings
from akv_testing.processes import halt

pytestmark = [pytest.mark.mooncake, pytest.mark.anyio]

Lender = Callable[..., AbstractContextManager["subprocess.Popen[str]"]]
MIB = 1 << 20
PAGE = 64 << 10

#: Arguments: the master's address, a directory in shared memory, the kind of memory, how it ends, first key's number. It lends
#: 64 MiB in two segments, puts eight pages, prints a line, and ends as it is told when its standard input is closed.
LENDER = """
import os, signal, sys
import anyio
from akv.pool import open_pool
from akv.settings import Settings, StoreSettings
from akv_testing.memory import FakeHostBuffer

address, directory, kind, ending, first = sys.argv[1:]
PAGE = 64 << 10
sizes = {"segment_bytes": 64 << 20, "segment_file_bytes": 32 << 20}
store = StoreSettings(master_address=address, segment_memory=kind, shared_memory_dir=directory, **sizes)

async def main():
    async with open_pool(Settings(model_key="m", store=store)) as pool:
        buffer = FakeHostBuffer(8 * PAGE)
        numbers = range(int(first), int(first) + 8)
        for index, number in enumerate(numbers):
            buffer.view()[index * PAGE:(index + 1) * PAGE] = bytes([number]) * PAGE
        pool.register(buffer)
        offsets = [index * PAGE for index in range(8)]
        pool.put([f"akv-test/page{number}" for number in numbers], buffer, offsets, [PAGE] * 8)
        pool.unregister(buffer)
        print("lent", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
        if ending == "raise":
            raise ZeroDivisionError
        if ending == "exit":
            sys.exit(3)
        if ending == "unclean":
            # The master does not answer, so nothing is closed.
            os.kill(int(os.environ["MASTER"]), signal.SIGSTOP)

anyio.run(main)
"""


@pytest.fixture
def reader(own_master: tuple[str, int]) -> Iterator[MooncakePool]:
    """A client that lends nothing."""
    made = set_up_store(StoreSettings(master_address=own_master[0], segment_bytes=0))
    yield made
    made.close()


@pytest.fixture
def anyio_backend() -> str:
    """One loop is enough here: tests/pool/test_segments.py has the others."""
    return "asyncio"


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def keys(first: int = 0) -> list[str]:
    return [f"akv-test/page{number}" for number in range(first, first + 8)]


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_R3_R4_another_process_gets_pages_from_such_segments_and_finds_their_bytes_where_the_pool_says(
    kind: str, own_master: tuple[str, int], reader: MooncakePool, lender: Lender, shm: Path, memory: Callable[[int], Any]
) -> None:
    store = StoreSettings(shared_memory_dir=str(shm))
    with lender(LENDER, own_master[0], str(shm), kind, "return", "0") as process:
        entries = lent_segments(store)
        assert [(entry.owner_pid, entry.size) for entry in entries] == [(process.pid, 32 * MIB)] * 2
        buffer = memory(8 * PAGE)
        reader.register(buffer)
        answers = reader.get(keys(), buffer, [index * PAGE for index in range(8)], [PAGE] * 8)
        assert [answer.state for answer in answers] == [KeyState.OK] * 8
        for number, replica in enumerate(reader.describe(keys())):
            assert replica is not None
            assert (replica.size, replica.complete) == (PAGE, True)
            (entry,) = [
                entry
                for entry in entries
                if entry.endpoint == replica.endpoint and 0 <= replica.address - entry.base <= entry.size - PAGE
            ]
            descriptor = open_segment(entry)
            assert os.pread(descriptor, PAGE, replica.address - entry.base) == bytes([number]) * PAGE
            os.close(descriptor)
            assert bytes(buffer.view()[number * PAGE : (number + 1) * PAGE]) == bytes([number]) * PAGE
        reader.unregister(buffer)
        assert reader.describe(["akv-test/none"]) == [None]
    assert lent_segments(store) == []
    assert list(register_directory(store).iterdir()) == []


def test_R5_each_process_puts_into_its_own_segments(
    own_master: tuple[str, int], reader: MooncakePool, lender: Lender, shm: Path
) -> None:
    store = StoreSettings(shared_memory_dir=str(shm))
    address = own_master[0]
    with (
        lender(LENDER, address, str(shm), "memfd", "return", "0") as one,
        lender(LENDER, address, str(shm), "memfd", "return", "8") as two,
    ):
        endpoints = {entry.owner_pid: entry.endpoint for entry in lent_segments(store)}
        assert len(set(endpoints.values())) == 2
        for process, first in ((one, 0), (two, 8)):
            replicas = reader.describe(keys(first))
            assert {replica and replica.endpoint for replica in replicas} == {endpoints[process.pid]}


async def test_R5_when_the_own_segments_are_full_values_go_to_others(
    own_master: tuple[str, int], lender: Lender, shm: Path, memory: Callable[[int], Any]
) -> None:
    address, size = own_master[0], MIB
    with lender(LENDER, address, str(shm), "memfd", "return", "0") as other:
        store = StoreSettings(master_address=address, segment_bytes=16 * MIB, shared_memory_dir=str(shm))
        async with open_pool(Settings(model_key="m", store=store)) as pool:
            endpoints = {entry.owner_pid: entry.endpoint for entry in lent_segments(store)}
            buffer = memory(size)
            pool.register(buffer)
            names = [f"akv-test/full{number}" for number in range(24)]
            for name in names:
                assert pool.put([name], buffer, [0], [size])[0].state is KeyState.OK
            went = [replica.endpoint for replica in pool.describe(names) if replica is not None]
            pool.unregister(buffer)
    assert went[:15] == [endpoints[os.getpid()]] * 15
    assert set(went[16:]) == {endpoints[other.pid]}


@pytest.mark.parametrize("kind", ["memfd", "file"])
@pytest.mark.parametrize("ending", ["return", "raise", "exit", "unclean"])
def test_R3_an_owner_that_ends_by_itself_leaves_nothing(
    ending: str, kind: str, own_master: tuple[str, int], lender: Lender, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = register_directory(StoreSettings(shared_memory_dir=str(shm)))
    monkeypatch.setenv("MASTER", str(own_master[1]))
    try:
        with lender(LENDER, own_master[0], str(shm), kind, ending, "0") as process:
            assert len(list(directory.iterdir())) == (4 if kind == "file" else 2)
        assert process.returncode == {"return": 0, "raise": 1, "exit": 3, "unclean": 0}[ending]
    finally:
        os.kill(own_master[1], signal.SIGCONT)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("kind", ["memfd", "file"])
async def test_R3_the_segments_of_an_owner_that_was_killed_are_used_no_more_and_removed_by_the_next_start(
    kind: str, own_master: tuple[str, int], lender: Lender, shm: Path
) -> None:
    store = StoreSettings(master_address=own_master[0], segment_bytes=16 * MIB, shared_memory_dir=str(shm))
    directory = register_directory(store)
    with lender(LENDER, own_master[0], str(shm), kind, "return", "0") as process:
        (first, _) = lent_segments(store)
        descriptor = open_segment(first)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert lent_segments(store) == []
    # Whoever had it open reads on; it is the lease that says how long that is of use.
    assert len(os.pread(descriptor, PAGE, 0)) == PAGE
    os.close(descriptor)
    assert len(read_register(directory).stale) == 2
    async with open_pool(Settings(model_key="m", store=store)):
        assert [entry.owner_pid for entry in lent_segments(store)] == [os.getpid()]
        assert len(names_in(directory)) == 1
    assert names_in(directory) == []


async def test_a_named_file_needs_more_than_shared_memory_has(own_master: tuple[str, int], shm: Path) -> None:
    system = os.statvfs(shm)
    size = system.f_blocks * system.f_frsize + MIB
    store = StoreSettings(master_address=own_master[0], segment_bytes=size, segment_memory="file", shared_memory_dir=str(shm))
    with pytest.raises(PoolError, match=rf"{size} bytes.*bytes are free"):
        async with open_pool(Settings(model_key="m", store=store)):
            pytest.fail("it does not fit")
    assert names_in(register_directory(store)) == []


async def test_O7_a_master_that_was_started_again_is_told_of_the_same_segments(
    own_master: tuple[str, int], shm: Path, memory: Callable[[int], Any]
) -> None:
    address, pid = own_master
    store = StoreSettings(master_address=address, segment_bytes=32 * MIB, segment_memory="file", shared_memory_dir=str(shm))
    async with open_pool(Settings(model_key="m", store=store)) as pool:
        before = lent_segments(store)
        buffer = memory(PAGE)
        pool.register(buffer)
        halt(pid, signal.SIGKILL)
        port = int(address.rpartition(":")[2])
        command = embedded.watched_command(embedded.find_master(), port, embedded.free_ports(1)[0])
        async with await anyio.open_process(command, stdin=subprocess.PIPE, stdout=None, stderr=None) as again:
            with anyio.fail_after(30):
                while (await anyio.to_thread.run_sync(pool.put, ["a"], buffer, [0], [PAGE]))[0].state is not KeyState.OK:
                    pass
            (replica,) = pool.describe(["a"])
            pool.unregister(buffer)
            assert replica is not None
            assert lent_segments(store) == before
            assert replica.endpoint == before[0].endpoint
            assert before[0].base <= replica.address < before[0].base + before[0].size
            again.kill()


async def test_R3_saves_into_touched_memory_do_not_wait_for_the_kernel(
    own_master: tuple[str, int], shm: Path, memory: Callable[[int], Any], record_property: Callable[[str, object], None]
) -> None:
    """No bound: figures of a busy machine are noise. They are recorded for whoever looks."""
    count, size = 24, MIB
    speeds = {}
    for kind in ("memfd", "private"):
        store = StoreSettings(
            master_address=own_master[0], segment_bytes=64 * MIB, segment_memory=kind, shared_memory_dir=str(shm)
        )
        async with open_pool(Settings(model_key="m", store=store)) as pool:
            with anyio.fail_after(20):
                while pool.lent and pool.lent.untouched_bytes:  # noqa: ASYNC110 - a thread makes the progress
                    await anyio.sleep(0.01)
            buffer = memory(size)
            pool.register(buffer)
            began = time.perf_counter()
            for number in range(count):
                pool.put([f"akv-test/{kind}{number}"], buffer, [0], [size])
            speeds[kind] = count * size / (time.perf_counter() - began) / 1e9
            pool.unregister(buffer)
    for kind, speed in speeds.items():
        record_property(f"put_{kind}_gb_per_s", round(speed, 2))
    assert len(speeds) == 2
