"""The fakes pass the suites that the real adapters pass."""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest

from akv.ports.calls import CallKind, CallRunner
from akv.ports.device import PassEvent
from akv_testing.calls import FakeRunner, Latency
from akv_testing.clock import ManualClock
from akv_testing.conformance.calls import CallRunnerConformance
from akv_testing.conformance.device import DeviceConformance
from akv_testing.conformance.pool import PoolConformance
from akv_testing.device import FakeDevice
from akv_testing.memory import FakeHostBuffer
from akv_testing.pool import FakePool
from akv_testing.ports import tiny_layout
from akv_testing.segments import FakeHost
from akv_testing.store import FakeStore


class TestFakePool(PoolConformance):
    @pytest.fixture
    def pool(self) -> FakePool:
        store = FakeStore(ManualClock())
        store.places.append(FakeHost().lend(1 << 22))
        return FakePool(store)

    @pytest.fixture
    def closed_pool(self, pool: FakePool) -> FakePool:
        pool.close()
        return pool

    @pytest.fixture
    def new_key(self) -> Callable[[], str]:
        numbers = count()
        return lambda: f"key {next(numbers)}"

    @pytest.fixture
    def memory(self) -> Callable[[int], FakeHostBuffer]:
        return FakeHostBuffer

    @pytest.fixture
    def begin_write(self, pool: FakePool) -> Callable[[str], None]:
        return pool.store.begin_write


class FakeDeviceKit:
    def __init__(self, *, host_pages: bool = False, one_memory: bool = False, device_bytes: int | None = 1 << 20) -> None:
        self.clock = ManualClock()
        self.layout = tiny_layout(groups=2)
        self.device = FakeDevice(
            self.layout, (8, 9), self.clock, host_pages=host_pages, one_memory=one_memory, device_bytes=device_bytes
        )
        self.host_groups = frozenset({0, 1} if host_pages else ())

    def write(self, group: int, page: int, content: bytes) -> None:
        self.device.kernel(writes=[(group, page, content)], duration_s=1)

    def read(self, group: int, page: int) -> bytes:
        event = self.device.kernel(reads=[(group, page)])
        self.wait(event)
        return event.seen[group, page]

    def wait(self, event: PassEvent) -> None:
        for _ in range(100):
            if event.query():
                return
            self.clock.advance(0.5)
        raise TimeoutError("the event never came")


class TestFakeDevice(DeviceConformance):
    @pytest.fixture(
        params=[{}, {"device_bytes": None}, {"host_pages": True}, {"host_pages": True, "one_memory": True}],
        ids=["device", "device without slots", "host", "host, one memory"],
    )
    def kit(self, request: pytest.FixtureRequest) -> FakeDeviceKit:
        return FakeDeviceKit(**request.param)


class FakeRunnerKit:
    def __init__(self, body_at_start: bool, latency: Latency) -> None:
        self._body_at_start = body_at_start
        self._latency = latency

    def runner(self, limits: Mapping[CallKind, int]) -> CallRunner:
        return FakeRunner(limits=limits, latency=self._latency, body_at_start=self._body_at_start)

    def hold(
        self, runner: CallRunner, kind: CallKind, body: Callable[[], Any]
    ) -> tuple[Callable[[], Any], Callable[[], None]]:
        assert isinstance(runner, FakeRunner)
        return body, runner.hold(kind).release


@pytest.mark.anyio
class TestFakeRunner(CallRunnerConformance):
    @pytest.fixture(params=[(False, Latency()), (True, Latency(per_byte_s=0.01))], ids=["body-last", "body-first"])
    def kit(self, request: pytest.FixtureRequest) -> FakeRunnerKit:
        return FakeRunnerKit(*request.param)
