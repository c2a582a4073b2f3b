"""An abort before, behind and beside what else ends a request: its completion, its finish, and the next use of its id
(D2, D6, D8, M3, M7, O6).
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

import anyio
import pytest

from akv import (
    Connector,
    LoadCancelled,
    LoadCompleted,
    LoadState,
    LookupOutcome,
    NotOpenError,
    PagesReleased,
    SavesCompleted,
)
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS, part

if TYPE_CHECKING:
    from collections.abc import Callable

    from akv_testing.calls import Gate
    from tests.cancellation.conftest import Engine

pytestmark = pytest.mark.anyio

#: Whether the store's calls go through slots, or to the pages themselves.
REACH = pytest.mark.parametrize("host_pages", [False, True], ids=["slots", "host pages"])

warm = partial(FakeServer.warm, TOKENS, LONG)


# -- a gated load, aborted


@REACH
@pytest.mark.parametrize("after_body", [False, True], ids=["nothing written", "all written"])
async def test_D6_D8_an_abort_then_a_late_completion(
    host_pages: bool, after_body: bool, left_open: Callable[[Connector], list[str]]
) -> None:
    server = warm(host_pages=host_pages)
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.GET, after_body=after_body)
        request, load, table = await server.load(kv, "r", TOKENS)
        await gate.reached()
        quarantined = await request.cancel()
        assert (request.closed, load.state) == (True, LoadState.CANCELLED)
        # Through slots the call touches no page; else it touches those of one batch, the first group's four.
        assert quarantined == ((tuple(table[0][:4]), ()) if host_pages else ())
        held = [list(group) for group in quarantined] or [[], []]
        server.free([[page for page in pages if page not in held[group]] for group, pages in enumerate(table)])
        assert kv.completed() == []
        gate.release()
        await settle()
        assert kv.completed() == (
            [PagesReleased(request_id="r", incarnation=request.incarnation, pages=quarantined)] if host_pages else []
        )
        server.free(held)
        with pytest.raises(LoadCancelled):
            await load.wait()
        assert left_open(kv) == []
        assert server.free_pages == [64, 64]
    assert server.left_behind() == []


@REACH
async def test_D6_D8_a_completion_then_an_abort(host_pages: bool, left_open: Callable[[Connector], list[str]]) -> None:
    server = warm(host_pages=host_pages)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        await kv.changed.wait()
        # The engine has not looked yet. What it learns of the load from now on is what became of it.
        assert await request.cancel() == ()
        assert load.state is LoadState.LOADED
        assert (await load.wait()).incarnation == request.incarnation
        assert kv.completed() == []
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        server.free(table)
        assert left_open(kv) == []
    assert server.left_behind() == []


@REACH
async def test_D6_M3_O6_an_abort_and_no_completion_at_all(host_pages: bool) -> None:
    server = warm(host_pages=host_pages)
    async with server.open(shutdown_deadline_s=0.5) as kv:
        server.runner.hold(CallKind.GET)
        request, load, table = await server.load(kv, "r", TOKENS)
        await settle()
        quarantined = await request.cancel()
        assert (request.closed, load.state) == (True, LoadState.CANCELLED)
        held = [list(group) for group in quarantined] or [[], []]
        server.free([[page for page in pages if page not in held[group]] for group, pages in enumerate(table)])
        # Others are served meanwhile, for as long as the call hangs, and never in its slots or pages.
        for number in range(50):
            other, its_load, its_table = await server.load(kv, f"o{number}", LONG)
            assert (await its_load.wait()).state is LoadState.LOADED
            assert server.wrong_pages(LONG, its_table, 0, 9) == []
            await other.finished()
            server.free(its_table)
            await anyio.sleep(10)
        began = anyio.current_time()
    assert anyio.current_time() - began == pytest.approx(0.5, abs=0.01)
    assert kv.touched_pages == quarantined
    # The buffers stay the store's, since its call may still write.
    assert "outstanding get calls" in server.left_behind()
    assert len(server.pool.registered) == (4 if host_pages else 2)


# -- a request that never got pages


@pytest.mark.parametrize("finishes", [False, True], ids=["cancel", "finish"])
@pytest.mark.parametrize("came_to", ["opened", "offered", "refused", "honoured with nothing", "planned in vain"])
async def test_D6_D9_an_abort_of_a_request_that_never_got_pages(
    came_to: str, finishes: bool, left_open: Callable[[Connector], list[str]]
) -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS, reads_cache=came_to != "refused")
        if came_to != "opened":
            offer = await request.lookup()
            assert (offer.outcome is LookupOutcome.NOT_READING) == (came_to == "refused")
        if came_to == "honoured with nothing":
            assert (await request.reserve(offer, 0, [[], []]).wait()).tokens == 0
        if came_to == "planned in vain":
            kv.drop_pass(kv.plan_pass([part(request, 0, 3, [[5], [5]])]))
        began = anyio.current_time()
        assert await (request.finished() if finishes else request.cancel()) == ()
        assert anyio.current_time() == began
        assert request.closed
        assert kv.completed() == []
        assert server.device.copies == []
        assert left_open(kv) == []
    assert server.left_behind() == []


# -- an abort and a finish


@REACH
@pytest.mark.parametrize("order", ["cancel finish", "finish cancel", "cancel cancel", "finish finish"])
async def test_D6_S7_of_two_ends_that_come_together_both_return_and_it_is_told_once(
    order: str, host_pages: bool, engine: type[Engine], left_open: Callable[[Connector], list[str]]
) -> None:
    server = warm(host_pages=host_pages)
    tokens = range(900, 918)
    returned: list[str] = []
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        request, table = kv.open_request("r", tokens), server.allocate(18)
        await server.compute(kv, request, tokens, table)
        await gate.reached()
        await anyio.sleep(0.01)

        async def end(way: str) -> None:
            await (request.cancel() if way == "cancel" else request.finished())
            assert request.closed
            returned.append(way)

        async with anyio.create_task_group() as group:
            for way in order.split():
                group.start_soon(end, way)
                await settle()
            # A finish waits for its saves, unless a cancel comes before it or beside it.
            assert len(returned) == (0 if order == "finish finish" else 2)
            gate.release()
        assert sorted(returned) == sorted(order.split())
        # Whichever comes later finds it closed, and says the same at once.
        request.finish()
        last = await request.cancel()
        assert last == await request.finished() == request.quarantined
        told = kv.completed()
        assert [one for one in told if not isinstance(one, PagesReleased)] == []
        assert len(told) == (host_pages and order != "finish finish")
        server.free(table)
        await server_goes_on(server, kv)
        assert left_open(kv) == []
    assert server.left_behind() == []
    assert server.wrong_values() == []


async def server_goes_on(server: FakeServer, kv: Connector) -> None:
    request, load, table = await server.load(kv, "r", LONG)
    assert (await load.wait()).state is LoadState.LOADED
    assert server.wrong_pages(LONG, table, 0, 9) == []
    await request.finished()
    server.free(table)


async def test_D6_an_abort_after_the_connector_has_closed_says_so() -> None:
    server = warm()
    async with server.open() as kv:
        request, load, _ = await server.load(kv, "r", TOKENS)
    with pytest.raises(NotOpenError):
        await request.cancel()
    assert (request.closed, load.state) == (True, LoadState.CANCELLED)
    assert server.left_behind() == []


# -- the next use of the id


class Reuse:
    """One id, used again and again while calls of its former owners come back late, in any order."""

    def __init__(self, server: FakeServer, kv: Connector, seed: int) -> None:
        self.server = server
        self.kv = kv
        self.random = Random(seed)
        #: Pages in quarantine, of each group.
        self.held: list[set[int]] = [set() for _ in server.layout.groups]
        self.late: list[Gate] = []
        self.incarnations: list[int] = []
        #: The ends of each incarnation, however they were told.
        self.told: list[LoadCompleted | SavesCompleted] = []

    async def use(self, number: int) -> None:
        """Load, compute and save; aborted somewhere, or not. The same prompt prefix, so the same keys, every time."""
        tokens = (*TOKENS[:16], *range(1000 * number, 1000 * number + 10))
        kinds = self.random.sample([CallKind.GET, CallKind.PUT], self.random.randrange(3))
        # A place and slots must be left for whoever comes next, so few hang at a time.
        gates = [self.server.runner.hold(kind, after_body=self.random.random() < 0.5) for kind in kinds]
        request = self.kv.open_request("r", tokens)
        self.incarnations.append(request.incarnation)
        table = self.server.allocate(tokens)
        while not (offer := await request.lookup()).tokens:
            # Calls of former owners have every place, so nothing is offered.
            self.late.pop().release()
            await settle()
        load = request.reserve(offer, 16, table)
        await self.moment()
        if load.state is None and CallKind.GET not in kinds:
            await load.wait()
            assert self.server.wrong_pages(tokens, table, 0, 4) == []
        if load.state is LoadState.LOADED:
            await self.server.compute(self.kv, request, tokens, table, 16)
            await self.moment()
        if self.random.random() < 0.3:
            request.finish()
            await self.moment()
        self.name(await request.cancel())
        assert request.closed
        self.give_back(table)
        self.late += gates
        self.random.shuffle(self.late)
        while len(self.late) > 1:
            # The calls of a former owner, or of this one, return while the next one is under way, or before.
            self.late.pop().release()
            if self.random.random() < 0.5:
                await settle()

    async def moment(self) -> None:
        await anyio.sleep(self.random.choice([0, 0.0003, 0.001, 0.003]))
        await settle()
        self.fetch()

    def fetch(self) -> None:
        for done in self.kv.completed():
            if isinstance(done, PagesReleased):
                for group, pages in enumerate(done.pages):
                    assert self.held[group].issuperset(pages)
                    self.held[group].difference_update(pages)
                self.server.free([list(pages) for pages in done.pages])
            else:
                self.told.append(done)
                self.name(done.quarantined)

    def name(self, quarantined: tuple[tuple[int, ...], ...]) -> None:
        for group, pages in enumerate(quarantined):
            assert self.held[group].isdisjoint(pages)
            self.held[group].update(pages)

    def give_back(self, table: list[list[int]]) -> None:
        self.server.free([[p for p in pages if p not in self.held[group]] for group, pages in enumerate(table)])


@REACH
@pytest.mark.parametrize("seed", range(3))
async def test_D8_M7_an_id_is_used_again_while_late_ends_of_its_former_owners_come(
    seed: int, host_pages: bool, left_open: Callable[[Connector], list[str]]
) -> None:
    server = warm(host_pages=host_pages, slots=32)
    async with server.open(loaders=4, savers=2) as kv:
        reuse = Reuse(server, kv, seed)
        for number in range(1, 101):
            await reuse.use(number)
        for gate in reuse.late:
            gate.release()
        await anyio.sleep(1)
        reuse.fetch()
        assert reuse.incarnations == sorted(set(reuse.incarnations))
        # Nothing of an earlier incarnation was told once the next one had begun, and each end once.
        ends = [(one.incarnation, type(one)) for one in reuse.told]
        assert ends == sorted(ends, key=lambda end: end[0])
        assert len(set(ends)) == len(ends) > 10
        assert not any(reuse.held)
        assert server.free_pages == [64, 64]
        assert left_open(kv) == []
    assert server.left_behind() == []
    assert server.wrong_values() == []
