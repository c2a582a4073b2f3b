"""Whoever awaits something of a rank or of its scheduler is cancelled, at every wait (D6, M6, S2).

What a rank was told is carried out all the same, by the next call; what the scheduler's side began goes on.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from akv import EngineCapabilities, LoadFailed, LoadState
from akv.plan.window import stale_blocks
from akv_testing import run_virtual
from akv_testing.calls import Latency
from akv_testing.cancelling import Cancelling
from akv_testing.clock import BACKENDS
from akv_testing.ranked_server import STEP_S, RankedServer
from akv_testing.traffic import LONG, TOKENS, part
from akv_testing.window_server import window_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.ranks import Scheduler
    from akv.request import Request
    from akv_testing.server import PageTable

    LeftOpen = Callable[[RankedServer, Scheduler], list[str]]

WINDOW = 6
SAVING, FINISHING = tuple(range(300, 318)), tuple(range(400, 420))

WAYS = [
    *(pytest.param(backend, Cancelling(times=times), id=f"{backend}-{times}") for backend in BACKENDS for times in (1, 3)),
    *(pytest.param(backend, Cancelling(after_s=0.0), id=f"{backend}-waiting") for backend in BACKENDS),
    *(pytest.param("asyncio", Cancelling(native=True, times=times), id=f"native-{times}") for times in (1, 2)),
]


class Ranks(RankedServer):
    """Two ranks whose model forgets, with calls that take their time."""

    def __init__(self) -> None:
        super().__init__(
            layout=window_layout([(WINDOW, 0)]),
            capabilities=EngineCapabilities(),
            rewind_tokens=0,
            slots=8,
            latency=Latency(get_s=0.0007, put_s=0.0011, snapshot_s=0.0002, copy_s=0.0003),
        )

    def forget(self, tokens: Sequence[int], table: PageTable) -> None:
        """The window has left these pages behind, and others get them."""
        stale = stale_blocks(len(tokens), WINDOW, 0, self.tokens_per_block)
        self.free([[], [table[1][block] for block in stale if table[1][block] >= 0]])
        table[1][stale.start : stale.stop] = [-1] * len(stale)

    async def until_carried(self, kv: Scheduler) -> None:
        """Until every rank has carried out what was said so far: the engine's steps carry the messages."""
        while kv._ranks._orders or self.carrying:  # noqa: ASYNC110 - as the engine, which takes a step
            await anyio.sleep(STEP_S)


class Batch:
    """Orders of every kind for one `carry_out`: a pass ends, a request that is read is preempted, a load, a finish."""

    def __init__(self) -> None:
        self.server = server = Ranks()
        server.put_in_store(TOKENS)
        for rank in server.ranks:
            rank.device.script.delay("gather", 0.002)

    async def begin(self, kv: Scheduler) -> bytes:
        server = self.server
        server.still = True
        self.preempted, self.taken = kv.open_request("preempted", LONG), server.allocate(LONG)
        await server.compute(kv, self.preempted, LONG, self.taken)
        self.finishing, self.last = kv.open_request("finishing", FINISHING[:18]), server.allocate(FINISHING)
        await server.compute(kv, self.finishing, FINISHING[:18], self.last)
        self.saving, self.table = kv.open_request("saving", SAVING), server.allocate(SAVING)
        plan = kv.plan_pass([part(self.saving, 0, 18, self.table), part(self.finishing, 18, 2, self.last)])
        await server.carry(kv)
        for rank in server.ranks:
            rank.write(SAVING, self.table)
            rank.write(FINISHING, self.last, 4)
        await kv.after_forward(plan)
        kv._halves.preempt(self.preempted._record)
        loading = kv.open_request("loading", TOKENS)
        offer = await loading.lookup()
        self.loading, self.loaded = loading, server.allocate(TOKENS)
        self.load = loading.reserve(offer, offer.tokens, self.loaded)
        self.finishing.append(FINISHING[18:])
        self.finishing.finish()
        return kv.take_orders()

    async def end(self, kv: Scheduler) -> None:
        """All of them come to their end."""
        server = self.server
        # Every rank has said that the engine may go on.
        server.free(self.taken)
        server.forget(SAVING, self.table)
        server.still = False
        with anyio.fail_after(1):
            assert (await self.load.wait()).state is LoadState.LOADED
            await self.preempted.preempted()
            for request in (self.loading, self.saving, self.finishing, self.preempted):
                await request.finished()
        for rank in server.ranks:
            hashes = rank.hashes(TOKENS)
            assert [rank.device.read_page(0, self.loaded[0][block]) for block in range(4)] == [
                rank.content(block_hash, 0) for block_hash in hashes
            ]
        server.free(self.table)
        server.free(self.last)
        server.free(self.loaded)


@pytest.mark.parametrize(("backend", "way"), WAYS)
def test_D6_S2_carrying_orders_out_is_cancelled_at_every_wait_and_the_rest_is_done_by_the_next_call(
    backend: str, way: Cancelling, left_open: LeftOpen
) -> None:
    async def main(at: int) -> bool:
        batch = Batch()
        async with batch.server.open() as kv:
            orders = await batch.begin(kv)
            first, second = batch.server.workers
            async with anyio.create_task_group() as group:
                group.start_soon(second.carry_out, orders)
                ended = await way.run(partial(first.carry_out, orders), at)
                await first.carry_out(b"")
            await batch.end(kv)
            await anyio.sleep(0.01)
            kv.completed()
            assert left_open(batch.server, kv) == []
        assert batch.server.wrong_values() == []
        assert batch.server.left_behind() == []
        # Its pages of full attention were saved, however often the wait for the copies of its window was cut short.
        there = [set(rank.store.keys()) >= set(rank.keys_of(SAVING)[0]) for rank in batch.server.ranks]
        assert there == [True, True]
        return ended

    at = 1
    while not run_virtual(backend, main, at):
        at += 1
    assert at > 3


class Lives:
    """An engine that runs one request after another, cancels those whose task is cancelled, and takes their pages back."""

    def __init__(self) -> None:
        self.server = server = Ranks()
        server.put_in_store(TOKENS)
        self.ended = 0

    async def life(self, kv: Scheduler, name: str) -> None:
        """Load, compute, be preempted, and again; in the end saved."""
        tokens = (*TOKENS[:16], *range(1000 + self.ended, 1012 + self.ended))
        request = kv.open_request(name, tokens)
        tables: list[PageTable] = []
        try:
            for preempt in (True, False):
                offer = await request.lookup()
                tables.append(table := self.server.allocate(tokens))
                load = request.reserve(offer, offer.tokens, table)
                with suppress(LoadFailed):
                    await load.wait()
                before = offer.tokens if load.state is LoadState.LOADED else 0
                await self.one_pass(kv, request, tokens, table, before)
                if preempt:
                    await request.preempted()
                    self.server.free(tables.pop())
            await request.finished()
        finally:
            await self.cancel(request)  # noqa: ASYNC102 - goes on whatever comes
            for table in tables:
                self.server.free(table)

    async def one_pass(self, kv: Scheduler, request: Request, tokens: Sequence[int], table: PageTable, before: int) -> None:
        plan = kv.plan_pass([part(request, before, len(tokens) - before, table)])
        try:
            await self.server.until_carried(kv)
        except BaseException:
            kv.drop_pass(plan)
            raise
        for rank in self.server.ranks:
            rank.write(tokens, table, before // 4)
        await kv.after_forward(plan)
        await self.server.until_carried(kv)
        self.server.forget(tokens, table)

    async def cancel(self, request: Request) -> None:
        """Whatever comes meanwhile."""
        while True:
            try:
                with anyio.CancelScope(shield=True):
                    await request.cancel()
            except anyio.get_cancelled_exc_class():  # noqa: ASYNC103 - the engine's own clean-up goes on
                continue  # noqa: ASYNC104 - as above
            return


@pytest.mark.parametrize(("backend", "way"), WAYS)
def test_D6_M6_a_request_of_several_ranks_is_cancelled_at_its_every_wait(
    backend: str, way: Cancelling, left_open: LeftOpen
) -> None:
    async def main() -> int:
        lives = Lives()
        async with lives.server.open() as kv:
            free = [len(group) for group in lives.server.ranks[0]._free]
            at = 1
            while not await way.run(partial(lives.life, kv, f"r{at}"), at):
                at += 1
                assert [len(group) for group in lives.server.ranks[0]._free] == free
            await anyio.sleep(0.05)
            kv.completed()
            assert left_open(lives.server, kv) == []
        assert lives.server.wrong_values() == []
        assert lives.server.left_behind() == []
        return at

    assert run_virtual(backend, main) > 10


@pytest.mark.parametrize(("backend", "way"), WAYS)
def test_K8_D6_a_reset_is_cancelled_at_its_every_wait(backend: str, way: Cancelling, left_open: LeftOpen) -> None:
    async def main(at: int) -> bool:
        server = Ranks()
        async with server.open() as kv:
            request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
            await server.compute(kv, request, TOKENS, table)
            ended = await way.run(partial(kv.reset, "step-2"), at)
            await request.cancel()
            server.free(table)
            await anyio.sleep(0.02)
            kv.completed()
            assert left_open(server, kv) == []
            assert [key for key in list(server.store.keys()) if "@step-2" in key] == []
        assert server.left_behind() == []
        return ended

    at = 1
    while not run_virtual(backend, main, at):
        at += 1
    assert at > 1
