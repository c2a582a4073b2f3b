"""Long prompts do not hold the loop: one pass looks at a bounded number of blocks, and the rest comes later (L3, S13)."""

import pytest

from akv import EngineContractError, LookupOutcome
from akv.plan import hashing
from akv.plan.tokens import TOKEN_BYTES
from akv_testing.server import FakeServer
from akv_testing.traffic import blocks_to_save, part

pytestmark = pytest.mark.anyio

#: 50 blocks of four tokens, and a token.
TOKENS = tuple(range(201))
#: Blocks that one pass looks at in these tests.
MOST = 12


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 4 * TOKEN_BYTES + hashing._BLOCK_OVERHEAD_BYTES
    monkeypatch.setattr(hashing, "_SLICE_BYTES", MOST * block_bytes)


async def test_L3_a_long_local_match_is_listed_over_several_passes_and_all_of_it_stored() -> None:
    server = FakeServer(pages=128)
    async with server.open(role="producer") as kv:
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        server.write(TOKENS, table)
        listed = []
        for _ in range(5):
            plan = kv.plan_pass([part(request, 200, 1, table)])
            listed.append(blocks_to_save(plan))
            await kv.after_forward(plan)
        assert [len(blocks) for blocks in listed] == [MOST, MOST, MOST, MOST, 2]
        assert [block for blocks in listed for block in blocks] == list(range(50))
        await request.finished()
    assert server.stored_blocks(TOKENS) == list(range(50))


async def test_L3_requests_of_one_pass_share_its_bound() -> None:
    server = FakeServer(pages=256)
    async with server.open(role="producer") as kv:
        sequences = [tuple(range(n, n + 201)) for n in (0, 1000, 2000)]
        requests = [kv.open_request(str(n), tokens) for n, tokens in enumerate(sequences)]
        tables = [server.allocate(tokens) for tokens in sequences]
        plan = kv.plan_pass([part(request, 0, 40, table) for request, table in zip(requests, tables, strict=True)])
        assert [len(order.groups[0].blocks) for order in plan.saves] == [10, 2]
        kv.drop_pass(plan)


async def test_S12_what_passes_left_over_is_listed_by_finish() -> None:
    server = FakeServer(pages=128)
    async with server.open(role="producer") as kv:
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        server.write(TOKENS, table)
        await kv.after_forward(kv.plan_pass([part(request, 0, 201, table)]))
        await request.finished()
    assert server.stored_blocks(TOKENS) == list(range(50))


async def test_S13_a_long_match_that_the_pool_holds_is_not_listed_and_not_looked_at_twice() -> None:
    server = FakeServer(pages=256)
    async with server.open() as kv:
        first, table = kv.open_request("first", TOKENS), server.allocate(TOKENS)
        await server.compute(kv, first, TOKENS, table)
        await first.finished()
        second = kv.open_request("second", TOKENS)
        assert (await second.lookup(200)).outcome is LookupOutcome.SKIPPED
        for _ in range(5):
            plan = kv.plan_pass([part(second, 200, 1, table)])
            assert plan.saves == ()
            await kv.after_forward(plan)
        mark = kv._halves.scheduler.requests.records[0].marks.mark
        assert mark == 50
        await second.finished()


async def test_S1_blocks_without_pages_keep_neither_their_own_request_nor_another_from_being_saved() -> None:
    server = FakeServer(pages=256)
    async with server.open(role="producer") as kv:
        holed, table = kv.open_request("holed", TOKENS), server.allocate(TOKENS)
        server.write(TOKENS, table)
        other = tuple(range(1000, 1041))
        healthy, pages = kv.open_request("healthy", other), server.allocate(other)
        server.write(other, pages)
        table[0][:20] = [-1] * 20
        for _ in range(5):
            plan = kv.plan_pass([part(holed, 200, 1, table), part(healthy, 40, 1, pages)])
            await kv.after_forward(plan)
        await holed.finished()
        await healthy.finished()
    assert server.stored_blocks(TOKENS) == list(range(20, 50))
    assert server.stored_blocks(other) == list(range(10))


async def test_L6_every_block_that_may_be_listed_has_its_page_checked_however_far_behind_the_mark() -> None:
    server = FakeServer(pages=128)
    async with server.open(role="producer") as kv, kv.request("r", TOKENS) as request:
        table = server.allocate(TOKENS)
        for wrong, message in ((table[0][48], "block 48, .*listed for a later block"), (-2, "block 49, .*not in the cache")):
            spoilt = [list(pages) for pages in table]
            spoilt[0][49] = wrong
            with pytest.raises(EngineContractError, match=message):
                kv.plan_pass([part(request, 200, 1, spoilt)])
        await request.cancel()
