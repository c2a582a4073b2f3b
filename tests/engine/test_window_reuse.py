"""The reference engine with windows, by itself: pages that windows gave back are others' at once, and no bit changes."""

from collections.abc import Callable

import anyio
import msgspec
import pytest
import torch

from akv_testing.engine import TINY_SLIDING, AttentionGroup, Engine, EngineConfig, Model, Pages, Result, open_engine
from akv_testing.engine.batch import Batch

pytestmark = pytest.mark.anyio

T = 8
TOKENS = [7 * position % 251 for position in range(300)]


def sliding(window: int, sinks: int) -> Model:
    """Full attention, the window in question in bfloat16, and one of other heads."""
    full, _, other = TINY_SLIDING.groups
    group = AttentionGroup(layers=(1,), window_tokens=window, sink_tokens=sinks, dtype="bfloat16")
    return Model(msgspec.structs.replace(TINY_SLIDING, groups=(full, group, other)))


def config_of(model: Model, *, pages: int | tuple[int, ...] = 64, retention: int = 0) -> EngineConfig:
    return EngineConfig(
        model=model.config,
        tokens_per_block=T,
        pages=pages,
        chunk_tokens=32,
        max_tokens_per_pass=64,
        max_running=8,
        window_retention_tokens=retention,
    )


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine, Pages], None]:
    """From here on every page that is free is overwritten with NaN as soon as a pass has been committed."""

    def watch(engine: Engine, pages: Pages) -> None:
        advance = Batch._advance

        def advance_and_overwrite(batch: Batch, *arguments: object) -> None:
            advance(batch, *arguments)  # type: ignore[arg-type]
            for caches, free in zip(pages.caches, engine.cache.free_page_lists(), strict=True):
                for cache in caches:
                    cache[list(free)] = float("nan")

        monkeypatch.setattr(Batch, "_advance", advance_and_overwrite)

    return watch


@pytest.mark.parametrize("sinks", [0, 1, 40])
@pytest.mark.parametrize("window", [1, 20, 31, 100])
async def test_Q1_reuse_equals_a_cold_run_wherever_a_prompt_ends(
    poisoned: Callable[[Engine, Pages], None], window: int, sinks: int
) -> None:
    model = sliding(window, sinks)
    config = config_of(model, retention=T)
    pages = Pages(config)
    async with open_engine(config, model=model, pages=pages) as engine:
        poisoned(engine, pages)
        for length in range(129, 129 + T):  # every residue
            prompt = [length, *TOKENS[1:length]]
            cold = await ask(engine, f"cold {length}", prompt, local_reuse=False)
            first = await ask(engine, f"first {length}", prompt[:97])  # leaves 96 tokens: three whole chunks
            again = await ask(engine, f"again {length}", prompt)
            assert (cold.local_tokens, first.local_tokens, again.local_tokens) == (0, 0, 96)
            assert_same(again, cold)
        await engine.settled()
        assert engine.cache.check() == []


async def test_W1_a_long_sequence_needs_few_window_pages(poisoned: Callable[[Engine, Pages], None]) -> None:
    model = sliding(20, 3)
    plenty, few = config_of(model), config_of(model, pages=(40, 9, 13))
    async with open_engine(plenty, model=model) as engine:
        expected = await ask(engine, "plenty", TOKENS)
    pages = Pages(few)
    async with open_engine(few, model=model, pages=pages) as engine:
        poisoned(engine, pages)
        for attempt in range(3):
            result = await ask(engine, f"few {attempt}", TOKENS, local_at_most=0)
            assert_same(result, expected)
            await engine.settled()
            assert engine.cache.check() == []


async def test_continuous_batching_on_few_window_pages_changes_no_bits(poisoned: Callable[[Engine, Pages], None]) -> None:
    model = sliding(20, 3)
    prompts = {f"r{i}": [(i + 3) * position % 250 for position in range(100 + 3 * i)] for i in range(10)}
    alone, together = {}, {}
    async with open_engine(config_of(model), model=model) as engine:
        for name, prompt in prompts.items():
            alone[name] = await ask(engine, name, prompt, local_reuse=False)
    few = config_of(model, pages=(40, 20, 28))
    pages = Pages(few)
    async with open_engine(few, model=model, pages=pages) as engine:
        poisoned(engine, pages)

        async def one(name: str) -> None:
            together[name] = await ask(engine, name, prompts[name])

        async with anyio.create_task_group() as group:
            for name in prompts:
                group.start_soon(one, name)
        await engine.settled()
        assert engine.cache.check() == []
    for name in prompts:
        assert_same(together[name], alone[name])


async def ask(engine: Engine, name: str, prompt: list[int], **options: bool | int) -> Result:
    return await engine.generate(name, prompt, max_new_tokens=5, keep_logits=True, keep_pages=True, **options)  # type: ignore[arg-type]


def assert_same(result: Result, expected: Result) -> None:
    assert result.tokens == expected.tokens
    assert result.logits is not None
    assert expected.logits is not None
    assert not result.logits.isnan().any()
    assert torch.equal(result.logits, expected.logits)
    for ours, theirs in zip(result.page_digests, expected.page_digests, strict=True):
        assert all(b"" in (a, b) or a == b for a, b in zip(ours, theirs, strict=True))
