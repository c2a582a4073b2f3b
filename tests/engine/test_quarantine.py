"""Pages that a store call still touches: the reference engine computes in others until akv says they are free (D2, D6)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import pytest
import torch

from akv.connector import Connector
from akv.errors import LoadFailed, PagesLost
from akv.host import PagedCache
from akv.ports.calls import CallKind
from akv.values.messages import PagesPerGroup, PagesReleased
from akv.values.offers import LookupOutcome, Offer
from akv_testing.engine import EngineConfig, Model, Pages, open_engine
from akv_testing.engine.quarantine import Quarantine
from akv_testing.store import FakeStore

#: The fixture `served`: what it opens is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]

TOKENS = [7 * position % 251 for position in range(90)]


def released(pages: PagesPerGroup) -> PagesReleased:
    return PagesReleased(request_id="r", incarnation=1, pages=pages)


def test_D2_pages_in_quarantine_are_kept_out_of_use() -> None:
    cache = PagedCache(4, [8, 8])
    quarantine = Quarantine(cache)
    sequence = cache.admit(range(12), 12)
    assert sequence is not None
    quarantine.opened("r")
    quarantine.name("r", ((0, 1), (2,)))
    quarantine.name("unknown", ((5,), ()))
    quarantine.release("r", sequence)
    assert cache.free_pages == (6, 7)
    quarantine.released(released(((0,), ())))
    assert cache.free_pages == (7, 7)
    quarantine.released(released(((1,), (2,))))
    assert cache.free_pages == (8, 8)
    assert cache.check() == []


def test_D2_a_page_that_is_released_before_its_sequence_holds_up_nothing() -> None:
    cache = PagedCache(4, [8])
    quarantine = Quarantine(cache)
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
        self.reads = True
        self.changed = anyio.Event()
        self.ended: list[object] = []
        #: Told once, in place of what ended.
        self.lost: PagesLost | None = None
        #: The page tables of the load.
        self.pages: tuple[tuple[int, ...], ...] = ()

    def completed(self) -> list[object]:
        if self.lost is not None:
            lost, self.lost = self.lost, None
            raise lost
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
async def test_O8_pages_of_one_request_that_are_lost_hold_up_nobody_elses_release() -> None:
    """A connector that degraded tells of them in place of what ended, and goes on."""
    cache, kv, followed = PagedCache(4, [8]), GivesUp(), []
    kv.pages = ((0,),)
    quarantine = Quarantine(cache)
    sequence = cache.admit(range(12), 12)
    assert sequence is not None
    quarantine.opened("r")
    quarantine.name("r", kv.pages)
    quarantine.release("r", sequence)
    async with anyio.create_task_group() as group:
        group.start_soon(quarantine.follow, cast(Connector, kv), lambda: followed.append(cache.free_pages))
        await anyio.wait_all_tasks_blocked()
        kv.lost = PagesLost("other", 2, ((1,),))
        kv.lets_go()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert followed == [(8,)]


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
        assert engine.cache.available_blocks == 64 - 11  # the load's
        kv.lets_go()
        await anyio.wait_all_tasks_blocked()
        assert engine.cache.available_blocks == 64
        assert engine.cache.check() == []


@pytest.mark.anyio
@pytest.mark.parametrize("contiguous", [True, False])
async def test_D2_a_store_that_writes_pages_itself_keeps_them_until_its_call_returned(
    config: EngineConfig, served: OpenServed, contiguous: bool
) -> None:
    config = msgspec.structs.replace(config, contiguous_pages=contiguous)
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        cold = await computing.engine.generate("cold", TOKENS, max_new_tokens=6, keep_logits=True)
    async with served(config, store, load_deadline_s=0.05) as fresh:
        gate = fresh.runner.hold(CallKind.GET)
        hurt = await fresh.engine.generate("hurt", TOKENS, max_new_tokens=6, keep_logits=True)
        assert (hurt.load_failure, hurt.from_pool_tokens) == ("deadline", 0)
        assert torch.equal(cast(torch.Tensor, hurt.logits), cast(torch.Tensor, cold.logits))
        await fresh.engine.settled()
        assert (fresh.engine.cache.available_blocks < 64) is contiguous  # a slot of akv's keeps no page
        gate.release()
        with anyio.fail_after(50):
            while fresh.engine.cache.available_blocks < 64:
                await fresh.kv.changed.wait()
                await anyio.lowlevel.checkpoint()
        assert fresh.engine.cache.check() == []
