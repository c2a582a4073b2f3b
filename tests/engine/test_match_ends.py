"""Where local matches end: on blocks beside a pool that is read (P2), elsewhere inside them too (P3). Always the same bits."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import anyio
import msgspec
import pytest

from akv.errors import SettingsError
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
from akv_testing.store import FakeStore

#: The fixtures `served` and `assert_same`: what they do is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]
Same = Callable[[Result, Result], None]

pytestmark = pytest.mark.anyio

T = 8
TOKENS = [7 * position % 251 for position in range(65)]
MODELS = {
    "target alone": TINY,
    "windows": TINY_SLIDING,
    "drafter in the same pages": TINY_DRAFTER,
    "drafter beside windows": TINY_SLIDING_DRAFTER,
}
WEIGHTS = {name: Model(model) for name, model in MODELS.items()}
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "keep_logits": True, "keep_pages": True}
each_model = pytest.mark.parametrize("name", MODELS)


def config_of(model: ModelConfig, **changed: Any) -> EngineConfig:
    """Chunks of two tokens: wherever an even number of tokens is reused, the chunks behind are those of a cold run."""
    config = EngineConfig(
        model=model,
        tokens_per_block=T,
        pages=64,
        chunk_tokens=2,
        max_tokens_per_pass=64,
        max_running=8,
        draft_tokens=0 if model.drafter == "none" else 1,
        # Ends two blocks before the prompt can be resumed at when the answer is there.
        window_retention_tokens=5 * T,
    )
    return msgspec.structs.replace(config, **changed)


@each_model
@pytest.mark.parametrize(
    ("word", "backoff", "local", "from_pool"),
    [("off", 1, 64, 0), ("align", 1, 56, 8), ("align", 9, 48, 16), ("align", 0, 64, 0)],
)
async def test_P2_Q1_an_offer_goes_on_behind_a_match_whatever_the_backoff(
    name: str,
    word: Literal["off", "align"],
    backoff: int,
    local: int,
    from_pool: int,
    served: OpenServed,
    assert_same: Same,
) -> None:
    config = config_of(MODELS[name])
    async with open_engine(config, model=WEIGHTS[name]) as alone:
        await alone.generate("computes", TOKENS, max_new_tokens=6)
        expected = await alone.generate("reuses", TOKENS, **OPTIONS)
    assert expected.local_tokens == 64
    config = msgspec.structs.replace(config, local_reuse_backoff=word, reuse_backoff_tokens=backoff)
    async with served(config, FakeStore(anyio.current_time), weights=WEIGHTS[name]) as server:
        await server.engine.generate("computes", TOKENS, max_new_tokens=6)
        await server.engine.settled()
        hit = await server.engine.generate("reuses", TOKENS, **OPTIONS)
        await server.engine.settled()
        assert server.engine.cache.check() == []
    assert (hit.local_tokens, hit.from_pool_tokens) == (local, from_pool)
    assert (hit.drafts_accepted, hit.drafts_rejected) == (expected.drafts_accepted, expected.drafts_rejected)
    # Page by page where both have it: windows keep what they had when the request resumed, which was earlier here.
    assert_same(msgspec.structs.replace(hit, page_digests=()), msgspec.structs.replace(expected, page_digests=()))
    for ours, theirs in zip(hit.page_digests, expected.page_digests, strict=True):
        assert all(a == b for a, b in zip(ours, theirs, strict=True) if a and b)


@pytest.mark.parametrize("name", ["target alone", "drafter in the same pages"])
@pytest.mark.parametrize(("backoff", "alignment", "local"), [(1, 2, 62), (1, 4, 60), (3, 2, 60), (0, 2, 64), (1, 0, 56)])
async def test_P3_Q1_a_match_that_ends_inside_a_block_has_the_bits_of_a_cold_run(
    name: str, backoff: int, alignment: int, local: int, assert_same: Same
) -> None:
    config = config_of(MODELS[name], reuse_backoff_tokens=backoff, reuse_match_alignment=alignment)
    async with open_engine(config, model=WEIGHTS[name]) as engine:
        cold = await engine.generate("cold", TOKENS, local_reuse=False, **OPTIONS)
        await engine.generate("computes", TOKENS, max_new_tokens=6)
        for number in range(2):  # the second finds what the first did, which wrote nothing into what it shared
            hit = await engine.generate(f"reuses {number}", TOKENS, **OPTIONS)
            assert hit.local_tokens == local
            assert_same(hit, cold)
        await engine.settled()
        assert engine.cache.check() == []


async def test_P3_two_requests_at_a_time_copy_the_page_that_both_matches_end_in(assert_same: Same) -> None:
    config = config_of(TINY, reuse_backoff_tokens=1, reuse_match_alignment=2)
    prompts = {"one": [*TOKENS[:64], 5], "other": [*TOKENS[:64], 6]}
    together: dict[str, Result] = {}
    async with open_engine(config, model=WEIGHTS["target alone"]) as engine:
        cold = {name: await engine.generate(name, prompt, local_reuse=False, **OPTIONS) for name, prompt in prompts.items()}
        await engine.settled()
        await engine.generate("computes", TOKENS, max_new_tokens=1)

        async def one(name: str) -> None:
            together[name] = await engine.generate(name, prompts[name], **OPTIONS)

        async with anyio.create_task_group() as group:
            for name in prompts:
                group.start_soon(one, name)
    for name, result in together.items():
        assert result.local_tokens == 62
        assert_same(result, cold[name])


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("target alone", 62),
        ("windows", 56),  # a window's page is read whole from where the sequence resumes
        ("drafter in the same pages", 54),  # another token follows the last block, so it is another block
        ("drafter beside windows", 48),
    ],
)
async def test_P2_P3_what_a_producer_saves_behind_such_a_match_is_what_a_reader_computes(
    name: str, local: int, served: OpenServed
) -> None:
    store = FakeStore(anyio.current_time)
    config = config_of(MODELS[name], reuse_backoff_tokens=1, reuse_match_alignment=2, local_reuse_backoff="align")
    longer = [*TOKENS[:64], *range(30)]
    async with open_engine(config_of(MODELS[name]), model=WEIGHTS[name]) as alone:
        clean = await alone.generate("r", longer, local_reuse=False, **OPTIONS)
    async with served(config, store, weights=WEIGHTS[name], role="producer") as producer:
        await producer.engine.generate("computes", TOKENS, max_new_tokens=1)
        await producer.engine.settled()
        again = await producer.engine.generate("reuses", longer, max_new_tokens=1)
    assert (again.local_tokens, again.from_pool_tokens, again.lookup_outcome) == (local, 0, "not_reading")
    async with served(config, store, weights=WEIGHTS[name], role="consumer") as consumer:
        hit = await consumer.engine.generate("r", longer, **OPTIONS)
    assert hit.from_pool_tokens == 88
    assert hit.tokens == clean.tokens
    for ours, theirs in zip(hit.page_digests, clean.page_digests, strict=True):
        assert all(a == b for a, b in zip(ours, theirs, strict=True) if a and b)


@pytest.mark.parametrize(
    "changed", [{"reuse_backoff_tokens": -1}, {"local_reuse_backoff": "on"}, {"reuse_match_alignment": 3}]
)
async def test_P2_P3_what_no_engine_can_do_is_refused_by_name(changed: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(changed))):
        async with open_engine(config_of(TINY, **changed), model=WEIGHTS["target alone"]):
            pass
