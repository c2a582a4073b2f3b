"""pytest fixtures that say which backends, and which clock, the asynchronous tests of a module run on.

anyio's pytest plugin asks a fixture named `anyio_backend`. Name one of these so, in a `conftest.py` for a folder or in a
module for itself (the module's wins):

    from akv_testing.pytest_backends import real_backends

    anyio_backend = real_backends
    pytestmark = pytest.mark.anyio

- `virtual_backends`: asyncio and trio, each test under its own virtual clock that starts at 0 (the default of akv's tests);
- `real_backends`: asyncio, asyncio on uvloop, and trio, in real time: for tests with threads, sockets or a real store. Its
  scope is the module, so asynchronous fixtures of module scope may use it.

A property test (`hypothesis`) calls `akv_testing.clock.run_virtual` per example instead: each needs a clock of its own.
"""

from typing import Any

import pytest

from akv_testing.clock import BACKENDS, virtual_backend


@pytest.fixture(params=BACKENDS)
def virtual_backends(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both backends, under a virtual clock that is fresh for each test."""
    return virtual_backend(request.param)


@pytest.fixture(
    scope="module",
    params=[("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})],
    ids=["asyncio-real", "uvloop-real", "trio-real"],
)
def real_backends(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The three event loops that akv supports, in real time."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend
