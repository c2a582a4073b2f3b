"""Beside a drafter: pages that depend on the token behind them, drafts that are taken back, and what of it is saved."""

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import msgspec
import pytest

from akv.values.requests import Scheduled
from akv_testing.engine import (
    TINY,
    TINY_DRAFTER,
    TINY_SLIDING,
    TINY_SLIDING_DRAFTER,
    EngineConfig,
    Model,
    ModelConfig,
    Result,
    open_engine,
)
from akv_testing.engine.step import confirmed
from akv_testing.store import FakeStore

#: The fixtures `served` and `assert_same`: what they do is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]
Same = Callable[[Result, Result], None]

pytestmark = pytest.mark.anyio

T = 8
TOKENS = [7 * position % 251 for position in range(97)]
NEW = 20
MODELS = {
    "shared pages": TINY_DRAFTER,
    "own group beside windows": TINY_SLIDING_DRAFTER,
    "hidden state": msgspec.structs.replace(TINY, drafter="hidden_state"),
}
WEIGHTS = {name: Model(model) for name, model in MODELS.items()}
each_drafter = pytest.mark.parametrize("name", MODELS)


def config_of(model: ModelConfig, **changed: Any) -> EngineConfig:
    """Chunks of one block: a page's bits follow from its prefix, wherever a request resumes."""
    config = EngineConfig(
        model=model,
        tokens_per_block=T,
        pages=64,
        chunk_tokens=T,
        max_tokens_per_pass=64,
        max_running=8,
        draft_tokens=3,
        window_retention_tokens=2 * T,
    )
    return msgspec.structs.replace(config, **changed)


@pytest.mark.parametrize(
    ("drafts", "given", "tokens"),
    [
        ([], [5], (5,)),
        ([5], [5, 6], (5, 6)),
        ([4], [5, 6], (5,)),
        ([5, 6, 7], [5, 6, 7, 8], (5, 6, 7, 8)),
        ([5, 9, 7], [5, 6, 7, 8], (5, 6)),
    ],
)
def test_P1_drafts_are_confirmed_up_to_the_first_that_the_target_does_not_give(
    drafts: list[int], given: list[int], tokens: tuple[int, ...]
) -> None:
    assert confirmed(drafts, given) == tokens


@each_drafter
@pytest.mark.parametrize("draft_tokens", [1, 3])
async def test_P1_drafting_changes_no_token(name: str, draft_tokens: int) -> None:
    plain = TINY_SLIDING if "windows" in name else TINY
    async with open_engine(config_of(plain, draft_tokens=0)) as engine:
        expected = await engine.generate("r", TOKENS, max_new_tokens=NEW)
    async with open_engine(config_of(MODELS[name], draft_tokens=draft_tokens), model=WEIGHTS[name]) as engine:
        drafting = await engine.generate("drafting", TOKENS, max_new_tokens=NEW, keep_logits=True)
        without = await engine.generate("without", TOKENS, max_new_tokens=NEW, drafts=False)
        await engine.settled()
        assert engine.cache.check() == []
    assert drafting.tokens == without.tokens == expected.tokens
    assert (without.drafts_accepted, without.drafts_rejected) == (0, 0)
    # Every token but the first came of a pass that decodes: itself, or an accepted draft.
    assert drafting.drafts_accepted > 0 < drafting.drafts_rejected
    assert drafting.logits is not None
    assert len(drafting.logits) == NEW


@each_drafter
async def test_Q1_a_hit_equals_local_reuse_with_drafts_and_without(name: str, served: OpenServed, assert_same: Same) -> None:
    config = config_of(MODELS[name])
    options: dict[str, Any] = {"max_new_tokens": NEW, "keep_logits": True, "keep_pages": True}
    async with open_engine(config, model=WEIGHTS[name]) as engine:
        await engine.generate("computes", TOKENS, max_new_tokens=NEW)
        local = [await engine.generate(f"reuses {drafts}", TOKENS, drafts=drafts, **options) for drafts in (True, False)]
    store = FakeStore(anyio.current_time)
    async with served(config, store, weights=WEIGHTS[name]) as computing:
        await computing.engine.generate("cold", TOKENS, max_new_tokens=NEW)
    async with served(config, store, weights=WEIGHTS[name]) as fresh:
        for expected, drafts in zip(local, (True, False), strict=True):
            hit = await fresh.engine.generate(f"{drafts}", TOKENS, drafts=drafts, local_reuse=False, **options)
            assert (hit.local_tokens, hit.from_pool_tokens) == (0, 96)
            assert hit.tokens == expected.tokens
            assert (hit.drafts_accepted, hit.drafts_rejected) == (expected.drafts_accepted, expected.drafts_rejected)
            assert hit.logits is not None
            assert expected.logits is not None
            assert hit.logits.equal(expected.logits)


@each_drafter
@pytest.mark.parametrize("length", [95, 96, 97])
async def test_S1_K2_what_was_drafted_and_rejected_is_in_no_page_of_the_pool(
    name: str, length: int, served: OpenServed
) -> None:
    config, model = config_of(MODELS[name]), MODELS[name]
    prompt, chain = [length, *TOKENS[1:length]], (length - model.lookahead) // T
    async with open_engine(config, model=WEIGHTS[name]) as engine:
        clean = await engine.generate("r", prompt, max_new_tokens=1, local_reuse=False, keep_pages=True)
    store = FakeStore(anyio.current_time)
    async with served(config, store, weights=WEIGHTS[name]) as computing:
        first = await computing.engine.generate("drafts", prompt, max_new_tokens=NEW)
        assert first.drafts_rejected > 0
    keys, full = store.keys(), [at for at, group in enumerate(config.groups) if not group.window_tokens]
    assert all(sum(f"/lg{at}/" in key for key in keys) == chain for at in full)  # of the answer there is nothing
    async with served(config, store, weights=WEIGHTS[name]) as fresh:
        hit = await fresh.engine.generate("r", prompt, max_new_tokens=1, keep_pages=True)
    assert hit.from_pool_tokens == min(chain, (length - 1) // T) * T
    for group, ours, theirs in zip(config.groups, hit.page_digests, clean.page_digests, strict=True):
        assert all(a == b for a, b in zip(ours, theirs, strict=True) if a and b)
        assert all(ours) or group.window_tokens


@each_drafter
async def test_S1_akv_is_told_what_is_drafted_and_goes_on_behind_what_was_confirmed(
    name: str, served: OpenServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(config_of(MODELS[name]), FakeStore(anyio.current_time), weights=WEIGHTS[name]) as computing:
        told: list[Scheduled] = []
        plan_pass = computing.kv.plan_pass

        def plan(scheduled: Iterable[Scheduled]) -> Any:
            parts = list(scheduled)
            told.extend(parts)
            return plan_pass(parts)

        monkeypatch.setattr(computing.kv, "plan_pass", plan)
        result = await computing.engine.generate("r", TOKENS, max_new_tokens=NEW)
    decoding = [part for part in told if part.computed_before >= len(TOKENS)]
    # The prompt's last pass gives a token, and so does each of these, beside the drafts that it confirms.
    assert len(decoding) == NEW - 1 - result.drafts_accepted
    assert {part.tokens for part in decoding} == {1}
    assert sum(part.draft_tokens for part in decoding) == result.drafts_accepted + result.drafts_rejected


@pytest.mark.parametrize("name", ["shared pages", "own group beside windows"])
async def test_K2_a_block_that_another_token_follows_is_another_block(name: str, served: OpenServed) -> None:
    config, one, other = config_of(MODELS[name]), TOKENS[:41], [*TOKENS[:40], 250]
    store, options = FakeStore(anyio.current_time), {"max_new_tokens": 1, "keep_pages": True}
    async with served(config, store, weights=WEIGHTS[name]) as computing:
        first = await computing.engine.generate("one", one, **options)
        alone = await computing.engine.generate("alone", other, local_reuse=False, reads_pool=False, **options)
        locally = await computing.engine.generate("locally", other, reads_pool=False, **options)
        await computing.engine.settled()
        assert computing.engine.cache.check() == []
    async with served(config, FakeStore(anyio.current_time), weights=WEIGHTS[name]) as fresh:
        cold = await fresh.engine.generate("cold", other, **options)
    async with served(config, store, weights=WEIGHTS[name]) as fresh:
        for prompt, hit in ((one, 40), ([*one[:40], 249], 32)):
            assert (await fresh.engine.generate("r", prompt, local_reuse=False, max_new_tokens=1)).from_pool_tokens == hit
            await fresh.engine.settled()
    assert locally.local_tokens == 32
    assert locally.page_digests[-1] == alone.page_digests[-1] == cold.page_digests[-1]
    differs = [at for at in range(5) if first.page_digests[-1][at] != alone.page_digests[-1][at]]
    assert differs == [4]  # the drafter's KV of the block's last token, and nothing before it


@each_drafter
async def test_D7_drafts_take_no_page_from_anybody(name: str) -> None:
    prompts = {f"r{number}": [number, *TOKENS[1:24]] for number in range(3)}
    config = config_of(MODELS[name])
    async with open_engine(config, model=WEIGHTS[name]) as engine:
        alone = {name: await engine.generate(name, prompt, max_new_tokens=40) for name, prompt in prompts.items()}
    together: dict[str, Result] = {}
    few = msgspec.structs.replace(config, pages=tuple(18 if not group.window_tokens else 64 for group in config.groups))
    async with open_engine(few, model=WEIGHTS[name]) as engine:

        async def one(name: str) -> None:
            together[name] = await engine.generate(name, prompts[name], max_new_tokens=40, local_reuse=False)

        async with anyio.create_task_group() as group:
            for request_id in prompts:
                group.start_soon(one, request_id)
        await engine.settled()
        assert engine.cache.check() == []
        assert engine.cache.available_blocks == 18
    assert sum(result.preemptions for result in together.values()) > 0
    assert {name: result.tokens for name, result in together.items()} == {name: r.tokens for name, r in alone.items()}
