"""A prompt that is matched locally copies no window page that the pool is known to hold; what left comes back (S13, W3)."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from akv import Connector, LoadFailed, LookupOutcome, Scheduled
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv.units import NO_PAGE
from akv_testing.server import PageTable
from akv_testing.store import FakeStore
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Eleven whole blocks of four tokens, and three tokens more. With W = 10 its end reads blocks 8 to 10.
PROMPT = tuple(range(47))
TAIL = (8, 9, 10)


async def again(
    server: WindowServer, kv: Connector, request_id: str, tokens: Sequence[int] = PROMPT, *, local: int = 40, **opened: Any
) -> list[tuple[int, tuple[int, ...]]]:
    """A request whose first `local` tokens the engine has itself, and its one pass. Returns what that listed to be copied."""
    request = kv.open_request(request_id, tokens, **opened)
    await request.lookup()
    table: PageTable = [[] for _ in server.layout.groups]
    server.prepare(table, 0, local)
    server.forward(tokens, table, 0, local)
    server.commit(table, local)
    server.prepare(table, local, len(tokens))
    plan = kv.plan_pass([Scheduled(request=request, computed_before=local, tokens=len(tokens) - local, pages=table)])
    server.forward(tokens, table, local, len(tokens))
    await kv.after_forward(plan)
    server.commit(table, len(tokens))
    await request.finished()
    server.free(table)
    return [(group.group, group.blocks) for order in plan.saves if order.snapshot for group in order.groups]


def puts(server: WindowServer) -> list[str]:
    return [key for call in server.pool.calls if call.operation == "put" for key in call.keys]


async def pool_was_lost(server: WindowServer, kv: Connector) -> None:
    """Its master does not answer, is found dead by a lookup, and comes back without what it held."""
    server.store.clear()
    server.store.down = True
    await kv.open_request("finds out", range(500, 520)).lookup()
    await anyio.sleep(0.1)
    server.store.down = False
    await anyio.sleep(10)


async def test_S13_W3_S4_a_local_hit_of_a_stored_prompt_copies_nothing_and_asks_for_no_slot() -> None:
    server = WindowServer()
    async with server.open() as kv:
        assert await again(server, kv, "first", local=0) == [(1, TAIL)]
        stored, copies = puts(server), len(server.device.copies)
        asked: list[Any] = []
        kv._halves.scheduler.worker.plan_arrived = asked.append
        # A copy would hang, and the pass with it.
        server.runner.hold(CallKind.SNAPSHOT)
        for number in range(3):
            assert await again(server, kv, f"hit {number}") == []
        assert (puts(server), len(server.device.copies), asked) == (stored, copies, [])
    assert server.ends(PROMPT)[-1] == 11


async def test_S13_a_prompt_that_goes_on_copies_what_is_new_at_its_end() -> None:
    server = WindowServer(rewind_tokens=16, retention_tokens=16)
    longer = (*PROMPT, *range(200, 210))
    async with server.open() as kv:
        await again(server, kv, "first", local=0)
        before = len(puts(server))
        assert await again(server, kv, "longer", longer) == [(1, (11, 12, 13))]
        # Each block that is new, once in each group.
        assert len(puts(server)) - before == 6
    assert server.wrong_values() == []
    assert [end for end in server.ends(longer) if end >= 10] == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("block", TAIL)
async def test_S13_a_window_page_that_was_evicted_is_stored_again_by_the_next_closing_pass(block: int) -> None:
    server = WindowServer()
    async with server.open() as kv:
        await again(server, kv, "first", local=0)
        await anyio.sleep(20)
        evicted = server.keys_of(PROMPT)[1][block]
        assert server.store.evict(evicted)
        assert await again(server, kv, "misses it") == [(1, (block,))]
        assert server.store.value(evicted) is not None
        assert await again(server, kv, "hit") == []
    assert server.ends(PROMPT)[-1] == 11
    assert server.wrong_values() == []


async def test_S13_behind_an_evicted_block_of_the_prefix_the_window_is_stored_again_too() -> None:
    """The lookup ends at the hole, so it asks for no page of the window behind it, which may be gone as well."""
    server = WindowServer()
    async with server.open() as kv:
        await again(server, kv, "first", local=0)
        await anyio.sleep(20)
        for key in (server.keys_of(PROMPT)[0][4], server.keys_of(PROMPT)[1][9]):
            assert server.store.evict(key)
        assert await again(server, kv, "misses it") == [(1, TAIL)]
    assert server.ends(PROMPT)[-1] == 11


async def test_S13_an_end_that_was_evicted_whole_is_stored_again_though_an_earlier_one_is_recovered() -> None:
    server = WindowServer(rewind_tokens=4, retention_tokens=4)
    async with server.open() as kv:
        await again(server, kv, "first", PROMPT[:23], local=0)
        await again(server, kv, "longer", local=20)
        await anyio.sleep(20)
        for block in TAIL:
            server.store.evict(server.keys_of(PROMPT)[1][block])
        request = kv.open_request("recovers", PROMPT)
        assert (await request.lookup()).outcome is LookupOutcome.RECOVERED
        assert await again(server, kv, "hit") == [(1, TAIL)]


async def test_S13_pages_that_were_never_stored_leave_no_trace() -> None:
    store = FakeStore(anyio.current_time)
    server = WindowServer(store=store)
    server.put_in_store(PROMPT)
    for key in server.keys_of(PROMPT)[1]:
        store.remove(key)
    async with server.open() as kv:
        offer = await kv.open_request("r", PROMPT).lookup()
        assert offer.outcome is LookupOutcome.WINDOW_MISS
        assert len(kv._halves.scheduler.requests._known) == 0


async def test_S13_a_page_whose_get_failed_counts_as_gone_until_a_put_took_it() -> None:
    server = WindowServer()
    async with server.open() as kv:
        await again(server, kv, "first", local=0)
        key = server.keys_of(PROMPT)[1][9]
        server.pool.answer("get", KeyState.MISSING, key=key)
        request = kv.open_request("loads", PROMPT)
        offer = await request.lookup()
        table = server.allocate(PROMPT)
        pages = [[p if b in server.loads(g, 11) else NO_PAGE for b, p in enumerate(row)] for g, row in enumerate(table)]
        with pytest.raises(LoadFailed):
            await request.reserve(offer, offer.tokens, pages).wait()
        await request.cancel()
        listed = await again(server, kv, "hit")
        assert dict(listed)[1] == TAIL
        assert await again(server, kv, "next") == []


async def test_S13_a_pool_that_was_lost_gets_a_prompts_end_again_by_the_next_local_hit() -> None:
    server = WindowServer()
    async with server.open() as kv:
        await again(server, kv, "first", local=0)
        await pool_was_lost(server, kv)
        assert server.ends(PROMPT) == []
        # No lookup says what is missing: a generation ended.
        assert await again(server, kv, "hit", reads_cache=False) == [(1, TAIL)]
    assert server.ends(PROMPT)[-1] == 11


async def test_S13_K8_new_weights_store_their_own_ends() -> None:
    server = WindowServer()
    async with server.open() as kv:
        await again(server, kv, "first", local=0)
        stored = len(puts(server))
        await kv.reset("r2")
        server.weights = b"r2"
        assert await again(server, kv, "new", local=0, reads_cache=False) == [(1, TAIL)]
        assert len(puts(server)) == 2 * stored
        assert await again(server, kv, "hit", reads_cache=False) == []


async def test_S13_L7_a_request_that_does_not_read_leaves_out_what_is_known() -> None:
    server = WindowServer()
    async with server.open(role="producer") as kv:
        await again(server, kv, "first", local=0, reads_cache=False)
        assert await again(server, kv, "second", local=0, reads_cache=False) == []


async def test_S13_requests_that_run_at_once_list_their_end_until_one_has_stored_it() -> None:
    server = WindowServer()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        listed = []

        async def run(name: str) -> None:
            listed.append(await again(server, kv, name, local=0))

        async with anyio.create_task_group() as group:
            for name in ("a", "b"):
                group.start_soon(run, name)
            await gate.reached()
            gate.release()
        assert listed == [[(1, TAIL)]] * 2
        assert await again(server, kv, "c") == []
    assert server.wrong_values() == []
    assert server.left_behind() == []


@pytest.mark.parametrize("evicted", [True, False])
async def test_S8_a_sequence_that_computed_much_asks_for_its_window_again_without_a_lookup(evicted: bool) -> None:
    server = WindowServer(resave_min_tokens=40, role="producer")
    async with server.open() as kv:
        await again(server, kv, "first", local=0)
        await anyio.sleep(20)
        key = server.keys_of(PROMPT)[1][9]
        if evicted:
            server.store.evict(key)
        before = len(puts(server))
        assert await again(server, kv, "matched", local=20) == []
        assert await again(server, kv, "computed", local=0) == [(1, TAIL)]
        assert puts(server)[before:] == [key] * evicted
        assert server.store.value(key) is not None


async def test_S12_S13_an_end_that_the_pool_is_known_to_hold_lacks_nothing() -> None:
    server = WindowServer()
    with capture_logs() as logs:
        async with server.open() as kv:
            await again(server, kv, "first", local=0)
            await again(server, kv, "hit")
    assert [log for log in logs if log["event"] == "akv.window.tail_missing"] == []
    ends = [(log["request_id"], log["pages"], log["ends"]) for log in logs if log["event"] == "akv.window.end"]
    # What the engine held is counted, copied or not.
    assert ends == [("first", 3, 1), ("hit", 3, 1)]
