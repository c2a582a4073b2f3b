"""Plans of passes: each ends once, and one that never ran leaves no trace (S2)."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from akv import (
    ConnectorBroken,
    EngineContractError,
)
from akv.ports.calls import CallKind
from akv.values.messages import PassPlan
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS, blocks_to_save, part

pytestmark = pytest.mark.anyio


async def test_S2_a_plan_changes_nothing_and_one_that_never_ran_saves_again() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        first = kv.plan_pass([part(request, 0, 18, table)])
        kv.drop_pass(first)
        second = kv.plan_pass([part(request, 0, 18, table)])
        assert blocks_to_save(second) == blocks_to_save(first) == [0, 1, 2, 3]
        server.write(TOKENS, table)
        await kv.after_forward(second)
        assert blocks_to_save(kv.plan_pass([part(request, 18, 1, table)])) == []
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
        assert blocks_to_save(two) == list(range(9))
        server.write(LONG, table, 0, 5)
        await kv.after_forward(one)
        server.write(LONG, table, 5)
        await kv.after_forward(two)
        await request.finished()
        keys = [key for call in server.pool.calls if call.operation == "put" for key in call.keys]
        assert len(keys) == len(set(keys)) == 18
    assert server.wrong_values() == []


async def test_L6_a_plan_that_was_never_made_breaks_the_connector_for_every_call_and_every_waiter() -> None:
    server = FakeServer.warm(TOKENS)
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


async def test_L6_two_blocks_of_one_page_are_refused_before_either_is_saved() -> None:
    server = FakeServer()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = [list(pages) for pages in server.allocate(TOKENS)]
        table[1][3] = table[1][1]
        with pytest.raises(EngineContractError, match=r"'r', block 1, group 1: page \d+ is also listed"):
            kv.plan_pass([part(request, 0, 18, table)])
        # A block without a page is none of them, however many there are.
        table[1][1] = table[1][3] = -1
        assert blocks_to_save(kv.plan_pass([part(request, 0, 18, table)])) == [0, 2]
