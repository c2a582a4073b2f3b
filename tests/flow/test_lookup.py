"""Lookups: what is asked, what counts, and what a slow or silent pool makes of the answer."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from akv import EngineContractError, LookupOutcome, Offer, Request, Scope
from akv.plan import hashing
from akv.ports.calls import CallKind, CallSize
from akv.ports.pool import KeyAnswer, KeyState
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer
from akv_testing.traffic import TOKENS

pytestmark = pytest.mark.anyio


async def offered(server: FakeServer, local_tokens: int = 0, tokens: Sequence[int] = TOKENS, **settings: Any) -> Offer:
    async with server.open(**settings) as kv:
        return await kv.open_request("r", tokens).lookup(local_tokens)


@pytest.mark.parametrize(("length", "blocks"), [(16, 3), (17, 4), (18, 4), (5, 1), (4, 0), (1, 0)])
async def test_L1_a_hit_of_the_whole_prompt_leaves_a_token_to_compute(length: int, blocks: int) -> None:
    server = FakeServer.warm(TOKENS)
    offer = await offered(server, tokens=TOKENS[:length])
    assert (offer.tokens, offer.local_tokens) == (4 * blocks, 0)
    assert offer.outcome is (LookupOutcome.FULL if blocks else LookupOutcome.SKIPPED)


async def test_L1_an_offer_starts_at_the_local_match_and_asks_for_nothing_below() -> None:
    server = FakeServer.warm(TOKENS)
    offer = await offered(server, local_tokens=8)
    assert (offer.tokens, offer.local_tokens) == (8, 8)
    asked = {key for call in server.pool.calls for key in call.keys}
    assert asked == {key for keys in server.keys_of(TOKENS) for key in keys[2:]}


@pytest.mark.parametrize(
    ("local_tokens", "outcome"), [(6, LookupOutcome.UNALIGNED), (16, LookupOutcome.SKIPPED), (18, LookupOutcome.UNALIGNED)]
)
async def test_L1_a_local_match_off_a_block_or_at_the_end_is_offered_nothing(
    local_tokens: int, outcome: LookupOutcome
) -> None:
    server = FakeServer.warm(TOKENS)
    offer = await offered(server, local_tokens=local_tokens)
    assert (offer.tokens, offer.outcome) == (0, outcome)
    assert server.pool.calls == []


async def test_L1_a_local_match_beyond_the_prompt_is_the_engines_fault_and_the_connector_goes_on() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        req = kv.open_request("r", TOKENS)
        with pytest.raises(EngineContractError, match="'r'"):
            await req.lookup(20)
        assert (await req.lookup()).tokens == 16


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("hole", [0, 2])
async def test_L2_a_page_that_is_missing_in_any_group_ends_the_offer(group: int, hole: int) -> None:
    server = FakeServer.warm(TOKENS)
    server.store.remove(server.keys_of(TOKENS)[group][hole])
    offer = await offered(server)
    assert offer.tokens == 4 * hole
    assert offer.outcome is (LookupOutcome.FULL if hole else LookupOutcome.FULL_ATTENTION_MISS)


@pytest.mark.parametrize(
    "answer",
    [state for state in KeyState if state is not KeyState.OK] + [KeyAnswer(KeyState.REFUSED, 7)],
)
async def test_L2_only_an_answer_that_the_key_is_there_counts(answer: KeyState | KeyAnswer) -> None:
    server = FakeServer.warm(TOKENS)
    server.pool.answer("probe", answer, key=server.keys_of(TOKENS)[1][3])
    assert (await offered(server)).tokens == 12


async def test_L2_a_pool_that_answers_nobody_is_unavailable_and_not_an_error() -> None:
    server = FakeServer.warm(TOKENS)
    server.store.down = True
    offer = await offered(server)
    assert (offer.tokens, offer.outcome) == (0, LookupOutcome.UNAVAILABLE)


async def test_L3_a_cold_prompt_costs_one_small_call() -> None:
    server = FakeServer()
    await offered(server, tokens=list(range(400)), probe_head=4, probe_chunk=32)
    assert [len(call.keys) for call in server.pool.calls] == [4]


async def test_L3_a_warm_prompt_is_asked_for_in_chunks_up_to_the_first_hole() -> None:
    server, tokens = FakeServer(), list(range(200))
    server.put_in_store(tokens, range(30))
    offer = await offered(server, tokens=tokens, probe_head=4, probe_chunk=32, probe_concurrency=1)
    assert offer.tokens == 120
    assert [len(call.keys) for call in server.pool.calls] == [4, 32, 32]


@pytest.mark.parametrize(("at_a_time", "rounds"), [(1, 12), (2, 6)])
async def test_L3_chunks_behind_the_head_are_in_flight_together_and_no_more_than_allowed(at_a_time: int, rounds: int) -> None:
    server, tokens = FakeServer(latency=Latency(probe_s=0.01)), list(range(200))
    server.put_in_store(tokens)
    async with server.open(probe_head=4, probe_chunk=8, probe_concurrency=at_a_time) as kv:
        began = anyio.current_time()
        assert (await kv.open_request("r", tokens).lookup()).tokens == 196
        # The head alone, then 12 chunks of four blocks.
        assert anyio.current_time() - began == pytest.approx(0.01 * (1 + rounds))
    assert server.runner.most_running[CallKind.PROBE] == at_a_time


async def test_L3_nobody_waits_for_what_lies_beyond_a_hole() -> None:
    # Two blocks, then four, then three: which of the last two calls is started first is the loop's choice.
    server, tokens = FakeServer(), list(range(38))
    server.put_in_store(tokens, range(4))
    server.runner.latency = lambda kind, size: 0.5 if size.keys == 6 else 0.0
    async with server.open(probe_head=4, probe_chunk=8, probe_concurrency=2) as kv:
        offer = await kv.open_request("r", tokens).lookup()
        assert (offer.tokens, offer.outcome) == (16, LookupOutcome.FULL)
        assert [call.size.keys for call in server.runner.calls if call.ended_at is None] == [6]
        assert anyio.current_time() == 0.0


@pytest.mark.parametrize("recent", [0, 10_000])
async def test_K7_a_follow_up_turn_hashes_only_what_is_new(recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = [0]
    fresh = hashing._FRESH.copy

    class Counted:
        @staticmethod
        def copy() -> Any:
            hashed[0] += 1
            return fresh()

    monkeypatch.setattr(hashing, "_FRESH", Counted)
    server, tokens = FakeServer(), list(range(200))
    server.put_in_store(tokens)
    async with server.open(recent_chains_tokens=recent) as kv:
        hashed[0] = 0
        first = await kv.open_request("r", tokens).lookup()
        assert (first.tokens, hashed[0]) == (196, 49)
        # Its last block is whole only now, and ten more have come.
        second = await kv.open_request("s", [*tokens, *range(40)]).lookup()
        assert second.tokens == 200
        assert hashed[0] - 49 == (10 if recent else 59)
        # Another tenant shares nothing, whatever the tokens are: the head of its prompt is hashed and missed.
        before = hashed[0]
        assert (await kv.open_request("t", tokens, Scope(salt="other")).lookup()).tokens == 0
        assert hashed[0] - before == 32


@pytest.mark.parametrize(("slice_bytes", "least", "most"), [(1, 30, 99), (192 * 1024, 0, 1)], ids=["slow", "quick"])
async def test_L3_hashing_gives_way_to_other_tasks_where_it_takes_its_time(
    monkeypatch: pytest.MonkeyPatch, slice_bytes: int, least: int, most: int
) -> None:
    monkeypatch.setattr(hashing, "_SLICE_BYTES", slice_bytes)  # 1: one block at a stretch
    server, turns, at_first_call = FakeServer(), [0], [0]

    async def count() -> None:
        while True:
            turns[0] += 1
            await anyio.lowlevel.checkpoint()

    def noted(kind: CallKind, size: CallSize) -> float:
        at_first_call[0] = turns[0]
        return 0.0

    async with server.open() as kv, anyio.create_task_group() as group:
        req = kv.open_request("r", list(range(400)))
        group.start_soon(count)
        server.runner.latency = noted
        before = turns[0]
        await req.lookup()
        group.cancel_scope.cancel()
    # 32 blocks of the head chunk, each in a turn of its own; or all in one.
    assert least <= at_first_call[0] - before <= most


async def test_L4_past_the_deadline_the_answer_is_a_miss_and_nothing_is_held_by_the_probe_that_still_runs() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.PROBE)
    async with server.open(lookup_deadline_s=1.0) as kv:
        async with kv.request("r", TOKENS) as req:
            began = anyio.current_time()
            offer = await req.lookup()
            assert (offer.tokens, offer.outcome) == (0, LookupOutcome.DEADLINE)
            assert anyio.current_time() - began == pytest.approx(1.0)
            # Neither the request's end nor a second lookup waits for the stuck probe.
            assert (await req.lookup()).tokens == 16
        assert req.closed
        assert server.runner.outstanding(CallKind.PROBE) == 1
        gate.release()
        await settle()
    assert server.left_behind() == []


async def test_L4_a_lookup_that_waits_for_its_turn_meets_the_same_deadline() -> None:
    server = FakeServer()
    gate = server.runner.hold_all(CallKind.PROBE)
    outcomes: list[LookupOutcome] = []

    async def look(req: Request) -> None:
        outcomes.append((await req.lookup()).outcome)

    async with server.open(lookup_deadline_s=1.0) as kv:
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(look, kv.open_request(f"r{number}", TOKENS))
        assert outcomes == [LookupOutcome.DEADLINE] * 5
        assert anyio.current_time() == pytest.approx(1.0)
        assert server.runner.outstanding(CallKind.PROBE) == server.runner.limits[CallKind.PROBE]
        gate.release()


async def test_L5_asking_again_gives_what_a_fresh_lookup_would_and_moves_no_mark() -> None:
    server = FakeServer()
    server.put_in_store(TOKENS, [0, 1])
    async with server.open() as kv:
        async with kv.request("r", TOKENS) as req:
            assert [(await req.lookup(m)).tokens for m in (0, 4, 0, 8, 0)] == [8, 4, 8, 0, 8]
            server.put_in_store(TOKENS, [2])
            assert (await req.lookup()).tokens == 12
            server.store.clear()
            assert (await req.lookup()).tokens == 0
            # Found once is not saved: with the pool empty again every block is listed.
            await server.compute(kv, req, TOKENS, server.allocate(TOKENS))
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


async def test_L7_a_request_that_does_not_read_is_offered_nothing_and_saved_all_the_same() -> None:
    server = FakeServer.warm(TOKENS[:8])
    async with server.open() as kv:
        async with kv.request("r", TOKENS, reads_cache=False) as req:
            offer = await req.lookup()
            assert (offer.tokens, offer.outcome) == (0, LookupOutcome.NOT_READING)
            assert server.pool.calls == []
            await server.compute(kv, req, TOKENS, server.allocate(TOKENS))
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []


async def test_L7_a_producer_does_not_read() -> None:
    server = FakeServer.warm(TOKENS)
    offer = await offered(server, role="producer")
    assert (offer.tokens, offer.outcome) == (0, LookupOutcome.NOT_READING)
    assert server.pool.calls == []


async def test_K1_another_scope_finds_nothing() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        assert (await kv.open_request("a", TOKENS, Scope(salt="tenant-a")).lookup()).tokens == 0
        assert (await kv.open_request("b", TOKENS).lookup()).tokens == 16


async def test_D6_a_lookup_that_is_cancelled_holds_nothing() -> None:
    server = FakeServer(latency=Latency(probe_s=0.5))
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        req = kv.open_request("r", TOKENS)
        with anyio.move_on_after(0.1) as scope:
            await req.lookup()
        assert scope.cancelled_caught
        assert anyio.current_time() == pytest.approx(0.1)
        assert (await req.lookup()).tokens == 16
    assert server.left_behind() == []


@pytest.mark.parametrize("nth", [1, 2])
async def test_an_error_of_any_probe_is_raised_as_it_is(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server, tokens, calls = FakeServer(), list(range(200)), [0]
    server.put_in_store(tokens)
    probe = server.pool.probe

    def fails(keys: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise ZeroDivisionError
        return probe(keys)

    monkeypatch.setattr(server.pool, "probe", fails)
    async with server.open(probe_head=4, probe_chunk=8) as kv:
        with pytest.raises(ZeroDivisionError):
            await kv.open_request("r", tokens).lookup()
