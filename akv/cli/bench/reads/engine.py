"""The pages that are moved, as an engine has them: a tensor for each region, and pages of requests at random places."""

import ctypes
from time import perf_counter

import numpy as np
import numpy.typing as npt

from akv.connector import Connector
from akv.device import rows_at
from akv.errors import PoolError
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import KeySpace
from akv.settings import Settings
from akv.values.layout import LayerGroup, Layout, Region
from akv.values.requests import Scheduled
from akv.values.scope import EMPTY_SCOPE

TOKENS_PER_BLOCK = 16
#: Seconds. What is measured is speed, not how something degrades.
PATIENCE_S = 60.0


def bench_layout(page_bytes: int, regions: int) -> Layout:
    """One group, whose pages consist of equal pieces."""
    piece = page_bytes // regions
    return Layout(
        tokens_per_block=TOKENS_PER_BLOCK,
        groups=(
            LayerGroup(
                layers=tuple(range(regions)),
                dtype="uint8",
                kv_heads=1,
                head_size=1,
                regions=tuple(Region(name=f"layers.{index}", bytes_per_page=piece) for index in range(regions)),
            ),
        ),
    )


class Pages:
    """Twice as many pages as are moved: the first half is what is saved, the second what is loaded into, in random order."""

    def __init__(self, page_bytes: int, regions: int, count: int) -> None:
        random = np.random.default_rng(0)
        self.page_bytes, self.regions, self.count = page_bytes, regions, count
        self.layout = bench_layout(page_bytes, regions)
        shape = (2 * count, page_bytes // regions)
        self._rows: list[npt.NDArray[np.uint8]] = [random.integers(0, 256, shape, np.uint8) for _ in range(regions)]
        self.caches = [
            [rows_at(rows.ctypes.data, rows.shape[1], rows.strides[0], rows.shape[0], cuda=False) for rows in self._rows]
        ]
        self._loaded: list[int] = (count + random.permutation(count)).tolist()

    @property
    def nbytes(self) -> int:
        """Of the pages that are moved."""
        return self.count * self.page_bytes

    def tokens(self, number: int) -> npt.NDArray[np.int64]:
        """A prompt of so many blocks, no block of which another number has, and the token that is left to compute."""
        first = number * (self.count + 1) * TOKENS_PER_BLOCK
        return np.arange(first, first + self.count * TOKENS_PER_BLOCK + 1)

    def keys(self, settings: Settings, number: int) -> list[str]:
        """The pool's names of that prompt's pages."""
        chain = Chain(scope_seed(EMPTY_SCOPE), TOKENS_PER_BLOCK)
        chain.append(self.tokens(number))
        return KeySpace.of_settings(settings, self.layout).keys(0, chain.hashes(0, self.count))

    async def save(self, kv: Connector, number: int) -> float:
        """Save the pages as those of that prompt. Returns the seconds from the end of the pass to the last save's end.

        Whether all were stored is for the caller to ask.
        """
        tokens = self.tokens(number)
        request = kv.open_request(f"save {number}", tokens)
        await request.lookup()
        pages = [[*range(self.count), self.count]]
        plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=len(tokens), pages=pages)])
        began = perf_counter()
        await kv.after_forward(plan)
        request.finish()
        await request.finished()
        return perf_counter() - began

    async def load(self, kv: Connector, number: int) -> float:
        """Load that prompt's pages into others. Returns the seconds from the load's order to its end."""
        self._forget()
        async with kv.request(f"load {number}", self.tokens(number)) as request:
            offer = await request.lookup()
            if offer.tokens != self.count * TOKENS_PER_BLOCK:
                raise PoolError(
                    f"{offer.tokens} of {self.count * TOKENS_PER_BLOCK} tokens were offered ({offer.outcome}): nothing can be "
                    "measured"
                )
            began = perf_counter()
            await request.reserve(offer, offer.tokens, [self._loaded]).wait()
            took = perf_counter() - began
        self._compare()
        return took

    def copy(self, address: int, offsets: list[int]) -> float:
        """Copy them into the same pages without akv, each piece by itself. `address`: where the memory begins that they lie
        in, each at its offset. Returns the seconds.
        """
        self._forget()
        piece = self.page_bytes // self.regions
        pieces = [(rows.ctypes.data, piece * index) for index, rows in enumerate(self._rows)]
        began = perf_counter()
        for page, offset in zip(self._loaded, offsets, strict=True):
            for base, start in pieces:
                ctypes.memmove(base + page * piece, address + offset + start, piece)
        took = perf_counter() - began
        self._compare()
        return took

    def _forget(self) -> None:
        for rows in self._rows:
            rows[self.count :] = 0

    def _compare(self) -> None:
        for rows in self._rows:
            if not np.array_equal(rows[: self.count], rows[self._loaded]):
                raise RuntimeError("a page did not arrive as it was saved: nothing was measured")
