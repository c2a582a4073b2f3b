"""Saves: what a pass publishes, when, and what becomes of blocks that the pool refuses."""

import anyio
import pytest

from akv import (
    NO_PAGE,
    Connector,
    ConnectorBroken,
    EngineContractError,
    SavesCompleted,
)
from akv.plan.put_attempts import MOST_ATTEMPTS
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import UnorderedAccess, settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS, blocks_to_save, part

pytestmark = pytest.mark.anyio


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
            listed.append(blocks_to_save(plan))
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
        assert blocks_to_save(kv.plan_pass([part(request, 0, 18, table)])) == [0, 2, 3]
        table[1][1] = missing
        assert blocks_to_save(kv.plan_pass([part(request, 0, 18, table)])) == [0, 1, 2, 3]


async def test_K6_a_block_with_tokens_that_were_not_told_yet_is_not_saved() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(8)
        plan = kv.plan_pass([part(request, 0, 20, table)])
        assert blocks_to_save(plan) == [0, 1, 2, 3]
        request.append([18, 19])
        assert blocks_to_save(kv.plan_pass([part(request, 0, 20, table)])) == [0, 1, 2, 3, 4]


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
    cause = broken.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert cause.subgroup(UnorderedAccess)
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
        with anyio.move_on_after(50) as scope:
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
    server.pool.answer("put", KeyState.NO_SPACE, key=server.keys_of(TOKENS)[1][2], times=MOST_ATTEMPTS)
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


# -- trouble


async def test_S2_refused_blocks_step_back_and_are_offered_again_after_the_back_off() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, key=server.keys_of(TOKENS)[1][2], times=MOST_ATTEMPTS)
    async with server.open(save_backoff_s=1.0) as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        await anyio.sleep(0.5)
        assert server.stored_blocks(TOKENS) == [0, 1, 3]
        assert blocks_to_save(kv.plan_pass([part(request, 18, 1, table)])) == []
        await anyio.sleep(0.6)
        plan = kv.plan_pass([part(request, 18, 1, table)])
        assert blocks_to_save(plan) == [2]
        await kv.after_forward(plan)
        await request.finished()
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []


async def test_S2_finish_tries_refused_blocks_once_more_while_the_request_still_holds_their_pages() -> None:
    server = FakeServer()
    server.pool.answer("put", KeyState.NO_SPACE, key=server.keys_of(TOKENS)[0][3], times=MOST_ATTEMPTS)
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
