"""A pool that takes pages more slowly than passes compute them: the backlog stays within its bounds, and drops ends (S6)."""

import logging
import random

import anyio
import pytest

from akv import NO_PAGE, Connector, Request, SavesCompleted, SettingsError
from akv.plan.put_attempts import MOST_ATTEMPTS
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing.calls import Latency
from akv_testing.events import events_in
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import LONG, TOKENS, blocks_to_save, part
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Bytes of one block of a `FakeServer`'s layout.
BLOCK = 40


async def computed(
    server: FakeServer, kv: Connector, name: str = "r", tokens: tuple[int, ...] = TOKENS
) -> tuple[Request, PageTable]:
    """A request whose prompt one pass computed."""
    request, table = kv.open_request(name, tokens), server.allocate(tokens)
    await server.compute(kv, request, tokens, table)
    await anyio.sleep(0.01)
    return request, table


async def end_of(kv: Connector, request: Request) -> SavesCompleted:
    """What its end tells."""
    request.finish()
    while True:
        await kv.changed.wait()
        for done in kv.completed():
            if isinstance(done, SavesCompleted) and done.request_id == request.request_id:
                return done


async def test_S6_past_the_bound_in_bytes_the_end_of_the_chain_is_refused_and_offered_again_after_the_back_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "akv")
    server = FakeServer(backlog_bytes=3 * BLOCK - 1, save_backoff_s=1.0)
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.PUT)
        request, table = await computed(server, kv)
        busy = kv.pressure()
        assert (busy.backlog_bytes, busy.backlog_passes, busy.backlog_refused_blocks) == (2 * BLOCK, 1, 2)
        gate.release()
        await anyio.sleep(0.9)
        assert server.stored_blocks(TOKENS) == [0, 1]
        assert kv.pressure().backlog_bytes == 0
        assert blocks_to_save(kv.plan_pass([part(request, 18, 1, table)])) == []
        await anyio.sleep(0.2)
        plan = kv.plan_pass([part(request, 18, 1, table)])
        assert blocks_to_save(plan) == [2, 3]
        await kv.after_forward(plan)
        assert (await end_of(kv, request)).refused_blocks == 0
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []
    assert events_in(caplog.records, "akv.save.backlog_full") == [
        {
            "requests": 1,
            "blocks": 2,
            "window_pages": 0,
            "listed_again": 0,
            "backlog_bytes": 2 * BLOCK,
            "backlog_passes": 1,
        }
    ]


async def test_S6_blocks_behind_a_dropped_one_wait_for_it_and_those_behind_one_that_the_pool_refused_do_not() -> None:
    for drops in (True, False):
        server = FakeServer(save_backoff_s=1.0, backlog_bytes=(2 if drops else 99) * BLOCK)
        if not drops:
            server.pool.answer("put", KeyState.NO_SPACE, key=server.keys_of(LONG)[0][2], times=MOST_ATTEMPTS)
        async with server.open() as kv:
            request, table = kv.open_request("r", LONG), server.allocate(LONG)
            for before, tokens in ((0, 16), (16, 8)):
                plan = kv.plan_pass([part(request, before, tokens, table)])
                server.write(LONG, table, before // 4, (before + tokens) // 4)
                await kv.after_forward(plan)
                await anyio.sleep(0.3)
            assert server.stored_blocks(LONG) == ([0, 1] if drops else [0, 1, 3, 4, 5])
            await anyio.sleep(1.0)
            plan = kv.plan_pass([part(request, 24, 1, table)])
            assert blocks_to_save(plan) == ([2, 3, 4, 5] if drops else [2])
            await kv.after_forward(plan)
            await anyio.sleep(0.1)
            assert server.stored_blocks(LONG) == ([0, 1, 2, 3] if drops else [0, 1, 2, 3, 4, 5])
        assert server.wrong_values() == []


async def test_S6_a_pass_that_was_planned_ahead_hands_nothing_over_behind_a_dropped_block() -> None:
    server = FakeServer(backlog_bytes=4 * BLOCK, save_backoff_s=1.0)
    async with server.open() as kv:
        request, table = kv.open_request("r", LONG), server.allocate(LONG)
        server.write(LONG, table, 0, 9)
        first = kv.plan_pass([part(request, 0, 20, table)])
        page, table[0][4] = table[0][4], NO_PAGE
        ahead = kv.plan_pass([part(request, 20, 16, table)])
        table[0][4] = page
        assert (blocks_to_save(first), blocks_to_save(ahead)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7, 8])
        await kv.after_forward(first)
        await anyio.sleep(0.5)
        # There is room again, but not for a chain with a hole.
        assert kv.pressure().backlog_bytes == 0
        await kv.after_forward(ahead)
        await anyio.sleep(0.4)
        assert server.stored_blocks(LONG) == [0, 1, 2, 3]
        assert kv.pressure().backlog_refused_blocks == 1 + 4
        await anyio.sleep(0.2)
        assert blocks_to_save(kv.plan_pass([part(request, 36, 1, table)])) == [4, 5, 6, 7, 8]


async def test_S6_so_many_passes_may_have_saves_under_way_and_a_requests_end_is_none() -> None:
    server = FakeServer(backlog_passes=2)
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.PUT)
        requests = [await computed(server, kv, str(number), (number, *TOKENS)) for number in range(3)]
        busy = kv.pressure()
        assert (busy.backlog_passes, busy.backlog_bytes, busy.backlog_refused_blocks) == (2, 8 * BLOCK, 4)
        requests[2][0].finish()
        assert (kv.pressure().backlog_passes, kv.pressure().backlog_bytes) == (2, 12 * BLOCK)
        gate.release()
        await anyio.sleep(0.01)
        assert (kv.pressure().backlog_passes, kv.pressure().backlog_bytes) == (0, 0)
    assert server.stored_blocks((2, *TOKENS)) == [0, 1, 2, 3]
    assert server.wrong_values() == []


async def test_S6_pages_that_were_dropped_are_neither_read_nor_held() -> None:
    server = FakeServer(backlog_bytes=2 * BLOCK)
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.PUT)
        first, _ = await computed(server, kv)
        other, table = await computed(server, kv, "other", LONG)
        # No room at its end either: it has nothing that could be waited for.
        other.finish()
        assert other.closed
        server.free(table)
        server.device.kernel(writes=[(group, page, 0x55) for group, pages in enumerate(table) for page in pages])
        gate.release()
        await anyio.sleep(0.01)
        assert (await end_of(kv, first)).stored_blocks == 4, "what was dropped of the first is offered again by its end"
        assert server.stored_blocks(LONG) == []
    assert server.left_behind() == []


async def test_S6_a_finish_past_the_bound_counts_what_it_could_not_hand_over() -> None:
    server = FakeServer(backlog_bytes=3 * BLOCK)
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.PUT)
        request, _ = await computed(server, kv)
        request.finish()
        gate.release()
        assert await end_of(kv, request) == SavesCompleted(
            request_id="r", incarnation=request.incarnation, stored_blocks=3, refused_blocks=1
        )
    assert server.stored_blocks(TOKENS) == [0, 1, 2]


async def test_S6_a_request_is_cancelled_with_dropped_blocks_and_its_room_comes_back_when_the_put_returned() -> None:
    server = FakeServer(backlog_bytes=2 * BLOCK)
    async with server.open() as kv:
        gate = server.runner.hold_all(CallKind.PUT)
        request, _ = await computed(server, kv)
        await request.cancel()
        assert kv.pressure().backlog_bytes == 2 * BLOCK, "its put is under way all the same"
        gate.release()
        await anyio.sleep(0.01)
        assert (kv.pressure().backlog_bytes, kv.pressure().backlog_passes) == (0, 0)
    assert server.left_behind() == []


# -- windows

#: Three blocks of four tokens and one token more; with a window of six, the last two are the end's window.
PROMPT = tuple(range(13))


@pytest.mark.parametrize("window_first", [True, False])
@pytest.mark.parametrize(("blocks", "windows"), [(3, 1), (3, 0), (2, 0)])
async def test_S6_the_windows_of_an_end_go_with_its_blocks_and_their_slots_are_back_at_once(
    caplog: pytest.LogCaptureFixture, window_first: bool, blocks: int, windows: int
) -> None:
    caplog.set_level(logging.DEBUG, "akv")
    server = WindowServer(windows=((6, 0),), window_first=window_first, save_backoff_s=60.0)
    full, window = (group.bytes_per_page for group in server.layout.groups)
    async with server.open(backlog_bytes=blocks * full + windows * 2 * window) as kv:
        gate = server.runner.hold_all(CallKind.PUT)
        request, _, table = await server.resume(kv, "r", PROMPT)
        await server.prefill(kv, request, PROMPT, table, chunk=64)
        await anyio.sleep(0.01)
        ring = kv.pressure().ring
        assert ring is not None
        assert ring.slots - ring.free == 2 * windows
        assert kv.pressure().backlog_bytes == blocks * full + windows * 2 * window
        gate.release()
        await anyio.sleep(0.01)
    assert server.ends(PROMPT) == ([3] if windows else [])
    assert server.wrong_values() == []
    dropped = events_in(caplog.records, "akv.snapshot.dropped")
    assert [(event["pages"], event["reason"]) for event in dropped] == [(2, "backlog_full")] * (not windows)
    told = [(event["blocks"], event["window_pages"]) for event in events_in(caplog.records, "akv.save.backlog_full")]
    assert told[:1] == ([(3 - blocks, 2)] if not windows else [])


# -- always


@pytest.mark.parametrize("seed", range(4))
async def test_S6_a_slow_pool_never_holds_more_than_the_bound_and_stores_no_chain_with_a_hole(seed: int) -> None:
    dice = random.Random(seed)
    bytes_bound, passes_bound = dice.randint(1, 12) * BLOCK, dice.randint(1, 4)
    server = FakeServer(
        pages=100, latency=Latency(put_s=0.5), backlog_bytes=bytes_bound, backlog_passes=passes_bound, save_backoff_s=0.1
    )
    prompts = {str(number): (number, *LONG[: dice.randint(4, 37)]) for number in range(3)}
    done = dict.fromkeys(prompts, 0)
    most = 0

    def within() -> None:
        nonlocal most
        busy = kv.pressure()
        assert busy.backlog_bytes <= bytes_bound
        assert busy.backlog_passes <= passes_bound
        held = kv._halves.scheduler.requests.pages.saving
        page_bytes = [group.bytes_per_page for group in server.layout.groups]
        assert sum(count * page_bytes[group] for (group, _), count in held.items()) <= busy.backlog_bytes
        most = max(most, busy.backlog_refused_blocks)

    async with server.open() as kv:
        requests = {name: kv.open_request(name, tokens) for name, tokens in prompts.items()}
        tables = {name: server.allocate(tokens) for name, tokens in prompts.items()}
        for name, tokens in prompts.items():
            server.write(tokens, tables[name], 0, len(tokens) // 4)
        while open_ones := [name for name in prompts if name in requests]:
            for name in dice.sample(open_ones, dice.randint(0, min(3, len(open_ones)))):
                count = min(dice.randint(1, 12), len(prompts[name]) - done[name])
                plan = kv.plan_pass([part(requests[name], done[name], count, tables[name])])
                await kv.after_forward(plan)
                done[name] += count
                if done[name] == len(prompts[name]) and dice.random() < 0.5:
                    requests.pop(name).finish()
                within()
            await anyio.sleep(dice.choice([0, 0.1, 1.0]))
            within()
        await anyio.sleep(15)
        assert (kv.pressure().backlog_bytes, kv.pressure().backlog_passes) == (0, 0)
    for tokens in prompts.values():
        stored = server.stored_blocks(tokens)
        assert stored == list(range(len(stored)))
    assert server.wrong_values() == []
    assert server.left_behind() == []
    assert most > 0, "this pool was fast enough"


# -- settings


async def test_S6_a_backlog_that_holds_no_block_is_refused_at_start() -> None:
    server = FakeServer()
    with pytest.raises(SettingsError, match="backlog_bytes"):
        async with server.open(backlog_bytes=BLOCK - 1):
            pass
    async with server.open(backlog_bytes=BLOCK):
        pass
