"""Three hundred requests at random: cancelled at any wait, preempted, plans dropped, a ring too small, calls that fail and
that hang. Whatever came together: nothing is left open at the end, and no stored byte is wrong (D2, D3, D6, S2, S4, M3, M6).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import anyio
import pytest

from akv import Connector, EngineCapabilities, LoadFailed, Scheduled
from akv_testing import run_virtual
from akv_testing.calls import Latency
from akv_testing.clock import BACKENDS
from akv_testing.crowd import make_trouble, serve_crowd
from akv_testing.window_server import WindowServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from akv_testing.cancelling import Cancelling
    from akv_testing.server import PageTable
    from tests.cancellation.conftest import Engine

REQUESTS = 300
#: Requests at a time.
SLOTS = 5


class Crowd:
    """A server, and clients that ask for prompts which share their beginnings."""

    def __init__(self, seed: int, engine: type[Engine], cancelling: type[Cancelling], *, host_pages: bool) -> None:
        self.random = Random(seed)
        self.cancelling = cancelling
        self.server = WindowServer(
            windows=((10, 3), (6, 0)),
            retention_tokens=4,
            host_pages=host_pages,
            capabilities=EngineCapabilities(window_retention_tokens=4, keeps_quarantined_pages=host_pages),
            pages=128,
            slots=6,
            latency=Latency(probe_s=0.0003, get_s=0.0007, put_s=0.0011, snapshot_s=0.0002, copy_s=0.0003),
            rewind_tokens=8,
            snapshot_slots=12,
            snapshot_wait_ms=1,
            load_deadline_s=0.02,
            save_backoff_s=0.001,
        )
        self.engine = engine(self.server)
        #: What happened, so that a test of nothing is found out.
        self.seen: Counter[str] = Counter()

    async def run(self, left_open: Callable[[Connector], list[str]]) -> None:
        async with self.server.open(negative_ttl_s=0.01) as kv:
            await serve_crowd(REQUESTS, SLOTS, partial(self.client, kv), partial(make_trouble, self.random, [self.server]))
            await anyio.sleep(1)
            self.engine.fetch(kv)
            assert left_open(kv) == []
            assert self.server.free_pages == [128] * 3
            self.server.pool._scripts.clear()
            await self.server.serve(kv, "last", range(9000, 9047))
            assert self.server.ends(range(9000, 9047))[-1] == 11
        assert self.server.left_behind() == []
        assert self.server.wrong_values() == []
        self.seen["named"] = self.engine.named

    async def client(self, kv: Connector, number: int) -> None:
        way = self.random.choice([self.cancelling(), self.cancelling(after_s=self.random.random() / 500)])
        at = self.random.choice([10_000, self.random.randrange(1, 25)])
        ended = await way.run(partial(self.request, kv, f"r{number}"), at)
        self.seen["ended" if ended else "cancelled"] += 1
        self.engine.fetch(kv)

    def prompt(self) -> tuple[int, ...]:
        family, shared, more = self.random.randrange(4), self.random.randrange(4, 44), self.random.randrange(8)
        return (*range(100 * family, 100 * family + shared), *(self.random.randrange(1000, 2000) for _ in range(more)))

    async def request(self, kv: Connector, name: str) -> None:
        """One request's way, until it is cancelled."""
        tokens, chunk = self.prompt(), self.random.choice([3, 8, 64])
        request, table = kv.open_request(name, tokens), [[] for _ in self.server.layout.groups]  # type: ignore[var-annotated]
        try:
            try:
                while not await self.prefill(kv, request, tokens, table, chunk):
                    # Its pages are wanted elsewhere: it goes on with others.
                    self.engine.name(await request.preempted())
                    self.engine.give_back(table)
                    self.seen["preempted"] += 1
            except LoadFailed as failed:
                self.engine.name(failed.quarantined)
                self.seen["load failed"] += 1
                return
            for _ in range(self.random.randrange(6)):
                tokens = (*tokens, self.random.randrange(5))
                request.append(tokens[-1:])
                await self.one_pass(kv, request, tokens, table, len(tokens) - 1, len(tokens))
            await request.finished()
        finally:
            await self.engine.cancel(kv, request, table)  # noqa: ASYNC102 - shielded there

    async def prefill(self, kv: Connector, request, tokens, table: PageTable, chunk: int) -> bool:  # type: ignore[no-untyped-def]
        """Load and compute a prompt. False if that was broken off somewhere, to be preempted."""
        start, load = await self.engine.reserve(request, tokens, table)
        if self.random.random() < 0.05:
            return False
        await load.wait()
        self.seen["loaded"] += start > 0
        for before in range(start, len(tokens), chunk):
            await self.one_pass(kv, request, tokens, table, before, min(len(tokens), before + chunk))
            if self.random.random() < 0.05:
                return False
        return True

    async def one_pass(self, kv: Connector, request, tokens, table: PageTable, before: int, end: int) -> None:  # type: ignore[no-untyped-def]
        """A pass, now and then planned once in vain. Nothing waits between a plan and its pass: passes come in order."""
        self.server.prepare(table, before, end)
        part = Scheduled(request=request, computed_before=before, tokens=end - before, pages=table)
        if self.random.random() < 0.2:
            vain = kv.plan_pass([part])
            if self.random.random() < 0.5:
                kv.drop_pass(vain)
        plan = kv.plan_pass([part])
        self.server.forward(tokens, table, before, end)
        try:
            await kv.after_forward(plan)
        finally:
            self.server.commit(table, end)


@pytest.mark.parametrize("host_pages", [False, True], ids=["slots", "host pages"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_D6_M6_whatever_comes_together_nothing_is_left_and_no_stored_byte_is_wrong(
    backend: str,
    host_pages: bool,
    cancelling: type[Cancelling],
    engine: type[Engine],
    left_open: Callable[[Connector], list[str]],
) -> None:
    crowd = Crowd(BACKENDS.index(backend), engine, cancelling, host_pages=host_pages)
    run_virtual(backend, crowd.run, left_open)
    assert crowd.seen["ended"] + crowd.seen["cancelled"] == REQUESTS
    assert min(crowd.seen[what] for what in ("ended", "cancelled", "loaded", "load failed", "preempted")) > 10, crowd.seen
    assert (crowd.seen["named"] > 0) is host_pages
