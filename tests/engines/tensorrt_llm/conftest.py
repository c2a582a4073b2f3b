"""Servers of the stand-in on one store, on both backends of the bridge."""

import time
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from akv_testing import FakeStore
from akv_testing.engines.tensorrt_llm import StandInServer


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> Literal["asyncio", "trio"]:
    chosen: Literal["asyncio", "trio"] = request.param
    return chosen


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(time.monotonic)


@pytest.fixture
def serve(store: FakeStore, backend: Literal["asyncio", "trio"]) -> Iterator[Callable[..., StandInServer]]:
    """Makes servers, and ends them."""
    servers: list[StandInServer] = []

    def make(**arguments: object) -> StandInServer:
        servers.append(StandInServer(store, **({"backend": backend} | arguments)))  # type: ignore[arg-type]
        return servers[-1]

    yield make
    for server in servers:
        server.engine.shutdown()
