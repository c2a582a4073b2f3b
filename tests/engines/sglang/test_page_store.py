"""Pages under keys of somebody else's: every wait ends by its deadline, and what a call may touch stays out of use until it
returned (M1, M3, L2, L4, L8, O7, S5).
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from akv.engines.sglang.page_store import LARGEST_PART, PARTS, Fetched, PageStore, StorePorts, open_page_store
from akv.errors import SettingsError
from akv.ports.calls import CallKind
from akv.ports.pool import KeyAnswer, KeyState
from akv.settings import Settings
from akv.values.pressure import BreakerState
from akv_testing.calls import FakeRunner
from akv_testing.memory import FakeHostBuffer
from akv_testing.pool import FakePool
from akv_testing.store import FakeStore

pytestmark = pytest.mark.anyio

PAGE = 24
KEYS = ["k0", "k1", "k2"]
Opens = Callable[..., AbstractAsyncContextManager["Parts"]]


class Parts:
    """A page store and what it stands on."""

    def __init__(self, **settings: Any) -> None:
        self.store = FakeStore(anyio.current_time)
        self.pool = FakePool(self.store)
        self.runner = FakeRunner()
        self.settings = Settings(model_key="m", pool="embedded", **settings)
        ports = StorePorts(pool=self.pool, runner=self.runner, memory=lambda nbytes: FakeHostBuffer(nbytes, name="staging"))
        self.opening = open_page_store(self.settings, ports)
        self.pages: PageStore

    def fill(self, *keys: str, size: int = PAGE) -> None:
        for key in keys:
            self.store.write(key, value(key, size))

    def calls(self, operation: str) -> list[tuple[str, ...]]:
        return [call.keys for call in self.pool.calls if call.operation == operation]

    async def fetch(self, *keys: str, patience_s: float = 5.0) -> Fetched:
        return await self.pages.fetch(keys or KEYS, PAGE, patience_s)

    async def put(self, *keys: str, patience_s: float = 5.0) -> list[bool]:
        room = await self.pages.room(len(keys), PAGE, patience_s)
        assert room is not None
        for key, offset in zip(keys, room.offsets, strict=True):
            room.buffer.view()[offset : offset + PAGE] = value(key)
        return await self.pages.put(room, keys, PAGE, patience_s)


def value(key: str, size: int = PAGE) -> bytes:
    return (key.encode() * size)[:size]


def found(fetched: Fetched) -> list[bytes]:
    view = fetched.buffer.view()
    return [bytes(view[at : at + PAGE]) for at in fetched.offsets]


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Parts]:
    parts = Parts(**settings)
    async with parts.opening as parts.pages:
        await parts.pages.make_room(PAGE)
        yield parts
    assert parts.pool.registered == [] or parts.pages.calls.outstanding


async def test_what_was_put_is_present_and_comes_back() -> None:
    async with opened() as parts:
        assert await parts.put(*KEYS) == [True, True, True]
        assert await parts.pages.present(KEYS) == [True, True, True]
        fetched = await parts.fetch()
        assert fetched.arrived == [True, True, True]
        assert found(fetched) == [value(key) for key in KEYS]
        parts.pages.leave(fetched)
        assert parts.pages.quarantined_slots == 0


async def test_L2_behind_a_hole_nothing_counts_and_little_is_asked_for() -> None:
    async with opened(probe_head=2, probe_chunk=2) as parts:
        parts.fill("k0", "k2", "k3", "k4", "k5")
        names = [f"k{index}" for index in range(6)]
        assert await parts.pages.present(names) == [True, False, False, False, False, False]
        assert parts.calls("probe") == [("k0", "k1")]
        assert await parts.pages.present(names, to_first_hole=False) == [True, False, True, True, True, True]


@pytest.mark.parametrize("state", [KeyState.UNAVAILABLE, KeyState.REFUSED, KeyState.MISSING])
async def test_L2_only_the_word_that_says_so_makes_a_page_present(state: KeyState) -> None:
    async with opened() as parts:
        parts.fill(*KEYS)
        parts.pool.answer("probe", state, key="k1")
        assert await parts.pages.present(KEYS, to_first_hole=False) == [True, False, True]


async def test_L4_a_query_past_its_deadline_found_nothing() -> None:
    async with opened(probe_head=1, lookup_deadline_s=1.0) as parts:
        parts.fill(*KEYS)
        gate = parts.runner.hold(CallKind.PROBE, nth=2)
        began = anyio.current_time()
        assert await parts.pages.present(KEYS) == [False, False, False]
        assert anyio.current_time() - began == pytest.approx(1.0)
        gate.release()


async def test_M1_M3_slots_of_a_get_that_hangs_are_nobodys_until_it_returned() -> None:
    async with opened() as parts:
        parts.fill(*KEYS)
        gate = parts.runner.hold(CallKind.GET)
        began = anyio.current_time()
        late = await parts.fetch(patience_s=0.5)
        assert (late.slots, late.arrived) == (None, [False, False, False])
        assert anyio.current_time() - began == pytest.approx(0.5)
        assert parts.pages.quarantined_slots == 3
        other = await parts.fetch()
        assert min(other.offsets) >= 3 * PAGE, "slots of the call that hangs were handed out again"
        gate.release()
        await anyio.sleep(0.01)
        assert parts.pages.quarantined_slots == 0
        assert found(other) == [value(key) for key in KEYS]
        parts.pages.leave(other)


async def test_M1_a_fetch_that_is_cancelled_keeps_its_slots_until_the_call_returned() -> None:
    async with opened() as parts:
        parts.fill(*KEYS)
        gate = parts.runner.hold(CallKind.GET)
        with anyio.move_on_after(0.1):
            await parts.fetch()
        assert parts.pages.quarantined_slots == 3
        gate.release()
        await anyio.sleep(0.01)
        assert parts.pages.quarantined_slots == 0


async def test_M1_slots_of_a_put_that_hangs_are_nobodys_until_it_returned() -> None:
    async with opened() as parts:
        gate = parts.runner.hold(CallKind.PUT)
        assert await parts.put(*KEYS, patience_s=0.5) == [False, False, False]
        assert parts.pages.quarantined_slots == 3
        gate.release()
        await anyio.sleep(0.01)
        # It read what was handed over, and not what came to lie there later.
        assert parts.store.value("k2") == value("k2")
        assert parts.pages.quarantined_slots == 0


async def test_without_slots_a_put_waits_no_longer_than_it_may() -> None:
    async with opened(quarantine_max_bytes=1 << 20) as parts:
        gate = parts.runner.hold_all(CallKind.PUT)
        first = await parts.pages.room(PARTS * LARGEST_PART, PAGE, 1.0)
        assert first is not None
        began = anyio.current_time()
        assert await parts.pages.room(1, PAGE, 0.5) is None
        assert anyio.current_time() - began == pytest.approx(0.5)
        first.slots.leave()
        assert await parts.pages.room(1, PAGE, 0.5) is not None
        gate.release()


@pytest.mark.parametrize(
    ("state", "again"),
    [
        (KeyState.MISSING, False),
        (KeyState.WRONG_SIZE, False),
        (KeyState.HOLDER_LOST, False),
        (KeyState.REFUSED, False),
        (KeyState.LEASE_EXPIRED, True),
        (KeyState.UNAVAILABLE, True),
    ],
)
async def test_L8_what_did_not_come_counts_as_missing_for_a_while(state: KeyState, again: bool) -> None:
    async with opened(negative_ttl_s=15.0) as parts:
        parts.fill(*KEYS)
        parts.pool.answer("get", state, key="k1")
        fetched = await parts.fetch()
        assert fetched.arrived == [True, False, True]
        parts.pages.leave(fetched)
        assert await parts.pages.present(KEYS, to_first_hole=False) == [True, again, True]
        await anyio.sleep(15.0)
        assert await parts.pages.present(KEYS) == [True, True, True]


async def test_L8_a_put_of_ours_ends_that_for_a_page_that_had_gone() -> None:
    async with opened() as parts:
        parts.pages.leave(await parts.fetch("k0"))
        parts.fill("k0")
        assert await parts.pages.present(["k0"]) == [False]
        assert await parts.put("k0") == [True]
        assert await parts.pages.present(["k0"]) == [True]


@pytest.mark.parametrize("size", [PAGE - 1, PAGE + 1, 1])
async def test_X4_a_value_of_another_size_is_no_page(size: int) -> None:
    async with opened() as parts:
        parts.fill("k0", "k2")
        parts.fill("k1", size=size)
        assert (await parts.fetch()).arrived == [True, False, True]


async def test_D4_what_came_after_the_lease_is_no_page() -> None:
    async with opened(lease_s=1.0) as parts:
        parts.fill(*KEYS)
        gate = parts.runner.hold(CallKind.GET, after_body=True)
        fetched: list[Fetched] = []
        async with anyio.create_task_group() as group:

            async def fetch() -> None:
                fetched.append(await parts.fetch())

            group.start_soon(fetch)
            await anyio.sleep(1.5)
            gate.release()
        assert fetched[0].arrived == [False, False, False]


async def test_S5_what_the_pool_refuses_for_lack_of_room_is_tried_again() -> None:
    async with opened() as parts:
        parts.pool.answer("put", KeyState.NO_SPACE, key="k1")
        assert await parts.put(*KEYS) == [True, True, True]
        assert parts.calls("put") == [("k0", "k1", "k2"), ("k1",)]


async def test_O7_beside_a_master_that_does_not_answer_nothing_is_asked_and_nothing_is_copied() -> None:
    async with opened() as parts:
        parts.fill(*KEYS)
        parts.store.down = True
        assert await parts.pages.present(KEYS) == [False, False, False]
        assert parts.pages.gate.state is not BreakerState.CLOSED
        asked = len(parts.pool.calls)
        assert await parts.pages.present(KEYS) == [False, False, False]
        fetched = await parts.fetch()
        assert fetched.arrived == [False, False, False]
        parts.pages.leave(fetched)
        assert await parts.pages.room(1, PAGE, 5.0) is None
        assert len(parts.pool.calls) == asked
        parts.store.down = False
        await anyio.sleep(5.0)
        assert await parts.pages.present(KEYS) == [True, True, True]


async def test_O7_two_gets_in_vain_open_the_breaker() -> None:
    async with opened() as parts:
        parts.fill(*KEYS)
        gate = parts.runner.hold_all(CallKind.GET)
        for _ in range(2):
            assert parts.pages.gate.state is BreakerState.CLOSED
            await parts.fetch("k0", patience_s=0.1)
        assert parts.pages.gate.state is not BreakerState.CLOSED
        gate.release()


async def test_M3_too_much_memory_in_quarantine_opens_the_breaker() -> None:
    async with opened(quarantine_max_bytes=2 * PAGE) as parts:
        gate = parts.runner.hold_all(CallKind.PUT)
        await parts.put(*KEYS, patience_s=0.1)
        assert await parts.pages.room(1, PAGE, 0.1) is None
        assert parts.pages.gate.state is not BreakerState.CLOSED
        gate.release()


async def test_M3_over_rdma_slots_behind_a_failed_transfer_are_out_of_use_for_good() -> None:
    async with opened() as parts:
        parts.pool.lets_go_at_return = False
        parts.fill(*KEYS)
        parts.pool.answer("get", KeyState.HOLDER_LOST, key="k0")
        parts.pages.leave(await parts.fetch())
        assert parts.pages.quarantined_slots == 1
        again = await parts.fetch("k1")
        assert min(again.offsets) >= PAGE
        parts.pages.leave(again)


@pytest.mark.parametrize("integrity", ["checksum", "mac"])
async def test_S11_a_page_that_is_not_its_keys_is_no_page(integrity: str) -> None:
    secret = {"integrity_secret": "s"} if integrity == "mac" else {}
    async with opened(integrity=integrity, **secret) as parts:
        assert await parts.put(*KEYS) == [True, True, True]
        parts.store.swap("k0", "k1")
        fetched = await parts.fetch()
        assert fetched.arrived == [False, False, True]
        parts.pages.leave(fetched)


async def test_what_begins_with_a_prefix_is_removed_and_nothing_else() -> None:
    async with opened() as parts:
        parts.fill("a/1", "a/2", "b/1")
        assert await parts.pages.remove_all("a/") == KeyAnswer(KeyState.OK, 2)
        assert parts.store.keys() == ["b/1"]
        gate = parts.runner.hold(CallKind.PROBE)
        assert (await parts.pages.remove_all("b/")).state is KeyState.UNAVAILABLE
        gate.release()


async def test_room_for_no_page_is_a_settings_error_that_names_both_sizes() -> None:
    parts = Parts(staging_buffer_bytes=PAGE)
    async with parts.opening as pages:
        await pages.make_room(PAGE)
        assert pages.part(PAGE) == 1
        with pytest.raises(SettingsError, match=str(PAGE + 1)):
            await pages.make_room(PAGE + 1)


async def test_O6_leaving_waits_for_calls_and_keeps_what_one_that_hangs_may_touch() -> None:
    async with opened(shutdown_deadline_s=1.0) as parts:
        parts.fill(*KEYS)
        gate = parts.runner.hold(CallKind.GET)
        await parts.fetch(patience_s=0.1)
        began = anyio.current_time()
    assert anyio.current_time() - began == pytest.approx(1.0, abs=1.1)
    assert parts.pool.registered, "memory was unregistered beside a call that writes there"
    gate.release()


async def test_O6_a_call_that_returns_while_the_store_is_left_lets_go_of_its_memory() -> None:
    async with anyio.create_task_group() as group:
        async with opened(shutdown_deadline_s=1.0) as parts:
            parts.fill(*KEYS)
            gate = parts.runner.hold(CallKind.GET)
            await parts.fetch(patience_s=0.1)

            async def release() -> None:
                await anyio.sleep(0.5)
                gate.release()

            group.start_soon(release)
        assert anyio.current_time() == pytest.approx(0.6)
        assert (parts.pool.registered, parts.pages.calls.outstanding) == ([], 0)


async def test_O6_while_the_store_is_left_nobody_probes_any_more() -> None:
    async with opened(shutdown_deadline_s=1.0) as parts:
        parts.fill(*KEYS)
        parts.runner.hold(CallKind.GET)
        await parts.fetch(patience_s=0.1)
        parts.store.down = True
        await parts.pages.present(KEYS)
        assert parts.pages.gate.state is not BreakerState.CLOSED
        probes = len(parts.calls("probe"))
    assert len(parts.calls("probe")) == probes


async def test_M3_over_rdma_without_slots_for_a_part_the_pool_is_not_asked_any_more() -> None:
    async with opened(staging_buffer_bytes=2 * PAGE) as parts:
        parts.pool.lets_go_at_return = False
        for key in ("k0", "k1"):
            assert parts.pages.gate.lets_through()
            parts.pool.answer("get", KeyState.HOLDER_LOST)
            parts.pages.leave(await parts.fetch(key))
        assert not parts.pages.gate.lets_through()
        began = anyio.current_time()
        assert (await parts.fetch("k2")).arrived == [False]
        assert anyio.current_time() == began


async def test_O8_when_a_service_fails_the_engine_goes_on_and_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    async with opened() as parts:
        parts.fill(*KEYS)
        monkeypatch.setattr(parts.pages.gate, "ended", broken)
        assert await parts.pages.present(KEYS) == [True, True, True]
        await anyio.sleep(0.1)
        assert await parts.pages.present(KEYS) == [False, False, False]
        fetched = await parts.fetch()
        assert fetched.arrived == [False, False, False]
