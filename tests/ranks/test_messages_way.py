"""A request ends at every moment of its messages' way: not told, told to one rank, ended on one, heard of one (D3, D6, S2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from akv import LoadState
from akv.ports.calls import CallKind
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS, part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.ranks import Scheduler
    from akv.request import Load, Request
    from akv_testing.server import PageTable
    from akv_testing.timeline import CopyGate
    from tests.ranks.conftest import Post

pytestmark = pytest.mark.anyio

ENDINGS = ["cancel", "finished", "preempted"]
#: How far the messages of a load have come.
LOAD_STAGES = ["reserved", "fetched", "told to one", "told", "ended on one", "heard of one", "ended", "heard"]
#: And of a pass that saves.
SAVE_STAGES = [
    *("planned", "plan told to one", "plan told", "ran", "end told to one", "end told", "ended on one", "heard of one"),
    *("ended", "heard"),
]
#: Where the pass that was planned does not run.
DROPPED = ["plan told to one"]
#: Longer than what runs freely takes.
RUNS_S = 0.01


async def taken(steps: Sequence[Callable[[], Any]]) -> None:
    """Take these, each to its end."""
    for step in steps:
        if (waits := step()) is not None:
            await waits


async def end(request: Request, how: str) -> None:
    await getattr(request, how)()
    if how == "preempted":
        assert not request.closed


async def goes_on(server: RankedServer, kv: Scheduler) -> None:
    """Another request can still load, compute and save, on every rank."""
    request, load, table = await server.load(kv, "later", LONG)
    assert (await load.wait()).state is LoadState.LOADED
    assert server.wrong_pages(LONG, table, 0, 9) == []
    await request.finished()
    tokens = list(range(500, 518))
    fresh = kv.open_request("fresh", tokens)
    await server.compute(kv, fresh, tokens, server.allocate(tokens))
    await fresh.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2, 3]


async def load_until(server: RankedServer, kv: Scheduler, post: Post, stage: str) -> tuple[Request, Load, PageTable]:
    at = LOAD_STAGES.index(stage)
    gates = [rank.runner.hold(CallKind.GET) for rank in server.ranks]
    request, load, table = await server.load(kv, "r", TOKENS)

    async def ends(rank: int) -> None:
        gates[rank].release()
        await anyio.sleep(RUNS_S)

    steps: list[Callable[[], Any]] = [
        post.fetch,
        lambda: post.tell(1),
        lambda: post.tell(0),
        lambda: ends(0),
        lambda: post.hear(0),
        lambda: ends(1),
        lambda: post.hear(1),
    ]
    await taken(steps[:at])
    if at < LOAD_STAGES.index("ended"):
        assert load.state is None
    return request, load, table


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("stage", LOAD_STAGES)
async def test_D3_D6_a_request_with_a_load_ends(
    stage: str, ending: str, post: type[Post], left_open: Callable[[RankedServer, Scheduler], list[str]]
) -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    server.put_in_store(LONG)
    async with server.open() as kv:
        by_hand = post(server, kv)
        request, load, table = await load_until(server, kv, by_hand, stage)
        async with anyio.create_task_group() as group:
            group.start_soon(end, request, ending)
            await anyio.sleep(RUNS_S)
            await by_hand.go_on()
        # It may have ended everywhere before anybody heard of the cancel.
        assert load.state is (LoadState.LOADED if stage in {"ended", "heard"} else LoadState.CANCELLED)
        # A race, if a copy of any rank still wrote one of them.
        server.free(table)
        if ending == "preempted":
            await request.cancel()
        for rank in server.ranks:
            for gate in rank.runner._gates:
                gate.release()
        await anyio.sleep(RUNS_S)
        assert left_open(server, kv) == []
        await goes_on(server, kv)
        await anyio.sleep(RUNS_S)
        kv.completed()
        assert left_open(server, kv) == []
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def save_until(
    server: RankedServer, kv: Scheduler, post: Post, stage: str, gates: list[CopyGate]
) -> tuple[Request, PageTable]:
    at = SAVE_STAGES.index(stage)
    request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
    plan = kv.plan_pass([part(request, 0, len(TOKENS), table)])

    async def runs() -> None:
        for rank in server.ranks:
            rank.write(TOKENS, table)
        await kv.after_forward(plan)

    async def ends(rank: int) -> None:
        gates[rank].release()
        await anyio.sleep(RUNS_S)

    steps: list[Callable[[], Any]] = [
        lambda: post.tell(1),
        lambda: post.tell(0),
        runs,
        lambda: post.tell(0),
        lambda: post.tell(1),
        lambda: ends(0),
        lambda: post.hear(0),
        lambda: ends(1),
        lambda: post.hear(1),
    ]
    await taken(steps[:at])
    if stage in DROPPED:
        kv.drop_pass(plan)
    elif at < SAVE_STAGES.index("ran"):
        await runs()
    return request, table


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("stage", SAVE_STAGES)
async def test_S2_S7_a_request_with_a_save_ends(
    stage: str, ending: str, post: type[Post], left_open: Callable[[RankedServer, Scheduler], list[str]]
) -> None:
    server = RankedServer()
    server.put_in_store(LONG)
    async with server.open() as kv:
        by_hand = post(server, kv)
        gates = [rank.device.script.hold("gather") for rank in server.ranks]
        request, table = await save_until(server, kv, by_hand, stage, gates)
        async with anyio.create_task_group() as group:
            group.start_soon(end, request, ending)
            await anyio.sleep(RUNS_S)
            group.start_soon(by_hand.go_on)
            await anyio.sleep(RUNS_S)
            if any(gate.holds for gate in gates):
                # Somebody reads its pages.
                assert not request.closed
                assert request.incarnation == 1
            for gate in gates:
                gate.release()
        server.free(table)
        if ending == "preempted":
            await request.cancel()
        await anyio.sleep(RUNS_S)
        assert left_open(server, kv) == []
        await goes_on(server, kv)
        await anyio.sleep(RUNS_S)
        kv.completed()
        assert left_open(server, kv) == []
        if ending == "finished" or stage == "heard":
            assert server.stored_blocks(TOKENS) == ([] if stage in DROPPED else [0, 1, 2, 3])
    assert server.wrong_values() == []
    assert server.left_behind() == []
