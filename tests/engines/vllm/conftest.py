"""Engines of vLLM's kind, closed behind each test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from akv_testing.ports import tiny_layout
from akv_testing.server import FakeServer
from akv_testing.vllm_engine import VllmEngine


@pytest.fixture
def make() -> Iterator[Callable[..., VllmEngine]]:
    """Makes engines; of one layer group unless a server is given."""
    engines: list[VllmEngine] = []

    def one(server: FakeServer | None = None, **arguments: Any) -> VllmEngine:
        name = f"engine {len(engines)}"
        engines.append(VllmEngine(FakeServer(layout=tiny_layout()) if server is None else server, name=name, **arguments))
        return engines[-1]

    yield one
    for engine in engines:
        serving = engine.session.serving
        assert engine.left_behind or serving is None or not serving.bridge.broken
        engine.close()
        assert engine.left_behind or list(engine.server.pool.registered) == []
