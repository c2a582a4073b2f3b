"""`akv bench soak`: thousands of requests at random on a real store, cancelled wherever they stand. At the end all is to
be as it was: slots, places, pages, threads, descriptors, memory; and no page of a load was wrong.

An embedded pool with little memory, so that it evicts all the time; the engine's pages lie in host memory. Figures are taken
behind a warm-up, which fills every cache, and at the end, each time with nothing under way.
"""

import gc
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
import numpy as np

from akv import EngineCapabilities, Ports, Settings, StoreSettings, open_connector
from akv.connector import Connector
from akv.pool import MooncakePool, ThreadRunner, open_pool
from akv.ports.calls import CallKind
from akv.ports.device import HostBuffer

if TYPE_CHECKING:
    from akv_testing.engine import EngineConfig, Pages
    from akv_testing.soak import Soak

#: Requests at a time.
AT_A_TIME = 24
#: Seconds that a request takes, about.
MOMENT_S = 0.04
#: Memory of the pool. Its pages are 4 KiB each, so it holds fewer blocks than ten thousand requests compute.
SEGMENT_BYTES = 64 * 1024**2
#: What memory may grow by, of what it was.
MOST_GROWTH = 0.05
#: Threads that the bare client starts late, once in a process; and connections to the master that it opens when calls come
#: together, and drops when they were idle for a while.
CLIENT_THREADS, CLIENT_CONNECTIONS = 1, 2
#: Seconds for what was given up to return, and for threads that are idle to end.
SETTLE_S = 20.0
TOKENS_PER_BLOCK = 16
GROUPS = 2
#: Bytes of a page, in each group: what `engine_config()` comes to.
PAGE_BYTES = 4096
#: Keys of one put while the pool is filled, and how many puts run at a time then.
_FILL, _FILLERS = 256, 8


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What the process and the connector hold with nothing under way."""

    #: Threads that make store calls: each is started when it is needed first, so there may be more of them later, up to
    #: the limits. Other threads of Python's, and those that the client started by itself.
    call_threads: int
    python_threads: int
    client_threads: int
    descriptors: int
    rss_bytes: int
    #: Slots of staging memory that are out of use, and places among the calls of all kinds that are taken.
    slots_out: int
    places_taken: int
    #: Calls, loads and saves that have not ended, and pages that the engine has not got back.
    calls: int
    loads: int
    saves: int
    pages_out: int


class SoakFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv bench soak --json` prints."""

    backend: str
    requests: int
    seconds: float
    #: How requests ended, and where those stood that were cut short.
    ended: dict[str, int]
    cut_short: dict[str, int]
    #: Pages of loads, and how many of them were wrong, or were written into after they had been given back.
    pages_compared: int
    page_mismatches: int
    before: Held
    after: Held
    #: Resident memory at the end, of what it was.
    rss_ratio: float
    #: What is not as it was. Empty, or the command's exit status is 1.
    failures: list[str]


class _CachePages:
    """The engine's pages as bytes: the regions of a page, in their order."""

    def __init__(self, pages: "Pages") -> None:
        self._regions = [[cache.numpy().view(np.uint8) for cache in group] for group in pages.caches]

    def write(self, group: int, page: int, content: bytes) -> None:
        at = 0
        for region in self._regions[group]:
            target = region[page].reshape(-1)
            target[:] = np.frombuffer(content, np.uint8, target.size, at)
            at += target.size

    def read(self, group: int, page: int) -> bytes:
        return b"".join(region[page].tobytes() for region in self._regions[group])


def engine_config(page_count: int, *, host_pages: bool) -> "EngineConfig":
    """Two layer groups with pages of `PAGE_BYTES`."""
    from akv_testing.engine import EngineConfig, ModelConfig  # noqa: PLC0415 - loads torch

    model = ModelConfig(layers=2, hidden=32, heads=2, kv_heads=2, head_size=16, intermediate=32)
    return EngineConfig(
        model=model,
        tokens_per_block=TOKENS_PER_BLOCK,
        pages=page_count,
        layer_groups=GROUPS,
        contiguous_pages=host_pages,
    )


def soak_settings() -> Settings:
    """Caches that a warm-up fills, a lease that lets the pool evict, and deadlines that a busy machine keeps."""
    return Settings(
        model_key="soak",
        pool="embedded",
        store=StoreSettings(segment_bytes=SEGMENT_BYTES),
        staging_buffer_bytes=4 * 1024**2,
        loaders=3,
        savers=2,
        lease_s=2.0,
        recent_chains_tokens=100_000,
        lookup_deadline_s=10.0,
        load_deadline_s=10.0,
    )


async def bench_soak(backend: str, requests: int, *, host_pages: bool, seed: int) -> SoakFigures:
    """Run; raises PoolError or DependencyError if there is no pool to run on."""
    from akv.device import open_torch_device  # noqa: PLC0415 - loads torch
    from akv_testing.engine import Pages  # noqa: PLC0415 - loads torch
    from akv_testing.soak import MOST_BLOCKS, Soak  # noqa: PLC0415 - for whoever runs this command

    settings = soak_settings()
    page_count = (AT_A_TIME + 8) * MOST_BLOCKS
    pages = Pages(engine_config(page_count, host_pages=host_pages))
    soak = Soak(pages.layout, _CachePages(pages), page_count, seed=seed, moment_s=MOMENT_S)
    runner = ThreadRunner(
        {
            CallKind.PROBE: settings.probe_concurrency,
            CallKind.GET: settings.loaders,
            CallKind.PUT: settings.savers,
            CallKind.COPY: settings.loaders + settings.savers,
        }
    )
    device = open_torch_device(pages.layout, pages.caches, None)
    capabilities = EngineCapabilities(keeps_quarantined_pages=host_pages)
    async with open_pool(settings) as pool:
        await _fill(pool, device.host_buffer(PAGE_BYTES * _FILL))
        ports = Ports(pool=pool, device=device, runner=runner)
        async with open_connector(settings, pages.layout, capabilities=capabilities, ports=ports) as kv:
            await soak.run(kv, max(200, requests // 5), at_a_time=AT_A_TIME)
            before = await _settled(kv, soak, page_count)
            soak.seen.clear()
            soak.cut_short.clear()
            began = time.perf_counter()
            await soak.run(kv, requests, at_a_time=AT_A_TIME)
            seconds = time.perf_counter() - began
            after = await _settled(kv, soak, page_count)
    device.close()
    return SoakFigures(
        backend=backend,
        requests=requests,
        seconds=round(seconds, 2),
        ended=dict(soak.seen),
        cut_short=dict(soak.cut_short),
        pages_compared=soak.pages_compared,
        page_mismatches=len(soak.wrong),
        before=before,
        after=after,
        rss_ratio=round(after.rss_bytes / before.rss_bytes, 4),
        failures=_failures(before, after, soak, sum(runner.limits.values())),
    )


async def _fill(pool: MooncakePool, memory: HostBuffer) -> None:
    """Touch all of the pool's memory, which this process lends: pages of it count as this process's once they were written.

    By more calls at a time than the requests make: the client opens a connection, and starts a thread, for each that it needs.
    """
    pool.register(memory)
    firsts = range(0, SEGMENT_BYTES // PAGE_BYTES, _FILL)
    async with anyio.create_task_group() as group:
        for filler in range(_FILLERS):
            group.start_soon(anyio.to_thread.run_sync, _put_each, pool, memory, firsts[filler::_FILLERS])
    pool.unregister(memory)


def _put_each(pool: MooncakePool, memory: HostBuffer, firsts: range) -> None:
    offsets, sizes = [PAGE_BYTES * number for number in range(_FILL)], [PAGE_BYTES] * _FILL
    for first in firsts:
        pool.put([f"fill/{first + number}" for number in range(_FILL)], memory, offsets, sizes)


async def _settled(kv: Connector, soak: "Soak", page_count: int) -> Held:
    """What is held once nothing is under way any more, or after `SETTLE_S`."""
    with anyio.move_on_after(SETTLE_S):
        while True:
            await anyio.sleep(0.1)
            soak.fetch(kv)
            held = _held(kv, soak, page_count)
            if not (held.calls or held.saves or held.pages_out):
                break
    # Idle threads of others' pools end a while later; what was cut short is garbage only now.
    gc.collect()
    await anyio.sleep(1)
    return _held(kv, soak, page_count)


def _held(kv: Connector, soak: "Soak", page_count: int) -> Held:
    pressure = kv.pressure()
    calling = sum(thread.name.startswith("akv-") for thread in threading.enumerate())
    return Held(
        call_threads=calling,
        python_threads=threading.active_count() - calling,
        client_threads=len(list(Path("/proc/self/task").iterdir())) - threading.active_count(),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        rss_bytes=int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        slots_out=sum(staging.slots - staging.free for staging in (pressure.loading, pressure.saving)),
        places_taken=kv._halves._desk.places_taken,
        calls=pressure.outstanding_calls,
        loads=pressure.parked_loads,
        saves=pressure.backlog_saves,
        pages_out=sum(page_count - free for free in soak.free_pages),
    )


def _failures(before: Held, after: Held, soak: "Soak", most_calling: int) -> list[str]:
    """What is not as it was, in words."""
    failures = list(soak.wrong[:10])
    if after.call_threads > most_calling:
        failures.append(f"call_threads is {after.call_threads}, and not {most_calling} at most")
    for what, more in (("python_threads", 0), ("client_threads", CLIENT_THREADS), ("descriptors", CLIENT_CONNECTIONS)):
        now, then = getattr(after, what), getattr(before, what)
        if now > then + more:
            failures.append(f"{what} is {now}, and not {then}")
    out = ("slots_out", "places_taken", "calls", "loads", "saves", "pages_out")
    failures += [f"{what} is {getattr(after, what)}, and not 0" for what in out if getattr(after, what)]
    if after.rss_bytes > before.rss_bytes * (1 + MOST_GROWTH):
        failures.append(f"{after.rss_bytes} resident bytes, and not {before.rss_bytes}")
    return failures
