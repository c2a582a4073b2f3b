"""Processes that lend segments on a real pool, and end, come back, or are lied about while pages are read (R3, R4, X5)."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from akv.pool import RegisteredSegments
from akv.pool.register import publish, register_directory
from akv.settings import StoreSettings
from akv.values.segments import SegmentEntry
from akv_testing.master import running_master

pytestmark = [pytest.mark.mooncake, pytest.mark.anyio]

Lending = Callable[..., AbstractContextManager["subprocess.Popen[str]"]]
Serving = Callable[..., AbstractAsyncContextManager[Any]]
MIB = 1 << 20


async def test_R3_an_owner_that_is_killed_while_its_pages_are_read_gives_right_bytes_or_a_failed_load(
    own_master: tuple[str, int], lending: Lending, serving: Serving
) -> None:
    with lending(own_master[0]) as owner:
        async with serving(own_master[0]) as server:
            await server.save()
            await server.load_until_direct()

            def kill() -> None:
                os.kill(owner.pid, signal.SIGKILL)
                owner.wait(10.0)

            # `load` compares the bytes where it says "".
            assert await server.during_a_copy(kill) in {"", "segment_changed"}
            before = server.kv.pressure().reads
            assert await server.load() != "", "nobody has them any more"
            after = server.kv.pressure().reads
            assert after.direct_pages == before.direct_pages
            assert after.staged["owner_gone"] == server.blocks


#: What an entry may say in the place of the truth.
LIES: dict[str, Callable[[SegmentEntry], Any]] = {
    "base": lambda honest: honest.base + 4096,
    "size": lambda honest: honest.size - 4096,
    "uid": lambda honest: honest.uid + 1,
    "owner_started": lambda honest: honest.owner_started + 1,
    "path": lambda honest: f"/proc/{os.getpid()}/fd/0",
}


async def test_X5_R4_what_a_register_says_that_lies_is_not_believed_before_or_after_it_was_mapped(
    own_master: tuple[str, int], lending: Lending, serving: Serving, shm: Path
) -> None:
    store = StoreSettings(shared_memory_dir=str(shm))
    directory = register_directory(store)
    with lending(own_master[0]):
        (honest,) = RegisteredSegments(store).entries()
        lies = [msgspec.structs.replace(honest, **{field: lie(honest)}) for field, lie in LIES.items()]
        publish(directory, lies[0])
        async with serving(own_master[0]) as server:
            await server.save()
            for lie in lies:
                publish(directory, lie)
                for _ in range(2):
                    # The register is read again once a second. `load` compares bytes.
                    assert await server.load() == ""
                    await anyio.sleep(0.6)
            assert server.kv.pressure().reads.direct_pages == 0
            for lie in (lies[0], lies[1]):
                publish(directory, honest)
                await server.load_until_direct()
                publish(directory, lie)
                with anyio.fail_after(20):
                    while server.kv.pressure().reads.segments:
                        assert await server.load() == ""
                        await anyio.sleep(0.1)


@pytest.fixture
def slow_master() -> Iterator[str]:
    """A master that counts a process among the living for a minute after it has died, and not for ten seconds."""
    with running_master("--client_ttl=60") as (address, _):
        yield address


async def test_R4_an_owner_that_comes_back_under_its_name_at_other_addresses_is_not_read_at_the_old_ones(
    slow_master: str, lending: Lending, serving: Serving, shm: Path
) -> None:
    store = StoreSettings(shared_memory_dir=str(shm))
    with lending(slow_master) as first:
        async with serving(slow_master) as server:
            await server.save()
            await server.load_until_direct()
        (before,) = RegisteredSegments(store).entries()
        first.kill()
        first.wait(10.0)
    with lending(slow_master, proven=False):
        (after,) = RegisteredSegments(store).entries()
        # As with a metadata server, where a process has the name that its settings say.
        publish(register_directory(store), msgspec.structs.replace(after, endpoint=before.endpoint))
        assert not before.base <= after.base < before.base + before.size
        async with serving(slow_master) as server:
            # The master names the old addresses yet.
            assert await server.load() == "holder_lost"
            reads = server.kv.pressure().reads
            assert reads.direct_pages == 0
            # The latter where the segment was not mapped yet, since pinning takes longer.
            assert reads.staged
            assert reads.staged.keys() <= {"not_shared", "no_segment"}


def segment_files(shm: Path) -> list[Path]:
    return list(shm.glob("*/*.segment"))


@pytest.mark.parametrize("to_bytes", [0, 32 * MIB])
async def test_R3_a_segment_file_that_somebody_shortens_is_an_error_and_no_crash(
    to_bytes: int, own_master: tuple[str, int], lending: Lending, serving: Serving, shm: Path
) -> None:
    with lending(own_master[0], "file") as owner:
        async with serving(own_master[0]) as server:
            await server.save()
            await server.load_until_direct()
            (path,) = segment_files(shm)

            def shorten() -> None:
                os.truncate(path, 0)
                os.truncate(path, to_bytes)

            # What is pinned for CUDA stays where it is, and is read: other pages may have been written into the file instead.
            read_on = to_bytes or server.caches[0].is_cuda
            assert await server.during_a_copy(shorten) == ("segment_changed" if read_on else "copy_failed")
            # It would read beyond the file's end, which ends it; that is what others must not do with it.
            owner.kill()
            assert await server.load() != ""
            assert "refused" in server.kv.pressure().reads.staged
