"""akv's adapter keeps what every adapter promises, with either pair of its classes."""

from collections.abc import Callable, Sequence

import pytest

from akv.ports.calls import CallKind
from akv_testing import FakePool, FakeStore
from akv_testing.conformance.adapter import AdapterConformance, AdapterServer
from akv_testing.engines.tensorrt_llm import GroupShape, StandInRequest, StandInServer, State


class Driven:
    """An `AdapterServer` of the stand-in."""

    def __init__(self, server: StandInServer) -> None:
        self._server = server
        self._requests: list[StandInRequest] = []
        self._loads: dict[int, int] = {}

    @property
    def tokens_per_block(self) -> int:
        return self._server.cache.tokens_per_block

    @property
    def pool(self) -> FakePool:
        return self._server.pool

    def submit(self, tokens: Sequence[int], *, new_tokens: int = 1, salt: str | None = None) -> int:
        request = StandInRequest(len(self._requests), list(tokens), max_new_tokens=new_tokens, cache_salt=salt)
        self._requests.append(request)
        self._server.engine.submit(request)
        return request.request_id

    def run(self) -> None:
        self._server.engine.run_until_done()

    def run_until_loading(self, request: int) -> None:
        self._server.engine.run_until(lambda: self._requests[request].state is State.PARKED)

    def run_until_generating(self, request: int, tokens: int) -> None:
        self._server.engine.run_until(lambda: len(self._requests[request].generated) >= tokens)

    def planned_in_vain(self) -> None:
        self._server.engine.run_pass(veto=True)

    def preempt(self, request: int) -> None:
        self._server.engine.preempt(self._requests[request])

    def cancel(self, request: int) -> None:
        self._server.engine.cancel(self._requests[request])

    def hold(self, kind: CallKind) -> Callable[[], None]:
        gate = self._server.on_loop(self._server.runner.hold, kind)
        return lambda: self._server.on_loop(gate.release)

    def tokens_of(self, request: int) -> list[int]:
        return self._requests[request].get_tokens(0)

    def loaded_tokens(self, request: int) -> int:
        served = self._requests[request]
        fed = len(served.prompt) + len(served.generated) - 1
        return max(0, fed - self._server.engine.computed_tokens[request])

    def left_behind(self) -> list[str]:
        return self._server.left_behind()


class TestRestarting(AdapterConformance):
    @pytest.fixture
    def new_server(self, serve: Callable[..., StandInServer]) -> Callable[[FakeStore], AdapterServer]:
        return lambda store: Driven(serve())


class TestSeveralGroups(AdapterConformance):
    @pytest.fixture
    def new_server(self, serve: Callable[..., StandInServer]) -> Callable[[FakeStore], AdapterServer]:
        return lambda store: Driven(serve(groups=(GroupShape(), GroupShape())))
