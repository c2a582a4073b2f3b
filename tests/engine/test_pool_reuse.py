"""The reference engine with akv: pages that another engine computed give the same bits, and trouble stays with its request."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest

from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv.values.messages import PassPlan
from akv.values.scope import Scope
from akv_testing.engine import TINY, EngineConfig, Model, Result, open_engine
from akv_testing.store import FakeStore

#: The fixture `served`: what it opens is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]
Same = Callable[[Result, Result], None]

pytestmark = pytest.mark.anyio

TOKENS = [7 * position % 251 for position in range(90)]


async def local_hit(config: EngineConfig, model: Model, tokens: list[int], max_new_tokens: int) -> Result:
    """The reference run: everything that may be reused is, and none of it came from a pool."""
    async with open_engine(config, model=model) as engine:
        await engine.generate("computes", tokens, max_new_tokens=max_new_tokens)
        return await engine.generate("reuses", tokens, max_new_tokens=max_new_tokens, keep_logits=True, keep_pages=True)


@pytest.mark.parametrize("layer_groups", [1, 2])
async def test_Q1_a_hit_equals_local_reuse_bit_for_bit(
    config: EngineConfig, model: Model, served: OpenServed, assert_same: Same, layer_groups: int
) -> None:
    config = EngineConfig(
        model=TINY, tokens_per_block=8, pages=64, chunk_tokens=32, max_tokens_per_pass=64, max_running=8,
        layer_groups=layer_groups,
    )  # fmt: skip
    reference = await local_hit(config, model, TOKENS, 12)
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        cold = await computing.engine.generate("cold", TOKENS, max_new_tokens=12)
    assert cold.from_pool_tokens == 0
    assert len(store.keys()) == layer_groups * ((90 + 12 - 1) // 8)
    async with served(config, store) as fresh:
        hit = await fresh.engine.generate("hit", TOKENS, max_new_tokens=12, keep_logits=True, keep_pages=True)
        assert (hit.local_tokens, hit.from_pool_tokens) == (0, 88)
        assert_same(hit, reference)
        again = await fresh.engine.generate("again", TOKENS, max_new_tokens=12, keep_logits=True, keep_pages=True)
        assert (again.local_tokens, again.from_pool_tokens) == (88, 0)  # what was loaded is local from then on
        assert_same(again, reference)


async def test_L1_the_pool_goes_on_where_the_local_match_ends(config: EngineConfig, model: Model, served: OpenServed) -> None:
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        await computing.engine.generate("cold", TOKENS, max_new_tokens=1)
    async with served(config, store) as fresh:
        await fresh.engine.generate("start", TOKENS[:41], max_new_tokens=1, reads_pool=False)
        hit = await fresh.engine.generate("hit", TOKENS, max_new_tokens=1)
        other = await fresh.engine.generate("other", TOKENS, max_new_tokens=1, scope=Scope(salt="other"))
        cold = await fresh.engine.generate("cold", TOKENS, max_new_tokens=1, local_reuse=False, reads_pool=False)
    assert (hit.local_tokens, hit.from_pool_tokens) == (40, 48)
    assert (other.local_tokens, other.from_pool_tokens) == (0, 0)
    assert (cold.local_tokens, cold.from_pool_tokens) == (0, 0)


async def test_S12_the_next_turn_finds_the_answer_in_the_pool(config: EngineConfig, served: OpenServed) -> None:
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        first = await computing.engine.generate("turn 1", TOKENS, max_new_tokens=10)
    async with served(config, store) as fresh:
        second = await fresh.engine.generate("turn 2", [*TOKENS, *first.tokens, 250, 249], max_new_tokens=1)
    assert second.from_pool_tokens == 96


async def test_D3_H4_a_failed_load_restarts_its_request_without_that_offer_and_hurts_nobody_else(
    config: EngineConfig, served: OpenServed, assert_same: Same
) -> None:
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        cold = await computing.engine.generate("cold", TOKENS, max_new_tokens=6, keep_logits=True, keep_pages=True)
    async with served(config, store) as fresh:
        fresh.pool.answer("get", KeyState.MISSING, skip=4)
        hurt = await fresh.engine.generate("hurt", TOKENS, max_new_tokens=6, keep_logits=True, keep_pages=True)
        # Asked again, the pool offers what is before the missing page: a whole chunk, so that the chunks are the same.
        assert (hurt.load_failure, hurt.failed_loads, hurt.from_pool_tokens) == ("missing", 1, 32)
        assert_same(hurt, cold)  # a recompute equals a cold run with the same chunks (Q1)
        await fresh.engine.settled()  # a put of ours clears the page's name
        fine = await fresh.engine.generate("fine", TOKENS, max_new_tokens=6, local_reuse=False)
        assert fine.from_pool_tokens == 88
        await fresh.engine.settled()
        assert fresh.engine.cache.check() == []
        assert fresh.engine.cache.available_blocks == 64


async def test_D1_others_go_on_computing_while_a_load_hangs(config: EngineConfig, served: OpenServed) -> None:
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        await computing.engine.generate("cold", TOKENS, max_new_tokens=1)
    async with served(config, store) as fresh, anyio.create_task_group() as group:
        gate = fresh.runner.hold(CallKind.GET)
        results: dict[str, Result] = {}

        async def parked() -> None:
            results["parked"] = await fresh.engine.generate("parked", TOKENS, max_new_tokens=1)

        group.start_soon(parked)
        await gate.reached()
        other = await fresh.engine.generate("other", TOKENS[1:], max_new_tokens=8)
        assert len(other.tokens) == 8
        assert results == {}
        gate.release()
    assert results["parked"].from_pool_tokens == 88


@pytest.mark.parametrize("kind", [CallKind.PROBE, CallKind.GET, CallKind.PUT])
async def test_D6_a_client_that_leaves_while_the_store_hangs_gives_its_pages_back(
    config: EngineConfig, served: OpenServed, kind: CallKind
) -> None:
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        await computing.engine.generate("cold", TOKENS, max_new_tokens=1)
    async with served(config, store) as fresh, anyio.create_task_group() as group:
        gate = fresh.runner.hold(kind)
        client = anyio.CancelScope()

        async def leaves() -> None:
            with client:
                tokens = TOKENS if kind is CallKind.GET else TOKENS[1:]
                await fresh.engine.generate("leaves", tokens, max_new_tokens=300)

        group.start_soon(leaves)
        await gate.reached()
        client.cancel()
        # The call returns only later, and no deadline passes sooner.
        with anyio.fail_after(50):
            await fresh.engine.settled()
        assert fresh.engine.cache.check() == []
        assert fresh.engine.cache.available_blocks == 64
        gate.release()


@pytest.mark.parametrize("loading", [True, False], ids=["scatter", "gather"])
async def test_D6_pages_that_a_copy_touches_are_not_given_back_before_it_ended(
    config: EngineConfig, served: OpenServed, loading: bool
) -> None:
    store = FakeStore(anyio.current_time)
    async with served(config, store) as computing:
        await computing.engine.generate("cold", TOKENS, max_new_tokens=1)
    async with served(config, store) as fresh, anyio.create_task_group() as group:
        gate = fresh.runner.hold(CallKind.COPY)
        client = anyio.CancelScope()

        async def leaves() -> None:
            with client:
                await fresh.engine.generate("leaves", TOKENS if loading else TOKENS[1:], max_new_tokens=300)

        group.start_soon(leaves)
        await gate.reached()
        client.cancel()
        with anyio.move_on_after(0.02):
            await fresh.engine.settled()
        assert fresh.engine.cache.available_blocks <= 64 - 12
        gate.release()
        await fresh.engine.settled()
        assert fresh.engine.cache.available_blocks == 64
        assert fresh.engine.cache.check() == []


async def test_S7_pages_of_a_finished_request_are_held_until_its_saves_ended(config: EngineConfig, served: OpenServed) -> None:
    async with served(config, FakeStore(anyio.current_time)) as fresh:
        gate = fresh.runner.hold_all(CallKind.COPY)
        await fresh.engine.generate("saves", TOKENS, max_new_tokens=6)
        await gate.reached()
        assert fresh.engine.cache.available_blocks == 64 - 12
        shares = await fresh.engine.generate("shares", TOKENS, max_new_tokens=1)
        assert shares.local_tokens == 88  # held is not hidden: others may read
        gate.release()
        await fresh.engine.settled()
        assert fresh.engine.cache.available_blocks == 64


async def test_S2_a_pass_that_failed_is_dropped(
    config: EngineConfig, model: Model, served: OpenServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("the kernel failed")

    monkeypatch.setattr(model, "forward", broken)
    dropped: list[PassPlan] = []

    async def serve() -> None:
        async with served(config, FakeStore(anyio.current_time)) as fresh:
            drop_pass = fresh.kv.drop_pass

            def recorded(plan: PassPlan) -> None:
                drop_pass(plan)  # raises if the plan has ended already
                dropped.append(plan)

            monkeypatch.setattr(fresh.kv, "drop_pass", recorded)
            await fresh.engine.generate("r", TOKENS, max_new_tokens=1)

    with pytest.raises(ArithmeticError, match="the kernel failed"):
        await serve()
    assert len(dropped) == 1


async def test_many_requests_on_few_pages_with_a_pool_give_the_bits_of_a_serial_run(
    config: EngineConfig, model: Model, served: OpenServed
) -> None:
    prompts = {f"r{i}": [*TOKENS[: 40 + 8 * (i % 3)], *range(i, i + 20)] for i in range(10)}
    few = EngineConfig(model=TINY, tokens_per_block=8, pages=30, chunk_tokens=32, max_tokens_per_pass=64, max_running=8)
    store = FakeStore(anyio.current_time)
    results: dict[str, Result] = {}
    async with served(few, store) as computing:
        for name, prompt in prompts.items():
            await computing.engine.generate(name, prompt, max_new_tokens=5)
        await computing.engine.settled()

        async def one(name: str) -> None:
            results[name] = await computing.engine.generate(f"again {name}", prompts[name], max_new_tokens=5)

        async with anyio.create_task_group() as group:
            for name in prompts:
                group.start_soon(one, name)
        await computing.engine.settled()
        assert computing.engine.cache.check() == []
        assert computing.engine.cache.available_blocks == 30
    assert sum(result.from_pool_tokens for result in results.values()) > 0
    for name, prompt in prompts.items():
        most = (len(prompt) - 1) // 8 * 8
        assert results[name].local_tokens + results[name].from_pool_tokens == most
        assert results[name].tokens == (await local_hit(config, model, prompt, 5)).tokens


async def test_S11_pages_with_a_trailer_behind_them_give_the_same_bits(
    config: EngineConfig, model: Model, served: OpenServed, assert_same: Same
) -> None:
    mac = {"integrity": "mac", "integrity_secret": "s"}
    reference = await local_hit(config, model, TOKENS, 4)
    store = FakeStore(anyio.current_time)
    async with served(config, store, **mac) as computing:
        await computing.engine.generate("cold", TOKENS, max_new_tokens=4)
    async with served(config, store, **mac) as fresh:
        hit = await fresh.engine.generate("hit", TOKENS, max_new_tokens=4, keep_logits=True, keep_pages=True)
    assert hit.from_pool_tokens == 88
    assert_same(hit, reference)
