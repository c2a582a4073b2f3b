"""Every asynchronous test runs on asyncio and on trio, under virtual time unless its module asks for real time.

How a module asks is told in `akv_testing.pytest_backends`.
"""

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

from akv_testing.pytest_backends import virtual_backends

anyio_backend = virtual_backends

# Beside other work on few cores any example may take longer than Hypothesis allows. pytest's own timeout finds one that hangs.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def structlog_as_it_was() -> Iterator[None]:
    """`structlog.testing.capture_logs` leaves structlog configured, and akv's events then go there instead of to logging."""
    yield
    structlog.reset_defaults()
