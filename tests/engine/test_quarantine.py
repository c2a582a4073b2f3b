"""Pages that a store call still touches: the reference engine computes in others until akv says they are free (D2, D6)."""

from collections.abc import Sequence
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
import torch

from akv.connector import Connector
from akv.errors import LoadFailed
from akv.host import PagedCache
from akv.values.messages import PagesPerGroup, PagesReleased
from akv.values.offers import LookupOutcome, Offer
from akv_testing.engine import EngineConfig, Model, Pages, open_engine
from akv_testing.engine.quarantine import Quarantine

TOKENS = [7 * position % 251 for position in range(90)]


def released(pages: PagesPerGroup) -> PagesReleased:
    return PagesReleased(request_id="r", incarnation=1, pages=pages)


def test_D2_a_sequence_with_a_page_in_quarantine_is_kept_out_of_use() -> None:
    cache, quarantine = PagedCache(4, [8, 8]), Quarantine()
    sequence = cache.admit(range(12), 12)
    assert sequence is not None
    quarantine.opened("r")
    quarantine.name("r", ((0, 1), (2,)))
    quarantine.name("unknown", ((5,), ()))
    quarantine.release("r", sequence)
    assert cache.available_blocks == 5
    quarantine.released(released(((0,), ())))
    quarantine.released(released(((1,), ())))
    assert cache.available_blocks == 5
    quarantine.released(released(((), (2,))))
    assert cache.available_blocks == 8
    assert cache.check() == []


def test_D2_a_page_that_is_released_before_its_sequence_holds_up_nothing() -> None:
    cache, quarantine = PagedCache(4, [8]), Quarantine()
    sequence = cache.admit(range(12), 12)
    assert sequence is not None
    quarantine.opened("r")
    quarantine.name("r", ((0, 1),))
    quarantine.released(released(((0, 1),)))
    assert cache.available_blocks == 5
    quarantine.release("r", sequence)
    assert cache.available_blocks == 8


class GivesUp:
    """A connector as far as the engine sees it. Its load fails while a store call goes on writing the pages."""

    def __init__(self) -> None:
        self.changed = anyio.Event()
        self.ended: list[object] = []
        #: The page tables of the load.
        self.pages: tuple[tuple[int, ...], ...] = ()

    def completed(self) -> list[object]:
        ended, self.ended, self.changed = self.ended, [], anyio.Event()
        return ended

    def lets_go(self) -> None:
        """The store call returned."""
        self.ended.append(PagesReleased(request_id="r", incarnation=1, pages=self.pages))
        self.changed.set()

    def open_request(self, request_id: str, *_: object, **__: object) -> "GivesUp":
        self.request_id = request_id
        return self

    async def lookup(self, local_tokens: int) -> Offer:
        await anyio.lowlevel.checkpoint()
        return Offer(
            request_id="r",
            incarnation=1,
            local_tokens=local_tokens,
            tokens=0 if self.pages else 88,
            outcome=LookupOutcome.FULL,
            tokens_per_block=8,
        )

    def reserve(self, offer: Offer, tokens: int, pages: Sequence[Sequence[int]]) -> "GivesUp":
        self.pages = tuple(tuple(table[:11]) for table in pages)
        return self

    async def wait(self) -> None:
        await anyio.lowlevel.checkpoint()
        raise LoadFailed("r", "key", "deadline", self.pages)

    def append(self, tokens: object) -> None:
        pass

    def plan_pass(self, scheduled: object) -> list[object]:
        return list(cast(Any, scheduled))

    async def after_forward(self, plan: object) -> None:
        await anyio.lowlevel.checkpoint()

    async def finished(self) -> PagesPerGroup:
        await anyio.lowlevel.checkpoint()
        return ()


@pytest.mark.anyio
async def test_D2_a_failed_load_is_computed_in_pages_that_nobody_writes(config: EngineConfig, model: Model) -> None:
    async with open_engine(config, model=model) as engine:
        cold = await engine.generate("cold", TOKENS, max_new_tokens=6, keep_logits=True, keep_pages=True)
    kv, pages = GivesUp(), Pages(config)
    async with open_engine(config, model=model, pages=pages, kv=cast(Connector, kv)) as engine:
        hurt = await engine.generate("r", TOKENS, max_new_tokens=6, keep_logits=True, keep_pages=True)
        await engine.settled()
        assert (hurt.load_failure, hurt.lookup_outcome, hurt.from_pool_tokens) == ("deadline", "full", 0)
        assert hurt.page_digests == cold.page_digests
        assert torch.equal(cast(torch.Tensor, hurt.logits), cast(torch.Tensor, cold.logits))
        for group, table in enumerate(kv.pages):
            assert not set(table) & set(hurt.page_tables[group])
            assert all(not cache[list(table)].any() for cache in pages.caches[group])
        assert engine.cache.available_blocks == 64 - 12  # the whole sequence of the load
        kv.lets_go()
        await anyio.wait_all_tasks_blocked()
        assert engine.cache.available_blocks == 64
        assert engine.cache.check() == []
