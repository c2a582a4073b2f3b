"""Real time for this folder: forwards run in threads, and a virtual clock would jump while they do."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from akv.connector import Connector, open_connector
from akv.device import open_torch_device
from akv.ports import Ports
from akv_testing.calls import FakeRunner
from akv_testing.engine import TINY, Engine, EngineConfig, Model, Pages, open_engine
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


OpenServed = Callable[[EngineConfig, FakeStore], AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def model() -> Model:
    return Model(TINY)


@pytest.fixture
def config() -> EngineConfig:
    """T = 8, chunks of 32: prompts of a hundred tokens have several of both."""
    return EngineConfig(model=TINY, tokens_per_block=8, pages=64, chunk_tokens=32, max_tokens_per_pass=64, max_running=8)


@pytest.fixture
def served(model: Model) -> OpenServed:
    """Open an engine whose connector moves real torch pages to and from a fake store."""

    @asynccontextmanager
    async def open_served(config: EngineConfig, store: FakeStore) -> AsyncIterator[Served]:
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
        }
        async with (
            open_connector(settings, pages.layout, pages.caches, ports=ports) as kv,
            open_engine(config, model=model, pages=pages, kv=kv) as engine,
        ):
            yield Served(engine, kv, pool, runner, pages)

    return open_served
