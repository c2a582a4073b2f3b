"""Pages read straight from another process's segment on a real pool, and what may happen to them meanwhile (R1 to R4)."""

import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import torch

import akv
from akv import Connector, LoadFailed
from akv.device import open_torch_device
from akv.pool import MooncakePool, RegisteredSegments, ThreadRunner, open_pool
from akv.ports import Ports
from akv.ports.calls import CallKind
from akv.ports.device import DeviceCopier
from akv.ports.pool import KeyState, PagePool
from akv.settings import Settings, StoreSettings
from akv.values.layout import LayerGroup, Layout, Region
from akv.values.requests import Scheduled
from akv.values.segments import Replica

pytestmark = [pytest.mark.mooncake, pytest.mark.anyio]

Lender = Callable[..., AbstractContextManager["subprocess.Popen[str]"]]
MIB = 1 << 20
BLOCKS, T = 24, 4
REGIONS = (192 << 10, 64 << 10)
PAGE = sum(REGIONS)
TOKENS = list(range(T * BLOCKS))

#: Arguments: the master's address, a directory in shared memory, the kind of memory. It lends 32 MiB until its input ends.
LENDER = """
import sys
import anyio
from akv.pool import open_pool
from akv.settings import Settings, StoreSettings

address, directory, kind = sys.argv[1:]
store = StoreSettings(master_address=address, segment_memory=kind, shared_memory_dir=directory, segment_bytes=32 << 20)

async def main():
    async with open_pool(Settings(model_key="m", store=store)):
        print("lent", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)

anyio.run(main)
"""


@pytest.fixture
def anyio_backend() -> str:
    """One loop: what is looked at are bytes."""
    return "asyncio"


class Held:
    """A device whose direct copies may be held on their threads, as a bus does that is busy for long."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def scatter(self, *arguments: Any) -> Any:
        self.begun.set()
        self.go_on.wait(30.0)
        return self._device.scatter(*arguments)


class Asked:
    """A pool, and the keys of its last query."""

    def __init__(self, pool: MooncakePool) -> None:
        self._pool = pool
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def describe(self, keys: Sequence[str]) -> Sequence[Replica | None]:
        self.keys = list(keys)
        return self._pool.describe(keys)


class Server:
    """A server that lends nothing, with `BLOCKS` pages of a prompt and room for as many, and a connector on the pool."""

    def __init__(self, kv: Connector, pool: Asked, device: Held, caches: list[torch.Tensor]) -> None:
        self.kv, self.pool, self.device, self.caches = kv, pool, device, caches
        self._loads = 0

    async def save(self) -> None:
        """Compute the prompt's pages, and wait until they are in the pool."""
        request = self.kv.open_request("save", TOKENS)
        plan = self.kv.plan_pass(
            [Scheduled(request=request, computed_before=0, tokens=len(TOKENS), pages=[list(range(BLOCKS))])]
        )
        await self.kv.after_forward(plan)
        request.finish()
        await request.finished()

    async def load(self) -> str:
        """Load them into other pages. Why that failed, or "", which says that the bytes are right; LOADED bytes always are."""
        for cache in self.caches:
            cache[BLOCKS:] = 1
        self._loads += 1
        request = self.kv.open_request(f"load{self._loads}", [*TOKENS, 1])
        offer = await request.lookup()
        load = request.reserve(offer, offer.tokens, [list(range(2 * BLOCKS - 1, BLOCKS - 1, -1))])
        failure = ""
        try:
            await load.wait()
        except LoadFailed as failed:
            failure = failed.reason
        await request.cancel()
        if failure:
            return failure
        count = offer.tokens // T
        assert count, "the pool has nothing"
        for cache in self.caches:
            assert torch.equal(cache[:count], cache[BLOCKS:].flip(0)[:count])
        return ""

    async def load_until_direct(self) -> None:
        """Until a load found its segment mapped."""
        with anyio.fail_after(20):
            while True:
                before = self.kv.pressure().reads.direct_pages
                assert await self.load() == ""
                if self.kv.pressure().reads.direct_pages - before == BLOCKS:
                    return
                await anyio.sleep(0.02)

    async def during_a_copy(self, happens: Callable[[], Any]) -> str:
        """Load, and let something happen while the copy is held, on a thread of its own."""
        self.device.begun.clear()
        self.device.go_on.clear()
        reason: list[str] = []

        async def load() -> None:
            reason.append(await self.load())

        async with anyio.create_task_group() as group:
            group.start_soon(load)
            assert await anyio.to_thread.run_sync(self.device.begun.wait, 10.0)
            await anyio.to_thread.run_sync(happens)
            self.device.go_on.set()
        return reason[0]


@asynccontextmanager
async def serving(address: str, shm: Path, **changed: Any) -> AsyncIterator[Server]:
    regions = tuple(Region(name=f"{index}", bytes_per_page=size) for index, size in enumerate(REGIONS))
    group = LayerGroup(layers=(0,), dtype="uint8", kv_heads=1, head_size=1, regions=regions)
    layout = Layout(tokens_per_block=T, groups=(group,))
    generator = torch.Generator().manual_seed(7)
    caches = [torch.randint(0, 256, (2 * BLOCKS, size), dtype=torch.uint8, generator=generator) for size in REGIONS]
    store = StoreSettings(master_address=address, shared_memory_dir=str(shm), segment_bytes=changed.pop("lends", 0))
    settings = Settings(model_key="direct", store=store, staging_buffer_bytes=64 * MIB, **changed)
    device = Held(open_torch_device(layout, [caches]))
    async with open_pool(settings) as mooncake:
        pool = Asked(mooncake)
        runner = ThreadRunner(dict.fromkeys(CallKind, 2))
        ports = Ports(
            pool=cast(PagePool, pool), device=cast(DeviceCopier, device), runner=runner, segments=RegisteredSegments(store)
        )
        async with akv.open_connector(settings, layout, [caches], ports=ports) as kv:
            yield Server(kv, pool, device, caches)
    device.close()


def fill(server: Server) -> int:
    """Put other pages into all of the memory, and have them protected, so that whatever else is there is evicted for them as
    soon as its lease has passed. Returns how many the pool took.
    """
    buffer = server.device.host_buffer(PAGE)
    buffer.view()[:] = b"\x77" * PAGE
    server.pool.register(buffer)
    taken = 0
    for number in range(4 * 32 * MIB // PAGE):
        key = f"akv-test/other-{threading.get_ident()}-{number}"
        (answer,) = server.pool.put([key], buffer, [0], [PAGE])
        taken += answer.state is KeyState.OK
        server.pool.probe([key])
        if answer.state is KeyState.NO_SPACE:
            threading.Event().wait(0.005)
    server.pool.unregister(buffer)
    return taken


@pytest.mark.parametrize("kind", ["memfd", "file"])
async def test_R1_R4_pages_of_another_process_are_read_from_its_memory_without_a_get(
    kind: str, own_master: tuple[str, int], lender: Lender, shm: Path
) -> None:
    with lender(LENDER, own_master[0], str(shm), kind):
        async with serving(own_master[0], shm) as server:
            await server.save()
            await server.load_until_direct()
            moved = server.kv.pressure().reads
            assert (moved.segments, moved.segment_bytes) == (1, 32 * MIB)


async def test_R1_a_process_reads_its_own_segment_from_there_too(own_master: tuple[str, int], shm: Path) -> None:
    async with serving(own_master[0], shm, lends=32 * MIB) as server:
        await server.save()
        await server.load_until_direct()
        assert server.kv.pressure().reads.segments == 1


async def test_R4_R1_pages_that_no_process_of_this_host_shares_are_staged_in_one_load_with_the_others(
    own_master: tuple[str, int], lender: Lender, shm: Path
) -> None:
    # Half of the prompt lies in private memory, as that of another host does.
    with lender(LENDER, own_master[0], str(shm), "private"), lender(LENDER, own_master[0], str(shm), "memfd"):
        async with serving(own_master[0], shm) as server:
            await server.save()
            for _ in range(10):
                assert await server.load() == ""
                await anyio.sleep(0.05)
            reads = server.kv.pressure().reads
            assert reads.direct_pages
            assert reads.staged["not_shared"]


async def test_R2_a_region_that_is_used_again_behind_the_lease_gives_a_failed_load_and_no_wrong_byte(
    brief_master: str, lender: Lender, shm: Path
) -> None:
    with lender(LENDER, brief_master, str(shm), "memfd"):
        async with serving(brief_master, shm, lease_s=1.0, load_deadline_s=60.0) as server:
            await server.save()
            await server.load_until_direct()

            def evict() -> None:
                threading.Event().wait(1.2)
                fill(server)

            assert await server.during_a_copy(evict) == "lease_expired"
            assert (server.caches[0][BLOCKS:] == 0x77).all(dim=1).any(), "other pages lay there when it copied"


async def test_R2_pages_that_were_removed_by_force_before_the_copy_give_a_failed_load(
    own_master: tuple[str, int], lender: Lender, shm: Path
) -> None:
    with lender(LENDER, own_master[0], str(shm), "memfd"):
        async with serving(own_master[0], shm, load_deadline_s=60.0) as server:
            await server.save()
            await server.load_until_direct()

            def remove() -> None:
                server.pool.remove(server.pool.keys)
                assert fill(server)

            assert await server.during_a_copy(remove) == "moved"
            assert (server.caches[0][BLOCKS:] == 0x77).all(dim=1).any(), "other pages lay there when it copied"


async def test_R3_an_owner_that_is_killed_while_its_pages_are_read_gives_right_bytes_or_a_failed_load(
    own_master: tuple[str, int], lender: Lender, shm: Path
) -> None:
    with lender(LENDER, own_master[0], str(shm), "memfd") as owner:
        async with serving(own_master[0], shm) as server:
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
            assert after.staged["owner_gone"] == BLOCKS


def segment_files(shm: Path) -> list[Path]:
    return list(shm.glob("*/*.segment"))


@pytest.mark.parametrize("to_bytes", [0, 32 * MIB])
async def test_R3_a_segment_file_that_somebody_shortens_is_an_error_and_no_crash(
    to_bytes: int, own_master: tuple[str, int], lender: Lender, shm: Path
) -> None:
    with lender(LENDER, own_master[0], str(shm), "file") as owner:
        async with serving(own_master[0], shm) as server:
            await server.save()
            await server.load_until_direct()
            (path,) = segment_files(shm)

            def shorten() -> None:
                os.truncate(path, 0)
                os.truncate(path, to_bytes)

            assert await server.during_a_copy(shorten) == ("segment_changed" if to_bytes else "copy_failed")
            # It would read beyond the file's end, which ends it; that is what others must not do with it.
            owner.kill()
            assert await server.load() != ""
            assert "refused" in server.kv.pressure().reads.staged
