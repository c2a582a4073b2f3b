"""The two races, on hardware: kernels that overwrite window pages right after their pass, and kernels of a page's former owner
that still run while a load is about to fill it. With akv's orders every page from the pool is right, in each of many runs.
Without one of them, taken away here and nowhere in the product, pages are wrong: so the races are there, and the orders hold.

Kernels are made long enough that a copy which waits for nothing always comes too early, or too late.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from akv import EngineCapabilities, Settings, open_connector
from akv.connector import Connector
from akv.device import open_torch_device
from akv.device.streams import TorchEvent
from akv.device.torch_copier import TorchCopier
from akv.plan.window import load_blocks
from akv.pool import ThreadRunner
from akv.ports import Ports
from akv.ports.calls import CallKind
from akv.ports.device import CopyStream, DeviceSlots, HostBuffer, PassEvent, Source
from akv.values.layout import LayerGroup, Layout, Region
from akv.values.requests import Scheduled
from akv_testing.pool import FakePool
from akv_testing.store import FakeStore

pytestmark = [pytest.mark.anyio, pytest.mark.cuda, pytest.mark.timeout(120)]

RUNS = 100
TOKENS_PER_BLOCK = 4
#: Blocks of a prompt that the chain holds.
BLOCKS = 12
WINDOW_TOKENS = 24
#: Bytes of a page in each of a group's regions.
REGION_BYTES = 16 << 10
REGIONS = 3
#: Cycles of a kernel that holds a stream for 5 to 10 ms: longer than all that a load or a save asks of the host.
BUSY_CYCLES = 10_000_000

GROUPS = (0, WINDOW_TOKENS)


@pytest.fixture
def anyio_backend() -> str:
    """One loop: what races are kernels and copies."""
    return "asyncio"


def layout() -> Layout:
    return Layout(
        tokens_per_block=TOKENS_PER_BLOCK,
        groups=tuple(
            LayerGroup(
                layers=(index,),
                attention="sliding_window" if window else "full",
                window_tokens=window,
                dtype="uint8",
                kv_heads=1,
                head_size=1,
                regions=tuple(Region(name=f"{index}.{part}", bytes_per_page=REGION_BYTES) for part in range(REGIONS)),
            )
            for index, window in enumerate(GROUPS)
        ),
    )


class Careless:
    """The device with one of its orders taken away, and with side streams that are busy when they are asked."""

    def __init__(self, copier: TorchCopier, *, snapshots: bool, fences: bool) -> None:
        self._copier = copier
        self._snapshots = snapshots
        self._fences = fences

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def snapshot(
        self,
        stream: Any,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        via: DeviceSlots | None,
    ) -> PassEvent:
        with torch.cuda.stream(stream.cuda):
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        if self._snapshots:
            return self._copier.snapshot(stream, group, pages, buffer, offsets, via)
        # Read live, behind the pass, as pages of full attention are: they stay as they are until their saves ended.
        return self._copier.gather(stream, group, pages, buffer, offsets, self._copier.record())

    def scatter(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
    ) -> PassEvent:
        return self._copier.scatter(stream, group, pages, buffer, offsets, after if self._fences else TorchEvent())

    def scatter_from(self, stream: CopyStream, group: int, sources: Sequence[Source], after: PassEvent) -> PassEvent:
        return self._copier.scatter_from(stream, group, sources, after if self._fences else TorchEvent())


class Engine:
    """Pages whose right bytes follow from the prompt, and kernels that write and read them on one stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        pages = 2 * (BLOCKS + 1)
        self.caches = [
            [torch.zeros(pages, REGION_BYTES, dtype=torch.uint8, device="cuda") for _ in range(REGIONS)] for _ in GROUPS
        ]
        generator = np.random.default_rng(11)
        self._noise = torch.from_numpy(generator.integers(0, 256, (64 << 20,), dtype=np.uint8)).to("cuda")
        torch.cuda.synchronize()

    def right(self, prompt: int, group: int, block: int, region: int) -> torch.Tensor:
        """What a page of a block holds: bytes that no other block of any prompt has."""
        number = ((prompt * len(GROUPS) + group) * BLOCKS + block) * REGIONS + region
        begin = number * 4099 % (self._noise.numel() - REGION_BYTES)
        return self._noise[begin : begin + REGION_BYTES]

    def forward(self, prompt: int, tables: Sequence[Sequence[int]]) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(BUSY_CYCLES // 4)  # type: ignore[no-untyped-call]
            for group, table in enumerate(tables):
                for block, page in enumerate(table[:BLOCKS]):
                    for region, cache in enumerate(self.caches[group]):
                        cache[page].copy_(self.right(prompt, group, block, region))

    def overwrite(self, group: int, pages: Sequence[int], byte: int, *, after_cycles: int = 0) -> None:
        """A kernel that writes into pages; with `after_cycles` one that takes that long to come to it."""
        with torch.cuda.stream(self.stream):
            if after_cycles:
                torch.cuda._sleep(after_cycles)  # type: ignore[no-untyped-call]
            for cache in self.caches[group]:
                cache[pages[0] : pages[-1] + 1].fill_(byte)

    def read(self, group: int, pages: Sequence[int]) -> list[torch.Tensor]:
        """A kernel that reads adjacent pages."""
        with torch.cuda.stream(self.stream):
            return [cache[pages[0] : pages[-1] + 1].clone() for cache in self.caches[group]]

    def wrong_pages(self, prompt: int, tables: Sequence[Sequence[int]], blocks: int) -> int:
        """Loaded pages of the first blocks that a kernel queued now would find wrong."""
        wrong = 0
        with torch.cuda.stream(self.stream):
            for group, window in enumerate(GROUPS):
                for loaded in load_blocks(0, blocks, window, 0, TOKENS_PER_BLOCK):
                    for block in loaded:
                        held = [
                            torch.equal(cache[tables[group][block]], self.right(prompt, group, block, region))
                            for region, cache in enumerate(self.caches[group])
                        ]
                        wrong += not all(held)
        return wrong


class Counts:
    """Runs in which something was wrong."""

    def __init__(self) -> None:
        self.loaded_wrong = 0
        self.owner_saw_wrong = 0
        self.pages_wrong = 0


async def race(*, snapshots: bool, fences: bool) -> Counts:
    """Prompts that are computed, saved, and loaded into pages which a kernel of another request is still using."""
    engine, counts = Engine(), Counts()
    copier = open_torch_device(layout(), engine.caches, engine.stream)
    ports = Ports(
        pool=FakePool(FakeStore(time.monotonic)),
        device=Careless(copier, snapshots=snapshots, fences=fences),
        runner=ThreadRunner({CallKind.PROBE: 2, CallKind.GET: 2}),
    )
    settings = Settings(model_key="races", pool="embedded", staging_buffer_bytes=64 << 20, rewind_tokens=0)
    capabilities = EngineCapabilities(window_retention_tokens=WINDOW_TOKENS)
    async with open_connector(settings, layout(), ports=ports, capabilities=capabilities) as kv:
        for prompt in range(RUNS):
            await one_prompt(kv, engine, prompt, counts)
    copier.close()
    return counts


async def one_prompt(kv: Connector, engine: Engine, prompt: int, counts: Counts) -> None:
    tokens = [prompt, *range(BLOCKS * TOKENS_PER_BLOCK)]
    first, second = list(range(BLOCKS + 1)), list(range(BLOCKS + 1, 2 * (BLOCKS + 1)))
    request = kv.open_request(f"{prompt} computed", tokens)
    await request.lookup()
    plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=len(tokens), pages=[first, first])])
    engine.forward(prompt, [first, first])
    await kv.after_forward(plan)
    engine.overwrite(1, first, 0xEE)  # the next pass: the window's pages are somebody else's now
    await request.finished()

    engine.overwrite(0, second, 0x11)
    engine.overwrite(1, second, 0x11)
    with torch.cuda.stream(engine.stream):
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    # The last kernels of the pages' former owner: queued, and far from run. It still reads what it wrote, and writes again.
    seen = [engine.read(group, second) for group in range(len(GROUPS))]
    for group in range(len(GROUPS)):
        engine.overwrite(group, second, 0x22)
    request = kv.open_request(f"{prompt} loaded", tokens)
    offer = await request.lookup()
    assert offer.tokens == BLOCKS * TOKENS_PER_BLOCK
    await request.reserve(offer, offer.tokens, [second, second]).wait()
    wrong = engine.wrong_pages(prompt, [second, second], BLOCKS)
    counts.pages_wrong += wrong
    counts.loaded_wrong += wrong > 0
    counts.owner_saw_wrong += not all(bool(part.eq(0x11).all()) for parts in seen for part in parts)
    await request.cancel()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print past pytest: the counts are what these tests are for."""

    def told(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n    {text}")

    return told


async def test_S3_M5_D5_M4_with_every_order_each_page_from_the_pool_is_right_in_every_run(say: Callable[[str], None]) -> None:
    counts = await race(snapshots=True, fences=True)
    say(f"every order kept: {counts.loaded_wrong} of {RUNS} runs loaded wrong pages")
    assert (counts.loaded_wrong, counts.owner_saw_wrong, counts.pages_wrong) == (0, 0, 0)


async def test_S3_M5_without_the_snapshot_the_next_pass_is_what_is_stored(say: Callable[[str], None]) -> None:
    counts = await race(snapshots=False, fences=True)
    say(f"window pages read behind the pass: {counts.loaded_wrong} of {RUNS} runs wrong, {counts.pages_wrong} pages")
    assert counts.loaded_wrong > 0
    assert counts.owner_saw_wrong == 0


async def test_D5_M4_without_the_fence_loads_and_the_former_owner_destroy_each_others_pages(
    say: Callable[[str], None],
) -> None:
    counts = await race(snapshots=True, fences=False)
    say(
        f"no allocation fence: {counts.loaded_wrong} of {RUNS} runs wrong, {counts.pages_wrong} pages; "
        f"in {counts.owner_saw_wrong} the former owner read pages of the load"
    )
    assert counts.loaded_wrong > 0
    assert counts.owner_saw_wrong > 0


async def test_the_poller_waits_for_real_events_without_holding_the_loop() -> None:
    """A loop that is asked for every millisecond stays free while a load waits for 0.2 s of kernels before its fence."""
    engine = Engine()
    copier = open_torch_device(layout(), engine.caches, engine.stream)
    pool = FakePool(FakeStore(time.monotonic))
    ports = Ports(pool=pool, device=copier, runner=ThreadRunner({CallKind.PROBE: 2, CallKind.GET: 2}))
    settings = Settings(model_key="races", pool="embedded", staging_buffer_bytes=64 << 20, rewind_tokens=0)
    capabilities = EngineCapabilities(window_retention_tokens=WINDOW_TOKENS)
    late: list[float] = []

    async def ticks() -> None:
        while True:
            began = time.perf_counter()
            await anyio.sleep(0.002)
            late.append(time.perf_counter() - began - 0.002)

    async with open_connector(settings, layout(), ports=ports, capabilities=capabilities) as kv:
        await one_prompt(kv, engine, 0, Counts())  # loads kernels, which waits for the device
        tokens, pages = [0, *range(BLOCKS * TOKENS_PER_BLOCK)], list(range(BLOCKS + 1))
        request = kv.open_request("again", tokens)
        offer = await request.lookup()
        async with anyio.create_task_group() as group:
            group.start_soon(ticks)
            await anyio.sleep(0.01)
            with torch.cuda.stream(engine.stream):
                torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
            fence = copier.record()
            began = time.perf_counter()
            await request.reserve(offer, offer.tokens, [pages, pages]).wait()
            took = time.perf_counter() - began
            assert fence.query(), "the load ended behind its fence"
            group.cancel_scope.cancel()
        assert took > 0.1
        assert engine.wrong_pages(0, [pages, pages], BLOCKS) == 0
        await request.cancel()
    assert len(late) > took / 0.002 / 4
    assert sorted(late)[len(late) // 2] < 0.005
