"""Sliding windows end to end on the fakes: what a closing pass saves, what a later server resumes from, byte for byte.

The engine of these tests overwrites every window page that it releases at once, and uses it next.
"""

from collections.abc import Sequence

import anyio
import pytest
from structlog.testing import capture_logs

from akv import Connector, LookupOutcome
from akv.ports.calls import CallKind
from akv_testing import UnorderedAccess
from akv_testing.calls import Latency
from akv_testing.store import FakeStore
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Eleven whole blocks of four tokens, and three tokens more.
PROMPT = tuple(range(47))


async def saved_by(server: WindowServer, *prompts: Sequence[int], chunk: int = 8) -> None:
    """Have a server compute these prompts, one after the other, and save what it can."""
    async with server.open() as kv:
        for number, prompt in enumerate(prompts):
            await server.serve(kv, f"r{number}", prompt, chunk=chunk)
    assert server.wrong_values() == []
    assert server.left_behind() == []


# -- W2, W3: the end of a prompt is resumable, for every length and window


@pytest.mark.parametrize("window", [1, 3, 10, 200])
@pytest.mark.parametrize("sinks", [0, 9])
@pytest.mark.parametrize("chunk", [3, 64])
async def test_W2_W3_every_prompts_end_is_resumed_elsewhere_bit_for_bit(window: int, sinks: int, chunk: int) -> None:
    for length in (44, 45, 46, 47):
        tokens = PROMPT[:length]
        store = FakeStore(anyio.current_time)
        # With a block of retention, as akv.host has it: the very same prompt can only resume one block before its end.
        await saved_by(WindowServer(windows=((window, sinks),), store=store, retention_tokens=4), tokens, chunk=chunk)
        other = WindowServer(windows=((window, sinks),), store=store)
        async with other.open() as kv:
            offer = await other.serve(kv, "again", tokens)
        # The same prompt may resume at floor((n - 1)/T) at most: one token has to be left to compute.
        assert (offer.tokens, offer.outcome) == ((length - 1) // 4 * 4, LookupOutcome.FULL)
        assert other.wrong_values() == []


@pytest.mark.parametrize(("rewind", "retention"), [(0, 0), (16, 0), (16, 16), (64, 64)])
async def test_W4_every_end_that_the_pages_allow_is_offered_and_no_other(rewind: int, retention: int) -> None:
    """Prompts that leave the stored one at every block: each resumes at the latest end that a token-by-token model finds."""
    store = FakeStore(anyio.current_time)
    first = WindowServer(windows=((10, 3), (17, 0)), store=store, retention_tokens=retention, rewind_tokens=rewind)
    await saved_by(first, PROMPT)
    ends = first.ends(PROMPT)
    assert ends[-1] == 11
    reachable = len([end for end in ends if end >= 11 - rewind // 4])
    if retention >= rewind:
        assert reachable == min(11, rewind // 4 + 1)
    other = WindowServer(windows=((10, 3), (17, 0)), store=store, rewind_tokens=rewind)
    async with other.open(role="consumer") as kv:
        for shared in range(1, 12):
            tokens = (*PROMPT[: 4 * shared], *range(900, 906))
            offer = await other.serve(kv, f"leaves at {shared}", tokens)
            latest = max((end for end in ends if end <= shared), default=0)
            assert offer.tokens == 4 * latest
            assert offer.outcome is expected_outcome(latest, shared, rewind // 4)


def expected_outcome(latest: int, hit: int, rewind_blocks: int) -> LookupOutcome:
    """W7's word for an end, given the longest full-attention prefix."""
    if not latest:
        return LookupOutcome.WINDOW_MISS
    if latest == hit:
        return LookupOutcome.FULL
    return LookupOutcome.REWOUND if latest >= hit - rewind_blocks else LookupOutcome.RECOVERED


async def test_W7_a_conversation_resumes_at_the_last_turns_end_and_a_branch_further_back() -> None:
    store = FakeStore(anyio.current_time)
    turns = [PROMPT[:18], PROMPT[:31], PROMPT]
    await saved_by(WindowServer(store=store), *turns)
    server = WindowServer(store=store, rewind_tokens=4)
    async with server.open() as kv:
        longer = await server.serve(kv, "longer", (*PROMPT, *range(500, 520)))
        assert (longer.tokens, longer.outcome) == (44, LookupOutcome.FULL)
        branch = await server.serve(kv, "branch", (*PROMPT[:40], *range(600, 620)))
        # The second turn ended at block 7; the branch shares ten blocks, three beyond it.
        assert (branch.tokens, branch.outcome) == (28, LookupOutcome.RECOVERED)
        miss = await server.serve(kv, "miss", (*PROMPT[:12], *range(700, 720)))
        assert (miss.tokens, miss.outcome) == (0, LookupOutcome.WINDOW_MISS)
    off = WindowServer(store=store, rewind_tokens=4, window_fallback=False)
    async with off.open(role="consumer") as kv:
        branch = await off.serve(kv, "branch", (*PROMPT[:36], *range(800, 820)))
        assert (branch.tokens, branch.outcome) == (0, LookupOutcome.WINDOW_MISS)


async def test_W3_a_request_that_resumed_saves_only_window_pages_that_it_holds() -> None:
    """The tail below the point where it resumed is not its own: the union with what is stored makes the ends."""
    store = FakeStore(anyio.current_time)
    await saved_by(WindowServer(store=store), PROMPT[:30])
    server = WindowServer(store=store, rewind_tokens=64, retention_tokens=64)
    async with server.open() as kv:
        await server.serve(kv, "longer", PROMPT)
    assert server.wrong_values() == []
    # It resumed at block 7; what its window read there, blocks 5 and 6, came from the pool.
    assert server.ends(PROMPT) == [7, 8, 9, 10, 11]


async def test_D9_what_a_load_brought_is_asked_for_and_not_put_again() -> None:
    store = FakeStore(anyio.current_time)
    await saved_by(WindowServer(store=store), PROMPT[:30])
    server = WindowServer(store=store)
    async with server.open() as kv:
        request, offer, table = await server.resume(kv, "r", PROMPT[:31])
        before = len(server.pool.calls)
        await server.prefill(kv, request, PROMPT[:31], table, start=offer.tokens)
        await request.finished()
        calls = server.pool.calls[before:]
    assert [call.operation for call in calls] == ["probe"]


async def test_W1_a_layout_of_windows_alone_is_served() -> None:
    store = FakeStore(anyio.current_time)
    await saved_by(WindowServer(full=0, windows=((10, 3), (6, 0)), store=store), PROMPT)
    server = WindowServer(full=0, windows=((10, 3), (6, 0)), store=store)
    async with server.open() as kv:
        offer = await server.serve(kv, "again", PROMPT)
    assert (offer.tokens, offer.outcome) == (44, LookupOutcome.FULL)


# -- S3, M5: the copy comes before the pages are reused


async def test_S3_one_gather_per_layer_group_however_many_requests_end_in_a_pass() -> None:
    server = WindowServer(windows=((10, 3), (6, 0)))
    async with server.open() as kv:
        requests = [(kv.open_request(f"r{number}", range(n := 100 * number, n + 22)), range(n, n + 22)) for number in range(3)]
        tables: list[list[list[int]]] = [[[] for _ in server.layout.groups] for _ in requests]
        from akv import Scheduled

        for (_, tokens), table in zip(requests, tables, strict=True):
            server.prepare(table, 0, len(tokens))
        plan = kv.plan_pass(
            [
                Scheduled(request=request, computed_before=0, tokens=len(tokens), pages=table)
                for (request, tokens), table in zip(requests, tables, strict=True)
            ]
        )
        for (_, tokens), table in zip(requests, tables, strict=True):
            server.forward(tokens, table, 0, len(tokens))
        await kv.after_forward(plan)
        copies = [copy for copy in server.device.copies if copy.kind == "snapshot"]
        assert [copy.group for copy in copies] == [1, 2]
        for (request, tokens), table in zip(requests, tables, strict=True):
            server.commit(table, len(tokens))
            await request.finished()
            assert server.ends(tokens)[-1] == 5
    assert server.wrong_values() == []


class _SnapshotOff:
    """What a saver without a snapshot does: it reads window pages live, behind the pass's event, like any other page."""

    @staticmethod
    def plan(kv: Connector) -> None:
        listing = kv._halves.scheduler.requests.listing
        real = listing.windows
        listing.windows = lambda record, columns, **_: real(record, columns, snapshot=False)  # type: ignore[method-assign]


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.5])
async def test_S3_M5_released_pages_are_overwritten_at_once_and_no_stored_byte_is_wrong(delay_s: float) -> None:
    """However late the saver gets to them: the snapshot holds what the pass computed."""
    server = WindowServer(latency=Latency(put_s=delay_s, copy_s=delay_s))
    await saved_by(server, PROMPT, PROMPT[:30], range(300, 347))
    assert server.ends(PROMPT)[-1] == 11


@pytest.mark.parametrize("delay_s", [0.003, 0.5])
async def test_S3_control_without_the_snapshot_the_same_run_reads_another_pass_s_pages(delay_s: float) -> None:
    server = WindowServer(latency=Latency(put_s=delay_s, copy_s=delay_s))
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - a race that the device refuses, wrapped as a broken connector
        async with server.open() as kv:
            _SnapshotOff.plan(kv)
            for number, prompt in enumerate((PROMPT, PROMPT[:30], range(300, 347))):
                await server.serve(kv, f"r{number}", prompt)
        assert server.wrong_values() == []
    assert isinstance(caught.value, AssertionError) or "UnorderedAccess" in repr(caught.value) or _raced(caught.value)


def _raced(error: BaseException) -> bool:
    found: list[BaseException] = [error]
    while found:
        one = found.pop()
        if isinstance(one, UnorderedAccess):
            return True
        found += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        found += one.exceptions if isinstance(one, BaseExceptionGroup) else []
    return False


async def test_M5_control_a_snapshot_that_is_taken_after_the_event_copies_another_pass_s_pages() -> None:
    server = WindowServer()
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - as above
        async with server.open() as kv:
            real = kv._halves.worker.snapshot

            async def late(plan, taken):  # type: ignore[no-untyped-def]
                """The engine's own release comes first: what a saver that waits for the event would do."""
                server.commit(tables[-1], plan_ends[-1])
                await real(plan, taken)

            tables: list[list[list[int]]] = []
            plan_ends: list[int] = []
            prepare = server.prepare

            def remembered(table, before, end):  # type: ignore[no-untyped-def]
                tables.append(table)
                plan_ends.append(end)
                prepare(table, before, end)

            server.prepare = remembered  # type: ignore[method-assign]
            kv._halves.worker.snapshot = late  # type: ignore[method-assign]
            await server.serve(kv, "r", PROMPT)
        assert server.wrong_values() == []
    assert isinstance(caught.value, AssertionError) or _raced(caught.value)


# -- S4: the ring


def ring_of(kv: Connector) -> tuple[int, int, int]:
    """Slots in all, free, and of given-up calls."""
    ring = kv._halves.local_worker._ring
    assert ring is not None
    pool = ring.claims.host
    return pool.count, pool.free, ring.claims.plans


async def test_S4_a_ring_that_is_too_small_drops_window_pages_and_a_later_lookup_recovers_an_earlier_end() -> None:
    store = FakeStore(anyio.current_time)
    short = PROMPT[:14]
    server = WindowServer(store=store, windows=((10, 0),), rewind_tokens=8, snapshot_slots=4)
    with capture_logs() as logs:
        await saved_by(server, short, PROMPT, chunk=64)
    dropped = [log for log in logs if log["event"] == "akv.snapshot.dropped"]
    assert [(log["request_id"], log["reason"]) for log in dropped] == [("r1", "too_large")]
    other = WindowServer(store=store, windows=((10, 0),), rewind_tokens=8)
    async with other.open(role="consumer") as kv:
        offer = await other.serve(kv, "again", PROMPT)
    # Every full-attention page was stored; of the window only the first prompt's end.
    assert (offer.tokens, offer.outcome) == (12, LookupOutcome.RECOVERED)


async def test_S4_without_slots_in_time_a_pass_drops_its_window_pages_and_waits_for_nothing() -> None:
    server = WindowServer(snapshot_slots=4, windows=((10, 0),))
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        first = kv.open_request("first", PROMPT[:22])
        table: list[list[int]] = [[] for _ in server.layout.groups]
        await server.run_pass(kv, first, PROMPT[:22], table, 0, 22)
        await gate.reached()
        second = kv.open_request("second", range(500, 522))
        began = anyio.current_time()
        with capture_logs() as logs:
            await server.run_pass(kv, second, range(500, 522), [[] for _ in server.layout.groups], 0, 22)
        assert anyio.current_time() == began
        assert [log["reason"] for log in logs if log["event"] == "akv.snapshot.dropped"] == ["no_slots"]
        gate.release()
        await first.finished()
        await second.finished()
        assert ring_of(kv) == (4, 4, 0)
    assert server.ends(PROMPT[:22])[-1] == 5
    assert server.ends(range(500, 522)) == []
    assert server.wrong_values() == []


@pytest.mark.parametrize(("wait_ms", "stored"), [(50, False), (5000, True)])
async def test_S4_a_pass_waits_for_slots_at_most_as_long_as_the_setting_says(wait_ms: int, stored: bool) -> None:
    server = WindowServer(snapshot_slots=4, windows=((10, 0),), snapshot_wait_ms=wait_ms, latency=Latency(put_s=1.0))
    async with server.open() as kv:
        first = kv.open_request("first", PROMPT[:22])
        await server.run_pass(kv, first, PROMPT[:22], [[] for _ in server.layout.groups], 0, 22)
        second = kv.open_request("second", range(500, 522))
        began = anyio.current_time()
        await server.run_pass(kv, second, range(500, 522), [[] for _ in server.layout.groups], 0, 22)
        waited = anyio.current_time() - began
        assert (waited >= 0.9) if stored else (waited == pytest.approx(0.05, abs=0.002))
        await first.finished()
        await second.finished()
    assert (5 in server.ends(range(500, 522))) is stored


async def test_S4_slots_are_granted_while_the_forward_runs() -> None:
    server = WindowServer(snapshot_slots=4, windows=((10, 0),), latency=Latency(put_s=1.0))
    async with server.open() as kv:
        first = kv.open_request("first", PROMPT[:22])
        await server.run_pass(kv, first, PROMPT[:22], [[] for _ in server.layout.groups], 0, 22)
        second, tokens = kv.open_request("second", range(500, 522)), range(500, 522)
        table: list[list[int]] = [[] for _ in server.layout.groups]
        server.prepare(table, 0, 22)
        from akv import Scheduled

        plan = kv.plan_pass([Scheduled(request=second, computed_before=0, tokens=22, pages=table)])
        server.forward(tokens, table, 0, 22)
        await anyio.sleep(1.5)
        await kv.after_forward(plan)
        await second.finished()
        await first.finished()
    assert 5 in server.ends(tokens)
