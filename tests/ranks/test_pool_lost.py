"""A pool that does not answer, for all of a server's processes or for one rank alone (O7, S13)."""

import anyio
import pytest

from akv import BreakerState, LoadFailed, LookupOutcome
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv.ranks import Scheduler
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio

#: Virtual seconds after which a pool that is back has been found.
FOUND_S = 0.6


async def outcome(kv: Scheduler, tokens: tuple[int, ...] = TOKENS) -> LookupOutcome:
    request = kv.open_request("asks", tokens)
    found = (await request.lookup()).outcome
    await request.cancel()
    return found


def states(server: RankedServer) -> list[BreakerState]:
    return [worker._rank.breaker.state for worker in server.workers]


def lose(server: RankedServer, rank: int) -> None:
    """The client of this rank reaches nobody any more."""
    for operation in ("probe", "get", "put"):
        server.ranks[rank].pool.answer(operation, KeyState.UNAVAILABLE, times=None)


def find(server: RankedServer, rank: int) -> None:
    server.ranks[rank].pool._scripts.clear()


async def test_O7_a_master_that_is_gone_for_all_of_them_fails_no_request_and_is_used_again_when_it_is_back() -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        await load.wait()
        server.store.down = True
        assert await outcome(kv) is LookupOutcome.UNAVAILABLE
        assert kv.pressure().breaker is BreakerState.OPEN
        saving = kv.open_request("s", LONG)
        await server.compute(kv, saving, LONG, server.allocate(LONG))
        with anyio.fail_after(0.2):
            await saving.finished()
        assert states(server) == [BreakerState.OPEN] * 2
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        await request.finished()
        server.store.down = False
        await anyio.sleep(FOUND_S)
        assert states(server) == [BreakerState.CLOSED] * 2
        assert await outcome(kv) is LookupOutcome.FULL
        again = kv.open_request("s", LONG)
        await server.compute(kv, again, LONG, server.allocate(LONG))
        await again.finished()
        assert server.stored_blocks(LONG) == list(range(9))
    assert server.wrong_values() == []
    assert server.left_behind() == []


@pytest.mark.parametrize("lost", [0, 1])
async def test_O7_a_rank_that_lost_the_pool_fails_one_load_and_then_nothing_is_offered_until_it_has_found_it(
    lost: int,
) -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    async with server.open(negative_ttl_s=0.001) as kv:
        lose(server, lost)
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed):
            await load.wait()
        await anyio.sleep(0.005)
        assert [state is BreakerState.CLOSED for state in states(server)] == [rank != lost for rank in range(2)]
        # It would not be loaded: the others wait for that rank.
        asked = len(server.ports.pool.calls)
        assert await outcome(kv) is LookupOutcome.UNAVAILABLE
        assert len(server.ports.pool.calls) == asked
        await server.compute(kv, request, TOKENS, table)
        await request.finished()
        find(server, lost)
        await anyio.sleep(FOUND_S)
        _, load, table = await server.load(kv, "again", TOKENS)
        await load.wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
    assert server.left_behind() == []


async def test_S13_a_save_that_one_rank_had_ended_when_the_schedulers_own_pool_was_lost_is_done_again() -> None:
    server = RankedServer()
    gate = server.ranks[1].runner.hold(CallKind.PUT)
    async with server.open() as kv:
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await anyio.sleep(0.01)
        server.store.clear()
        server.ports.pool.answer("probe", KeyState.UNAVAILABLE, times=None)
        assert await outcome(kv, LONG) is LookupOutcome.UNAVAILABLE
        server.ports.pool._scripts.clear()
        await anyio.sleep(FOUND_S)
        gate.release()
        await request.finished()
        again = kv.open_request("again", TOKENS)
        await server.compute(kv, again, TOKENS, table, 16)
        await again.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.left_behind() == []


@pytest.mark.parametrize("lost", [0, 1])
async def test_S13_a_pool_that_one_rank_lost_gets_what_it_held_again(lost: int) -> None:
    server = RankedServer()
    async with server.open() as kv:
        first, table = kv.open_request("first", TOKENS), server.allocate(TOKENS)
        await server.compute(kv, first, TOKENS, table)
        await first.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        server.store.clear()
        # A block that was matched locally is known to be there, and is not listed.
        second = kv.open_request("second", TOKENS)
        await server.compute(kv, second, TOKENS, table, 16)
        await second.finished()
        assert server.stored_blocks(TOKENS) == []
        lose(server, lost)
        saving = kv.open_request("s", LONG)
        await server.compute(kv, saving, LONG, server.allocate(LONG))
        await saving.finished()
        find(server, lost)
        await anyio.sleep(FOUND_S)
        third = kv.open_request("third", TOKENS)
        await server.compute(kv, third, TOKENS, table, 16)
        await third.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []
    assert server.left_behind() == []


@pytest.mark.parametrize("finds_out", [0, 1])
async def test_S13_what_was_stored_before_the_pool_was_lost_and_is_heard_of_afterwards_is_listed_again(
    finds_out: int,
) -> None:
    server = RankedServer()
    async with server.open() as kv:
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        server.still = True
        await anyio.sleep(0.01)
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        server.store.clear()
        # Nobody has carried a report since, and one of them finds out.
        rank = server.workers[finds_out]._rank
        rank.breaker._opened(rank.breaker._breaker.unavailable(rank.breaker.began(), anyio.current_time()))
        await anyio.sleep(FOUND_S)
        server.still = False
        await request.finished()
        again = kv.open_request("again", TOKENS)
        await server.compute(kv, again, TOKENS, table, 16)
        await again.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.left_behind() == []
