"""Equal tokens are not equal KV: adapters, tenants, media, odd ids on a real model, in lookup, save, load (K1, K5, K6)."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import msgspec
import pytest

from akv.values.scope import Lora, Scope
from akv_testing.engine import TINY, TINY_DRAFTER, EngineConfig, Model, Result, open_engine
from akv_testing.store import FakeStore

#: The fixtures `served` and `assert_same`: what they do is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]
Same = Callable[[Result, Result], None]

pytestmark = pytest.mark.anyio

TOKENS = [7 * position % 251 for position in range(41)]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "keep_logits": True, "keep_pages": True}
SCOPES = {
    "none": Scope(),
    "adapter 7": Scope(lora=Lora(7)),
    "adapter 7, new weights": Scope(lora=Lora(7, "2")),
    "adapter 8": Scope(lora=Lora(8)),
    "a tenant's": Scope(salt="a"),
    "another tenant's": Scope(salt="b"),
    "a tenant's adapter 7": Scope(salt="a", lora=Lora(7)),
}


async def test_K1_no_scope_finds_what_another_computed_in_lookup_save_or_load(
    fine: EngineConfig, model: Model, served: OpenServed, assert_same: Same
) -> None:
    alone: dict[str, Result] = {}
    for name, scope in SCOPES.items():
        async with open_engine(fine, model=model) as engine:
            alone[name] = await engine.generate("r", TOKENS, scope=scope, **OPTIONS)
    store, stored = FakeStore(anyio.current_time), set[str]()
    async with served(fine, store) as computing:
        for name, scope in SCOPES.items():
            first = await computing.engine.generate(name, TOKENS, scope=scope, **OPTIONS)
            assert (first.local_tokens, first.from_pool_tokens, first.lookup_outcome) == (0, 0, "full_attention_miss")
            await computing.engine.settled()
            assert_same(first, alone[name])
            assert len(set(store.keys()) - stored) == 5  # nothing of it was there under its name, nor is it another's now
            stored = set(store.keys())
    async with served(fine, store) as fresh:
        for name, scope in SCOPES.items():
            hit = await fresh.engine.generate(name, TOKENS, scope=scope, **OPTIONS)
            assert (hit.local_tokens, hit.from_pool_tokens) == (0, 40)
            assert_same(hit, alone[name])
        assert (await fresh.engine.generate("other", TOKENS, scope=Scope(salt="c"), **OPTIONS)).from_pool_tokens == 0
    # An adapter changes what is computed, a tenant does not.
    assert alone["none"].page_digests == alone["a tenant's"].page_digests == alone["another tenant's"].page_digests
    digests = {name: alone[name].page_digests for name in ("none", "adapter 7", "adapter 7, new weights", "adapter 8")}
    assert len(set(digests.values())) == 4
    assert alone["adapter 7"].page_digests == alone["a tenant's adapter 7"].page_digests


async def test_K8_new_weights_find_nothing_that_others_computed_in_the_pool_or_here(
    fine: EngineConfig, model: Model, served: OpenServed, assert_same: Same
) -> None:
    others = Model(msgspec.structs.replace(TINY, seed=1))
    alone: list[Result] = []
    for weights in (model, others):
        async with open_engine(fine, model=weights) as engine:
            alone.append(await engine.generate("r", TOKENS, **OPTIONS))
    async with served(fine, FakeStore(anyio.current_time), revision="r1") as computing:
        assert_same(await computing.engine.generate("first", TOKENS, **OPTIONS), alone[0])
        await computing.engine.settled()
        for revision, weights, expected, from_pool in (("r2", others, alone[1], 0), ("r1", model, alone[0], 40)):
            # As the how-to has it: no request is open, and what the engine keeps itself is forgotten.
            await computing.kv.reset(revision)
            computing.engine.cache.evict_idle()
            computing.engine._batch._computer.model = weights
            result = await computing.engine.generate(revision, TOKENS, **OPTIONS)
            assert (result.local_tokens, result.from_pool_tokens) == (0, from_pool)
            assert_same(result, expected)
            await computing.engine.settled()
    assert alone[0].page_digests != alone[1].page_digests


async def test_K1_adapters_answer_otherwise(fine: EngineConfig, model: Model) -> None:
    answers = set()
    async with open_engine(fine, model=model) as engine:
        for number in range(3):
            scope = Scope(lora=Lora(number))
            answers.add((await engine.generate("r", TOKENS, max_new_tokens=20, scope=scope)).tokens)
            await engine.settled()
    assert len(answers) == 3


async def test_K5_media_without_digests_neither_read_nor_write(
    fine: EngineConfig, model: Model, served: OpenServed, assert_same: Same
) -> None:
    store, unknown = FakeStore(anyio.current_time), Scope(media=None)
    async with served(fine, store) as computing:
        known = await computing.engine.generate("known", TOKENS, **OPTIONS)
        await computing.engine.settled()
        keys = set(store.keys())
        for name in ("first", "again"):
            result = await computing.engine.generate(name, TOKENS, scope=unknown, **OPTIONS)
            assert (result.local_tokens, result.from_pool_tokens, result.lookup_outcome) == (0, 0, "media_unknown")
            assert_same(result, known)
        await computing.engine.settled()
        assert set(store.keys()) == keys
        longer = await computing.engine.generate("longer", [*TOKENS, *range(20)], scope=unknown, **OPTIONS)
        assert longer.lookup_outcome == "media_unknown"
    assert set(store.keys()) == keys


@pytest.mark.parametrize("odd", [2**31, 2**63 - 1, -7], ids=str)
@pytest.mark.parametrize("drafter", [False, True])
async def test_K6_ids_outside_32_bits_are_told_apart_though_they_compute_alike(
    fine: EngineConfig, served: OpenServed, odd: int, drafter: bool
) -> None:
    weights = Model(msgspec.structs.replace(TINY_DRAFTER if drafter else TINY, any_ids=True))
    config = msgspec.structs.replace(fine, model=weights.config)
    twin = odd % weights.config.vocabulary
    at = 40 if drafter else 39  # with a lookahead the token behind the last block counts
    prompts = [[*TOKENS[:at], token, *TOKENS[at + 1 :]] for token in (odd, twin)]
    store = FakeStore(anyio.current_time)
    async with served(config, store, weights=weights) as computing:
        first = await computing.engine.generate("odd", prompts[0], **OPTIONS)
    async with served(config, store, weights=weights) as fresh:
        other = await fresh.engine.generate("twin", prompts[1], **OPTIONS)
        hit = await fresh.engine.generate("odd", prompts[0], **OPTIONS)
    assert (hit.local_tokens, hit.from_pool_tokens) == (32, 8)  # four blocks that it shares with the other one
    assert other.from_pool_tokens == 32
    assert hit.tokens == other.tokens == first.tokens
    assert hit.page_digests == other.page_digests == first.page_digests


@pytest.mark.parametrize("drafter", [False, True])
async def test_K6_a_tail_of_placeholders_is_in_no_name_and_no_page(
    fine: EngineConfig, served: OpenServed, drafter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that schedules ahead of its sampler hands over its buffer with -1 where nothing was sampled yet."""
    weights = Model(TINY_DRAFTER if drafter else TINY)
    config = msgspec.structs.replace(fine, model=weights.config, draft_tokens=2 if drafter else 0)
    store = FakeStore(anyio.current_time)
    async with served(config, store, weights=weights) as computing:
        open_request = computing.kv.open_request

        def with_tail(request_id: str, tokens: list[int], *arguments: Any, **options: Any) -> Any:
            request = open_request(request_id, [*tokens, *[-1] * 9], *arguments, **options)
            append = request.append
            monkeypatch.setattr(request, "append", lambda tokens: append([*tokens, -1, -1, -1]))
            return request

        monkeypatch.setattr(computing.kv, "open_request", with_tail)
        first = await computing.engine.generate("r", TOKENS[:40], max_new_tokens=20)
    assert len(store.keys()) == (4 if drafter else 7)
    async with served(config, store, weights=weights) as fresh:
        hit = await fresh.engine.generate("r", [*TOKENS[:40], *first.tokens[:17]], **OPTIONS)
    async with open_engine(config, model=weights) as engine:
        cold = await engine.generate("r", [*TOKENS[:40], *first.tokens[:17]], **OPTIONS)
    assert hit.from_pool_tokens == (32 if drafter else 56)
    assert hit.tokens == cold.tokens
    blocks = slice(0, hit.from_pool_tokens // 8 if drafter else 5)  # decoded tokens have other last bits than computed chunks
    assert hit.page_digests[0][blocks] == cold.page_digests[0][blocks]


async def test_P1_a_request_that_decodes_is_refused_where_only_prompts_are_computed_and_hurts_nobody(
    fine: EngineConfig, served: OpenServed
) -> None:
    weights = Model(TINY_DRAFTER)
    config = msgspec.structs.replace(fine, model=TINY_DRAFTER, prefill_only=True)
    store = FakeStore(anyio.current_time)
    async with served(config, store, weights=weights) as fresh:
        results: list[Result] = []

        async def prefills() -> None:
            results.append(await fresh.engine.generate("prefills", TOKENS, max_new_tokens=1))

        async with anyio.create_task_group() as group:
            group.start_soon(prefills)
            with pytest.raises(ValueError, match="'decodes' is to decode here"):
                await fresh.engine.generate("decodes", TOKENS, max_new_tokens=2)
        await fresh.engine.settled()
        assert fresh.engine.cache.check() == []
        assert fresh.engine.cache.available_blocks == 64
    assert len(results[0].tokens) == 1
    assert len(store.keys()) == 5
