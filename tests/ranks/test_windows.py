"""Window pages over ranks: copied at the pass by each of them; an end that one rank has no slots for is none (S3, S4, W3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from structlog.testing import capture_logs

from akv import EngineCapabilities, LoadState, LookupOutcome
from akv.plan.window import stale_blocks
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import TOKENS, part
from akv_testing.window_server import window_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.ranks import Scheduler
    from akv.request import Request
    from akv.values.messages import PassPlan
    from akv_testing.server import PageTable
    from tests.ranks.conftest import Post

pytestmark = pytest.mark.anyio

#: One full-attention group, one with a window of six tokens: the last two of four blocks make the end at 16 tokens.
WINDOW = 6


class Ranks(RankedServer):
    """Ranks whose model forgets: window pages are overwritten as soon as every rank has carried out what follows a pass."""

    def __init__(self, **arguments: Any) -> None:
        layout = window_layout([(WINDOW, 0)])
        super().__init__(layout=layout, **{"capabilities": EngineCapabilities(), "rewind_tokens": 0, **arguments})

    async def run_pass(self, kv: Scheduler, request: Request, tokens: Sequence[int], table: PageTable) -> None:
        """A prompt in one pass."""
        await self.compute(kv, request, tokens, table)
        self.forget(tokens, table)

    def forget(self, tokens: Sequence[int], table: PageTable) -> None:
        """The window has left these pages behind."""
        stale = stale_blocks(len(tokens), WINDOW, 0, self.tokens_per_block)
        self.free([[], [table[1][block] for block in stale]])
        table[1][stale.start : stale.stop] = [-1] * len(stale)

    async def serve(self, kv: Scheduler, name: str, tokens: Sequence[int]) -> None:
        request, table = kv.open_request(name, tokens), self.allocate(tokens)
        await self.run_pass(kv, request, tokens, table)
        await request.finished()
        self.free(table)

    @property
    def slots_in_use(self) -> list[int]:
        """Of each rank's ring."""
        rings = [worker._rank.worker._ring for worker in self.workers]
        return [ring.claims.host.count - ring.claims.host.free for ring in rings if ring is not None]


async def offered(server: Ranks, kv: Scheduler, tokens: Sequence[int] = TOKENS) -> tuple[int, LookupOutcome]:
    request = kv.open_request("asks", tokens)
    offer = await request.lookup()
    await request.cancel()
    return offer.tokens, offer.outcome


def starve(server: Ranks, rank: int) -> None:
    """No slot of this rank's ring is free."""
    ring = server.workers[rank]._rank.worker._ring
    assert ring is not None
    ring.claims.host.request(ring.claims.host.free, lambda: None)


async def test_S3_W3_each_rank_copies_its_window_pages_at_the_pass_and_a_second_server_resumes_there() -> None:
    first = Ranks()
    async with first.open() as kv:
        await first.serve(kv, "r", TOKENS)
        assert first.slots_in_use == [0, 0]
    assert [sum(copy.kind == "snapshot" for copy in rank.device.copies) for rank in first.ranks] == [1, 1]
    assert first.left_behind() == []
    second = Ranks(store=first.store)
    async with second.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        table = second.allocate(TOKENS)
        table[1][:2] = [-1, -1]
        ended = await request.reserve(offer, offer.tokens, table).wait()
        assert (ended.state, ended.tokens) == (LoadState.LOADED, 16)
        for rank in second.ranks:
            hashes = rank.hashes(TOKENS)
            assert [rank.device.read_page(0, page) for page in table[0][:4]] == [rank.content(h, 0) for h in hashes]
            assert [rank.device.read_page(1, page) for page in table[1][2:4]] == [rank.content(h, 1) for h in hashes[2:]]
        await request.finished()
    assert second.wrong_values() == []
    assert second.left_behind() == []


@pytest.mark.parametrize("starved", [0, 1])
async def test_S4_a_rank_without_slots_refuses_and_the_end_is_found_by_nobody(starved: int) -> None:
    server = Ranks()
    async with server.open() as kv:
        starve(server, starved)
        with capture_logs() as logs:
            await server.serve(kv, "r", TOKENS)
        assert [log["reason"] for log in logs if log["event"] == "akv.snapshot.dropped"] == ["no_slots"]
        assert await offered(server, kv) == (0, LookupOutcome.WINDOW_MISS)
        # Full attention was not given up.
        assert all(server.store.value(key) is not None for rank in server.ranks for key in rank.keys_of(TOKENS)[0])
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S4_what_one_rank_refused_the_next_request_that_computes_it_saves_on_all() -> None:
    server = Ranks(snapshot_slots=2)
    async with server.open() as kv:
        ring = server.workers[1]._rank.worker._ring
        assert ring is not None
        hog = ring.claims.host.request(2, lambda: None)
        await server.serve(kv, "r", TOKENS)
        hog.leave()
        assert (await offered(server, kv))[0] == 0
        await server.serve(kv, "again", TOKENS)
        assert await offered(server, kv) == (16, LookupOutcome.FULL)
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def planned(server: Ranks, kv: Scheduler) -> tuple[Request, PageTable, PassPlan]:
    request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
    plan = kv.plan_pass([part(request, 0, len(TOKENS), table)])
    await server.carry(kv)
    assert server.slots_in_use == [2, 2]
    return request, table, plan


@pytest.mark.parametrize("how", ["dropped", "superseded", "cancelled", "preempted", "finished", "reset"])
async def test_S2_S4_slots_of_a_plan_that_came_to_nothing_go_back_on_every_rank(
    how: str, left_open: Callable[[RankedServer, Scheduler], list[str]]
) -> None:
    server = Ranks()
    async with server.open() as kv:
        request, _, plan = await planned(server, kv)
        if how == "dropped":
            kv.drop_pass(plan)
        elif how == "superseded":
            await kv.after_forward(kv.plan_pass([]))
        else:
            if how == "reset":
                await kv.reset("other")
            elif how == "finished":
                await request.finished()
            else:
                await (request.cancel() if how == "cancelled" else request.preempted())
            await kv.after_forward(plan)
        await server.carry(kv)
        await settle()
        assert server.slots_in_use == [0, 0]
        await request.cancel()
        await server.exchange(kv)
        kv.completed()
        assert left_open(server, kv) == []
    assert server.store.keys() == []
    assert server.left_behind() == []


@pytest.mark.parametrize("leaving", ["in order", "by an error"])
async def test_S2_S4_slots_of_a_plan_go_back_where_the_server_closes(leaving: str) -> None:
    server = Ranks()

    async def block() -> None:
        async with server.open() as kv:
            await planned(server, kv)
            if leaving == "by an error":
                raise ValueError(leaving)

    if leaving == "by an error":
        with pytest.RaisesGroup(ValueError):
            await block()
    else:
        await block()
    assert server.slots_in_use == [0, 0]
    assert server.left_behind() == []


async def test_S4_a_rank_waits_for_slots_and_the_others_do_not_wait_for_it() -> None:
    server = Ranks(snapshot_slots=2)
    async with server.open(snapshot_wait_ms=20) as kv:
        ring = server.workers[1]._rank.worker._ring
        assert ring is not None
        hog = ring.claims.host.request(2, lambda: None)
        server.still = True
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        plan = kv.plan_pass([part(request, 0, len(TOKENS), table)])
        await server.carry(kv)
        for rank in server.ranks:
            rank.write(TOKENS, table)
        await kv.after_forward(plan)
        orders, took = kv.take_orders(), []

        async def tell(rank: int) -> None:
            began = anyio.current_time()
            await server.workers[rank].carry_out(orders)
            took.append(anyio.current_time() - began)

        async with anyio.create_task_group() as group:
            group.start_soon(tell, 0)
            group.start_soon(tell, 1)
            await anyio.sleep(0.005)
            assert took == [0]
            hog.leave()
        assert took == [0, pytest.approx(0.005, abs=0.002)]
        server.forget(TOKENS, table)
        server.still = False
        await request.finished()
        assert await offered(server, kv) == (16, LookupOutcome.FULL)
    assert server.wrong_values() == []
    assert server.left_behind() == []


@pytest.mark.parametrize("ending", ["cancel", "preempted"])
async def test_S3_D6_an_end_that_comes_while_one_rank_copies_waits_for_the_copy(ending: str, post: type[Post]) -> None:
    server = Ranks()
    gate = server.ranks[1].runner.hold(CallKind.SNAPSHOT)
    async with server.open() as kv:
        by_hand = post(server, kv)
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        plan = kv.plan_pass([part(request, 0, len(TOKENS), table)])
        await by_hand.tell(0, 1)
        for rank in server.ranks:
            rank.write(TOKENS, table)
        await kv.after_forward(plan)
        async with anyio.create_task_group() as group:
            group.start_soon(by_hand.tell, 0, 1)
            await gate.reached()
            group.start_soon(getattr(request, ending))
            await anyio.sleep(0.01)
            assert not request.closed
            assert request.incarnation == 1
            gate.release()
            await anyio.sleep(0.01)
            await by_hand.go_on()
        server.free(table)
        await request.cancel()
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S2_cancelling_after_forward_costs_no_window_page() -> None:
    server = Ranks()
    async with server.open() as kv:
        request, table, plan = await planned(server, kv)
        for rank in server.ranks:
            rank.write(TOKENS, table)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await kv.after_forward(plan)
        assert scope.cancelled_caught
        await server.carry(kv)
        server.forget(TOKENS, table)
        await request.finished()
        assert await offered(server, kv) == (16, LookupOutcome.FULL)
    assert server.left_behind() == []
