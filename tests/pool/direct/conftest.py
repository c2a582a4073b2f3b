"""A server on a real pool that reads pages from other processes' segments, and processes that lend such."""

import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import partial
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

MIB = 1 << 20
#: Every device of this machine.
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]
BLOCKS, T = 24, 4
REGIONS = (192 << 10, 64 << 10)
PAGE = sum(REGIONS)
TOKENS = list(range(T * BLOCKS))

#: Arguments: the master's address, a directory in shared memory, the kind of memory. It lends 32 MiB until its input ends.
LENDER = """
import os, sys
from pathlib import Path
import anyio
from akv.pool import open_pool
from akv.settings import Settings, StoreSettings

address, directory, kind = sys.argv[1:]
store = StoreSettings(master_address=address, segment_memory=kind, shared_memory_dir=directory, segment_bytes=32 << 20)

async def main():
    async with open_pool(Settings(model_key="m", store=store)) as pool:
        # How the master calls what it lends, which is not how descriptors do.
        Path(directory, f"{os.getpid()}.name").write_text(pool._client.get_hostname())
        print("lent", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)

anyio.run(main)
"""

#: The proof of the data path lasts until the master has forgotten a dead process; what happens before that is looked at.
UNPROVEN = """
import akv.pool
async def nothing(*arguments):
    return "unproven"
akv.pool.prove_data_path = nothing
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

    def scatter_from(self, *arguments: Any) -> Any:
        self.begun.set()
        self.go_on.wait(30.0)
        return self._device.scatter_from(*arguments)


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

    blocks = BLOCKS

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

    def fill(self) -> int:
        """Put other pages into all of the memory, and have them protected, so that whatever else is there is evicted for
        them as soon as its lease has passed. Returns how many the pool took.
        """
        buffer = self.device.host_buffer(PAGE)
        buffer.view()[:] = b"\x77" * PAGE
        self.pool.register(buffer)
        taken = 0
        for number in range(4 * 32 * MIB // PAGE):
            key = f"akv-test/other-{threading.get_ident()}-{number}"
            (answer,) = self.pool.put([key], buffer, [0], [PAGE])
            taken += answer.state is KeyState.OK
            self.pool.probe([key])
            if answer.state is KeyState.NO_SPACE:
                threading.Event().wait(0.005)
        self.pool.unregister(buffer)
        return taken

    def copied_other_pages(self) -> bool:
        """Whether the last load copied bytes that `fill` had put."""
        return bool((self.caches[0][BLOCKS:] == 0x77).all(dim=1).any())


@asynccontextmanager
async def _serving(shm: Path, device_type: str, address: str, **changed: Any) -> AsyncIterator[Server]:
    regions = tuple(Region(name=f"{index}", bytes_per_page=size) for index, size in enumerate(REGIONS))
    group = LayerGroup(layers=(0,), dtype="uint8", kv_heads=1, head_size=1, regions=regions)
    layout = Layout(tokens_per_block=T, groups=(group,))
    generator = torch.Generator().manual_seed(7)
    caches = [
        torch.randint(0, 256, (2 * BLOCKS, size), dtype=torch.uint8, generator=generator).to(device_type) for size in REGIONS
    ]
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


@pytest.fixture(params=DEVICES)
def serving(shm: Path, request: pytest.FixtureRequest) -> Callable[..., AbstractAsyncContextManager[Server]]:
    """`serving(address)`: a server on the pool of that master, with settings that differ, if any; `lends`: bytes."""
    return partial(_serving, shm, request.param)


@pytest.fixture
def lending(
    shm: Path, lender: Callable[..., AbstractContextManager["subprocess.Popen[str]"]]
) -> Callable[..., AbstractContextManager["subprocess.Popen[str]"]]:
    """`lending(address, kind)`: another process that lends 32 MiB. `proven`: it looks whether it can reach the pool first."""

    def lend(address: str, kind: str = "memfd", *, proven: bool = True) -> AbstractContextManager["subprocess.Popen[str]"]:
        return lender(LENDER if proven else UNPROVEN + LENDER, address, str(shm), kind)

    return lend
