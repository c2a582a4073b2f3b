"""What every implementation of a port must pass, and every adapter of an engine: suites for pytest. Those of ports are written
against `akv.ports` alone.

An implementation's test module subclasses a suite under a name that pytest collects, and supplies the fixtures that the
suite's docstring names:

    from akv_testing.conformance.pool import PoolConformance

    class TestMyPool(PoolConformance):
        @pytest.fixture
        def pool(self) -> PagePool: ...

The fixtures may stand in a conftest.py as well.
"""

import pytest

# Suites are no test modules by name, so pytest must be told to explain their assertions; before they are imported.
pytest.register_assert_rewrite(
    "akv_testing.conformance.adapter",
    "akv_testing.conformance.calls",
    "akv_testing.conformance.device",
    "akv_testing.conformance.pool",
    "akv_testing.conformance.sglang",
)
