"""Eighty requests of two ranks at random: cancelled at any wait, preempted, plans dropped; on either rank calls fail and
hang, keys vanish, a ring is too small. Nothing is left open at the end, and no stored or loaded byte is wrong (D2, D3, D6).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import anyio
import pytest

from akv import EngineCapabilities, LoadFailed
from akv.plan.window import stale_blocks
from akv.units import NO_PAGE
from akv_testing import run_virtual
from akv_testing.calls import Latency
from akv_testing.cancelling import Cancelling
from akv_testing.clock import BACKENDS
from akv_testing.crowd import make_trouble, serve_crowd
from akv_testing.quarantine import QuarantineBook
from akv_testing.ranked_server import STEP_S, RankedServer
from akv_testing.traffic import part
from akv_testing.window_server import window_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.ranks import Scheduler
    from akv.request import Request
    from akv_testing.server import PageTable

REQUESTS, SLOTS, PAGES, WINDOW = 80, 5, 128, 6


class Crowd:
    """A server, its engine, and clients that ask for prompts which share their beginnings."""

    def __init__(self, seed: int, *, host_pages: bool) -> None:
        self.random = Random(seed)
        self.server = RankedServer(
            layout=window_layout([(WINDOW, 0)]),
            capabilities=EngineCapabilities(keeps_quarantined_pages=host_pages),
            host_pages=host_pages,
            pages=PAGES,
            slots=6,
            latency=Latency(probe_s=0.0003, get_s=0.0007, put_s=0.0011, snapshot_s=0.0002, copy_s=0.0003),
            rewind_tokens=0,
            snapshot_slots=6,
            snapshot_wait_ms=1,
            load_deadline_s=0.02,
            save_backoff_s=0.001,
            negative_ttl_s=0.01,
        )
        #: One pass at a time.
        self.engine = anyio.Lock()
        self.quarantine = QuarantineBook(len(self.server.layout.groups), self.server.free)
        #: What happened, so that a test of nothing is found out.
        self.seen: Counter[str] = Counter()

    async def run(self, left_open: Callable[[RankedServer, Scheduler], list[str]]) -> None:
        server = self.server
        async with server.open() as kv:
            await serve_crowd(REQUESTS, SLOTS, partial(self.client, kv), partial(make_trouble, self.random, self.server.ranks))
            await anyio.sleep(0.3)
            self.quarantine.fetch(kv)
            assert left_open(server, kv) == []
            assert [rank.free_pages for rank in server.ranks] == [[PAGES] * 2] * 2
        assert server.left_behind() == []
        assert server.wrong_values() == []

    async def client(self, kv: Scheduler, number: int) -> None:
        way = self.random.choice([Cancelling(), Cancelling(after_s=self.random.random() / 500)])
        at = self.random.choice([10_000, self.random.randrange(1, 25)])
        ended = await way.run(partial(self.request, kv, f"r{number}"), at)
        self.seen["ended" if ended else "cancelled"] += 1
        self.quarantine.fetch(kv)

    # -- the engine

    async def request(self, kv: Scheduler, name: str) -> None:
        family, shared, more = self.random.randrange(4), self.random.randrange(8, 44), self.random.randrange(8)
        tokens = (*range(100 * family, 100 * family + shared), *(self.random.randrange(1000, 2000) for _ in range(more)))
        request = kv.open_request(name, tokens)
        table: PageTable = []
        try:
            try:
                while not await self.prefill(kv, request, tokens, table):
                    self.quarantine.name(await request.preempted())
                    self.quarantine.give_back(table)
                    self.seen["preempted"] += 1
            except LoadFailed as failed:
                self.quarantine.name(failed.quarantined)
                self.seen["load failed"] += 1
                return
            self.quarantine.name(await request.finished())
        finally:
            await self.cancel(request)  # noqa: ASYNC102 - goes on whatever comes
            self.quarantine.fetch(kv)
            self.quarantine.give_back(table)

    async def cancel(self, request: Request) -> None:
        was_closed = request.closed
        while True:
            try:
                with anyio.CancelScope(shield=True):
                    quarantined = await request.cancel()
            except anyio.get_cancelled_exc_class():  # noqa: ASYNC103 - the engine's own clean-up goes on
                continue  # noqa: ASYNC104 - as above
            if not was_closed:
                self.quarantine.name(quarantined)
            return

    async def prefill(self, kv: Scheduler, request: Request, tokens: Sequence[int], table: PageTable) -> bool:
        """Load and compute a prompt. False if that was broken off somewhere, to be preempted."""
        offer = await request.lookup()
        table[:] = self.server.allocate(tokens)
        load = request.reserve(offer, offer.tokens, table)
        if self.random.random() < 0.1:
            return False
        await load.wait()
        end = offer.tokens // 4
        if end:
            self.seen["loaded"] += 1
            window = range(stale_blocks(end * 4, WINDOW, 0, 4).stop, end)
            for rank in self.server.ranks:
                hashes = rank.hashes(tokens)
                for group, blocks in enumerate([range(end), window]):
                    for block in blocks:
                        assert rank.device.read_page(group, table[group][block]) == rank.content(hashes[block], group)
        async with self.engine:
            await self.one_pass(kv, request, tokens, table, offer.tokens)
        return self.random.random() > 0.1

    async def one_pass(self, kv: Scheduler, request: Request, tokens: Sequence[int], table: PageTable, before: int) -> None:
        """A pass over the rest, now and then planned once in vain."""
        scheduled = part(request, before, len(tokens) - before, table)
        if self.random.random() < 0.2:
            vain = kv.plan_pass([scheduled])
            if self.random.random() < 0.5:
                kv.drop_pass(vain)
        plan = kv.plan_pass([scheduled])
        if self.random.random() < 0.8:
            try:
                await self.until_carried(kv)
            except BaseException:
                kv.drop_pass(plan)
                raise
            if not request.closed and self.random.random() < 0.1:
                kv.drop_pass(plan)
                return
        for rank in self.server.ranks:
            rank.write(tokens, table, before // 4)
        try:
            await kv.after_forward(plan)
        finally:
            with anyio.CancelScope(shield=True):
                await self.until_carried(kv)
            stale = stale_blocks(len(tokens), WINDOW, 0, 4)
            gone = [table[1][block] for block in stale]
            table[1][stale.start : stale.stop] = [NO_PAGE] * len(stale)
            self.server.free([[], gone])

    async def until_carried(self, kv: Scheduler) -> None:
        """Until every rank has carried out what was said so far: the engine's steps carry the messages."""
        while kv._ranks._orders or self.server.carrying:  # noqa: ASYNC110 - as the engine, which takes a step
            await anyio.sleep(STEP_S)


@pytest.mark.parametrize("host_pages", [False, True], ids=["slots", "host pages"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_D3_D6_M6_whatever_comes_together_on_two_ranks_nothing_is_left_and_no_byte_is_wrong(
    backend: str, host_pages: bool, left_open: Callable[[RankedServer, Scheduler], list[str]]
) -> None:
    crowd = Crowd(BACKENDS.index(backend), host_pages=host_pages)
    run_virtual(backend, crowd.run, left_open)
    assert crowd.seen["ended"] + crowd.seen["cancelled"] == REQUESTS
    assert min(crowd.seen[what] for what in ("ended", "cancelled", "loaded", "load failed", "preempted")) > 2, crowd.seen
    assert (crowd.quarantine.named > 0) is host_pages
