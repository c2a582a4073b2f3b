"""`akv bench lookup`: what a lookup of a long prompt costs, and how long it keeps the loop from others (L3).

All figures come from one run against an embedded pool, so that their ratios mean something on any machine. The prompt's pages
are real keys with small values: a lookup asks whether they are there and never reads them.
"""

import time
from collections.abc import Awaitable, Callable
from statistics import median, quantiles

import anyio
import msgspec
import numpy as np

from akv import EMPTY_SCOPE, LayerGroup, Layout, Ports, Region, Settings, StoreSettings, open_connector
from akv.connector import Connector
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import KeySpace
from akv.pool import MooncakePool, ThreadRunner, open_pool
from akv.ports.calls import CallKind
from akv.ports.device import HostBuffer, PassEvent
from akv.ports.pool import KeyState

TOKENS_PER_BLOCK = 32
GROUPS = 2
#: Bytes of each value. Small: what is measured is asking for keys.
PAGE_BYTES = 64
#: Seconds between two wakings of the task that measures the loop.
NAP_S = 0.002
#: Keys of one put while the pool is filled.
_FILL = 512


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """How much later than asked a sleeping task woke, in milliseconds."""

    p50: float
    p99: float
    most: float


class LookupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv bench lookup --json` prints. Times in milliseconds, medians unless the name says otherwise."""

    backend: str
    tokens: int
    keys: int
    #: Store calls of a lookup of which nothing is in the pool, and the keys that they asked for.
    cold_calls: int
    cold_keys: int
    cold_ms: float
    #: One call of the client over all keys, all there; and a lookup of them all, hashing included.
    raw_call_ms: float
    warm_first_ms: float
    warm_ms: float
    #: A lookup of a prompt that was looked up before: its chain is a recent one (K7).
    warm_over_raw: float
    lookups: int
    idle: Lateness
    #: While `lookups` warm lookups run one after the other, and all at once.
    one_by_one: Lateness
    at_once: Lateness


class _NoDevice:
    """A device without pages: a lookup touches none. Staging memory is plain."""

    page_counts = (1,) * GROUPS
    copies_behind_calls = False

    def host_buffer(self, nbytes: int) -> HostBuffer:
        return _Memory(nbytes)

    def open_stream(self, name: str) -> str:
        return name

    def record(self) -> PassEvent:
        return _Passed()

    def close(self) -> None:
        pass


class _Passed:
    """The end of a stream on which nothing is ever queued."""

    def query(self) -> bool:
        return True


class _Memory:
    def __init__(self, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes, np.uint8)
        self.address, self.nbytes = self._bytes.ctypes.data, nbytes

    def view(self) -> memoryview:
        return self._bytes.data


def bench_layout() -> Layout:
    """Two groups of small pages."""
    return Layout(
        tokens_per_block=TOKENS_PER_BLOCK,
        groups=tuple(
            LayerGroup(
                layers=(group,),
                dtype="uint8",
                kv_heads=1,
                head_size=1,
                regions=(Region(name=f"layers.{group}", bytes_per_page=PAGE_BYTES),),
            )
            for group in range(GROUPS)
        ),
    )


class _CountedPool:
    """Counts the probes that pass through."""

    def __init__(self, pool: MooncakePool) -> None:
        self._pool = pool
        self.probes: list[int] = []
        self.get, self.put = pool.get, pool.put
        self.register, self.unregister, self.close = pool.register, pool.unregister, pool.close

    def probe(self, keys: list[str]) -> list[object]:
        self.probes.append(len(keys))
        return self._pool.probe(keys)  # type: ignore[return-value]


async def bench_lookup(backend: str, tokens: int, lookups: int) -> LookupFigures:
    """Measure; raises PoolError or DependencyError if there is no pool to measure."""
    settings = Settings(
        model_key="bench",
        pool="embedded",
        store=StoreSettings(segment_bytes=256 * 1024**2),
        staging_buffer_bytes=1024**2,
        lookup_deadline_s=60.0,
    )
    prompt = np.random.default_rng(0).integers(0, 100_000, tokens)
    other = np.random.default_rng(1).integers(0, 100_000, tokens)
    runner = ThreadRunner({CallKind.PROBE: settings.probe_concurrency, CallKind.GET: settings.loaders})
    async with open_pool(settings) as pool:
        keys = await anyio.to_thread.run_sync(_fill, pool, prompt)
        counted = _CountedPool(pool)
        ports = Ports(pool=counted, device=_NoDevice(), runner=runner)  # type: ignore[arg-type]
        async with open_connector(settings, bench_layout(), ports=ports) as kv:
            cold = await _timed(lambda: _lookup(kv, "cold", other, 0))
            cold_calls = list(counted.probes)
            warm_first = await _timed(lambda: _lookup(kv, "first", prompt, tokens))
            idle = await _lateness(lambda: anyio.sleep(1.0))
            raw, warm = [], []
            for number in range(9):
                raw.append(await _timed(lambda: anyio.to_thread.run_sync(_probe_all, pool, keys)))
                warm.append(await _timed(lambda n=number: _lookup(kv, f"w{n}", prompt, tokens)))  # type: ignore[misc]
            one_by_one = await _lateness(lambda: _one_by_one(kv, prompt, lookups))
            at_once = await _at_once(kv, prompt, lookups)
    return LookupFigures(
        backend=backend,
        tokens=tokens,
        keys=len(keys),
        cold_calls=len(cold_calls),
        cold_keys=sum(cold_calls),
        cold_ms=cold,
        raw_call_ms=median(raw),
        warm_first_ms=warm_first,
        warm_ms=median(warm),
        warm_over_raw=median(w / r for w, r in zip(warm, raw, strict=True)),
        lookups=lookups,
        idle=idle,
        one_by_one=one_by_one,
        at_once=at_once,
    )


def _fill(pool: MooncakePool, prompt: np.ndarray) -> list[str]:
    """Store a small value under every key that a lookup of the prompt can ask for; return the keys."""
    chain = Chain(scope_seed(EMPTY_SCOPE), TOKENS_PER_BLOCK)
    chain.append(prompt)
    hashes = chain.hashes(0, (len(prompt) - 1) // TOKENS_PER_BLOCK)
    space = KeySpace.of(bench_layout(), "akv1", "bench")
    keys = [key for group in range(GROUPS) for key in space.keys(group, hashes)]
    memory = _Memory(PAGE_BYTES * _FILL)
    pool.register(memory)
    for at in range(0, len(keys), _FILL):
        part = keys[at : at + _FILL]
        pool.put(part, memory, [PAGE_BYTES * index for index in range(len(part))], [PAGE_BYTES] * len(part))
    pool.unregister(memory)
    _probe_all(pool, keys)
    return keys


def _probe_all(pool: MooncakePool, keys: list[str]) -> None:
    missing = sum(answer.state is not KeyState.OK for answer in pool.probe(keys))
    if missing:
        raise RuntimeError(f"{missing} of {len(keys)} keys are not in the pool: nothing can be measured")


async def _lookup(kv: Connector, request_id: str, prompt: np.ndarray, least: int) -> None:
    async with kv.request(request_id, prompt) as request:
        offer = await request.lookup()
    if offer.tokens < least - TOKENS_PER_BLOCK:
        raise RuntimeError(f"only {offer.tokens} of {least} tokens were offered: nothing can be measured")


async def _one_by_one(kv: Connector, prompt: np.ndarray, lookups: int) -> None:
    for number in range(lookups):
        await _lookup(kv, f"o{number}", prompt, len(prompt))


async def _at_once(kv: Connector, prompt: np.ndarray, lookups: int) -> Lateness:
    """Lookups of requests that were taken in before: that part is synchronous, and a server does it as requests come."""
    requests = [kv.open_request(f"a{number}", prompt) for number in range(lookups)]

    async def all_of_them() -> None:
        async with anyio.create_task_group() as group:
            for request in requests:
                group.start_soon(request.lookup)

    late = await _lateness(all_of_them)
    for request in requests:
        await request.cancel()
    return late


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return 1000 * (time.perf_counter() - began)


async def _lateness(work: Callable[[], Awaitable[object]]) -> Lateness:
    """How late a task that sleeps wakes while `work` runs."""
    late: list[float] = []

    async def nap() -> None:
        while True:
            began = time.perf_counter()
            await anyio.sleep(NAP_S)
            late.append(1000 * (time.perf_counter() - began - NAP_S))

    async with anyio.create_task_group() as group:
        group.start_soon(nap)
        await work()
        # Work that is over before the second waking is not long enough to keep anybody waiting; quantiles need two.
        await anyio.sleep(3 * NAP_S)
        group.cancel_scope.cancel()
    return Lateness(p50=median(late), p99=quantiles(late, n=100, method="inclusive")[98], most=max(late))
