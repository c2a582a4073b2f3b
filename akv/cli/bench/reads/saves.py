"""Saves of two servers, in turn, each into memory that it lends itself: one's was touched before, the other's by nobody."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

import anyio
from anyio import to_thread

from akv.cli.bench.reads.engine import PATIENCE_S, Pages
from akv.cli.bench.reads.figures import SaveFigures, ratio
from akv.connector import Connector, open_connector
from akv.device import open_torch_device
from akv.errors import PoolError
from akv.pool import LentSegments, MooncakePool, ThreadRunner, open_embedded_master, open_pool
from akv.ports import Ports
from akv.ports.calls import CallKind
from akv.settings import Settings, StoreSettings

PAGE_BYTES = 1 << 20
#: Of the memory that is lent, what the pages may take at most.
_FILL = 0.8
_LEAST_LENT = 64 << 20
#: Of the memory that nobody is to touch, what was touched all the same before that was stopped, at most.
_MOST_TOUCHED = 0.1
#: Seconds for touching all of it.
_TOUCHED_WITHIN_S = 120.0
_LOOK_AGAIN_S = 0.01


async def bench_saves(nbytes: int, rounds: int) -> SaveFigures:
    """Measure, with so many bytes of pages at a time, each time into other memory. Raises as `bench_reads`."""
    pages = Pages(PAGE_BYTES, 1, nbytes // PAGE_BYTES)
    # A save before the first round has the way from page to store warm.
    lent = max(_LEAST_LENT, int((rounds + 1) * nbytes / _FILL))
    took: dict[str, list[float]] = {"touched": [], "fresh": []}
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(open_embedded_master())
        servers = {
            # Of different sizes: servers of one process with equal settings of the store share its memory.
            kind: await stack.enter_async_context(_server(address, lent + index * _LEAST_LENT, kind, pages))
            for index, kind in enumerate(took)
        }
        for number in range(rounds + 1):
            for kind in sorted(took, reverse=number % 2 == 1):
                seconds = await servers[kind].save(number)
                if number:
                    took[kind].append(seconds)
    return SaveFigures(
        page_bytes=PAGE_BYTES,
        pages=pages.count,
        **{kind: pages.nbytes / median(seconds) for kind, seconds in took.items()},
        touched_over_fresh=ratio(took["touched"], took["fresh"]),
    )


class _Server:
    def __init__(self, settings: Settings, pages: Pages, pool: MooncakePool, lent: LentSegments, kv: Connector) -> None:
        self._settings, self._pages, self._pool, self._lent, self._kv = settings, pages, pool, lent, kv

    async def save(self, number: int) -> float:
        took = await self._pages.save(self._kv, number)
        replicas = self._pool.describe(self._pages.keys(self._settings, number))
        own = [replica for replica in replicas if replica is not None and self._lent.holds(replica.address, replica.size)]
        if len(own) != self._pages.count:
            raise PoolError(f"{len(own)} of {self._pages.count} pages lie in the own segment: nothing can be measured")
        return took


@asynccontextmanager
async def _server(address: str, lent_bytes: int, kind: str, pages: Pages) -> AsyncIterator[_Server]:
    settings = Settings(
        model_key=kind,
        store=StoreSettings(master_address=address, segment_bytes=lent_bytes, segment_memory="memfd"),
        staging_buffer_bytes=256 << 20,
        backlog_bytes=max(1 << 30, pages.nbytes),
        lookup_deadline_s=PATIENCE_S,
        save_hold_max_s=PATIENCE_S,
    )
    async with open_pool(settings) as pool:
        lent = pool.lent
        if lent is None:
            raise AssertionError("memory files were asked for")
        await (_touched(lent) if kind == "touched" else _untouched(lent, lent_bytes))
        # With the pool at hand, since whoever joins it again has touching go on.
        runner = ThreadRunner({CallKind.PROBE: 2, CallKind.GET: 1, CallKind.PUT: 1, CallKind.COPY: 2, CallKind.SNAPSHOT: 1})
        ports = Ports(pool=pool, device=open_torch_device(pages.layout, pages.caches), runner=runner)
        async with open_connector(settings, pages.layout, ports=ports) as kv:
            yield _Server(settings, pages, pool, lent, kv)


async def _touched(lent: LentSegments) -> None:
    with anyio.move_on_after(_TOUCHED_WITHIN_S):
        while True:
            if not lent.untouched_bytes:
                return
            await anyio.sleep(_LOOK_AGAIN_S)
    raise PoolError(f"{lent.untouched_bytes} bytes were not touched within {_TOUCHED_WITHIN_S:g} s: nothing can be measured")


async def _untouched(lent: LentSegments, lent_bytes: int) -> None:
    stopped = await to_thread.run_sync(lent.stop)
    if not stopped or lent.untouched_bytes < (1 - _MOST_TOUCHED) * lent_bytes:
        raise PoolError(f"only {lent.untouched_bytes} of {lent_bytes} bytes are fresh: nothing can be measured")
