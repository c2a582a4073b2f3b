"""What was ordered and not carried out when a rank closes is told to have ended, and nothing of it begins (M8, O6)."""

import anyio
import msgspec
import pytest

from akv import LoadFailed
from akv.values.messages import LoadState, RankReport
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS, part

pytestmark = pytest.mark.anyio


async def test_M8_a_rank_that_closes_ends_what_it_was_ordered_and_has_not_begun() -> None:
    server = RankedServer()
    server.put_in_store(LONG)
    async with server.open() as kv:
        server.still = True
        saved, loading = kv.open_request("saved", TOKENS), kv.open_request("loading", LONG)
        table = server.allocate(TOKENS)
        plan = kv.plan_pass([part(saved, 0, len(TOKENS), table)])
        await kv.after_forward(plan)
        offer = await loading.lookup()
        loading.reserve(offer, offer.tokens, server.allocate(LONG))
        finished = kv.open_request("finished", LONG[:8])
        await server.ranks[0].compute(kv, finished, LONG[:8], server.allocate(LONG[:8]))
        finished.finish()
        orders = kv.take_orders()
        worker = server.workers[1]
        with anyio.CancelScope() as scope:
            scope.cancel()  # Cancelled before it began: the next call would carry them out, and none comes.
            await worker.carry_out(orders)
        worker.take_report()
        await worker._rank.close(orderly=True)
        said = msgspec.msgpack.decode(worker.take_report(), type=RankReport).report
    assert [(load.request_id, load.state, load.reason) for load in said.loads] == [("loading", LoadState.FAILED, "closed")]
    assert {save.request_id for save in said.saves} == {"saved", "finished"}
    assert all(save.refused and not save.stored and save.reason == "closed" for save in said.saves)
    assert server.ranks[1].pool.bytes_moved["get"] == server.ranks[1].pool.bytes_moved["put"] == 0


async def test_M8_what_is_said_behind_the_end_of_a_rank_ends_without_it() -> None:
    server = RankedServer()
    server.put_in_store(LONG)
    async with server.open() as kv:
        request = kv.open_request("r", LONG)
        offer = await request.lookup()
        last = RankReport(rank=1, degraded="Planted", ended=True)
        server.workers.pop()
        load = request.reserve(offer, offer.tokens, server.allocate(LONG))
        kv.take_report(msgspec.msgpack.encode(last))
        with anyio.fail_after(1), pytest.raises(LoadFailed, match="rank_ended|degraded"):
            await load.wait()
        with anyio.fail_after(1):
            await request.cancel()
        # The connector goes on without a cache: what comes now is computed, and its end waits for nobody.
        later = kv.open_request("later", TOKENS)
        assert (await later.lookup()).tokens == 0
        with anyio.fail_after(1):
            await later.finished()
