"""Saves: what a pass publishes, when, and what becomes of blocks that the pool refuses."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from akv import (
    NO_PAGE,
    Connector,
    ConnectorBroken,
    EngineContractError,
    LoadState,
    Request,
    SavesCompleted,
    Scheduled,
)
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv.values.messages import PassPlan
from akv_testing import FakeStore, UnorderedAccess, settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer, PageTable

pytestmark = pytest.mark.anyio

TOKENS = list(range(18))
LONG = list(range(100, 138))


def part(request: Request, before: int, tokens: int, table: PageTable, drafts: int = 0) -> Scheduled:
    return Scheduled(request=request, computed_before=before, tokens=tokens, draft_tokens=drafts, pages=table)


def blocks(plan: PassPlan) -> list[int]:
    """The blocks that a plan of one request would save; the same in every group."""
    listed = {group.blocks for order in plan.saves for group in order.groups}
    assert len(listed) < 2
    return [block for group in listed for block in group]


def leaves(error: BaseException | None) -> list[type[BaseException]]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [] if error is None else [type(error)]


async def saves_ended(kv: Connector) -> SavesCompleted:
    """The next end of a request's saves."""
    while True:
        await kv.changed.wait()
        for done in kv.completed():
            if isinstance(done, SavesCompleted):
                return done


# -- what may be published


@pytest.mark.parametrize(
    ("before", "tokens", "drafts", "saved"),
    [(0, 18, 0, 4), (0, 16, 0, 4), (0, 15, 0, 3), (0, 3, 0, 0), (0, 7, 9, 1), (8, 4, 0, 3)],
)
async def test_S1_only_whole_computed_blocks_are_published(before: int, tokens: int, drafts: int, saved: int) -> None:
    server = FakeServer()
    async with server.open() as kv:
        async with kv.request("r", TOKENS) as request:
            # More pages are allocated than the pass computes.
            table = server.allocate(8)
            plan = kv.plan_pass([part(request, before, tokens, table, drafts)])
            server.write(TOKENS, table, 0, saved)
            await kv.after_forward(plan)
    assert server.stored_blocks(TOKENS) == list(range(saved))
    assert server.wrong_values() == []


async def test_S1_chunked_prefill_saves_each_block_with_the_pass_that_completes_it() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", LONG)
        table = server.allocate(LONG)
        listed = []
        for before in range(0, 38, 10):
            plan = kv.plan_pass([part(request, before, min(10, 38 - before), table)])
            listed.append(blocks(plan))
            server.write(LONG, table, before // 4, min(38, before + 10) // 4)
            await kv.after_forward(plan)
        assert listed == [[0, 1], [2, 3, 4], [5, 6], [7, 8]]
        await request.finished()
        assert server.stored_blocks(LONG) == list(range(9))
        # No key was put twice.
        keys = [key for call in server.pool.calls if call.operation == "put" for key in call.keys]
        assert len(keys) == len(set(keys)) == 18
    assert server.wrong_values() == []


async def test_S1_L2_a_block_that_lacks_a_page_in_one_group_is_not_listed() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        missing = table[1][1]
        table[1][1] = NO_PAGE
        assert blocks(kv.plan_pass([part(request, 0, 18, table)])) == [0, 2, 3]
        table[1][1] = missing
        assert blocks(kv.plan_pass([part(request, 0, 18, table)])) == [0, 1, 2, 3]


async def test_K6_a_block_with_tokens_that_were_not_told_yet_is_not_saved() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        plan = kv.plan_pass([part(request, 0, 20, table)])
        assert blocks(plan) == [0, 1, 2, 3]
        request.append([18, 19])
        assert blocks(kv.plan_pass([part(request, 0, 20, table)])) == [0, 1, 2, 3, 4]


# -- order of accesses


async def compute_slowly(server: FakeServer, kv: Connector) -> None:
    request = kv.open_request("r", TOKENS)
    await server.compute(kv, request, TOKENS, server.allocate(TOKENS), duration_s=0.02)
    await request.finished()


async def test_D5_pages_are_read_only_after_the_event_of_the_pass_that_computed_them() -> None:
    server = FakeServer()
    async with server.open() as kv:
        began = anyio.current_time()
        await compute_slowly(server, kv)
        assert anyio.current_time() - began > 0.02
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []


async def test_D5_with_the_passes_event_ignored_the_same_save_is_a_race_that_the_fake_device_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FakeServer()
    too_early = server.device.record()
    monkeypatch.setattr(server.device, "record", lambda: too_early)
    with pytest.raises(ConnectorBroken) as broken:
        async with server.open() as kv:
            await compute_slowly(server, kv)
    assert UnorderedAccess in leaves(broken.value.__cause__)
    assert server.stored_blocks(TOKENS) == []


async def test_S7_a_save_waits_for_its_own_pass_and_for_no_later_one() -> None:
    server = FakeServer()
    gate = server.runner.hold(CallKind.PUT)
    async with server.open() as kv:
        ahead = kv.open_request("ahead", LONG)
        await server.compute(kv, ahead, LONG, server.allocate(LONG))
        await gate.reached()
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS), duration_s=0.01)
        server.device.kernel(writes=[(0, 60, 1)], duration_s=1.0)
        gate.release()
        await anyio.sleep(0.05)
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


async def test_S7_after_forward_waits_for_no_copy_and_no_call() -> None:
    server = FakeServer(latency=Latency(put_s=1.0, copy_s=1.0))
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        began = anyio.current_time()
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS), duration_s=1.0)
        assert anyio.current_time() == began


async def test_S7_finished_returns_only_after_the_puts_ended_and_the_pages_may_be_overwritten_then() -> None:
    server = FakeServer()
    gate = server.runner.hold(CallKind.PUT, nth=2)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        with anyio.move_on_after(100) as scope:
            await request.finished()
        assert scope.cancelled_caught
        assert [request.closed] == [False]
        gate.release()
        await request.finished()
        assert request.closed
        server.free(table)
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S7_finish_tells_its_end_by_completed() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, key=server.keys_of(TOKENS)[1][2])
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        request.finish()
        request.finish()
        assert await saves_ended(kv) == SavesCompleted(
            request_id="r", incarnation=request.incarnation, stored_blocks=3, refused_blocks=1
        )
        with pytest.raises(EngineContractError, match="finish|closed"):
            request.append([1])


# -- plans


async def test_S2_a_plan_changes_nothing_and_one_that_never_ran_saves_again() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        first = kv.plan_pass([part(request, 0, 18, table)])
        kv.drop_pass(first)
        second = kv.plan_pass([part(request, 0, 18, table)])
        assert blocks(second) == blocks(first) == [0, 1, 2, 3]
        server.write(TOKENS, table)
        await kv.after_forward(second)
        assert blocks(kv.plan_pass([part(request, 18, 1, table)])) == []
        await request.finished()
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


async def test_S2_a_dropped_plan_leaves_nothing_for_finish_to_save() -> None:
    server = FakeServer()
    async with server.open() as kv:
        async with kv.request("r", TOKENS) as request:
            kv.drop_pass(kv.plan_pass([part(request, 0, 18, server.allocate(TOKENS))]))
    assert server.store.keys() == []


@pytest.mark.parametrize("ended_by", ["after_forward", "drop_pass", "later"])
async def test_S2_a_plan_ends_once(ended_by: str) -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        server.write(TOKENS, table)
        plan = kv.plan_pass([part(request, 0, 18, table)])
        if ended_by == "after_forward":
            await kv.after_forward(plan)
        elif ended_by == "drop_pass":
            kv.drop_pass(plan)
        else:
            await kv.after_forward(kv.plan_pass([part(request, 0, 18, table)]))
        with pytest.raises(EngineContractError, match="has ended already"):
            await kv.after_forward(plan)
        with pytest.raises(EngineContractError, match="has ended already"):
            kv.drop_pass(plan)
        # That was the adapter's fault alone, and the connector goes on.
        await kv.after_forward(kv.plan_pass([part(request, 18, 0, table)]))
        await request.finished()
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


async def test_S2_overlapping_plans_that_list_the_same_blocks_save_each_once() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", LONG)
        table = server.allocate(LONG)
        one = kv.plan_pass([part(request, 0, 20, table)])
        two = kv.plan_pass([part(request, 20, 18, table)])
        assert blocks(two) == list(range(9))
        server.write(LONG, table, 0, 5)
        await kv.after_forward(one)
        server.write(LONG, table, 5)
        await kv.after_forward(two)
        await request.finished()
        keys = [key for call in server.pool.calls if call.operation == "put" for key in call.keys]
        assert len(keys) == len(set(keys)) == 18
    assert server.wrong_values() == []


async def test_L6_a_plan_that_was_never_made_breaks_the_connector_for_every_call_and_every_waiter() -> None:
    server = FakeServer()
    server.put_in_store(TOKENS)
    gate = server.runner.hold_all(CallKind.GET)
    ends: dict[str, BaseException] = {}

    async def waits(name: str, wait: Any) -> None:
        try:
            await wait()
        except ConnectorBroken as error:
            ends[name] = error

    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
        saving = kv.open_request("saving", LONG)
        put = server.runner.hold(CallKind.PUT)
        await server.compute(kv, saving, LONG, server.allocate(LONG))
        async with anyio.create_task_group() as group:
            group.start_soon(waits, "load", load.wait)
            group.start_soon(waits, "changed", kv.changed.wait)
            group.start_soon(waits, "finished", saving.finished)
            await gate.reached()
            await put.reached()
            with pytest.raises(EngineContractError, match="never made"):
                await kv.after_forward(PassPlan(plan_id=7))
        assert set(ends) == {"load", "changed", "finished"}
        calls: list[Callable[[], object]] = [
            lambda: kv.open_request("x", TOKENS),
            kv.completed,
            lambda: kv.plan_pass([]),
            lambda: kv.drop_pass(PassPlan(plan_id=1)),
            request.finish,
            lambda: request.append([1]),
        ]
        for call in calls:
            with pytest.raises(ConnectorBroken):
                call()
        later: list[Callable[[], Any]] = [request.lookup, request.cancel, request.finished, load.wait, kv.changed.wait]
        for wait in later:
            with pytest.raises(ConnectorBroken):
                await wait()
        gate.release()
        put.release()
    assert server.left_behind() == []


async def test_L6_the_part_of_a_pass_that_cannot_be_is_refused_naming_its_request() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        gone = kv.open_request("gone", TOKENS)
        await gone.cancel()
        table = server.allocate(TOKENS)
        wrong = {
            "scheduled twice": [part(request, 0, 4, table), part(request, 4, 4, table)],
            "computed_before = -1": [part(request, -1, 4, table)],
            "tokens = -4": [part(request, 0, -4, table)],
            "1 page tables": [part(request, 0, 18, table[:1])],
            "page 64 is not in the cache": [part(request, 0, 18, [[64, *table[0][1:]], table[1]])],
            "'gone'.*not open": [part(gone, 0, 4, table)],
        }
        for message, scheduled in wrong.items():
            with pytest.raises(EngineContractError, match=message):
                kv.plan_pass(scheduled)
        server.write(TOKENS, table)
        await kv.after_forward(kv.plan_pass([part(request, 0, 18, table)]))
        await request.finished()
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


async def test_S2_a_request_that_ends_between_plan_and_pass_gets_nothing_queued() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        plan = kv.plan_pass([part(request, 0, 18, table)])
        await request.cancel()
        server.free(table)
        await kv.after_forward(plan)
    assert server.store.keys() == []
    assert server.left_behind() == []


# -- trouble


async def test_S2_refused_blocks_step_back_and_are_offered_again_after_the_back_off() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, key=server.keys_of(TOKENS)[1][2])
    async with server.open(save_backoff_s=1.0) as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await anyio.sleep(0.5)
        assert server.stored_blocks(TOKENS) == [0, 1, 3]
        assert blocks(kv.plan_pass([part(request, 18, 1, table)])) == []
        await anyio.sleep(0.6)
        plan = kv.plan_pass([part(request, 18, 1, table)])
        assert blocks(plan) == [2]
        await kv.after_forward(plan)
        await request.finished()
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []


async def test_S2_finish_tries_refused_blocks_once_more_while_the_request_still_holds_their_pages() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, key=server.keys_of(TOKENS)[0][3])
    async with server.open(save_backoff_s=60.0) as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await anyio.sleep(0.5)
        assert server.stored_blocks(TOKENS) == [0, 1, 2]
        await request.finished()
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]


@pytest.mark.parametrize("trouble", [KeyState.UNAVAILABLE, KeyState.REFUSED, KeyState.NO_SPACE])
async def test_S2_a_put_that_answers_trouble_for_every_key_is_an_outcome_and_no_error(trouble: KeyState) -> None:
    server = FakeServer()
    server.pool.answer("put", trouble, times=None)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        request.finish()
        assert await saves_ended(kv) == SavesCompleted(
            request_id="r", incarnation=request.incarnation, stored_blocks=0, refused_blocks=4
        )
    assert server.left_behind() == []


@pytest.mark.parametrize("at_the_call", [True, False])
async def test_S2_blocks_whose_gather_fails_are_refused_and_the_others_saved(at_the_call: bool) -> None:
    server = FakeServer()
    script = server.device.script
    (script.fail_call if at_the_call else script.fail_copy)("gather", RuntimeError("ECC"), nth=2)
    async with server.open() as kv:
        request = kv.open_request("r", LONG)
        await server.compute(kv, request, LONG, server.allocate(LONG))
        request.finish()
        done = await saves_ended(kv)
        # The second gather: the second group's pages of the first eight blocks.
        assert (done.stored_blocks, done.refused_blocks) == (1, 8)
        assert server.stored_blocks(LONG) == [8]
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S2_a_pass_that_fails_on_the_device_publishes_nothing() -> None:
    from akv.errors import DeviceError
    from akv_testing.timeline import FakeEvent

    class FailedEvent(FakeEvent):
        def query(self) -> bool:
            raise DeviceError("illegal instruction")

    server = FakeServer()
    real = server.device.record()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        failed = FailedEvent(real.work, real.stamp, real._host, real.timeline)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.device, "record", lambda: failed)
            await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
            await settle()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.device, "record", lambda: failed)
            request.finish()
            done = await saves_ended(kv)
        assert (done.stored_blocks, done.refused_blocks) == (0, 4)
    assert server.store.keys() == []
    assert server.left_behind() == []


# -- generated tokens


async def decode(
    server: FakeServer, kv: Connector, request: Request, tokens: list[int], table: PageTable, steps: Sequence[int]
) -> None:
    """Feed the last token, sample the next: its own KV comes with the pass after."""
    for sampled in steps:
        request.append([sampled])
        tokens.append(sampled)
        before = len(tokens) - 1
        plan = kv.plan_pass([part(request, before, 1, table)])
        if len(tokens) % 4 == 0:
            server.write(tokens, table, len(tokens) // 4 - 1)
        await kv.after_forward(plan)


async def test_S12_decoded_blocks_are_saved_as_they_complete() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        tokens = list(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await decode(server, kv, request, tokens, table, range(50, 57))
        await anyio.sleep(0.1)
        assert server.stored_blocks(tokens) == [0, 1, 2, 3, 4, 5]
        await request.finished()
    assert server.wrong_values() == []


async def test_S12_prompt_blocks_alone_are_saved_with_save_generated_off() -> None:
    server = FakeServer()
    async with server.open(save_generated=False) as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        tokens = list(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await decode(server, kv, request, tokens, table, range(50, 57))
        await request.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2, 3]


async def test_S12_overlap_scheduling_a_token_that_is_told_after_the_plan_is_saved_at_the_finish() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        tokens = [*TOKENS, 50, 51]
        await server.compute(kv, request, TOKENS, table)
        for before in (18, 19):
            plan = kv.plan_pass([part(request, before, 1, table)])
            assert blocks(plan) == []
            server.write(tokens[: before + 1], table, 4)
            await kv.after_forward(plan)
            request.append([tokens[before]])
        await request.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2, 3, 4]
    assert server.wrong_values() == []


async def test_S12_the_last_sampled_token_has_no_KV() -> None:
    server = FakeServer()
    tokens = [*TOKENS, 50, 51]
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        await server.compute(kv, request, TOKENS, table)
        await decode(server, kv, request, list(TOKENS), table, [50])
        # Sampled by the last pass and confirmed, but never fed.
        request.append([51])
        await request.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2, 3]


async def test_S12_a_finish_in_the_middle_of_prefill_saves_what_was_computed() -> None:
    server = FakeServer()
    async with server.open() as kv:
        async with kv.request("r", LONG) as request:
            table = server.allocate(LONG)
            plan = kv.plan_pass([part(request, 0, 13, table)])
            server.write(LONG, table, 0, 3)
            await kv.after_forward(plan)
    assert server.stored_blocks(LONG) == [0, 1, 2]


# -- shared content


async def test_S13_a_prefix_that_many_requests_share_is_saved_once() -> None:
    server = FakeServer()
    async with server.open() as kv:
        for number in range(3):
            tokens = [*TOKENS[:16], 90 + number, 91, 92, 93]
            async with kv.request(f"r{number}", tokens) as request:
                table = server.allocate(tokens)
                await server.compute(kv, request, tokens, table)
            server.free(table)
            assert server.stored_blocks(tokens) == [0, 1, 2, 3, 4]
        keys = [key for call in server.pool.calls if call.operation == "put" for key in call.keys]
        assert len(keys) == len(set(keys)) == 2 * (4 + 3)
    assert server.wrong_values() == []


@pytest.mark.parametrize("kept", [0, 2])
async def test_S13_blocks_that_a_lookup_no_longer_finds_are_saved_again(kept: int) -> None:
    server = FakeServer()
    async with server.open() as kv:
        for number in range(2):
            async with kv.request(f"r{number}", TOKENS) as request:
                offer = await request.lookup()
                table = server.allocate(TOKENS)
                await request.reserve(offer, offer.tokens, table).wait()
                await server.compute(kv, request, TOKENS, table, offer.tokens)
            assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
            assert offer.tokens == (4 * kept if number else 0)
            # The pool evicts without telling anybody.
            for keys in server.keys_of(TOKENS):
                for key in keys[kept:]:
                    server.store.remove(key)
    assert server.wrong_values() == []


async def test_content_that_two_servers_computed_is_put_by_both_and_keeps_its_first_value() -> None:
    store = FakeStore(anyio.current_time)
    one, two = FakeServer(store=store, name="one"), FakeServer(store=store, name="two")
    async with one.open() as kv_one, two.open() as kv_two:
        requests = [kv.open_request("r", TOKENS) for kv in (kv_one, kv_two)]
        for server, kv, request in zip((one, two), (kv_one, kv_two), requests, strict=True):
            await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        for request in requests:
            await request.finished()
    assert [server.pool.bytes_moved["put"] for server in (one, two)] == [160, 160]
    assert store.used_bytes == 160
    assert one.wrong_values() == []


async def test_L7_a_consumer_saves_nothing() -> None:
    server = FakeServer()
    server.put_in_store(TOKENS[:8])
    async with server.open(role="consumer") as kv:
        async with kv.request("r", TOKENS) as request:
            table = server.allocate(TOKENS)
            load = request.reserve(await request.lookup(), 8, table)
            assert (await load.wait()).state is LoadState.LOADED
            plan = kv.plan_pass([part(request, 8, 10, table)])
            assert plan.saves == ()
            server.write(TOKENS, table, 2)
            await kv.after_forward(plan)
    assert server.stored_blocks(TOKENS) == [0, 1]
