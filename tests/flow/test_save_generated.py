"""Saves of generated tokens, and of content that many requests or servers share (S12, S13)."""

from collections.abc import Sequence

import anyio
import pytest

from akv import (
    Connector,
    LoadState,
    Request,
)
from akv_testing import FakeStore
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import LONG, TOKENS, blocks_to_save, part

pytestmark = pytest.mark.anyio


# -- generated tokens


async def decode(
    server: FakeServer, kv: Connector, request: Request, tokens: list[int], table: PageTable, steps: Sequence[int]
) -> None:
    """Feed the last token, sample the next: its own KV comes with the pass after."""
    for sampled in steps:
        request.append([sampled])
        tokens.append(sampled)
        before = len(tokens) - 1
        plan = kv.plan_pass([part(request, before, 1, table)])
        if len(tokens) % 4 == 0:
            server.write(tokens, table, len(tokens) // 4 - 1)
        await kv.after_forward(plan)


async def test_S12_decoded_blocks_are_saved_as_they_complete() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        tokens = list(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await decode(server, kv, request, tokens, table, range(50, 57))
        await anyio.sleep(0.1)
        assert server.stored_blocks(tokens) == [0, 1, 2, 3, 4, 5]
        await request.finished()
    assert server.wrong_values() == []


async def test_S12_prompt_blocks_alone_are_saved_with_save_generated_off() -> None:
    server = FakeServer()
    async with server.open(save_generated=False) as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        tokens = list(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await decode(server, kv, request, tokens, table, range(50, 57))
        await request.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2, 3]


async def test_S12_overlap_scheduling_a_token_that_is_told_after_the_plan_is_saved_at_the_finish() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        tokens = [*TOKENS, 50, 51]
        await server.compute(kv, request, TOKENS, table)
        for before in (18, 19):
            plan = kv.plan_pass([part(request, before, 1, table)])
            assert blocks_to_save(plan) == []
            server.write(tokens[: before + 1], table, 4)
            await kv.after_forward(plan)
            request.append([tokens[before]])
        await request.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2, 3, 4]
    assert server.wrong_values() == []


async def test_S12_the_last_sampled_token_has_no_KV() -> None:
    server = FakeServer()
    tokens = [*TOKENS, 50, 51]
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        await server.compute(kv, request, TOKENS, table)
        await decode(server, kv, request, list(TOKENS), table, [50])
        # Sampled by the last pass and confirmed, but never fed.
        request.append([51])
        await request.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2, 3]


async def test_S12_a_finish_in_the_middle_of_prefill_saves_what_was_computed() -> None:
    server = FakeServer()
    async with server.open() as kv:
        async with kv.request("r", LONG) as request:
            table = server.allocate(LONG)
            plan = kv.plan_pass([part(request, 0, 13, table)])
            server.write(LONG, table, 0, 3)
            await kv.after_forward(plan)
    assert server.stored_blocks(LONG) == [0, 1, 2]


# -- shared content


async def test_S13_a_prefix_that_many_requests_share_is_saved_once() -> None:
    server = FakeServer()
    async with server.open() as kv:
        for number in range(3):
            tokens = [*TOKENS[:16], 90 + number, 91, 92, 93]
            async with kv.request(f"r{number}", tokens) as request:
                table = server.allocate(tokens)
                await server.compute(kv, request, tokens, table)
            server.free(table)
            assert server.stored_blocks(tokens) == [0, 1, 2, 3, 4]
        keys = [key for call in server.pool.calls if call.operation == "put" for key in call.keys]
        assert len(keys) == len(set(keys)) == 2 * (4 + 3)
    assert server.wrong_values() == []


@pytest.mark.parametrize("kept", [0, 2])
async def test_S13_blocks_that_a_lookup_no_longer_finds_are_saved_again(kept: int) -> None:
    server = FakeServer()
    async with server.open() as kv:
        for number in range(2):
            async with kv.request(f"r{number}", TOKENS) as request:
                offer = await request.lookup()
                table = server.allocate(TOKENS)
                await request.reserve(offer, offer.tokens, table).wait()
                await server.compute(kv, request, TOKENS, table, offer.tokens)
            assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
            assert offer.tokens == (4 * kept if number else 0)
            # The pool evicts without telling anybody.
            for keys in server.keys_of(TOKENS):
                for key in keys[kept:]:
                    server.store.remove(key)
    assert server.wrong_values() == []


async def test_content_that_two_servers_computed_is_put_by_both_and_keeps_its_first_value() -> None:
    store = FakeStore(anyio.current_time)
    one, two = FakeServer(store=store, name="one"), FakeServer(store=store, name="two")
    async with one.open() as kv_one, two.open() as kv_two:
        requests = [kv.open_request("r", TOKENS) for kv in (kv_one, kv_two)]
        for server, kv, request in zip((one, two), (kv_one, kv_two), requests, strict=True):
            await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        for request in requests:
            await request.finished()
    assert [server.pool.bytes_moved["put"] for server in (one, two)] == [160, 160]
    assert store.used_bytes == 160
    assert one.wrong_values() == []


async def test_L7_a_consumer_saves_nothing() -> None:
    server = FakeServer.warm(TOKENS[:8])
    async with server.open(role="consumer") as kv:
        async with kv.request("r", TOKENS) as request:
            table = server.allocate(TOKENS)
            load = request.reserve(await request.lookup(), 8, table)
            assert (await load.wait()).state is LoadState.LOADED
            plan = kv.plan_pass([part(request, 8, 10, table)])
            assert plan.saves == ()
            server.write(TOKENS, table, 2)
            await kv.after_forward(plan)
    assert server.stored_blocks(TOKENS) == [0, 1]
