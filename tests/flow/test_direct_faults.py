"""What may happen between the query and the end of a direct copy: a failed load or the right bytes, never wrong ones (R2)."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from akv import LoadFailed, LoadState
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.segments import FakeHost, FakeSegment
from akv_testing.server import FakeServer
from akv_testing.store import FakeStore
from akv_testing.traffic import LONG, TOKENS
from akv_testing.warm_segments import map_each, put_into_each

pytestmark = pytest.mark.anyio

LEASE_S = 1.0
#: What other pages' bytes are, in place of a pool's.
OTHERS = b"\x77" * 16


class Scene:
    """A server whose prompt lies in one segment, which is full: what is freed there is used again at once."""

    def __init__(self, **settings: Any) -> None:
        self.host = FakeHost()
        self.store = FakeStore(anyio.current_time, lease_s=LEASE_S)
        self.segment: FakeSegment = self.host.lend(5 * (16 + 24))
        self.server = FakeServer(store=self.store, segments=self.host, lease_s=LEASE_S, **settings)
        put_into_each(self.server, [self.segment])
        self.server.put_in_store(TOKENS)
        self.keys = [key for keys in self.server.keys_of(TOKENS) for key in keys]

    def evict_and_fill(self, *, force: bool) -> None:
        """Take the prompt's pages out, by force or where no lease protects them, and put other pages where they lay."""
        for key in self.keys:
            if force:
                self.store.remove(key)
            else:
                self.store.evict(key)
        for number in range(10):
            self.store.write(f"other{number}", OTHERS)


async def failed(scene: Scene, during_copy: Callable[[], None], *, after_s: float = 0.0) -> LoadFailed | None:
    """Load the prompt, let something happen while its first copy runs, and say how the load failed; None if it did not."""
    server = scene.server
    async with server.open() as kv:
        await map_each(server, kv, [scene.segment])
        gate = server.device.script.hold("scatter")
        _, load, table = await server.load(kv, "r", TOKENS)
        await settle()
        assert server.device.busy
        await anyio.sleep(after_s)
        during_copy()
        gate.release()
        failure: LoadFailed | None = None
        try:
            await load.wait()
        except LoadFailed as error:
            failure = error
        assert load.state is (LoadState.FAILED if failure else LoadState.LOADED)
        if failure is None:
            assert server.wrong_pages(TOKENS, table, 0, 4) == []
    assert server.left_behind() == []
    return failure


async def test_R2_a_region_that_is_used_again_behind_the_lease_fails_the_load_whose_copy_outlived_it() -> None:
    scene = Scene()
    failure = await failed(scene, lambda: scene.evict_and_fill(force=False), after_s=1.5 * LEASE_S)
    assert failure is not None
    assert (failure.key, failure.reason) == (scene.keys[0], "lease_expired")


@pytest.mark.parametrize(("share", "reason"), [(0.85, None), (0.95, "lease_expired")])
async def test_R2_a_copy_counts_until_a_margin_before_the_end_of_its_lease(share: float, reason: str | None) -> None:
    failure = await failed(Scene(), lambda: None, after_s=share * LEASE_S)
    assert (failure and failure.reason) == reason


async def test_R2_the_lease_counts_from_the_sending_of_the_query_not_from_its_answer() -> None:
    scene = Scene()
    server = scene.server
    async with server.open() as kv:
        await map_each(server, kv, [scene.segment])
        # The pool has answered and the answer is on its way back for most of the lease.
        gate = server.runner.hold(CallKind.READ, after_body=True)
        copy = server.device.script.hold("scatter")
        _, load, _ = await server.load(kv, "r", TOKENS)
        await anyio.sleep(0.45 * LEASE_S)
        gate.release()
        await anyio.sleep(0.5 * LEASE_S)
        copy.release()
        with pytest.raises(LoadFailed, match="lease_expired"):
            await load.wait()


async def test_R2_pages_that_were_removed_by_force_between_query_and_copy_fail_the_load() -> None:
    scene = Scene()
    failure = await failed(scene, lambda: scene.evict_and_fill(force=True))
    assert failure is not None
    assert (failure.key, failure.reason) == (scene.keys[0], "moved")


async def test_R2_a_page_that_was_removed_and_put_back_at_another_place_fails_the_load() -> None:
    scene = Scene()

    def put_back() -> None:
        scene.evict_and_fill(force=True)
        scene.store.places.append(scene.host.lend(1 << 12))
        scene.server.put_in_store(TOKENS)

    failure = await failed(scene, put_back)
    assert (failure and failure.reason) == "moved"


async def test_R2_a_page_that_the_pool_moved_between_query_and_copy_fails_the_load() -> None:
    scene = Scene()
    scene.store.places.append(scene.host.lend(1 << 12))
    failure = await failed(scene, lambda: scene.store.move(scene.keys[1]))
    assert failure is not None
    assert (failure.key, failure.reason) == (scene.keys[1], "moved")


async def test_R3_the_owner_s_end_during_the_copy_leaves_the_right_bytes() -> None:
    scene = Scene()
    assert await failed(scene, scene.segment.owner_ends) is None


async def test_R4_an_owner_that_ended_and_whose_name_another_process_has_is_not_read_at_the_old_addresses() -> None:
    scene = Scene()
    server, old = scene.server, scene.segment
    async with server.open() as kv:
        await map_each(server, kv, [scene.segment])
        # It is mapped, and then another process has its endpoint and, by bad luck, some of its addresses.
        old.owner_ends()
        scene.store.clear()
        new = scene.host.lend(1 << 12, endpoint=old.entry.endpoint, base=old.base - 64)
        scene.store.places = [new]
        server.put_in_store(TOKENS)
        _, load, table = await server.load(kv, "r", TOKENS)
        await load.wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        before = kv.pressure().reads.direct_pages
        for number in range(3):
            await anyio.sleep(2.0)
            _, load, table = await server.load(kv, f"again-{number}", TOKENS)
            await load.wait()
            assert server.wrong_pages(TOKENS, table, 0, 4) == []
        assert kv.pressure().reads.direct_pages - before >= 8


async def test_R3_a_file_that_was_shortened_during_the_copy_fails_the_load_and_the_next_one_is_staged() -> None:
    scene = Scene()
    failure = await failed(scene, lambda: scene.segment.truncate(80))
    assert (failure and failure.reason) == "copy_failed"


@pytest.mark.parametrize("length", [80, 199])
async def test_R3_a_file_that_was_shortened_and_made_longer_again_is_read_no_more(length: int) -> None:
    scene = Scene()

    def shorten() -> None:
        scene.segment.truncate(length)
        scene.segment.array[:] = 0
        scene.segment.length = scene.segment.entry.size

    failure = await failed(scene, shorten)
    assert (failure and failure.reason) == "segment_changed"


async def test_R3_a_file_that_was_shortened_before_the_query_costs_no_load() -> None:
    scene = Scene()
    server = scene.server
    async with server.open() as kv:
        await map_each(server, kv, [scene.segment])
        scene.segment.truncate(0)
        _, load, table = await server.load(kv, "r", TOKENS)
        await load.wait()
        assert server.wrong_pages(TOKENS, table, 0, 4) == []
        assert kv.pressure().reads.staged["refused"] == 8
        # It is let go of, so that the next load does not ask it again.
        assert kv.pressure().reads.segments == 0


async def test_R2_a_failed_direct_copy_fails_its_load_alone() -> None:
    scene = Scene()
    server = scene.server
    async with server.open() as kv:
        await map_each(server, kv, [scene.segment])
        server.device.script.fail_copy("scatter", RuntimeError("bus"))
        _, load, _ = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed, match="copy_failed"):
            await load.wait()
        request = kv.open_request("next", TOKENS)
        assert (await request.lookup()).tokens == 16


@pytest.mark.parametrize(("probe_chunk", "queries"), [(512, 2), (10, 4), (1, 6)])
async def test_R6_R2_a_long_load_is_copied_in_stretches_of_a_probe_and_each_is_asked_for_twice(
    probe_chunk: int, queries: int
) -> None:
    # A stretch is never below a batch of the slots, which is four blocks here.
    scene = Scene(probe_chunk=probe_chunk)
    server = scene.server
    scene.store.places.append(other := scene.host.lend(1 << 12))
    server.put_in_store(LONG)
    async with server.open() as kv:
        await map_each(server, kv, [scene.segment])
        _, load, _ = await server.load(kv, "first", LONG)
        await load.wait()
        await settle()
        assert kv.pressure().reads.segment_bytes == scene.segment.entry.size + other.entry.size
        server.pool.calls.clear()
        _, load, table = await server.load(kv, "r", LONG)
        await load.wait()
        assert server.wrong_pages(LONG, table, 0, 9) == []
    asked = [call.keys for call in server.pool.calls if call.operation == "describe"]
    keys = sorted(key for keys in server.keys_of(LONG) for key in keys)
    assert sorted(key for call in asked for key in call) == sorted(keys * 2)
    assert len(asked) == queries


@pytest.mark.parametrize("asks", [True, False])
async def test_O7_loads_past_their_deadline_in_a_query_are_a_sign_of_the_pool_and_in_a_copy_they_are_none(
    asks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(loaders=2)
    server = scene.server
    async with server.open(load_deadline_s=0.5) as kv:
        await map_each(server, kv, [scene.segment])
        # Two layer groups are two copies of each load.
        query = server.runner.hold_all(CallKind.READ) if asks else None
        copies = [] if asks else [server.device.script.hold("scatter", nth=nth) for nth in (1, 2, 3, 4)]
        loads = [(await server.load(kv, str(number), TOKENS))[1] for number in range(2)]
        await anyio.sleep(0.6)
        if query is not None:
            query.release()
        for copy in copies:
            copy.release()
        for load in loads:
            with pytest.raises(LoadFailed, match="deadline"):
                await load.wait()
    opened = [record for record in caplog.records if getattr(record, "akv_event", "") == "akv.breaker.open"]
    assert len(opened) == asks
    assert server.left_behind() == []


async def test_O6_a_connector_that_takes_its_time_to_close_begins_no_look_at_the_register() -> None:
    scene = Scene(read_path="auto")
    server = scene.server
    async with server.open(shutdown_deadline_s=10.0) as kv:
        await map_each(server, kv, [scene.segment])
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("save", LONG)
        await server.compute(kv, request, LONG, server.allocate(LONG))
        _, load, _ = await server.load(kv, "r", TOKENS)
        await load.wait()
        looks = sum(call.kind is CallKind.MAP for call in server.runner.calls)
    # The put hung for all of the deadline, and the pause between two looks was over long before.
    assert sum(call.kind is CallKind.MAP for call in server.runner.calls) == looks
    gate.release()
