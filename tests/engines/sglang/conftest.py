"""Backends on fakes."""

from collections.abc import Iterator

import pytest

from akv_testing.engines.sglang.on_fakes import FakeBackends


@pytest.fixture
def backends() -> Iterator[FakeBackends]:
    made = FakeBackends()
    yield made
    made.close()
    assert not any(pool.registered for pool in made.pools), "staging memory is still registered"


@pytest.fixture
def make_backend(backends: FakeBackends) -> FakeBackends:
    return backends
