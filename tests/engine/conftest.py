"""Real time for this folder: forwards run in threads, and a virtual clock would jump while they do."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
import torch
from torch import Tensor

from akv.connector import Connector, open_connector
from akv.device import open_torch_device
from akv.ports import Ports
from akv_testing.calls import FakeRunner
from akv_testing.engine import TINY, Engine, EngineConfig, Model, Pages, Result, capabilities_of, open_engine
from akv_testing.engine.pages import DTYPES
from akv_testing.pool import FakePool
from akv_testing.pytest_backends import real_backends
from akv_testing.store import FakeStore

anyio_backend = real_backends


@dataclass(frozen=True)
class Served:
    """An engine with a connector on a fake pool, as one process would have them."""

    engine: Engine
    kv: Connector
    pool: FakePool
    runner: FakeRunner
    pages: Pages


OpenServed = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def model() -> Model:
    return Model(TINY)


@pytest.fixture(scope="session")
def dense_logits() -> Callable[[Model, list[int]], Tensor]:
    """The same transformer written plainly: no pages, no chunks, attention spelled out. Logits of every position."""
    return _dense_logits


@pytest.fixture
def config() -> EngineConfig:
    """T = 8, chunks of 32: prompts of a hundred tokens have several of both."""
    return EngineConfig(model=TINY, tokens_per_block=8, pages=64, chunk_tokens=32, max_tokens_per_pass=64, max_running=8)


@pytest.fixture
def fine() -> EngineConfig:
    """Chunks of one block: wherever a request resumes the chunks behind are those of a cold run, and so are the bits (Q1)."""
    return EngineConfig(model=TINY, tokens_per_block=8, pages=64, chunk_tokens=8, max_tokens_per_pass=64, max_running=8)


@pytest.fixture
def assert_same() -> Callable[[Result, Result], None]:
    """Tokens, pages and logits of two runs, bit for bit."""
    return _assert_same


@pytest.fixture
def served(model: Model) -> OpenServed:
    """Open an engine whose connector moves real torch pages to and from a fake store. Further arguments are settings."""

    @asynccontextmanager
    async def open_served(
        config: EngineConfig, store: FakeStore, *, weights: Model = model, **changed: object
    ) -> AsyncIterator[Served]:
        pages = Pages(config)
        pool, runner = FakePool(store), FakeRunner(now=anyio.current_time)
        ports = Ports(pool=pool, device=open_torch_device(pages.layout, pages.caches), runner=runner)
        settings = {
            "model_key": config.model.key,
            "pool": "embedded",
            "staging_buffer_bytes": "1MiB",
            # In real time, on a machine that may be busy: no test here is about a deadline, and none may run into one.
            "lookup_deadline_s": 100.0,
            "load_deadline_s": 100.0,
            "shutdown_deadline_s": 100.0,
            **changed,
        }
        capabilities = capabilities_of(config)
        async with (
            open_connector(settings, pages.layout, pages.caches, capabilities=capabilities, ports=ports) as kv,
            open_engine(config, model=weights, pages=pages, kv=kv) as engine,
        ):
            yield Served(engine, kv, pool, runner, pages)

    return open_served


def _assert_same(result: Result, expected: Result) -> None:
    assert result.tokens == expected.tokens
    assert result.page_digests == expected.page_digests
    assert result.logits is not None
    assert expected.logits is not None
    assert torch.equal(result.logits, expected.logits)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Wait until something holds that nobody tells: what an engine has come to while its passes run in threads."""
    return _until


async def _until(holds: Callable[[], object]) -> None:
    with anyio.fail_after(50):
        while not holds():  # noqa: ASYNC110 - there is no event
            await anyio.sleep(0.001)


def _dense_logits(model: Model, tokens: list[int]) -> Tensor:
    config = model.config
    length, half = len(tokens), config.head_size // 2
    x = model.embedding[torch.tensor(tokens)]
    angle = torch.outer(torch.arange(length).double(), 10_000.0 ** (-torch.arange(half).double() / half))
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(v: Tensor) -> Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def rotated(v: Tensor) -> Tensor:
        turned = torch.complex(v[..., :half].double(), v[..., half:].double()) * turn[:, None]
        return torch.cat((turned.real, turned.imag), -1).float()

    groups = {number: group for group in config.layer_groups() for number in group.layers}
    for number, layer in enumerate(model.layers):
        group = groups[number]
        qkv = (norm(x) @ layer.query_key_value).view(length, config.heads + 2 * group.kv_heads, config.head_size)
        q, k = rotated(qkv[:, : config.heads]), rotated(qkv[:, config.heads : config.heads + group.kv_heads])
        k, v = (part.to(DTYPES[group.dtype]).float() for part in (k, qkv[:, config.heads + group.kv_heads :]))
        sees = [
            [key <= at and (not group.window_tokens or at - key < group.window_tokens or key < group.sink_tokens)
             for key in range(length)]
            for at in range(length)
        ]  # fmt: skip
        outputs = []
        for head in range(config.heads):
            shared = head // (config.heads // group.kv_heads)
            scores = q[:, head] @ k[:, shared].T / config.head_size**0.5
            scores = scores.masked_fill(~torch.tensor(sees), float("-inf"))
            outputs.append(scores.softmax(-1) @ v[:, shared])
        x = x + torch.cat(outputs, -1) @ layer.attention_out
        hidden = norm(x) @ layer.gate_up
        gate, up = hidden[:, : config.intermediate], hidden[:, config.intermediate :]
        x = x + (gate * gate.sigmoid() * up) @ layer.down
    return norm(x) @ model.unembedding
