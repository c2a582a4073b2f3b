"""Puts that the pool does not take at once: what is tried again, from where, and who may stop it (S5)."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from akv import Connector, Request
from akv.plan.keys import KeySpace
from akv.plan.put_attempts import PAUSES_S
from akv.ports.calls import CallKind
from akv.ports.pool import KeyAnswer, KeyState
from akv_testing.calls import Latency
from akv_testing.server import FakeServer, PageTable
from akv_testing.store import FakeStore
from akv_testing.traffic import LONG, TOKENS
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Where a batch may lie while it is put.
PLACES = pytest.mark.parametrize("host_pages", [False, True], ids=["in slots", "in pages"])
#: Four whole blocks that no other prompt here has.
OTHERS = tuple(range(500, 518))


async def saved(server: FakeServer, kv: Connector, tokens: Sequence[int], name: str = "r") -> Request:
    """A request that computed these tokens, after its saves ended."""
    request = kv.open_request(name, tokens)
    await server.compute(kv, request, tokens, server.allocate(tokens))
    await anyio.sleep(1.0)
    await request.finished()
    return request


async def goes_on(server: FakeServer, kv: Connector) -> None:
    """All slots are free, and another request is saved whole."""
    await anyio.sleep(0.1)
    saving = kv._halves.local_worker.memory.stagings[1].slots
    assert saving.free == saving.count
    await saved(server, kv, OTHERS, "goes on")
    assert server.stored_blocks(OTHERS) == [0, 1, 2, 3]
    assert server.wrong_values() == []


def asked(server: FakeServer, operation: str) -> list[tuple[str, ...]]:
    """The keys of each call."""
    return [call.keys for call in server.pool.calls if call.operation == operation]


def said(logs: Sequence[Any], event: str, *fields: str) -> list[tuple[object, ...]]:
    """Those fields of each such event."""
    return [tuple(log[field] for field in fields) for log in logs if log["event"] == event]


# -- tried again


@PLACES
async def test_S5_a_block_refused_once_for_lack_of_space_is_stored_within_the_same_save(host_pages: bool) -> None:
    server = FakeServer(host_pages=host_pages)
    key = server.keys_of(TOKENS)[1][2]
    server.pool.answer("put", KeyState.NO_SPACE, key=key)
    async with server.open(save_backoff_s=60) as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        with capture_logs() as logs:
            await anyio.sleep(PAUSES_S[0] + 0.01)
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        # Only that key was asked for and put again.
        assert asked(server, "probe") == [(key,)]
        assert asked(server, "put")[2:] == [(key,)]
        assert said(logs, "akv.save.refused") == []
        assert said(logs, "akv.save.complete", "blocks", "bytes") == [(4, 4 * (16 + 24))]
        assert said(logs, "akv.save.retried", "group", "pages", "attempts", "stored", "found", "reason") == [
            (1, 1, 2, 1, 0, "no_space")
        ]
        await request.finished()
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_S5_a_full_pool_that_evicts_takes_everything() -> None:
    """Room for five of eight pages: what is evicted in the background makes room for the rest, 20 ms later."""
    server = FakeServer()
    server.ports.pool.store = store = FakeStore(anyio.current_time, capacity_bytes=400, eviction_ratio=0.5)
    for number in range(10):
        store.write(f"older/{number}", bytes(30))
    async with server.open(save_backoff_s=60) as kv:
        await saved(server, kv, TOKENS)
    states = [answer.state for call in server.pool.calls if call.operation == "put" for answer in call.answers]
    assert states.count(KeyState.NO_SPACE) == 3
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


@PLACES
async def test_S5_one_key_that_is_refused_spoils_no_other_and_is_put_once(host_pages: bool) -> None:
    server = FakeServer(host_pages=host_pages)
    bad = server.keys_of(TOKENS)[0][1]
    server.pool.answer("put", KeyState.REFUSED, key=bad, times=None)
    async with server.open(save_backoff_s=60) as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        with capture_logs() as logs:
            await anyio.sleep(1)
        assert server.stored_blocks(TOKENS) == [0, 2, 3]
        assert [bad in keys for keys in asked(server, "put")] == [True, False]
        assert asked(server, "probe") == []
        assert said(logs, "akv.save.refused", "blocks", "reason") == [(1, "refused")]
        await goes_on(server, kv)


async def test_S5_a_key_that_another_server_stored_meanwhile_counts_as_stored_and_is_not_put_again() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, key=server.keys_of(TOKENS)[0][2])
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await anyio.sleep(PAUSES_S[0] / 2)
        server.put_in_store(TOKENS)
        with capture_logs() as logs:
            await request.finished()
        assert len(asked(server, "put")) == 2
        # Its bytes are not ours.
        assert said(logs, "akv.save.complete", "blocks", "bytes") == [(4, 3 * 16 + 4 * 24)]
        assert said(logs, "akv.save.retried", "attempts", "stored", "found") == [(2, 0, 1)]
        await goes_on(server, kv)


async def test_S5_pages_of_one_key_are_put_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    one, other = server.hashes(TOKENS)[1:3]
    keys = KeySpace.keys
    monkeypatch.setattr(KeySpace, "keys", lambda space, g, hashes: keys(space, g, [one if h == other else h for h in hashes]))
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        with capture_logs() as logs:
            await request.finished()
    assert [len(keys) for keys in asked(server, "put")] == [3, 3]
    assert said(logs, "akv.save.complete", "blocks") == [(4,)]


# -- answers that say nothing


@PLACES
@pytest.mark.parametrize("length", [0, 3, 5])
async def test_S5_a_put_that_answers_with_a_list_of_another_length_is_refused_and_the_next_save_runs(
    length: int, host_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer(host_pages=host_pages)
    async with server.open(save_backoff_s=60) as kv:
        with monkeypatch.context() as patch:
            patch.setattr(server.pool, "put", lambda *_: [KeyAnswer(KeyState.OK)] * length)
            request = kv.open_request("r", TOKENS)
            await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
            with capture_logs() as logs:
                await anyio.sleep(1)
        assert said(logs, "akv.save.refused", "blocks", "reason") == [(4, "refused")]
        await goes_on(server, kv)
        # Offered again at the request's end.
        await request.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


async def test_L2_a_probe_between_that_answers_with_a_list_of_another_length_finds_nothing() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, times=4)
    async with server.open() as kv:
        server.pool.probe = lambda _: [KeyAnswer(KeyState.OK)]  # type: ignore[method-assign,assignment]
        await saved(server, kv, TOKENS)
        assert len(asked(server, "put")) == 3
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


# -- no more than that


@PLACES
async def test_S5_a_pool_that_stays_full_is_asked_three_times_and_then_once_a_batch(host_pages: bool) -> None:
    server = FakeServer(host_pages=host_pages)
    server.pool.answer("put", KeyState.NO_SPACE, times=None)
    async with server.open(save_backoff_s=60) as kv:
        request = kv.open_request("r", LONG)
        await server.compute(kv, request, LONG, server.allocate(LONG))
        with capture_logs() as logs:
            await anyio.sleep(sum(PAUSES_S) + 0.01)
        # Four batches: a long save would hold its saver for the retries of each.
        assert [len(keys) for keys in asked(server, "put")] == [8, 8, 8, 8, 1, 1]
        assert [len(keys) for keys in asked(server, "probe")] == [8, 8]
        # Once, after the last attempt.
        assert said(logs, "akv.save.refused", "blocks", "reason") == [(9, "no_space")]
        server.pool._scripts.clear()
        await goes_on(server, kv)


async def test_S5_a_store_that_hangs_gets_no_second_call() -> None:
    server = FakeServer()
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.PUT)
        request = kv.open_request("r", LONG)
        await server.compute(kv, request, LONG, server.allocate(LONG))
        await gate.reached()
        await anyio.sleep(100)
        assert [server.runner.outstanding(kind) for kind in (CallKind.PUT, CallKind.PROBE)] == [1, 0]
        assert asked(server, "probe") == []
        gate.release()
        await request.finished()
        await goes_on(server, kv)


async def test_S5_O7_a_store_that_is_unavailable_after_long_is_asked_once() -> None:
    """As with a frozen master, which answers every call after the client's own deadline: then the breaker is open."""
    server = FakeServer(latency=Latency(put_s=1.5))
    server.pool.answer("put", KeyState.UNAVAILABLE, times=None)
    async with server.open(save_backoff_s=60) as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await anyio.sleep(3.1)
        assert len(asked(server, "put")) == 1
        assert all(key.endswith("/breaker") for keys in asked(server, "probe") for key in keys)
        assert kv.pressure().backlog_saves == 0


async def test_S5_a_save_whose_copy_raises_is_refused_and_the_next_one_runs() -> None:
    server = FakeServer()
    server.device.script.fail_call("gather", RuntimeError("ECC"))
    async with server.open(save_backoff_s=60) as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        with capture_logs() as logs:
            await goes_on(server, kv)
        assert said(logs, "akv.save.refused", "request_id", "reason") == [("r", "copy_failed")]


async def test_M3_slots_are_held_while_the_pool_is_given_time_and_counted() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, times=8)
    async with server.open() as kv:
        request = kv.open_request("r", LONG)
        await server.compute(kv, request, LONG, server.allocate(LONG))
        await anyio.sleep(PAUSES_S[0] / 2)
        # The first batch, and the next one, which has been gathered meanwhile.
        assert kv.pressure().saving.free == 0
        assert server.runner.outstanding() == 0
        await request.finished()
        assert server.stored_blocks(LONG) == list(range(9))
        await goes_on(server, kv)


# -- withdrawn


async def in_the_pause(server: FakeServer, kv: Connector) -> tuple[Request, PageTable]:
    """A request whose save waits to be tried again."""
    request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
    await server.compute(kv, request, TOKENS, table)
    await anyio.sleep(PAUSES_S[0] / 2)
    return request, table


@PLACES
async def test_S5_D6_a_withdrawn_save_is_not_tried_again_and_its_pages_are_free_at_once(host_pages: bool) -> None:
    server = FakeServer(host_pages=host_pages)
    server.pool.answer("put", KeyState.NO_SPACE, times=None)
    async with server.open() as kv:
        request, table = await in_the_pause(server, kv)
        calls, began = len(server.pool.calls), anyio.current_time()
        assert await request.cancel() == ()
        assert anyio.current_time() == began
        server.free(table)
        await anyio.sleep(1)
        # A batch that lay in slots already is put, once.
        assert len(server.pool.calls) - calls == (0 if host_pages else 1)
        assert asked(server, "probe") == []
        server.pool._scripts.clear()
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_S5_D6_a_save_that_is_withdrawn_while_a_probe_asks_is_not_put_again() -> None:
    server = FakeServer(latency=Latency(probe_s=0.01))
    server.pool.answer("put", KeyState.NO_SPACE, times=4)
    async with server.open() as kv:
        request, table = await in_the_pause(server, kv)
        await anyio.sleep(PAUSES_S[0] / 2 + 0.005)
        assert server.runner.outstanding(CallKind.PROBE) == 1
        await request.cancel()
        server.free(table)
        await anyio.sleep(1)
        assert [len(keys) for keys in asked(server, "put")] == [4, 4]
        assert server.stored_blocks(TOKENS) == []
        await goes_on(server, kv)
    assert server.left_behind() == []


async def test_D6_closing_in_the_pause_gives_everything_back() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, times=None)
    async with server.open(shutdown_deadline_s=0.001) as kv:
        await in_the_pause(server, kv)
        slots = kv._halves.local_worker.memory.stagings[1].slots
    assert slots.free == slots.count
    assert server.left_behind() == []


# -- window pages


#: Five whole blocks and two tokens.
PROMPT = tuple(range(22))


async def closing(server: WindowServer, kv: Connector) -> Request:
    """The pass that completes `PROMPT`."""
    request = kv.open_request("r", PROMPT)
    await server.run_pass(kv, request, PROMPT, [[] for _ in server.layout.groups], 0, len(PROMPT))
    return request


def ring_is_free(kv: Connector) -> bool:
    ring = kv._halves.local_worker._ring
    assert ring is not None
    return ring.claims.host.free == ring.claims.host.count


async def test_S5_window_pages_refused_for_lack_of_space_are_stored_from_their_slots() -> None:
    server = WindowServer()
    window = server.keys.prefix(1)
    server.pool.answer("put", KeyState.NO_SPACE, key=lambda key: key.startswith(window), times=3)
    async with server.open() as kv:
        await closing(server, kv)
        await anyio.sleep(PAUSES_S[0] / 2)
        assert not ring_is_free(kv)
        await anyio.sleep(0.1)
        assert server.ends(PROMPT)[-1] == 5
        assert ring_is_free(kv)
    assert server.wrong_values() == []


async def test_S5_window_pages_are_probed_once_after_their_puts_and_full_attention_is_not() -> None:
    server = WindowServer()
    async with server.open() as kv:
        await closing(server, kv)
        with capture_logs() as logs:
            await anyio.sleep(0.1)
        assert asked(server, "probe") == [tuple(server.keys_of(PROMPT)[1][2:])]
        assert said(logs, "akv.save.complete", "blocks", "bytes") == [(3, 3 * 24), (5, 5 * 16)]


async def test_S5_an_accepted_window_page_that_is_not_there_counts_as_refused_and_finish_offers_it_again() -> None:
    """Another server is writing it: the put answers 0, and nobody can read it."""
    server = WindowServer()
    key = server.keys_of(PROMPT)[1][3]
    server.store.begin_write(key)
    async with server.open() as kv:
        request = await closing(server, kv)
        with capture_logs() as logs:
            await anyio.sleep(1)
        assert said(logs, "akv.save.refused", "blocks", "reason") == [(1, "missing")]
        assert server.ends(PROMPT) == []
        assert ring_is_free(kv)
        # Its writer died. The request holds the page to its end.
        server.store.abandon_write(key)
        await request.finished()
    assert server.ends(PROMPT)[-1] == 5
    assert server.wrong_values() == []


@pytest.mark.parametrize("state", [KeyState.UNAVAILABLE, KeyState.REFUSED])
async def test_S5_L2_window_pages_that_a_probe_does_not_confirm_count_as_refused(state: KeyState) -> None:
    server = WindowServer()
    server.pool.answer("probe", state)
    async with server.open() as kv:
        await closing(server, kv)
        with capture_logs() as logs:
            await anyio.sleep(1)
        assert said(logs, "akv.save.refused", "blocks", "reason") == [(1, state)]


@pytest.mark.parametrize("length", [0, 2, 4])
async def test_S5_L2_a_probe_of_another_length_confirms_no_window_page_and_the_next_save_runs(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = WindowServer()
    async with server.open() as kv:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(server.pool, "probe", lambda _: [KeyAnswer(KeyState.OK)] * length)
            await closing(server, kv)
            await anyio.sleep(1)
        assert said(logs, "akv.save.refused", "blocks", "reason") == [(3, "refused")]
        await server.serve(kv, "next", OTHERS)
    assert server.ends(OTHERS)[-1] == 4


async def test_L3_probes_of_saves_are_no_larger_than_those_of_lookups() -> None:
    server = WindowServer(probe_chunk=2)
    window = server.keys.prefix(1)
    server.pool.answer("put", KeyState.NO_SPACE, key=lambda key: not key.startswith(window), times=3)
    async with server.open() as kv:
        await closing(server, kv)
        await anyio.sleep(1)
        # Three window pages behind their puts, and three others between two attempts.
        assert sorted(len(keys) for keys in asked(server, "probe")) == [1, 1, 2, 2]
    assert server.ends(PROMPT)[-1] == 5


async def test_S5_window_pages_whose_request_was_cancelled_are_not_asked_for_and_count_as_dropped() -> None:
    server = WindowServer()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = await closing(server, kv)
        await gate.reached()
        with capture_logs() as logs:
            await request.cancel()
            gate.release()
            await anyio.sleep(1)
        assert [len(keys) for keys in asked(server, "put")] == [3]
        assert asked(server, "probe") == []
        assert said(logs, "akv.save.dropped", "blocks")[-1] == (3,)
        assert ring_is_free(kv)


async def test_S5_D9_window_pages_that_were_found_before_are_not_asked_for_twice() -> None:
    server = WindowServer()
    async with server.open() as kv:
        await server.serve(kv, "first", PROMPT)
    again = WindowServer(store=server.store)
    async with again.open() as kv:
        request, offer, table = await again.resume(kv, "r", (*PROMPT[:21], 7))
        before = len(again.pool.calls)
        await again.prefill(kv, request, (*PROMPT[:21], 7), table, start=offer.tokens)
        await request.finished()
        probed = [key for call in again.pool.calls[before:] if call.operation == "probe" for key in call.keys]
    assert len(probed) == len(set(probed))
