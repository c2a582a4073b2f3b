"""One server of several ranks without a model: a scheduler half, a worker half for each rank on fakes of its own, and an
engine that carries their messages.

    server = RankedServer(world=2)
    async with server.open() as kv:                                      # the engine takes a step each millisecond
        request = kv.open_request("r", tokens)
        table = server.allocate(tokens)
        await server.compute(kv, request, tokens, table)
        await request.finished()

A rank is a `FakeServer`: its device, its client of the one store. All have the same page tables, as an engine's ranks do.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from anyio import CancelScope, create_task_group, sleep

from akv.ranks import Scheduler, Worker, open_scheduler, open_worker
from akv.request import Load, Request
from akv.values.layout import Layout
from akv.values.messages import PassPlan
from akv.values.requests import Scheduled
from akv_testing.ports import fake_ports, tiny_layout
from akv_testing.server import FakeServer, PageTable
from akv_testing.store import FakeStore

#: Seconds between two steps of the engine.
STEP_S = 0.001


def ranked_layout(layout: Layout, world: int, kv_heads: int = 8) -> Layout:
    """The layout of a model with so many KV heads, split over `world` ranks. 1: every rank holds the same pages."""
    groups = tuple(msgspec.structs.replace(group, kv_heads=kv_heads) for group in layout.groups)
    return msgspec.structs.replace(layout, groups=groups, world=world)


class RankedServer:
    """A server of `world` ranks. `layout`: of one rank, two layer groups by default. `rank`: what makes a rank, which a test
    may want to be of another kind. Other arguments are those of `FakeServer`, for each rank.
    """

    def __init__(
        self,
        *,
        world: int = 2,
        layout: Layout | None = None,
        kv_heads: int = 8,
        store: FakeStore | None = None,
        rank: Callable[..., FakeServer] = FakeServer,
        **arguments: Any,
    ) -> None:
        self.layout = ranked_layout(tiny_layout(groups=2) if layout is None else layout, world, kv_heads)
        ports = fake_ports(self.layout, store=store, name="scheduler")
        #: What the scheduler half asks.
        self.ports = ports
        self.store = ports.pool.store
        self.ranks = [
            rank(layout=self.layout, store=self.store, rank=number, name=f"rank {number}", **arguments)
            for number in range(world)
        ]
        self.workers: list[Worker] = []
        #: Orders that were fetched, and that no rank was told.
        self.carried: list[bytes] = []
        #: How many calls of `carry` have not returned.
        self.carrying = 0
        #: Set to hold the engine still: no message travels.
        self.still = False

    @property
    def capabilities(self) -> Any:
        """What the engine declares."""
        return self.ranks[0].capabilities

    @property
    def tokens_per_block(self) -> int:
        """T."""
        return self.layout.tokens_per_block

    @asynccontextmanager
    async def open(self, **settings: Any) -> AsyncIterator[Scheduler]:
        """The worker halves, the scheduler half, and the engine's steps, with `settings` on top of the ranks' own."""
        async with AsyncExitStack() as stack:
            self.workers = [
                await stack.enter_async_context(
                    open_worker(
                        rank.settings | settings,
                        self.layout,
                        rank=number,
                        capabilities=rank.capabilities,
                        ports=rank.ports,
                    )
                )
                for number, rank in enumerate(self.ranks)
            ]
            hellos = [worker.hello for worker in reversed(self.workers)]
            opened = open_scheduler(
                self.ranks[0].settings | settings, hellos, capabilities=self.capabilities, ports=self.ports
            )
            kv = await stack.enter_async_context(opened)
            async with create_task_group() as group:
                group.start_soon(self._steps, kv)
                try:
                    yield kv
                finally:
                    group.cancel_scope.cancel()

    async def _steps(self, kv: Scheduler) -> None:
        while True:
            await sleep(STEP_S)
            if not self.still:
                await self.exchange(kv)

    async def exchange(self, kv: Scheduler) -> None:
        """One step without a pass: orders to every rank, reports from every rank."""
        await self.carry(kv)
        for worker in self.workers:
            kv.take_report(worker.take_report())

    async def carry(self, kv: Scheduler) -> None:
        """Orders to every rank; returns when each may go on. What a rank was not told yet, it is by the next call."""
        if orders := kv.take_orders():
            self.carried.append(orders)
        with CancelScope(shield=True):
            waiting, self.carried = self.carried, []
            self.carrying += 1
            try:
                async with create_task_group() as group:
                    for worker in self.workers:
                        group.start_soon(self._tell, worker, waiting)
            finally:
                self.carrying -= 1

    @staticmethod
    async def _tell(worker: Worker, all_orders: Sequence[bytes]) -> None:
        for orders in all_orders:
            await worker.carry_out(orders)

    # -- pages

    def allocate(self, tokens: Sequence[int] | int) -> PageTable:
        """A page table, the same on every rank."""
        tables = [rank.allocate(tokens) for rank in self.ranks]
        return tables[0]

    def free(self, table: PageTable) -> None:
        """The engine's own release of pages, on every rank; poisons them."""
        for rank in self.ranks:
            rank.free([list(pages) for pages in table])

    def wrong_pages(self, tokens: Sequence[int], table: PageTable, first: int, end: int) -> list[tuple[int, int, int]]:
        """Blocks of [first, end), each with its rank and group, whose page does not hold what it stands for."""
        return [
            (number, *wrong) for number, rank in enumerate(self.ranks) for wrong in rank.wrong_pages(tokens, table, first, end)
        ]

    # -- loads and passes

    async def load(
        self, kv: Scheduler, request_id: str, tokens: Sequence[int], local_tokens: int = 0
    ) -> tuple[Request, Load, PageTable]:
        """Open a request, look it up, take up the whole offer, and return while its pages load."""
        request = kv.open_request(request_id, tokens)
        offer = await request.lookup(local_tokens)
        table = self.allocate(tokens)
        return request, request.reserve(offer, offer.tokens, table), table

    async def compute(
        self, kv: Scheduler, request: Request, tokens: Sequence[int], table: PageTable, before: int = 0
    ) -> PassPlan:
        """One pass over all of `tokens` behind the first `before`, on every rank."""
        part = Scheduled(request=request, computed_before=before, tokens=len(tokens) - before, pages=table)
        plan = kv.plan_pass([part])
        await self.carry(kv)
        for rank in self.ranks:
            rank.write(tokens, table, before // self.tokens_per_block)
        await kv.after_forward(plan)
        await self.carry(kv)
        return plan

    # -- the store

    def put_in_store(self, tokens: Sequence[int], blocks: Sequence[int] | None = None) -> None:
        """Store a sequence's blocks, every rank's part, as if another server had computed them."""
        for rank in self.ranks:
            rank.put_in_store(tokens, blocks)

    def stored_blocks(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of a sequence whose pages of every group and rank are in the store."""
        stored = [set(rank.stored_blocks(tokens)) for rank in self.ranks]
        return sorted(set.intersection(*stored))

    def wrong_values(self) -> list[str]:
        """Keys whose value is no rank's page of that name."""
        wrong = [set(rank.wrong_values()) for rank in self.ranks]
        return sorted(set.intersection(*wrong))

    def left_behind(self) -> list[str]:
        """What leaving the block has not given back, on any rank."""
        return [f"rank {number}: {left}" for number, rank in enumerate(self.ranks) for left in rank.left_behind()]
