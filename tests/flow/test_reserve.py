"""What an engine may not hand over: each is refused at its call, and nothing is taken (L6)."""

from typing import Any

import pytest

from akv import (
    NO_PAGE,
    EngineContractError,
    Scheduled,
)
from akv.ports.calls import CallKind
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


def bad_tables(table: PageTable) -> dict[str, Any]:
    short = [table[0], table[1][:3]]
    return {
        "block 3.*ends": short,
        "group 1, block 2.*no page": [table[0], [*table[1][:2], NO_PAGE, table[1][3]]],
        "group 0, block 1.*not in the cache": [[table[0][0], 64, *table[0][2:]], table[1]],
        "group 1, block 3.*earlier block": [table[0], [*table[1][:3], table[1][0]]],
        "integer": [["0", *table[0][1:]], table[1]],
        "1 page tables": [table[0]],
    }


@pytest.mark.parametrize("message", list(bad_tables([[0, 1, 2, 3], [0, 1, 2, 3]])))
async def test_L6_a_page_table_that_cannot_be_is_refused_and_nothing_is_taken(message: str) -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        table = server.allocate(TOKENS)
        with pytest.raises(EngineContractError, match=f"'r'.*{message}|{message}.*'r'"):
            request.reserve(offer, 16, bad_tables(table)[message])
        assert (await request.reserve(offer, 16, table).wait()).tokens == 16


@pytest.mark.parametrize("honoured", [-4, 3, 17, 20])
async def test_L6_an_honoured_count_that_is_no_part_of_the_offer_is_refused_and_nothing_is_taken(honoured: int) -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        table = server.allocate(TOKENS)
        with pytest.raises(EngineContractError, match="'r'"):
            request.reserve(offer, honoured, table)
        assert (await request.reserve(offer, 8, table).wait()).tokens == 8
        assert server.wrong_pages(TOKENS, table, 0, 2) == []
        assert len(server.wrong_pages(TOKENS, table, 2, 4)) == 4


async def test_L6_an_offer_of_another_request_or_of_an_earlier_use_of_the_id_is_refused() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        first = kv.open_request("r", TOKENS)
        offer = await first.lookup()
        table = server.allocate(TOKENS)
        await first.cancel()
        second = kv.open_request("r", TOKENS)
        for request in (second, kv.open_request("other", TOKENS)):
            with pytest.raises(EngineContractError, match="offer"):
                request.reserve(offer, 16, table)
        with pytest.raises(EngineContractError, match="closed"):
            first.reserve(offer, 16, table)
        await second.reserve(await second.lookup(), 16, table).wait()


async def test_L6_a_second_reservation_and_a_page_in_use_are_refused_and_the_first_is_untouched() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(EngineContractError, match="load under way"):
            request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
        other = kv.open_request("other", TOKENS)
        offer = await other.lookup()
        with pytest.raises(EngineContractError, match=r"'other', block 0, group 0.*another load fills"):
            other.reserve(offer, 16, table)
        gate.release()
        await load.wait()
        assert (await other.reserve(offer, 16, table).wait()).tokens == 16


async def test_D2_L6_pages_that_a_save_reads_cannot_be_lent() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.PUT)
    async with server.open() as kv:
        saving = kv.open_request("saving", LONG)
        table = server.allocate(LONG)
        await server.compute(kv, saving, LONG, table)
        await gate.reached()
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        with pytest.raises(EngineContractError, match="a save reads"):
            request.reserve(offer, 16, table)
        gate.release()
        await saving.finished()
        await request.reserve(offer, 16, table).wait()


async def test_L6_a_pass_over_a_request_that_loads_is_refused() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(EngineContractError, match="load is under way"):
            kv.plan_pass([Scheduled(request=request, computed_before=16, tokens=2, pages=table)])
        gate.release()
        await load.wait()
        kv.drop_pass(kv.plan_pass([Scheduled(request=request, computed_before=16, tokens=2, pages=table)]))
