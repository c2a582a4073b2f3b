"""`akv bench reads` from beginning to end.

Two pools on loopback, one after the other. In the first another process lends all memory, and pages of each shape that were
saved there are loaded in turn, round by round: in place, through the store's client, and by a plain copy from a mapping of the
same memory. A load that was not read as it should be ends all. `saves.py` measures in the second pool.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Literal

import anyio
import msgspec

from akv.cli.bench.faults.victims import open_lender
from akv.cli.bench.reads.engine import PATIENCE_S, Pages
from akv.cli.bench.reads.figures import ReadFigures, ReadsFigures, missed, ratio
from akv.cli.bench.reads.saves import bench_saves
from akv.connector import Connector, open_connector
from akv.device import open_torch_device
from akv.errors import PoolError
from akv.pool import MooncakePool, RegisteredSegments, open_embedded_master, open_pool
from akv.settings import Settings, StoreSettings

#: Bytes of a page, and the regions that it consists of.
SHAPES = ((256 << 10, 1), (256 << 10, 8), (1 << 20, 1), (1 << 20, 8))
#: Of the memory that is lent, what the pages may take at most: the master begins to evict at nine tenths.
_FILL = 0.8
_LEAST_LENT = 64 << 20
#: Seconds until memory that another process lends is mapped here, which happens in the background.
_MAPPED_WITHIN_S = 30.0
_LOOK_AGAIN_S = 0.1


async def bench_reads(nbytes: int, rounds: int) -> ReadsFigures:
    """Measure, with so many bytes of pages at a time. Raises DependencyError or PoolError if there is nothing to measure, and
    RuntimeError if a page arrived as another one.

    **Cancellation:** every process that was started has ended when this returns.
    """
    lent = max(_LEAST_LENT, int(len(SHAPES) * nbytes / _FILL))
    async with open_embedded_master() as address, open_lender(address, lent):
        # It lends nothing: what it saves lies in the other process's memory.
        store = StoreSettings(master_address=address, segment_bytes=0)
        async with open_pool(Settings(model_key="bench", store=store)) as pool:
            reads = [await _shape(pool, store, Pages(size, regions, nbytes // size), rounds) for size, regions in SHAPES]
    figures = ReadsFigures(rounds=rounds, reads=tuple(reads), saves=await bench_saves(nbytes, rounds))
    return msgspec.structs.replace(figures, missed=missed(figures))


async def _shape(pool: MooncakePool, store: StoreSettings, pages: Pages, rounds: int) -> ReadFigures:
    async with _connector(store, pages, "auto") as direct, _connector(store, pages, "staged") as staged:
        await pages.save(direct, 0)
        await _until_in_place(direct, pages)
        await pages.load(staged, 0)
        plain = _PlainCopy(pool, store, pages)
        plain()
        took: dict[str, list[float]] = {"direct": [], "staged": [], "plain": []}
        for number in range(rounds):
            # In turn, so that what comes first meets all alike.
            for kind in [*took][number % 3 :] + [*took][: number % 3]:
                if kind == "plain":
                    took[kind].append(plain())
                else:
                    took[kind].append(await _load(direct if kind == "direct" else staged, pages, in_place=kind == "direct"))
    return ReadFigures(
        page_bytes=pages.page_bytes,
        regions=pages.regions,
        pages=pages.count,
        **{kind: pages.nbytes / median(seconds) for kind, seconds in took.items()},
        direct_over_staged=ratio(took["direct"], took["staged"]),
        direct_over_plain=ratio(took["direct"], took["plain"]),
    )


@asynccontextmanager
async def _connector(store: StoreSettings, pages: Pages, read_path: Literal["auto", "staged"]) -> AsyncIterator[Connector]:
    async with open_connector(_settings(store, pages, read_path), pages.layout, pages.caches) as kv:
        yield kv


def _settings(store: StoreSettings, pages: Pages, read_path: Literal["auto", "staged"]) -> Settings:
    return Settings(
        model_key="bench",
        store=store,
        read_path=read_path,
        staging_buffer_bytes=256 << 20,
        backlog_bytes=max(1 << 30, pages.nbytes),
        lookup_deadline_s=PATIENCE_S,
        load_deadline_s=PATIENCE_S,
        save_hold_max_s=PATIENCE_S,
    )


async def _until_in_place(kv: Connector, pages: Pages) -> None:
    """Memory is mapped in the background, once pages were seen in it."""
    with anyio.move_on_after(_MAPPED_WITHIN_S):
        while True:
            before = kv.pressure().reads.direct_pages
            await pages.load(kv, 0)
            if kv.pressure().reads.direct_pages == before + pages.count:
                return
            await anyio.sleep(_LOOK_AGAIN_S)
    raise PoolError(
        f"pages that another process lends are not read in place after {_MAPPED_WITHIN_S:g} s (staged, by reason: "
        f"{kv.pressure().reads.staged}): nothing can be measured. `akv doctor` tells which segments are refused, and why"
    )


async def _load(kv: Connector, pages: Pages, *, in_place: bool) -> float:
    before = kv.pressure().reads.direct_pages
    took = await pages.load(kv, 0)
    after = kv.pressure().reads
    if after.direct_pages - before != (pages.count if in_place else 0):
        raise PoolError(
            f"{after.direct_pages - before} of {pages.count} pages were read in place, not {'all' if in_place else 'none'} "
            f"(staged, by reason: {after.staged}): nothing can be measured"
        )
    return took


class _PlainCopy:
    """Copies the pages from a mapping of the memory that they lie in: the one that akv reads."""

    def __init__(self, pool: MooncakePool, store: StoreSettings, pages: Pages) -> None:
        self._pages = pages
        replicas = pool.describe(pages.keys(_settings(store, pages, "auto"), 0))
        places = [(replica.endpoint, replica.address) for replica in replicas if replica is not None]
        register = RegisteredSegments(store)
        for entry in register.entries():
            inside = [address for endpoint, address in places if endpoint == entry.endpoint]
            self._offsets: Sequence[int] = [address - entry.base for address in inside]
            if len(inside) == pages.count and all(0 <= offset < entry.size for offset in self._offsets):
                self._memory = open_torch_device(pages.layout, pages.caches).map_segment(register.open(entry))
                return
        raise PoolError(f"{pages.count} pages do not lie in one segment of this host: nothing can be measured")

    def __call__(self) -> float:
        return self._pages.copy(self._memory.address, [*self._offsets])
