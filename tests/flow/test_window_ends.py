"""What `finish` saves of window pages (S12), saving again (S8), the order of saves (W6), what is refused at the door (W9)."""

from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from akv import (
    Connector,
    EngineCapabilities,
    EngineContractError,
    LoadFailed,
    LookupOutcome,
    Request,
    Scheduled,
    SettingsError,
)
from akv.plan.put_attempts import MOST_ATTEMPTS
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing.calls import Latency
from akv_testing.server import PageTable
from akv_testing.store import FakeStore
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Five whole blocks of four tokens, and two tokens more.
PROMPT = tuple(range(22))


def empty(server: WindowServer) -> PageTable:
    return [[] for _ in server.layout.groups]


async def answered(
    server: WindowServer, kv: Connector, request_id: str, prompt: tuple[int, ...], answer: tuple[int, ...]
) -> tuple[Request, PageTable]:
    """A prompt and its answer, token by token. The last sampled token has no KV: it was never fed back."""
    request, offer, table = await server.resume(kv, request_id, prompt)
    await server.prefill(kv, request, prompt, table, start=offer.tokens)
    tokens = prompt
    for token in answer:
        request.append([token])
        tokens = (*tokens, token)
        if len(tokens) < len(prompt) + len(answer):
            await server.run_pass(kv, request, tokens, table, len(tokens) - 1, len(tokens))
    return request, table


@pytest.mark.parametrize("answer_tokens", range(1, 10))
async def test_S12_with_a_block_of_retention_the_next_turn_resumes_at_the_answers_end(answer_tokens: int) -> None:
    store = FakeStore(anyio.current_time)
    server = WindowServer(windows=((10, 3),), store=store, retention_tokens=4)
    answer = tuple(range(100, 100 + answer_tokens))
    async with server.open() as kv:
        request, table = await answered(server, kv, "r", PROMPT, answer)
        await request.finished()
        server.free(table)
        turn = (*PROMPT, *answer, *range(200, 210))
        offer = await server.serve(kv, "next", turn)
    assert (offer.tokens, offer.outcome) == ((len(PROMPT) + answer_tokens - 1) // 4 * 4, LookupOutcome.FULL)
    assert server.wrong_values() == []


@pytest.mark.parametrize(("answer_tokens", "end"), [(4, 6), (10, 5)])
async def test_S12_without_retention_the_tail_is_stored_as_far_as_it_is_held_and_the_prompts_end_serves(
    answer_tokens: int, end: int
) -> None:
    """With 25 tokens of KV W = 8 still reads token 18, in block 4, and so does the end at block 6, which reads token 17.

    With 31 it reads from token 24 on: block 5 has gone, and with it the ends at 6 and 7. The prompt's own is at block 5.
    """
    server = WindowServer(windows=((8, 0),))
    answer = tuple(range(100, 100 + answer_tokens))
    async with server.open() as kv:
        request, table = await answered(server, kv, "r", PROMPT, answer)
        await request.finished()
        server.free(table)
    assert server.wrong_values() == []
    assert server.ends((*PROMPT, *answer, *range(200, 210)))[-1] == end


async def test_S12_S7_window_pages_at_the_end_are_held_until_they_are_stored() -> None:
    server = WindowServer(windows=((10, 3),), retention_tokens=4, latency=Latency(put_s=1.0))
    async with server.open() as kv:
        request, table = await answered(server, kv, "r", PROMPT, tuple(range(100, 108)))
        pinned = kv._halves.scheduler.requests.pages
        request.finish()
        tail = {(1, page) for page in table[1] if page != -1}
        assert tail & set(pinned.saving)
        await request.finished()
        assert not pinned.saving
    assert server.wrong_values() == []


async def test_S12_pages_that_the_closing_pass_saved_are_not_listed_again_by_finish() -> None:
    server = WindowServer(windows=((10, 3),), retention_tokens=4)
    async with server.open() as kv:
        request, offer, table = await server.resume(kv, "r", PROMPT)
        await server.prefill(kv, request, PROMPT, table, start=offer.tokens)
        await request.finished()
    keys = [key for call in server.pool.calls if call.operation == "put" for key in call.keys]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("first", [True, False])
async def test_W6_window_pages_go_ahead_of_full_attention_unless_turned_off(first: bool) -> None:
    server = WindowServer()
    async with server.open(window_first=first) as kv:
        request = kv.open_request("r", PROMPT)
        await server.run_pass(kv, request, PROMPT, empty(server), 0, len(PROMPT))
        await request.finished()
    puts = [call.keys[0] for call in server.pool.calls if call.operation == "put"]
    assert puts[0].startswith(server.keys.prefix(1 if first else 0))


@pytest.mark.parametrize(("least", "again"), [(0, False), (22, True), (23, False)])
async def test_S8_a_sequence_that_computed_much_asks_for_its_blocks_again_and_puts_what_is_missing(
    least: int, again: bool
) -> None:
    server = WindowServer(resave_min_tokens=least)
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        # Two passes: what the first saved is stored when the second completes the prompt.
        await server.run_pass(kv, request, PROMPT, table, 0, 8)
        await anyio.sleep(1)
        lost = server.keys_of(PROMPT)[0][1]
        server.store.remove(lost)
        before = len(server.pool.calls)
        await server.run_pass(kv, request, PROMPT, table, 8, 12)
        await server.run_pass(kv, request, PROMPT, table, 12, len(PROMPT))
        await request.finished()
        # Window pages are probed behind their puts in any case (S5).
        probed = {key for call in server.pool.calls[before:] if call.operation == "probe" for key in call.keys}
    assert (server.store.value(lost) is not None) is again
    assert (lost in probed) is again


async def test_S8_what_others_computed_does_not_count() -> None:
    store = FakeStore(anyio.current_time)
    first = WindowServer(store=store)
    async with first.open() as kv:
        await first.serve(kv, "r", PROMPT)
    second = WindowServer(store=store, resave_min_tokens=3)
    async with second.open() as kv:
        await second.serve(kv, "r", PROMPT)
        # It loaded 20 tokens and computed two.
        asked = [key for call in second.pool.calls if call.operation == "probe" for key in call.keys]
    assert asked.count(second.keys_of(PROMPT)[0][1]) == 1


async def test_S8_a_put_again_that_fails_leaves_the_block_to_be_offered_again() -> None:
    server = WindowServer(resave_min_tokens=1, save_backoff_s=0.001)
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        await server.run_pass(kv, request, PROMPT, table, 0, 8)
        await anyio.sleep(1)
        lost = server.keys_of(PROMPT)[0][1]
        server.store.remove(lost)
        server.pool.answer("put", KeyState.NO_SPACE, key=lost, times=MOST_ATTEMPTS)
        await server.run_pass(kv, request, PROMPT, table, 8, len(PROMPT))
        await anyio.sleep(1)
        assert server.store.value(lost) is None
        request.append([7])
        await server.run_pass(kv, request, (*PROMPT, 7), table, len(PROMPT), len(PROMPT) + 1)
        await request.finished()
    assert server.store.value(lost) is not None


async def test_L7_a_consumer_copies_nothing_and_has_no_ring() -> None:
    server = WindowServer()
    async with server.open(role="consumer") as kv:
        assert kv._halves.local_worker._ring is None
        await server.serve(kv, "r", PROMPT)
    assert server.device.copies == []
    assert server.store.keys() == []


async def test_W9_an_engine_without_reservations_is_refused_by_name_before_anything_opens() -> None:
    server = WindowServer(capabilities=EngineCapabilities(reservations=False))
    with pytest.raises(SettingsError, match=r"capabilities\.reservations"):
        async with server.open():
            pytest.fail("it opened")
    assert server.pool.registered == []


async def test_W3_nothing_is_copied_before_the_pass_that_completes_the_chain() -> None:
    server = WindowServer()
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        for before, end in ((0, 8), (8, 16), (16, 19)):
            await server.run_pass(kv, request, PROMPT, table, before, end)
            assert [copy for copy in server.device.copies if copy.kind == "snapshot"] == []
        # A trimmed chunk: the chain of five blocks is complete, the prompt is not.
        await server.run_pass(kv, request, PROMPT, table, 19, 21)
        assert len([copy for copy in server.device.copies if copy.kind == "snapshot"]) == 1
        await server.run_pass(kv, request, PROMPT, table, 21, 22)
        assert len([copy for copy in server.device.copies if copy.kind == "snapshot"]) == 1
        await request.finished()
    assert server.ends(PROMPT)[-1] == 5


async def test_L6_a_page_that_two_window_blocks_share_is_refused_and_the_plan_takes_no_slot() -> None:
    server = WindowServer()
    async with server.open() as kv:
        request, table = kv.open_request("r", PROMPT), empty(server)
        server.prepare(table, 0, len(PROMPT))
        table[1][4] = table[1][3]
        with pytest.raises(EngineContractError, match=r"request 'r', block 3, group 1"):
            kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=22, pages=table)])
        ring = kv._halves.local_worker._ring
        assert ring is not None
        assert ring.claims.plans == 0


async def test_S3_a_gather_that_hangs_holds_up_no_pass() -> None:
    """A snapshot has a place of its own among the calls."""
    server = WindowServer()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.COPY)
        for number in range(4):
            tokens = range(100 * number, 100 * number + 22)
            request = kv.open_request(f"r{number}", tokens)
            began = anyio.current_time()
            await server.run_pass(kv, request, tokens, empty(server), 0, 22)
            assert anyio.current_time() == began
        await gate.reached()
        gate.release()


def events(logs: list[Any], name: str) -> list[Any]:
    return [log for log in logs if log["event"] == name]


@pytest.mark.parametrize(("retention", "ends"), [(0, 1), (16, 5)])
async def test_W4_ends_that_the_engine_s_retention_costs_are_counted(retention: int, ends: int) -> None:
    server = WindowServer(windows=((10, 3), (6, 0)), retention_tokens=retention, rewind_tokens=16)
    with capture_logs() as logs:
        async with server.open() as kv:
            await server.serve(kv, "r", tuple(range(46)), chunk=2)
    [told] = events(logs, "akv.window.end")
    assert (told["ends"], told["wanted_ends"]) == (ends, 5)
    assert len([end for end in server.ends(range(46)) if end >= 7]) == ends


@pytest.mark.parametrize(("retention", "missing"), [(0, True), (4, False)])
async def test_S12_an_end_without_its_window_is_counted(retention: int, missing: bool) -> None:
    server = WindowServer(windows=((8, 0),), retention_tokens=retention)
    answer = tuple(range(100, 110))
    with capture_logs() as logs:
        async with server.open() as kv:
            request, _ = await answered(server, kv, "r", PROMPT, answer)
            await request.finished()
    assert [told["block"] for told in events(logs, "akv.window.tail_missing")] == ([7] if missing else [])


# -- pages that the engine let go of between the last pass and the end


@pytest.mark.parametrize("retention", [0, 4])
@pytest.mark.parametrize("accepted", [1, 3])
async def test_S12_pages_that_accepted_drafts_moved_out_of_the_window_are_not_read_at_the_end(
    retention: int, accepted: int
) -> None:
    """A pass is told of one token and of drafts; the engine releases pages by all that it accepted, and reuses them."""
    server = WindowServer(windows=((5, 0),), retention_tokens=retention)
    async with server.open() as kv:
        for length in range(6, 14):
            prompt = tuple(range(1000 * length, 1000 * length + length))
            request, offer, table = await server.resume(kv, f"r{length}", prompt)
            await server.prefill(kv, request, prompt, table, start=offer.tokens)
            tokens, new = prompt, tuple(range(2000 * length, 2000 * length + 1 + accepted))
            for _ in range(3):
                request.append(new[:1])
                before, tokens = len(tokens), tokens + new
                server.prepare(table, before, len(tokens))
                part = Scheduled(request=request, computed_before=before, tokens=1, draft_tokens=accepted, pages=table)
                plan = kv.plan_pass([part])
                server.forward(tokens, table, before, len(tokens))
                await kv.after_forward(plan)
                request.append(new[1:])
                server.commit(table, len(tokens))
            await request.finished()
            server.free(table)
    assert server.wrong_values() == []


@pytest.mark.parametrize("delivered", [True, False])
async def test_S12_a_load_in_mid_life_ends_what_an_earlier_pass_held(delivered: bool) -> None:
    """The engine releases window pages for the load; those of the pass before it are another's by the time of `finish`."""
    store = FakeStore(anyio.current_time)
    tokens = tuple(range(42))
    server = WindowServer(windows=((8, 0),), store=store)
    other = WindowServer(windows=((8, 0),), store=store)
    async with server.open() as kv, other.open() as kv_of_other:
        request, table = kv.open_request("r", tokens), empty(server)
        await request.lookup()
        await server.run_pass(kv, request, tokens, table, 0, 18)
        await other.serve(kv_of_other, "r", tokens)
        for block in (2, 3):
            store.remove(server.keys_of(tokens)[1][block])
        offer = await request.lookup(16)
        end = 4 + offer.tokens // 4
        server._grow(table, [range(4, end), server.loads(1, end)])
        if not delivered:
            server.pool.answer("get", KeyState.MISSING)
        load = request.reserve(offer, offer.tokens, table)
        if delivered:
            await load.wait()
        else:
            with pytest.raises(LoadFailed):
                await load.wait()
        server.commit(table, end * 4)
        await request.finished()
    assert server.wrong_values() == []


async def test_W3_passes_that_are_planned_ahead_complete_a_prompt_once() -> None:
    server = WindowServer(windows=((10, 0),))
    with capture_logs() as logs:
        async with server.open() as kv:
            request, table = kv.open_request("r", PROMPT), empty(server)
            server.prepare(table, 0, len(PROMPT) + 2)
            request.append([7, 8])
            parts = [(0, len(PROMPT)), (len(PROMPT), len(PROMPT) + 1), (len(PROMPT) + 1, len(PROMPT) + 2)]
            plans = [
                kv.plan_pass([Scheduled(request=request, computed_before=before, tokens=end - before, pages=table)])
                for before, end in parts[:2]
            ]
            for (before, end), plan in zip(parts, plans, strict=False):
                server.forward((*PROMPT, 7, 8), table, before, end)
                await kv.after_forward(plan)
            await request.finished()
    assert len(events(logs, "akv.window.end")) == 1
    assert len([copy for copy in server.device.copies if copy.kind == "snapshot"]) == 1
    assert server.ends(PROMPT)[-1] == 5


async def test_L3_a_producers_lookup_hashes_the_prompt_that_its_closing_pass_will_name() -> None:
    server = WindowServer()
    async with server.open(role="producer") as kv:
        request = kv.open_request("r", PROMPT)
        assert (await request.lookup()).outcome is LookupOutcome.NOT_READING
        assert request._record.chain.hash_up_to(0) == 5
    full = WindowServer(windows=())
    async with full.open(role="producer") as kv:
        request = kv.open_request("r", PROMPT)
        await request.lookup()
        assert request._record.chain.hash_up_to(0) == 0
