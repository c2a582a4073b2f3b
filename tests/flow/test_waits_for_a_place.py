"""Loads and saves whose store call cannot begin, because calls that hang hold every place of their kind (O7)."""

import anyio
import pytest

from akv import LoadFailed, LookupOutcome
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


async def test_O7_a_load_that_waits_for_the_place_of_a_call_that_hangs_fails_when_the_breaker_opens() -> None:
    server = FakeServer.warm(TOKENS, loaders=2)
    async with server.open(load_deadline_s=1.0) as kv:
        gate = server.runner.hold_all(CallKind.GET)
        loads = [(await server.load(kv, "first", TOKENS))[1]]
        await anyio.sleep(0.5)
        # The third one is taken up when the first one's deadline passes, and finds both places taken by calls that hang.
        loads += [(await server.load(kv, request_id, TOKENS))[1] for request_id in ("second", "third")]
        ended = []
        for load in loads:
            with pytest.raises(LoadFailed) as failed:
                await load.wait()
            ended.append((failed.value.reason, anyio.current_time()))
        assert ended == [("deadline", 1.0), ("deadline", 1.5), ("unavailable", 1.5)]
        gate.release()
        await settle()
        assert [call.operation for call in server.pool.calls].count("get") == 2, "the third one never asked"
    assert server.left_behind() == []


async def test_O7_while_calls_that_hang_have_every_place_a_lookup_offers_nothing_and_the_pool_is_not_asked() -> None:
    """The master answers, so the breaker closes again; the holder that stands still holds the gets for a minute."""
    server = FakeServer.warm(TOKENS, LONG, loaders=2)
    async with server.open(load_deadline_s=1.0) as kv:
        gate = server.runner.hold_all(CallKind.GET)
        first, *_ = await server.load(kv, "first", TOKENS)
        await anyio.sleep(0.5)
        await first.cancel()
        # One place is left: loads go on.
        third, load, _ = await server.load(kv, "second", TOKENS)
        assert load.state is None
        await anyio.sleep(0.1)
        await third.cancel()
        await settle()
        asked = len(server.pool.calls)
        offer = await kv.open_request("third", LONG).lookup()
        assert (offer.tokens, offer.outcome) == (0, LookupOutcome.UNAVAILABLE)
        assert len(server.pool.calls) == asked
        gate.release()
        await settle()
        assert (await kv.open_request("fourth", LONG).lookup()).tokens == 36
    assert server.left_behind() == []
