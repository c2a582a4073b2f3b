"""A service of one rank's worker half crashes, or a rank is heard of no more: everything ends, and no page comes back under a
copy (M8, O8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from structlog.testing import capture_logs

from akv import ConnectorBroken, LoadFailed, LookupOutcome, NotOpenError, PagesLost
from akv.ports.calls import CallKind
from akv.ranks import open_worker
from akv_testing import settle
from akv_testing.crashes import SERVICES, crash
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS, part

if TYPE_CHECKING:
    from akv.ranks import Scheduler, Worker
    from akv_testing.server import FakeServer, PageTable
    from tests.ranks.conftest import Post

pytestmark = pytest.mark.anyio

#: Each service in the midst of a load, and one of them in the midst of everything.
CRASHES = [
    *((service, "scatter") for service in SERVICES),
    *(("loader", state) for state in ("idle", "get", "gather", "put")),
]
DEADLINE_S = 0.1


def crashed(service: str, worker: Worker, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = worker._rank
    crash(service, rank, rank.worker, server.runner, monkeypatch.setattr)


async def begin(state: str, server: RankedServer, kv: Scheduler) -> tuple[Any, Any, PageTable]:
    """One piece of work that is held on rank 1; what holds it, the request, and its pages."""
    held: Any = None
    if state in {"scatter", "gather"}:
        held = server.ranks[1].device.script.hold(state)  # type: ignore[arg-type]
    elif state != "idle":
        held = server.ranks[1].runner.hold(CallKind(state))
    if state in {"get", "scatter"}:
        request, _, table = await server.load(kv, "r", TOKENS)
    else:
        request, table = kv.open_request("r", LONG), server.allocate(LONG)
        if state != "idle":
            await server.compute(kv, request, LONG, table)
    await anyio.sleep(0.01)
    return held, request, table


@pytest.mark.parametrize("returns", [True, False], ids=["returns", "hangs"])
@pytest.mark.parametrize(("service", "state"), CRASHES)
async def test_M8_O8_a_server_goes_on_without_a_cache_when_a_service_of_one_rank_crashes(
    service: str, state: str, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RankedServer(loaders=2, savers=2, on_failure="degrade", shutdown_deadline_s=DEADLINE_S)
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        held, request, table = await begin(state, server, kv)
        with capture_logs() as logs:
            crashed(service, server.workers[1], server.ranks[1], monkeypatch)
            # The breaker fails with its first probe.
            await anyio.sleep(0.06 if service == "breaker" else 0.01)
        told = [log["event"] for log in logs]
        assert "akv.connector.degraded" in told
        assert [log["rank"] for log in logs if log["event"] == "akv.rank.degraded"] == [1]
        assert kv.pressure().degraded.startswith("rank 1 serves no more")
        if held is not None and returns:
            held.release()
        lost: PagesLost | None = None
        with anyio.fail_after(DEADLINE_S + 0.1):
            try:
                await request.finished()
            except PagesLost as error:
                lost = error
        # Only a copy of which nobody saw the end keeps pages.
        assert bool(lost) is (state in {"scatter", "gather"} and not returns)
        if lost is None:
            server.free(table)
        else:
            assert set(lost.pages[0]) <= set(kv.touched_pages[0])
        again = kv.open_request("again", TOKENS)
        assert (await again.lookup()).outcome is LookupOutcome.DEGRADED
        table = server.allocate(TOKENS)
        await server.compute(kv, again, TOKENS, table)
        await again.finished()
        if held is not None:
            held.release()
        await anyio.sleep(0.01)
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_O8_a_load_of_a_rank_that_degrades_fails_for_all_and_its_request_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = RankedServer(on_failure="degrade")
    server.put_in_store(TOKENS)
    gate = server.ranks[0].runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        await gate.reached()
        crashed("saver", server.workers[1], server.ranks[1], monkeypatch)
        with pytest.raises(LoadFailed):
            await load.wait()
        server.free(table)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await request.finished()
        # The ranks that were sound are told, and begin nothing either.
        server.still = True
        assert all(not worker._rank.breaker.lets_through() for worker in server.workers)
        gate.release()
    assert server.left_behind() == []


@pytest.mark.parametrize("state", ["gather", "scatter"])
async def test_M8_S7_a_preemption_whose_copy_nobody_sees_end_does_not_hold_the_rank_for_ever(
    state: str, post: type[Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RankedServer(on_failure="degrade", shutdown_deadline_s=DEADLINE_S)
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        held, request, table = await begin(state, server, kv)
        by_hand = post(server, kv)
        crashed("loader", server.workers[1], server.ranks[1], monkeypatch)
        await settle()
        kv._halves.preempt(request._record)
        by_hand.fetch()
        later = kv.open_request("later", TOKENS)
        began = anyio.current_time()
        with anyio.fail_after(DEADLINE_S + 0.1), pytest.raises(PagesLost) as lost:
            await by_hand.tell(0, 1)
        assert anyio.current_time() - began == pytest.approx(DEADLINE_S, abs=0.01)
        assert lost.value.request_id == "r"
        assert set(lost.value.pages[0]) <= set(server.workers[1].touched_pages[0]) <= set(table[0])
        # Told once; what follows is carried out.
        await later.cancel()
        await by_hand.go_on()
        with pytest.raises(PagesLost), anyio.fail_after(DEADLINE_S + 0.1):
            await request.preempted()
        held.release()
    assert server.left_behind() == []


async def test_M8_a_broken_rank_says_so_at_every_call_and_leaves_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RankedServer(shutdown_deadline_s=DEADLINE_S)
    rank = server.ranks[0]
    worker: Worker | None = None
    with pytest.raises(ConnectorBroken) as broken:
        async with open_worker(rank.settings, server.layout, rank=0, ports=rank.ports) as worker:
            crashed("loader", worker, rank, monkeypatch)
            await anyio.sleep(1)
            raise AssertionError("the block goes on")
    assert isinstance(broken.value.__cause__, ExceptionGroup)
    assert worker is not None
    assert isinstance(worker.failure, ConnectorBroken)
    with pytest.raises(ConnectorBroken):
        worker.take_report()
    with pytest.raises(ConnectorBroken):
        await worker.carry_out(b"")
    assert rank.left_behind() == []


async def test_M8_carrying_out_ends_with_the_rank_whatever_it_waits_for(post: type[Post]) -> None:
    server = RankedServer()
    ended: list[float] = []

    async def wait(by_hand: Post) -> None:
        with pytest.raises(NotOpenError):
            await by_hand.tell(1)
        ended.append(anyio.current_time())

    async with anyio.create_task_group() as group:
        async with server.open() as kv:
            held, request, _ = await begin("gather", server, kv)
            by_hand = post(server, kv)
            kv._halves.preempt(request._record)
            group.start_soon(wait, by_hand)
            await anyio.sleep(0.01)
            assert ended == []
            began = anyio.current_time()
            group.start_soon(release_later, held)
        assert ended == [began]
    assert server.left_behind() == []


async def release_later(held: Any) -> None:
    """The closing waits for the copy."""
    await anyio.sleep(0.05)
    held.release()


@pytest.mark.parametrize("work", ["load", "save"])
async def test_M8_a_server_whose_rank_is_heard_of_no_more_closes_at_once_and_names_what_may_be_touched(work: str) -> None:
    server = RankedServer(shutdown_deadline_s=DEADLINE_S)
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        server.still = True
        if work == "load":
            request, load, table = await server.load(kv, "r", TOKENS)
        else:
            request, table = kv.open_request("r", LONG), server.allocate(LONG)
            await server.compute(kv, request, LONG, table)
        await server.carry(kv)
        for ends in (request.finished, load.wait) if work == "load" else (request.finished,):
            with anyio.move_on_after(5 * DEADLINE_S) as scope:
                await ends()
            assert scope.cancelled_caught, "its pages are the connector's"
        began = anyio.current_time()
        assert kv.touched_pages == ()
    assert anyio.current_time() - began < DEADLINE_S
    blocks = 4 if work == "load" else 9
    assert kv.touched_pages == tuple(tuple(pages[:blocks]) for pages in table)
    with pytest.raises(NotOpenError):
        kv.take_orders()
    with pytest.raises(NotOpenError):
        kv.take_report(b"")
    assert server.left_behind() == []


async def test_M8_the_pages_of_what_no_rank_was_told_are_nobodys_when_the_server_closes() -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        server.still = True
        await server.load(kv, "r", TOKENS)
        # The end of a pass that saves, and what a request saves that finishes.
        for name, tokens in (("s", LONG), ("t", LONG[:18])):
            request, table = kv.open_request(name, tokens), server.allocate(tokens)
            before = len(tokens) if name == "s" else 16
            await kv.after_forward(kv.plan_pass([part(request, 0, before, table)]))
            if name == "t":
                await kv.after_forward(kv.plan_pass([part(request, 16, 4, table)]))
                request.append(LONG[18:20])
                request.finish()
        orders = [type(order).__name__ for order in kv._ranks._orders]
        assert {"LoadOrder", "PlanEnded", "SavesNow"} <= set(orders)
    assert kv.touched_pages == ()
    assert server.left_behind() == []
