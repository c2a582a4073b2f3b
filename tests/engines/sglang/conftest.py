"""Backends on a fake pool, in threads and real time, and on a real one."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from akv.engines.sglang import HiCacheBackend, storage_class
from akv.engines.sglang.page_store import StorePorts
from akv_testing.calls import FakeRunner
from akv_testing.engines.sglang import INTERFACE, HiCacheStorageConfig
from akv_testing.memory import FakeHostBuffer
from akv_testing.pool import FakePool
from akv_testing.store import FakeStore

BACKEND = storage_class(INTERFACE)


class FakeBackends:
    """Makes backends that share one fake store, and remembers the parts of each."""

    def __init__(self) -> None:
        self.store = FakeStore(time.monotonic)
        self.made: list[HiCacheBackend] = []
        self.pools: list[FakePool] = []
        self.runners: list[FakeRunner] = []
        #: Settings of every backend, beside the model's name.
        self.settings: dict[str, Any] = {}

    def __call__(self, config: HiCacheStorageConfig) -> HiCacheBackend:
        pool, runner = FakePool(self.store, name=f"pool-{len(self.made)}"), FakeRunner()
        ports = StorePorts(pool=pool, runner=runner, memory=lambda nbytes: FakeHostBuffer(nbytes, name="staging"))
        settings = {"model_key": "m", "pool": "embedded", **self.settings}
        config.extra_config = {**(config.extra_config or {}), "akv": settings}
        self.made.append(BACKEND(config, {}, ports=ports))
        self.pools.append(pool)
        self.runners.append(runner)
        return self.made[-1]


@pytest.fixture
def backends() -> Iterator[FakeBackends]:
    made = FakeBackends()
    yield made
    for backend in made.made:
        backend.close()
    assert not any(pool.registered for pool in made.pools), "staging memory is still registered"


@pytest.fixture
def make_backend(backends: FakeBackends) -> Callable[[HiCacheStorageConfig], HiCacheBackend]:
    return backends
