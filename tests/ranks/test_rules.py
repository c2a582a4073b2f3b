"""What holds for one rank holds for several: new weights, pages that prove themselves, bounded holds, saving again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from akv import LoadFailed, LoadState, LookupOutcome, SettingsError
from akv.plan.keys import KeySpace
from akv.ports.calls import CallKind
from akv.settings import check_settings
from akv_testing import settle
from akv_testing.ranked_server import RankedServer
from akv_testing.traffic import LONG, TOKENS, part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.ranks import Scheduler
    from akv_testing.server import PageTable
    from tests.ranks.conftest import Post

pytestmark = pytest.mark.anyio


def new_weights(server: RankedServer, revision: str) -> None:
    """The engine's side of a reset."""
    for number, rank in enumerate(server.ranks):
        rank.weights = revision.encode()
        rank.keys = KeySpace.of_settings(check_settings(rank.settings), rank.layout, revision=revision, rank=number)


async def computed(server: RankedServer, kv: Scheduler, name: str, tokens: Sequence[int] = TOKENS) -> PageTable:
    request, table = kv.open_request(name, tokens), server.allocate(tokens)
    await server.compute(kv, request, tokens, table)
    await request.finished()
    return table


async def loaded(server: RankedServer, kv: Scheduler, name: str = "loads") -> int:
    """Tokens of TOKENS that were loaded, each page right."""
    request, load, table = await server.load(kv, name, TOKENS)
    tokens = (await load.wait()).tokens
    assert server.wrong_pages(TOKENS, table, 0, tokens // 4) == []
    await request.finished()
    return tokens


# -- K8


async def test_K8_after_a_reset_no_rank_finds_or_saves_under_the_old_name(
    left_open: Callable[[RankedServer, Scheduler], list[str]],
) -> None:
    server = RankedServer()
    async with server.open() as kv:
        await computed(server, kv, "old")
        assert await loaded(server, kv) == 16
        old = set(server.store.keys())
        request, table = kv.open_request("open", LONG), server.allocate(LONG)
        await server.compute(kv, request, LONG, table)
        with anyio.fail_after(0.1):
            await kv.reset("step-2")
        assert request.closed
        server.free(table)
        new_weights(server, "step-2")
        asks = kv.open_request("asks", TOKENS)
        assert (await asks.lookup()).tokens == 0
        await asks.cancel()
        await computed(server, kv, "new")
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        assert await loaded(server, kv) == 16
        kv.completed()
        assert left_open(server, kv) == []
    assert [key for key in server.wrong_values() if key not in old and "@step-2" in key] == []
    assert server.left_behind() == []


@pytest.mark.parametrize("told", [(), (0,), (0, 1)])
async def test_K8_a_reset_while_messages_are_under_way_lets_nothing_cross_over(
    told: tuple[int, ...], post: type[Post]
) -> None:
    server = RankedServer()
    server.put_in_store(LONG)
    for rank in server.ranks:
        rank.device.script.delay("gather", 0.003)
    async with server.open() as kv:
        by_hand = post(server, kv)
        _, load, loading = await server.load(kv, "loads", LONG)
        request, table = kv.open_request("saves", TOKENS), server.allocate(TOKENS)
        plan = kv.plan_pass([part(request, 0, len(TOKENS), table)])
        await by_hand.tell(*told)
        for rank in server.ranks:
            rank.write(TOKENS, table)
        await kv.after_forward(plan)
        await by_hand.tell(*told)
        async with anyio.create_task_group() as group:
            group.start_soon(kv.reset, "step-2")
            await settle()
            await by_hand.go_on()
        assert load.state is LoadState.CANCELLED
        server.free(table)
        server.free(loading)
        new_weights(server, "step-2")
        present = server.store.keys()
        assert [key for key in present if "@step-2" in key] == []
        await computed(server, kv, "new")
        assert await loaded(server, kv, "again") == 16
    assert [key for key in server.wrong_values() if "@step-2" in key] == []
    assert server.left_behind() == []


async def test_K8_cancelling_a_reset_ends_the_wait_alone(post: type[Post]) -> None:
    server = RankedServer()
    async with server.open() as kv:
        by_hand = post(server, kv)
        request, table = kv.open_request("saves", TOKENS), server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table)
        with anyio.move_on_after(0.01) as scope:
            await kv.reset("step-2")
        assert scope.cancelled_caught
        await by_hand.go_on()
        await request.cancel()
        new_weights(server, "step-2")
        await computed(server, kv, "new")
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        with pytest.raises(SettingsError):
            await kv.reset("")
    assert server.left_behind() == []


# -- S11

KINDS: dict[str, dict[str, Any]] = {
    "checksum": {"integrity": "checksum"},
    "mac": {"integrity": "mac", "integrity_secret": "hunter2"},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_S11_each_rank_puts_a_trailer_behind_its_part_and_one_that_is_wrong_fails_the_load(kind: str) -> None:
    server = RankedServer(**KINDS[kind])
    async with server.open() as kv:
        await computed(server, kv, "r")
        assert await loaded(server, kv) == 16
        # Rank 0's part under rank 1's name.
        mine, others = (rank.keys_of(TOKENS)[0][2] for rank in server.ranks)
        value = server.store.value(mine)
        assert value is not None
        server.store.write(others, value)
        request, load, _ = await server.load(kv, "forged", TOKENS)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert failed.value.reason == "damaged"
        assert server.store.value(others) is None, "it is removed by force"
        assert server.store.value(mine) == value
        await request.cancel()
    assert server.wrong_values() == []
    assert server.left_behind() == []


@pytest.mark.parametrize("other", [{}, {"integrity": "mac", "integrity_secret": "other"}])
async def test_S11_D1_a_rank_with_another_trailer_is_refused(other: dict[str, Any]) -> None:
    server = RankedServer(**KINDS["mac"])
    server.ranks[1].settings = {
        key: value for key, value in server.ranks[1].settings.items() if "integrity" not in key
    } | other
    with pytest.raises(SettingsError, match=r"terms\.trailer"):
        async with server.open():
            raise AssertionError("it opened")


# -- S7


async def test_S7_a_hold_is_bounded_whichever_rank_is_slow_and_the_pages_may_be_overwritten() -> None:
    server = RankedServer()
    async with server.open(save_hold_max_s=0.05) as kv:
        gate = server.ranks[1].runner.hold(CallKind.PUT)
        request, table = kv.open_request("r", LONG), server.allocate(LONG)
        await server.compute(kv, request, LONG, table)
        await gate.reached()
        began = anyio.current_time()
        await request.finished()
        assert anyio.current_time() - began == pytest.approx(0.05, abs=0.003)
        server.free(table)
        gate.release()
        await anyio.sleep(0.01)
        assert len(server.stored_blocks(LONG)) < 9
    assert server.wrong_values() == []
    assert server.left_behind() == []


# -- S8, S12


async def test_S8_a_sequence_that_computed_much_puts_what_one_rank_lost() -> None:
    server = RankedServer(resave_min_tokens=16)
    async with server.open() as kv:
        request, table = kv.open_request("r", TOKENS), server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS[:8], table)
        await anyio.sleep(0.01)
        assert server.stored_blocks(TOKENS) == [0, 1]
        server.store.evict(server.ranks[1].keys_of(TOKENS)[0][1])
        await server.compute(kv, request, TOKENS, table, 8)
        await request.finished()
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        puts = [sum(len(call.keys) for call in rank.pool.calls if call.operation == "put") for rank in server.ranks]
        assert puts == [8, 9]
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_S12_what_no_pass_listed_is_saved_by_every_rank_at_the_end() -> None:
    server = RankedServer()
    tokens = list(TOKENS)
    async with server.open() as kv:
        request, table = kv.open_request("r", tokens), server.allocate(24)
        await server.compute(kv, request, tokens, table)
        # Tokens that are confirmed behind the pass that computes their block.
        plan = kv.plan_pass([part(request, 18, 2, table)])
        await server.carry(kv)
        tokens += [900, 901]
        for rank in server.ranks:
            rank.write(tokens, table, 4)
        await kv.after_forward(plan)
        request.append([900, 901])
        await request.finished()
        assert server.stored_blocks(tokens) == [0, 1, 2, 3, 4]
    assert server.wrong_values() == []
    assert server.left_behind() == []


async def test_D9_an_offer_honoured_with_nothing_ends_on_every_rank() -> None:
    server = RankedServer()
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        ended = await request.reserve(offer, 0, server.allocate(TOKENS)).wait()
        assert (ended.state, ended.tokens) == (LoadState.LOADED, 0)
        await request.finished()
    assert server.left_behind() == []


async def test_O1_roles_hold_on_every_rank() -> None:
    producer = RankedServer(role="producer")
    async with producer.open() as kv:
        await computed(producer, kv, "r")
        request = kv.open_request("asks", TOKENS)
        assert (await request.lookup()).outcome is LookupOutcome.NOT_READING
        await request.cancel()
    assert producer.stored_blocks(TOKENS) == [0, 1, 2, 3]
    consumer = RankedServer(role="consumer", store=producer.store)
    async with consumer.open() as kv:
        assert await loaded(consumer, kv) == 16
        await computed(consumer, kv, "r", LONG)
    assert consumer.stored_blocks(LONG) == []
    assert consumer.left_behind() == []
