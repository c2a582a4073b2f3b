"""The model of a realistic shape, small: it computes what the same transformer written plainly does, in pages of its own."""

from typing import Any

import anyio
import msgspec
import pytest
import torch
from torch import Tensor

from akv.connector import open_connector
from akv.device import open_torch_device
from akv.errors import SettingsError
from akv.ports import Ports
from akv.values.scope import Lora, Scope
from akv_testing.calls import FakeRunner
from akv_testing.engine import EngineConfig, ModelConfig, Result, capabilities_of, open_engine
from akv_testing.engine.large import LLAMA_8B, LLAMA_8B_WINDOWS, SMALL, SMALL_WINDOWS, LargeComputer, LargeModel, open_pages
from akv_testing.pool import FakePool
from akv_testing.store import FakeStore

pytestmark = pytest.mark.anyio

#: On CUDA what decodes is captured, and windows are the flash kernel's.
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]


def exactly(model: ModelConfig) -> ModelConfig:
    """The same in float32, in which rounding hides nothing."""
    return msgspec.structs.replace(
        model, groups=tuple(msgspec.structs.replace(group, dtype="float32") for group in model.groups)
    )


def config_of(model: ModelConfig, **changed: object) -> EngineConfig:
    """T = 16, chunks of 64: a prompt has several of both, and a window of 32 begins inside a block."""
    config = EngineConfig(model=model, tokens_per_block=16, pages=64, chunk_tokens=64, max_tokens_per_pass=128, max_running=8)
    return msgspec.structs.replace(config, **changed)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * at + 31 * seed) % 509 for at in range(length)]


async def ask(config: EngineConfig, model: LargeModel, prompts: list[list[int]], tokens: int) -> list[Result]:
    """Ask all at once."""
    pages = open_pages(config)
    answers: dict[int, Result] = {}
    async with open_engine(config, pages=pages, computer=LargeComputer(config, model, pages)) as engine:

        async def one(at: int) -> None:
            answers[at] = await engine.generate(f"r{at}", prompts[at], max_new_tokens=tokens, keep_logits=True)

        async with anyio.create_task_group() as group:
            for at in range(len(prompts)):
                group.start_soon(one, at)
    return [answers[at] for at in range(len(prompts))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [SMALL, SMALL_WINDOWS], ids=["full attention", "windows"])
async def test_prompts_in_chunks_and_tokens_decoded_together_are_those_of_the_plain_transformer(
    shape: ModelConfig, device: str
) -> None:
    model = LargeModel(exactly(shape), device)
    prompts = [prompt(150), prompt(65, 1), prompt(3, 2)]
    answers = await ask(config_of(exactly(shape), device=device), model, prompts, 6)
    for tokens, answer in zip(prompts, answers, strict=True):
        expected = _plain_logits(model, [*tokens, *answer.tokens[:-1]])[len(tokens) - 1 :]
        assert answer.logits is not None
        torch.testing.assert_close(answer.logits, expected.cpu(), atol=2e-5, rtol=1e-4)
        assert len(answer.token_times) == 6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [SMALL, SMALL_WINDOWS], ids=["full attention", "windows"])
async def test_in_bfloat16_all_is_as_in_float32_but_for_rounding(shape: ModelConfig, device: str) -> None:
    model = LargeModel(shape, device)
    (answer,) = await ask(config_of(shape, device=device), model, [prompt(150)], 6)
    expected = _plain_logits(model, [*prompt(150), *answer.tokens[:-1]])[149:]
    assert answer.logits is not None
    torch.testing.assert_close(answer.logits, expected.cpu(), atol=0.2, rtol=0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [SMALL, SMALL_WINDOWS], ids=["full attention", "windows"])
async def test_Q1_a_hit_from_the_pool_equals_local_reuse_bit_for_bit(shape: ModelConfig, device: str) -> None:
    config = config_of(shape, window_retention_tokens=32, device=device)
    model, store = LargeModel(shape, device), FakeStore(anyio.current_time)
    asked: dict[str, Any] = {"max_new_tokens": 4, "keep_logits": True}
    results = []
    for reads in (False, True):
        pages = open_pages(config)
        computer = LargeComputer(config, model, pages)
        ports = Ports(
            pool=FakePool(store),
            device=open_torch_device(pages.layout, pages.caches, computer.stream),
            runner=FakeRunner(now=anyio.current_time),
        )
        settings = {"model_key": model.key, "pool": "embedded", "staging_buffer_bytes": "1MiB", "load_deadline_s": 100.0}
        async with (
            open_connector(settings, pages.layout, pages.caches, capabilities=capabilities_of(config), ports=ports) as kv,
            open_engine(config, pages=pages, kv=kv, computer=computer) as engine,
        ):
            if not reads:
                await engine.generate("computes", prompt(150), max_new_tokens=1)
                await engine.settled()
            results.append(await engine.generate("resumes", prompt(150), **asked))
    local, pool = results
    assert (local.local_tokens, pool.from_pool_tokens) == (144, 144)
    assert pool.tokens == local.tokens
    assert pool.logits is not None
    assert local.logits is not None
    assert torch.equal(pool.logits, local.logits)


async def test_rows_of_a_batch_that_are_nobodys_touch_no_page_of_the_cache() -> None:
    config = config_of(SMALL)
    pages = open_pages(config)
    async with open_engine(config, pages=pages, computer=LargeComputer(config, LargeModel(SMALL), pages)) as engine:
        # What it computed stays for others, in the first pages that there are.
        kept = await engine.generate("kept", prompt(40, 9), max_new_tokens=1)
        before = [cache.clone() for cache in pages.caches[0]]
        answers: list[Result] = []

        async def one(number: int) -> None:
            answers.append(await engine.generate(f"r{number}", prompt(20, number), max_new_tokens=5))

        async with anyio.create_task_group() as group:
            for number in range(3):  # decoded in a batch of four
                group.start_soon(one, number)
    used = {page for answer in answers for page in answer.page_tables[0]}
    untouched = [page for page in range(64) if page not in used]
    assert {0, *kept.page_tables[0][:2]} <= set(untouched)
    for cache, was in zip(pages.caches[0], before, strict=True):
        assert torch.equal(cache[untouched], was[untouched])


async def test_what_the_large_model_does_not_have_is_refused_by_name() -> None:
    drafting = msgspec.structs.replace(SMALL, drafter="hidden_state")
    sinks = msgspec.structs.replace(SMALL_WINDOWS.groups[1], sink_tokens=4)
    for shape, field in (
        (drafting, "model.drafter"),
        (msgspec.structs.replace(SMALL_WINDOWS, groups=(SMALL_WINDOWS.groups[0], sinks)), "model.groups"),
        (msgspec.structs.replace(SMALL, any_ids=True), "model.any_ids"),
    ):
        with pytest.raises(SettingsError, match=field):
            LargeModel(shape)
    with pytest.raises(SettingsError, match="contiguous_pages"):
        open_pages(config_of(SMALL, contiguous_pages=True))
    config = config_of(SMALL)
    pages = open_pages(config)
    with pytest.raises(ValueError, match="neither adapters nor a drafter"):
        async with open_engine(config, pages=pages, computer=LargeComputer(config, LargeModel(SMALL), pages)) as engine:
            await engine.generate("r", prompt(20), max_new_tokens=1, scope=Scope(lora=Lora(1)))


def test_the_shapes_are_those_of_servers() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 128 * 1024
    assert LLAMA_8B_WINDOWS.kv_bytes_per_token == 34 * 4096
    full, windows = LLAMA_8B_WINDOWS.groups
    assert (full.layers, len(windows.layers), windows.window_tokens) == ((5, 11, 17, 23, 29), 29, 1024)


def _plain_logits(model: LargeModel, tokens: list[int]) -> Tensor:
    """No pages, no chunks, attention spelled out. Logits of every position."""
    config = model.config
    length, half = len(tokens), config.head_size // 2
    turn = torch.outer(torch.arange(length).double(), 500_000.0 ** (-torch.arange(half).double() / half))
    turn = torch.polar(torch.ones_like(turn), turn).to(model.device)
    windows = {number: group.window_tokens for group in config.groups for number in group.layers}

    def norm(v: Tensor) -> Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    def rotated(v: Tensor) -> Tensor:
        turned = torch.complex(v[..., :half].double(), v[..., half:].double()) * turn[:, None]
        return torch.cat((turned.real, turned.imag), -1).float()

    x = model.embed(torch.tensor(tokens, device=model.device)).float()
    ahead = (torch.arange(length).unsqueeze(1) - torch.arange(length)).to(model.device)
    for number, layer in enumerate(model.layers):
        qkv = (norm(x) @ layer._query_key_value.float()).view(length, -1, config.head_size)
        q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        hidden = (ahead < 0) | ((ahead >= windows[number]) & (windows[number] > 0))
        outputs = []
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            scores = rotated(q)[:, head] @ rotated(k)[:, shared].T / config.head_size**0.5
            outputs.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, shared])
        x = x + torch.cat(outputs, -1) @ layer._attention_out.float()
        gate, up = (norm(x) @ layer._gate_up.float()).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer._down.float()
    return norm(x) @ model._unembedding.float()
