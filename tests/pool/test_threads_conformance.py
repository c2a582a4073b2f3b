"""What every `CallRunner` promises, with real threads."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from akv.pool.threads import ThreadRunner
from akv.ports.calls import CallKind, CallRunner
from akv_testing.conformance.calls import CallRunnerConformance, RunnerKit

pytestmark = pytest.mark.anyio


class ThreadKit:
    """Makes thread runners, and calls that wait on a `threading.Event`."""

    def runner(self, limits: Mapping[CallKind, int]) -> CallRunner:
        return ThreadRunner(limits)

    def hold(
        self, runner: CallRunner, kind: CallKind, body: Callable[[], Any]
    ) -> tuple[Callable[[], Any], Callable[[], None]]:
        gate = threading.Event()

        def held() -> Any:
            gate.wait()
            return body()

        return held, gate.set


class TestThreadRunner(CallRunnerConformance):
    @pytest.fixture
    def kit(self) -> RunnerKit:
        return ThreadKit()
