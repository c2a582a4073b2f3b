"""What all ranks saved a second server's ranks load, each its own part of every page (K3, L2)."""

import anyio
import pytest

from akv import LoadState
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio

#: World and KV heads, and how many distinct parts a page has then.
SPLITS = [(2, 8, 2), (4, 8, 4), (2, 1, 1), (4, 1, 1), (4, 2, 2)]


async def saved(server: RankedServer, tokens: tuple[int, ...] = TOKENS) -> None:
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        table = server.allocate(tokens)
        await server.compute(kv, request, tokens, table)
        # Long before the hold of its pages would be given up: a rank that stores nothing says so, too.
        with anyio.fail_after(0.1):
            await request.finished()
        server.free(table)


@pytest.mark.parametrize(("world", "kv_heads", "parts"), SPLITS)
async def test_K3_L2_what_all_ranks_saved_a_second_server_finds_and_loads_on_all_of_them(
    world: int, kv_heads: int, parts: int
) -> None:
    first = RankedServer(world=world, kv_heads=kv_heads)
    await saved(first)
    assert first.stored_blocks(TOKENS) == [0, 1, 2, 3]
    # Four blocks of two groups, and of each page every distinct part once.
    assert len(first.store.keys()) == 4 * 2 * parts
    assert first.left_behind() == []
    second = RankedServer(world=world, kv_heads=kv_heads, store=first.store)
    async with second.open() as kv:
        request, load, table = await second.load(kv, "r", TOKENS)
        ended = await load.wait()
        assert (ended.state, ended.tokens) == (LoadState.LOADED, 16)
        assert second.wrong_pages(TOKENS, table, 0, 4) == []
        await request.finished()
    assert second.wrong_values() == []
    assert second.left_behind() == []


@pytest.mark.parametrize(("world", "kv_heads"), [(2, 1), (4, 1), (4, 2)])
async def test_K3_a_part_that_several_ranks_hold_is_put_by_one_of_them_alone(world: int, kv_heads: int) -> None:
    server = RankedServer(world=world, kv_heads=kv_heads)
    await saved(server)
    puts = [sum(call.operation == "put" for call in rank.pool.calls) for rank in server.ranks]
    holders = world // kv_heads
    assert [bool(count) for count in puts] == [rank % holders == 0 for rank in range(world)]
    # Nor does another rank read pages for nothing.
    gathers = [len(rank.device.copies) for rank in server.ranks]
    assert [bool(count) for count in gathers] == [rank % holders == 0 for rank in range(world)]


@pytest.mark.parametrize("missing", [0, 1])
async def test_L2_a_page_that_lacks_one_ranks_part_is_no_hit(missing: int) -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    server.store.evict(server.ranks[missing].keys_of(TOKENS)[1][2])
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        assert (await load.wait()).tokens == 8
        assert server.wrong_pages(TOKENS, table, 0, 2) == []
        await request.cancel()
        nothing = kv.open_request("nothing", LONG)
        server.ranks[missing].put_in_store(LONG)
        assert (await nothing.lookup()).tokens == 0
        await nothing.cancel()
    assert server.left_behind() == []


async def test_L2_a_block_of_which_one_rank_lacks_a_part_is_saved_again() -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    server.store.evict(server.ranks[1].keys_of(TOKENS)[0][3])
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        assert (await load.wait()).tokens == 12
        await server.compute(kv, request, TOKENS, table, 12)
        await request.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []
    assert server.left_behind() == []
