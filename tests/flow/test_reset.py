"""New weights: from the reset on everything has other names, and nothing crosses over (K8, D9)."""

from typing import Any

import anyio
import pytest

from akv import (
    Connector,
    EngineContractError,
    LoadCancelled,
    LookupOutcome,
    NotOpenError,
    SavesCompleted,
    Scheduled,
    SettingsError,
)
from akv.plan.keys import KeySpace
from akv.settings import check_settings
from akv.values.messages import BadPage
from akv_testing import settle, tiny_layout
from akv_testing.calls import Latency
from akv_testing.server import FakeServer
from akv_testing.store import FakeStore
from akv_testing.traffic import TOKENS
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio


def serving(revision: str, store: FakeStore | None = None, **arguments: Any) -> FakeServer:
    """A server that runs the weights of a revision, which write other bytes than others do."""
    server = FakeServer(store=store, revision=revision, **arguments)
    server.weights = revision.encode()
    return server


def new_weights(server: FakeServer, revision: str) -> None:
    """The engine's side of a reset."""
    server.weights = revision.encode()
    server.keys = KeySpace.of_settings(check_settings(server.settings), server.layout, revision=revision)


def nothing_crossed_over(server: FakeServer, *revisions: str) -> None:
    """Every stored page holds what the weights in its name computed."""
    seen = 0
    for revision in revisions:
        new_weights(server, revision)
        present = server.store.keys()
        mine = {key for key in present if key.startswith(server.keys.space + "/")}
        assert not mine & set(server.wrong_values())
        seen += len(mine)
    assert seen == len(present)


async def computed(server: FakeServer, kv: Connector, request_id: str) -> None:
    request = kv.open_request(request_id, TOKENS)
    assert (await request.lookup()).tokens == 0
    table = server.allocate(TOKENS)
    await server.compute(kv, request, TOKENS, table)
    await request.finished()
    server.free(table)


async def test_K8_old_pages_keep_their_name_and_new_ones_get_another() -> None:
    # It does not read, so no lookup tells it that what it knows is not in the pool under the new name.
    server = serving("r1", role="producer")
    async with server.open() as kv:
        await computed(server, kv, "old")
        old = set(server.store.keys())
        await kv.reset("r2")
        new_weights(server, "r2")
        # Saved again, though the hashes were known to be in the pool.
        await computed(server, kv, "new")
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
        assert len(server.store.keys()) == 2 * len(old)
    nothing_crossed_over(server, "r1", "r2")
    for revision, tokens in (("r1", 16), ("r2", 16), ("r3", 0)):
        # A process that starts with a name finds the pages of that name.
        async with serving(revision, server.store).open() as kv:
            assert (await kv.open_request("r", TOKENS).lookup()).tokens == tokens


async def test_K8_a_save_on_its_way_ends_under_the_old_name_and_what_is_queued_not_at_all() -> None:
    server = serving("r1", latency=Latency(put_s=1.0), savers=1)
    async with server.open() as kv:
        for request_id, tokens in (("first", TOKENS), ("second", [*reversed(TOKENS)])):
            request = kv.open_request(request_id, tokens)
            await server.compute(kv, request, tokens, server.allocate(tokens))
            request.finish()
        await settle()
        await kv.reset("r2")
        # Both are told, and long before the store has answered.
        assert {(type(c), c.request_id) for c in kv.completed()} == {(SavesCompleted, "first"), (SavesCompleted, "second")}
        new_weights(server, "r2")
        assert server.store.keys() == []
        await anyio.sleep(5)
        assert (await kv.open_request("again", TOKENS).lookup()).outcome is LookupOutcome.FULL_ATTENTION_MISS
        await kv.open_request("behind", TOKENS).cancel()
    assert server.stored_blocks(TOKENS) == []
    new_weights(server, "r1")
    assert server.stored_blocks([*reversed(TOKENS)]) == []
    assert server.store.keys()
    nothing_crossed_over(server, "r1", "r2")


async def test_K8_a_save_that_ends_after_the_reset_teaches_nothing_about_the_new_names() -> None:
    """A request that waits for a copy has not closed when the put of another save of it ends."""
    server = serving("r1", layout=tiny_layout(groups=1), latency=Latency(put_s=1.5), savers=2, role="producer")
    server.device.copy_s = lambda _: 1.0
    async with server.open() as kv:
        request = kv.open_request("old", TOKENS)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS[:8], table)
        await anyio.sleep(1.7)
        await server.compute(kv, request, TOKENS, table, before=8)
        await anyio.sleep(0.3)
        with anyio.move_on_after(0.6):
            await kv.reset("r2")
        # The first put has ended, the second copy has not.
        assert server.stored_blocks(TOKENS) == [0, 1]
        assert not request.closed
        await request.cancel()
        new_weights(server, "r2")
        await computed(server, kv, "new")
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    nothing_crossed_over(server, "r1", "r2")


async def test_K8_D9_loads_end_as_cancelled_and_one_that_waited_is_withdrawn() -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(get_s=1.0), loaders=1)
    async with server.open() as kv:
        loads = [await server.load(kv, name, TOKENS) for name in ("moving", "waiting")]
        await settle()
        began = anyio.current_time()
        await kv.reset("r2")
        assert anyio.current_time() - began < 0.5
        for request, load, _ in loads:
            with pytest.raises(LoadCancelled):
                await load.wait()
            assert request.closed
        assert len([call for call in server.pool.calls if call.operation == "get"]) <= 1
        for _, _, table in loads:
            server.free(table)
        await anyio.sleep(5)
        assert (await kv.open_request("r", TOKENS).lookup()).tokens == 0


async def test_K8_an_offer_of_before_is_taken_up_by_nobody() -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(probe_s=1.0))
    offers = []
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)

        async def look_up() -> None:
            offers.append(await request.lookup())

        async with anyio.create_task_group() as group:
            group.start_soon(look_up)
            await anyio.sleep(0.5)
            await kv.reset("r2")
        assert request.closed
        with pytest.raises(EngineContractError, match="closed"):
            request.reserve(offers[0], offers[0].tokens, server.allocate(TOKENS))
        assert (await kv.open_request("r", TOKENS).lookup()).tokens == 0


async def test_K8_a_pass_that_was_planned_before_saves_nothing() -> None:
    server = WindowServer(windows=((10, 0),))
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        table = server.allocate(TOKENS)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=len(TOKENS), pages=table)])
        assert plan.saves
        await kv.reset("r2")
        await kv.after_forward(plan)
        await anyio.sleep(1)
    assert server.store.keys() == []
    assert server.left_behind() == []


async def test_K8_pages_of_a_failed_get_are_asked_for_again_under_the_new_name() -> None:
    server = serving("r1")
    server.put_in_store(TOKENS)
    async with server.open() as kv:
        request, load, _ = await server.load(kv, "r", TOKENS)
        negative = kv._halves.scheduler._negative
        await load.wait()
        await request.finished()
        negative.failed([BadPage(0, server.hashes(TOKENS)[0], named=True)], anyio.current_time())
        assert (await kv.open_request("s", TOKENS).lookup()).tokens == 0
        await kv.reset("r2")
        new_weights(server, "r2")
        server.put_in_store(TOKENS)
        assert (await kv.open_request("s", TOKENS).lookup()).tokens == 16


@pytest.mark.parametrize("revision", ["", " ", "\ud800", 2, b"r2", None])
async def test_K8_a_reset_needs_a_name_that_can_stand_in_a_key(revision: Any) -> None:
    server = serving("r1")
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        with pytest.raises(SettingsError) as refused:
            await kv.reset(revision)
        assert (refused.value.field, refused.value.value) == ("revision", revision)
        # Nothing was reset.
        assert not request.closed
        assert kv._halves.local_worker._parts.keys.space.endswith("@r1")
    with pytest.raises(NotOpenError):
        await kv.reset("r2")


async def test_K8_a_cancelled_wait_leaves_the_reset_done() -> None:
    server = serving("r1")
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        server.device.copy_s = lambda _: 2.0
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await anyio.sleep(0.5)
        with anyio.move_on_after(0.5) as cut:
            await kv.reset("r2")
        assert cut.cancelled_caught
        assert kv._halves.local_worker._parts.keys.space.endswith("@r2")
        await anyio.sleep(2)
        assert request.closed
        new_weights(server, "r2")
        await computed(server, kv, "new")
        assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    nothing_crossed_over(server, "r1", "r2")
