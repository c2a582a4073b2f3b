"""What a failed load leaves behind: pages that nobody asks for again for a while, and a request with few tries (L8, D3)."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from akv import Connector, LoadFailed, LookupOutcome, Offer, Request
from akv.pool.codes import read_sizes
from akv.ports.calls import CallKind
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState
from akv_testing.ports import tiny_layout
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

MISS = LookupOutcome.FULL_ATTENTION_MISS


async def failed_load(server: FakeServer, request: Request, tokens: Sequence[int] = TOKENS) -> LoadFailed:
    """Take up what the request is offered, and see it fail; the pages are the engine's again."""
    offer = await request.lookup()
    table = server.allocate(tokens)
    with pytest.raises(LoadFailed) as failed:
        await request.reserve(offer, offer.tokens, table).wait()
    server.free(table)
    return failed.value


async def offered(kv: Connector, name: str, tokens: Sequence[int] = TOKENS) -> tuple[int, LookupOutcome]:
    """What another request with this prompt is offered."""
    offer = await kv.open_request(name, tokens).lookup()
    return offer.tokens, offer.outcome


def gets(server: FakeServer) -> int:
    return sum(call.operation == "get" for call in server.pool.calls)


async def computed(server: FakeServer, kv: Connector, request: Request, tokens: Sequence[int] = TOKENS) -> None:
    """Compute the whole prompt, save it, and finish."""
    await server.compute(kv, request, tokens, server.allocate(tokens))
    await request.finished()


async def test_L8_a_pool_that_says_exists_and_never_delivers_costs_one_load_in_fifteen_seconds() -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.answer("get", KeyState.HOLDER_LOST, times=None)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await failed_load(server, request)
        assert await request.lookup() == Offer(
            request_id="r", incarnation=request.incarnation, local_tokens=0, tokens=0, outcome=MISS, tokens_per_block=4
        )
        # The put of it changes nothing: the pool has the first value, and keeps naming it.
        await computed(server, kv, request)
        await anyio.sleep(14.9)
        assert await offered(kv, "soon", TOKENS) == (0, MISS)
        assert gets(server) == 1
        await anyio.sleep(0.1)
        later = kv.open_request("later", TOKENS)
        await failed_load(server, later)
        assert gets(server) == 2
        assert (await later.lookup()).tokens == 0


async def test_D3_L8_a_pool_that_says_exists_and_never_delivers_gets_two_tries_of_a_request() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open(load_deadline_s=1.0) as kv:
        # The first get never returns, the second one answers trouble, and so would all.
        gate = server.runner.hold(CallKind.GET)
        server.pool.answer("get", KeyState.HOLDER_LOST, times=None)
        request = kv.open_request("r", TOKENS)
        reasons = [(await failed_load(server, request)).reason for _ in range(2)]
        assert reasons == ["deadline", "holder_lost"]
        asked = len(server.pool.calls)
        offer = await request.lookup()
        assert (offer.tokens, offer.outcome) == (0, LookupOutcome.LOADS_FAILED)
        assert len(server.pool.calls) == asked
        gate.release()
        await computed(server, kv, request)
        before = gets(server)
        assert await offered(kv, "soon") == (0, MISS)
        assert gets(server) == before
        await anyio.sleep(15.0)
        await failed_load(server, kv.open_request("later", TOKENS))
        assert gets(server) == before + 1
    assert server.left_behind() == []


@pytest.mark.parametrize("most", [1, 3])
async def test_D3_the_tries_of_a_request_are_its_own_and_a_setting(most: int) -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.answer("get", KeyState.LEASE_EXPIRED, times=None, key=server.keys_of(TOKENS)[0][0])
    async with server.open(max_load_attempts=most) as kv:
        request = kv.open_request("r", TOKENS)
        for _ in range(most):
            await failed_load(server, request)
        assert (await request.lookup()).outcome is LookupOutcome.LOADS_FAILED
        assert await offered(kv, "other") == (16, LookupOutcome.FULL)
        # Its id, used again, begins a new life.
        await request.cancel()
        assert await offered(kv, "r") == (16, LookupOutcome.FULL)


async def test_D3_of_two_reasons_for_no_offer_the_one_that_stays_is_told() -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.answer("get", KeyState.LEASE_EXPIRED, times=None)
    async with server.open(max_load_attempts=1, max_parked_loads=1) as kv:
        request = kv.open_request("r", TOKENS)
        await failed_load(server, request)
        gate = server.runner.hold_all(CallKind.GET)
        await server.load(kv, "parked", TOKENS)
        # Of two reasons it is told the one that stays.
        assert (await request.lookup()).outcome is LookupOutcome.LOADS_FAILED
        assert (await kv.open_request("mute", TOKENS, reads_cache=False).lookup()).outcome is LookupOutcome.NOT_READING
        gate.release()


@pytest.mark.parametrize("block", [0, 2, 3])
async def test_L8_an_eviction_between_lookup_and_load_fails_it_and_the_offer_ends_there_until_it_is_stored(block: int) -> None:
    server = FakeServer.warm(TOKENS)
    key = server.keys_of(TOKENS)[1][block]
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        server.store.remove(key)
        with pytest.raises(LoadFailed) as failed:
            await request.reserve(offer, offer.tokens, server.allocate(TOKENS)).wait()
        assert (failed.value.key, failed.value.reason) == (key, "missing")
        # One key of the batch is bad, and it alone: blocks before it are offered, and the other group's page is asked for.
        server.store.write(key, server.content(server.hashes(TOKENS)[block], 1))
        asked = len(server.pool.calls)
        assert (await request.lookup()).tokens == 4 * block
        assert key not in {name for call in server.pool.calls[asked:] for name in call.keys}
        assert server.keys_of(TOKENS)[0][block] in {name for call in server.pool.calls[asked:] for name in call.keys}
        # A put of ours that the pool took clears it.
        await computed(server, kv, request)
        assert await offered(kv, "next") == (16, LookupOutcome.FULL)


async def test_L8_a_refused_put_clears_nothing() -> None:
    server = FakeServer.warm(TOKENS)
    key = server.keys_of(TOKENS)[0][1]
    server.pool.answer("get", KeyState.MISSING, key=key)
    server.pool.answer("put", KeyState.NO_SPACE, key=key, times=None)
    # Nor does anybody else store it meanwhile: the probes between the attempts (S5) do not find it.
    server.pool.answer("probe", KeyState.MISSING, key=key, skip=1, times=2)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await failed_load(server, request)
        await computed(server, kv, request)
        assert await offered(kv, "next") == (4, LookupOutcome.FULL)


#: What the store's client returns for the second key of a get (the others are there), or for the whole call; why the load
#: fails; and how many tokens are offered afterwards.
Raw = Callable[[list[int]], Any]
ANSWERS: dict[str, tuple[Raw, str, int]] = {
    "none": (lambda sizes: None, "refused", 0),
    "a shorter list": (lambda sizes: sizes[:-1], "refused", 0),
    "a longer list": (lambda sizes: [*sizes, 0], "refused", 0),
    "no list": (lambda sizes: sizes[0], "refused", 0),
    "none for a key": (lambda sizes: [sizes[0], None, *sizes[2:]], "refused", 0),
    "0": (lambda sizes: [sizes[0], 0, *sizes[2:]], "wrong_size", 4),
    "short": (lambda sizes: [sizes[0], sizes[1] - 1, *sizes[2:]], "wrong_size", 4),
    "long": (lambda sizes: [sizes[0], sizes[1] + 1, *sizes[2:]], "wrong_size", 4),
    "-1": (lambda sizes: [sizes[0], -1, *sizes[2:]], "refused", 4),
    "-600": (lambda sizes: [sizes[0], -600, *sizes[2:]], "wrong_size", 4),
    "-704": (lambda sizes: [sizes[0], -704, *sizes[2:]], "missing", 4),
    "-707": (lambda sizes: [sizes[0], -707, *sizes[2:]], "lease_expired", 16),
    "-800": (lambda sizes: [sizes[0], -800, *sizes[2:]], "holder_lost", 4),
    "-900": (lambda sizes: [-900] * len(sizes), "unavailable", 0),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_D3_L8_whatever_the_client_answers_the_load_fails_and_the_keys_that_failed_are_bad(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, reason, offer_then = ANSWERS[case]
    server = FakeServer.warm(TOKENS)

    def get(keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        return read_sizes(raw(list(sizes)), sizes)

    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(server.pool, "get", get)
            failed = await failed_load(server, request)
        assert failed.reason == reason
        assert failed.key == server.keys_of(TOKENS)[0][1 if offer_then else 0]
        assert server.device.copies == []
        assert (await request.lookup()).tokens == offer_then
    assert server.left_behind() == []


@pytest.mark.parametrize("answer", [None, [], [KeyAnswer(KeyState.OK, 16)] * 9])
async def test_L2_a_pool_that_answers_no_list_of_that_length_delivered_nothing(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer.warm(TOKENS)
    monkeypatch.setattr(server.pool, "get", lambda *_: answer)
    async with server.open() as kv:
        assert (await failed_load(server, kv.open_request("r", TOKENS))).reason == "refused"
        assert server.device.copies == []


async def test_L8_neither_a_deadline_nor_a_cancel_says_anything_of_a_key() -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.answer("get", KeyState.HOLDER_LOST, times=None)
    async with server.open(load_deadline_s=1.0, loaders=2) as kv:
        gate = server.runner.hold_all(CallKind.GET, after_body=True)
        request = kv.open_request("slow", TOKENS)
        assert (await failed_load(server, request)).reason == "deadline"
        cancelled, _, _ = await server.load(kv, "cancelled", TOKENS)
        await cancelled.cancel()
        gate.release()
        assert await offered(kv, "next") == (16, LookupOutcome.FULL)


async def test_L8_a_copy_that_fails_says_nothing_of_a_key() -> None:
    server = FakeServer.warm(TOKENS)
    server.device.script.fail_copy("scatter", RuntimeError("ECC"))
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        assert (await failed_load(server, request)).reason == "copy_failed"
        assert (await request.lookup()).tokens == 16


async def test_L8_where_all_that_would_be_asked_is_bad_nobody_is_asked() -> None:
    server = FakeServer.warm(TOKENS, layout=tiny_layout())
    server.pool.answer("get", KeyState.HOLDER_LOST, times=None)
    async with server.open() as kv:
        await failed_load(server, kv.open_request("r", TOKENS))
        asked = len(server.pool.calls)
        assert await offered(kv, "next") == (0, MISS)
        assert len(server.pool.calls) == asked


async def test_L8_the_search_for_windows_goes_round_a_page_that_failed() -> None:
    server = WindowServer.warm(LONG)
    last = server.keys_of(LONG)[1][8]
    async with server.open() as kv:
        request = kv.open_request("r", LONG)
        server.pool.answer("get", KeyState.HOLDER_LOST, key=last)
        assert (await failed_load(server, request, LONG)).key == last
        asked = len(server.pool.calls)
        offer = await request.lookup()
        assert (offer.tokens, offer.outcome) == (32, LookupOutcome.RECOVERED)
        assert last not in {key for call in server.pool.calls[asked:] for key in call.keys}
