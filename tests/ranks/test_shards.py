"""A server of several ranks finds a page only if every rank's part of it is there, and stores each part once (K3, L2)."""

from collections.abc import Sequence

import pytest

from akv_testing import tiny_layout
from akv_testing.ranked_server import RankedServer
from akv_testing.window_server import window_layout

pytestmark = pytest.mark.anyio

TOKENS = list(range(41))  # Ten whole blocks of four.


async def offered(server: RankedServer, tokens: Sequence[int] = TOKENS) -> int:
    """Blocks that a lookup offers."""
    async with server.open() as kv, kv.request("r", tokens) as request:
        return (await request.lookup()).tokens // server.tokens_per_block


@pytest.mark.parametrize(("world", "kv_heads"), [(2, 8), (4, 8), (4, 2), (2, 1)])
async def test_L2_a_block_counts_up_to_the_first_rank_s_hole(world: int, kv_heads: int) -> None:
    for rank in range(world):
        server = RankedServer(world=world, kv_heads=kv_heads)
        server.put_in_store(TOKENS)
        assert await offered(server) == 10
        server.store.remove(server.ranks[rank].keys_of(TOKENS)[1][6])
        assert await offered(RankedServer(world=world, kv_heads=kv_heads, store=server.store)) == 6


@pytest.mark.parametrize(("world", "kv_heads", "shards"), [(2, 8, 2), (4, 8, 4), (4, 2, 2), (2, 1, 1), (1, 8, 1)])
async def test_L3_each_distinct_shard_is_asked_for_once_in_calls_of_so_many_keys(
    world: int, kv_heads: int, shards: int
) -> None:
    server = RankedServer(world=world, kv_heads=kv_heads, probe_head=8, probe_chunk=16)
    server.put_in_store(TOKENS)
    asked: list[list[str]] = []
    probe = server.ports.pool.probe

    def probed(keys: list[str]) -> object:
        asked.append(keys)
        return probe(keys)

    server.ports.pool.probe = probed  # type: ignore[method-assign, assignment]
    assert await offered(server) == 10
    keys = [key for call in asked for key in call]
    assert len(keys) == len(set(keys)) == 10 * 2 * shards
    assert len(asked[0]) <= 8
    assert max(map(len, asked)) <= 16


async def test_L3_so_do_window_pages() -> None:
    server = RankedServer(layout=window_layout(((10, 0),)), rewind_tokens=40, probe_head=8, probe_chunk=4)
    server.put_in_store(TOKENS)
    asked: list[int] = []
    probe = server.ports.pool.probe

    def probed(keys: list[str]) -> object:
        asked.append(len(keys))
        return probe(keys)

    server.ports.pool.probe = probed  # type: ignore[method-assign, assignment]
    assert await offered(server) == 10
    assert max(asked[1:]) <= 4


@pytest.mark.parametrize(("world", "kv_heads", "writers"), [(2, 8, [0, 1]), (4, 2, [0, 2]), (2, 1, [0])])
async def test_K3_of_ranks_with_equal_pages_the_lowest_stores_them(world: int, kv_heads: int, writers: list[int]) -> None:
    server = RankedServer(world=world, kv_heads=kv_heads)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await request.finished()
        assert server.stored_blocks(TOKENS) == list(range(10))
    assert [number for number, rank in enumerate(server.ranks) if rank.pool.bytes_moved["put"]] == writers
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_L2_window_pages_of_every_rank_make_an_end() -> None:
    layout = window_layout(((10, 0),))
    for rank in range(2):
        server = RankedServer(layout=layout, rewind_tokens=16)
        server.put_in_store(TOKENS)
        assert await offered(server) == 10
        server.store.remove(server.ranks[rank].keys_of(TOKENS)[1][9])
        assert await offered(RankedServer(layout=layout, rewind_tokens=16, store=server.store)) == 9


async def test_K3_one_rank_and_two_share_nothing_of_a_model_that_is_split() -> None:
    one = RankedServer(world=1, layout=tiny_layout(groups=2))
    one.put_in_store(TOKENS)
    two = RankedServer(world=2, layout=tiny_layout(groups=2), store=one.store)
    assert await offered(one) == 10
    assert await offered(two) == 0
