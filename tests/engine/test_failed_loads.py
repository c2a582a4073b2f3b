"""Whatever the pool answers or has lost: each request finishes, with what a cold run computes (D3, H4, L1, L2, L8)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest

from akv.pool.codes import probe_answer, read_codes, read_sizes
from akv.ports.calls import CallKind
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState
from akv_testing.engine import Engine, EngineConfig, Result
from akv_testing.store import FakeStore

#: The fixtures `served` and `assert_same`: what they do is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]
Same = Callable[[Result, Result], None]

pytestmark = pytest.mark.anyio

#: Five whole blocks, and a token more.
TOKENS = [7 * position % 251 for position in range(41)]


async def ask(engine: Engine, name: str, tokens: Sequence[int] = TOKENS) -> Result:
    return await engine.generate(name, tokens, max_new_tokens=3, keep_logits=True, keep_pages=True)


async def stored(served: OpenServed, config: EngineConfig, tokens: Sequence[int] = TOKENS) -> tuple[FakeStore, Result]:
    """A pool that holds a prompt, and the cold run that put it there."""
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        return store, await ask(computing.engine, "cold", tokens)


def calls(fresh: Any, operation: str) -> list[Any]:
    return [call for call in fresh.pool.calls if call.operation == operation]


async def nothing_is_left(fresh: Any) -> None:
    await fresh.engine.settled()
    assert fresh.engine.cache.check() == []
    assert fresh.engine.cache.available_blocks == 64


@pytest.mark.parametrize("state", [KeyState.HOLDER_LOST, KeyState.MISSING, KeyState.LEASE_EXPIRED, KeyState.UNAVAILABLE])
async def test_D3_L8_a_pool_that_always_says_exists_and_never_delivers_costs_two_loads_at_most(
    fine: EngineConfig, served: OpenServed, assert_same: Same, state: KeyState
) -> None:
    store, cold = await stored(served, fine)
    async with served(fine, store) as fresh:
        fresh.pool.answer("get", state, times=None)
        first = await ask(fresh.engine, "first")
        assert_same(first, cold)
        assert (first.failed_loads, first.load_failure, first.from_pool_tokens) == (
            len(calls(fresh, "get")),
            state,
            0,
        )
        assert 1 <= first.failed_loads <= 2
        await fresh.engine.settled()
        fresh.engine.cache.evict_idle()
        assert_same(await ask(fresh.engine, "next"), cold)
        assert len(calls(fresh, "get")) <= 4
        await nothing_is_left(fresh)


@pytest.mark.parametrize("most", [1, 2, 4])
async def test_D3_a_request_tries_as_often_as_it_is_let(
    fine: EngineConfig, served: OpenServed, assert_same: Same, most: int
) -> None:
    store, cold = await stored(served, fine)
    async with served(fine, store, max_load_attempts=most) as fresh:
        fresh.pool.answer("get", KeyState.LEASE_EXPIRED, times=None)  # says nothing of the key, so it is offered again
        hurt = await ask(fresh.engine, "hurt")
        assert (hurt.failed_loads, hurt.lookup_outcome) == (most, "loads_failed")
        assert_same(hurt, cold)
        await nothing_is_left(fresh)


async def test_D3_one_wait_for_a_load_deadline_is_enough(fine: EngineConfig, served: OpenServed, assert_same: Same) -> None:
    store, cold = await stored(served, fine)
    async with served(fine, store, load_deadline_s=0.05) as fresh:
        gate = fresh.runner.hold_all(CallKind.GET)  # as where the holder of the pages is frozen
        hurt = await ask(fresh.engine, "hurt")
        assert (hurt.failed_loads, hurt.load_failure) == (1, "deadline")
        assert_same(hurt, cold)
        gate.release()
        await nothing_is_left(fresh)


async def test_D3_whose_holder_has_gone_is_not_asked_for_the_rest_of_what_it_held(
    fine: EngineConfig, served: OpenServed, assert_same: Same
) -> None:
    store, cold = await stored(served, fine)
    async with served(fine, store) as fresh:
        # What came before it arrived, so that much would be offered again.
        fresh.pool.answer("get", KeyState.HOLDER_LOST, skip=2)
        hurt = await ask(fresh.engine, "hurt")
        assert (hurt.failed_loads, hurt.load_failure, hurt.from_pool_tokens) == (1, KeyState.HOLDER_LOST, 0)
        assert len(calls(fresh, "get")) == 1
        assert_same(hurt, cold)
        await nothing_is_left(fresh)


@pytest.mark.parametrize("block", [0, 2, 4])
async def test_D3_H4_eviction_between_lookup_and_load(
    fine: EngineConfig, served: OpenServed, assert_same: Same, block: int
) -> None:
    store, cold = await stored(served, fine)
    async with served(fine, store) as fresh:
        gate = fresh.runner.hold(CallKind.GET)
        hurt: list[Result] = []

        async def client() -> None:
            hurt.append(await ask(fresh.engine, "hurt"))

        async with anyio.create_task_group() as group:
            group.start_soon(client)
            await gate.reached()
            asked = [key for call in calls(fresh, "probe") for key in call.keys]
            store.remove(asked[block])
            gate.release()
        # Offered again is what is before the hole.
        assert (hurt[0].failed_loads, hurt[0].from_pool_tokens) == (1, 8 * block)
        assert_same(hurt[0], cold)
        await nothing_is_left(fresh)


async def test_L1_of_a_prompt_that_the_pool_has_whole_a_block_is_computed(
    fine: EngineConfig, served: OpenServed, assert_same: Same
) -> None:
    store, cold = await stored(served, fine, TOKENS[:40])
    async with served(fine, store) as fresh:
        hit = await ask(fresh.engine, "hit", TOKENS[:40])
        assert hit.from_pool_tokens == 32
        assert_same(hit, cold)
        again = await ask(fresh.engine, "again", TOKENS[:40])
        assert (again.local_tokens, again.from_pool_tokens) == (32, 0)
        assert_same(again, cold)


#: What the store's client returns for a get of all sizes.
GETS: dict[str, Callable[[list[int]], Any]] = {
    "none": lambda sizes: None,
    "no list": lambda sizes: sizes[0],
    "a shorter list": lambda sizes: sizes[:-1],
    "a longer list": lambda sizes: [*sizes, sizes[0]],
    "none for a key": lambda sizes: [*sizes[:-1], None],
    **{
        f"{code} for a key": lambda sizes, code=code: [*sizes[:-1], code]  # type: ignore[misc]
        for code in (0, -1, -600, -704, -707, -800, -900)
    },
    "a short value": lambda sizes: [*sizes[:-1], sizes[-1] - 1],
    "a long value": lambda sizes: [*sizes[:-1], sizes[-1] + 1],
}


@pytest.mark.parametrize("case", GETS)
async def test_D3_whatever_a_get_answers_no_request_is_lost(
    fine: EngineConfig, served: OpenServed, assert_same: Same, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cold = await stored(served, fine)
    got: list[int] = []

    def get(keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        got.append(len(keys))
        return read_sizes(GETS[case](list(sizes)), sizes)

    async with served(fine, store) as fresh:
        monkeypatch.setattr(fresh.pool, "get", get)
        hurt = await ask(fresh.engine, "hurt")
        assert hurt.from_pool_tokens == 0
        assert hurt.failed_loads == len(got)
        assert 1 <= len(got) <= 2
        assert_same(hurt, cold)
        await nothing_is_left(fresh)


#: What the client returns for a probe of all keys, and how many tokens of the forty that are there are loaded then.
PROBES: dict[str, tuple[Callable[[list[int]], Any], int]] = {
    "1": (lambda there: there, 40),
    "0": (lambda there: [0] * len(there), 0),
    "-1": (lambda there: [-1] * len(there), 0),
    "-704": (lambda there: [-704] * len(there), 0),
    "-900": (lambda there: [-900] * len(there), 0),
    "none": (lambda there: None, 0),
    "a shorter list": (lambda there: there[:-1], 0),
    "a longer list": (lambda there: [*there, 1], 0),
    **{
        f"{code} for a key": (lambda there, code=code: [*there[:2], code, *there[3:]], 16)  # type: ignore[misc]
        for code in (0, 2, -1, -704, -900)
    },
}


@pytest.mark.parametrize("case", PROBES)
async def test_L2_whatever_a_probe_answers_no_request_is_lost(
    fine: EngineConfig, served: OpenServed, assert_same: Same, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cold = await stored(served, fine)
    raw, loaded = PROBES[case]
    async with served(fine, store) as fresh:
        with monkeypatch.context() as patch:
            patch.setattr(fresh.pool, "probe", lambda keys: read_codes(raw([1] * len(keys)), len(keys), probe_answer))
            asking = await ask(fresh.engine, "asking")
            assert (asking.from_pool_tokens, asking.failed_loads) == (loaded, 0)
            assert_same(asking, cold)
            await nothing_is_left(fresh)


async def test_D3_a_cancelled_request_is_not_restarted(fine: EngineConfig, served: OpenServed) -> None:
    store, _ = await stored(served, fine)
    async with served(fine, store) as fresh, anyio.create_task_group() as group:
        fresh.pool.answer("get", KeyState.LEASE_EXPIRED, times=None)
        gate = fresh.runner.hold_all(CallKind.GET)
        client = anyio.CancelScope()

        async def leaves() -> None:
            with client:
                await ask(fresh.engine, "leaves")

        group.start_soon(leaves)
        await gate.reached()
        asked = len(calls(fresh, "probe"))
        gate.release()  # its load fails in the very moment in which its client goes
        client.cancel()
        await nothing_is_left(fresh)
        await anyio.sleep(0.01)
        assert (len(calls(fresh, "probe")), len(calls(fresh, "get"))) == (asked, 1)
        assert gate.holding == 0
