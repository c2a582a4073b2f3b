"""Pages read straight from another process's segment on a real pool, and what the pool may do to them meanwhile (R1, R2)."""

import subprocess
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest

from akv.pool import RegisteredSegments
from akv.settings import StoreSettings

pytestmark = [pytest.mark.mooncake, pytest.mark.anyio]

Lending = Callable[..., AbstractContextManager["subprocess.Popen[str]"]]
Serving = Callable[..., AbstractAsyncContextManager[Any]]
MIB = 1 << 20


@pytest.mark.parametrize("kind", ["memfd", "file"])
async def test_R1_R4_pages_of_another_process_are_read_from_its_memory_without_a_get(
    kind: str, own_master: tuple[str, int], lending: Lending, serving: Serving
) -> None:
    with lending(own_master[0], kind):
        async with serving(own_master[0]) as server:
            await server.save()
            await server.load_until_direct()
            moved = server.kv.pressure().reads
            assert (moved.segments, moved.segment_bytes) == (1, 32 * MIB)


async def test_R1_a_process_reads_its_own_segment_from_there_too(own_master: tuple[str, int], serving: Serving) -> None:
    async with serving(own_master[0], lends=32 * MIB) as server:
        await server.save()
        await server.load_until_direct()
        assert server.kv.pressure().reads.segments == 1


async def test_R4_R1_pages_that_no_process_of_this_host_shares_are_staged_in_one_load_with_the_others(
    own_master: tuple[str, int], lending: Lending, serving: Serving
) -> None:
    # Half of the prompt lies in private memory, as that of another host does.
    with lending(own_master[0], "private"), lending(own_master[0]):
        async with serving(own_master[0]) as server:
            await server.save()
            for _ in range(10):
                assert await server.load() == ""
                await anyio.sleep(0.05)
            reads = server.kv.pressure().reads
            assert reads.direct_pages
            assert reads.staged["not_shared"]


async def test_R2_a_region_that_is_used_again_behind_the_lease_gives_a_failed_load_and_no_wrong_byte(
    brief_master: str, lending: Lending, serving: Serving
) -> None:
    with lending(brief_master):
        async with serving(brief_master, lease_s=1.0, load_deadline_s=60.0) as server:
            await server.save()
            await server.load_until_direct()

            def evict() -> None:
                threading.Event().wait(1.2)
                server.fill()

            assert await server.during_a_copy(evict) == "lease_expired"
            assert server.copied_other_pages(), "other pages lay there when it copied"


async def test_R2_pages_that_were_removed_by_force_before_the_copy_give_a_failed_load(
    own_master: tuple[str, int], lending: Lending, serving: Serving
) -> None:
    with lending(own_master[0]):
        async with serving(own_master[0], load_deadline_s=60.0) as server:
            await server.save()
            await server.load_until_direct()

            def remove() -> None:
                server.pool.remove(server.pool.keys)
                assert server.fill()

            assert await server.during_a_copy(remove) == "moved"
            assert server.copied_other_pages(), "other pages lay there when it copied"


async def test_R2_pages_that_the_pool_moved_during_the_copy_give_a_failed_load(
    own_master: tuple[str, int], lending: Lending, serving: Serving, shm: Path
) -> None:
    with lending(own_master[0]), lending(own_master[0]):
        async with serving(own_master[0]) as server:
            await server.save()
            await server.load_until_direct()
            (before,) = server.pool.describe(server.pool.keys[:1])
            assert before is not None
            entries = RegisteredSegments(StoreSettings(shared_memory_dir=str(shm))).entries()
            away = sorted(entries, key=lambda entry: entry.endpoint == before.endpoint, reverse=True)

            def move() -> None:
                names = [Path(shm, f"{entry.owner_pid}.name").read_text() for entry in away]
                # The lease that the query granted holds up nobody who moves.
                client: Any = server.pool._client
                assert client.create_move_task(server.pool.keys[0], *names)[1] == 0
                while server.pool.describe(server.pool.keys[:1]) == [before]:
                    threading.Event().wait(0.05)

            assert await server.during_a_copy(move) == "moved"
            assert await server.load() == "", "it is read from its new place, or comes through the store"
