"""akv's adapter for vLLM keeps what every adapter promises, in both ways in which vLLM schedules."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from akv.ports.calls import CallKind
from akv_testing import FakePool, FakeStore
from akv_testing.conformance.adapter import AdapterConformance, AdapterServer
from akv_testing.ports import tiny_layout
from akv_testing.server import FakeServer
from akv_testing.vllm_engine import VllmEngine
from akv_testing.vllm_objects import Status, VllmRequest

#: Blocks that hold every request of the suite at once.
BLOCKS = 256


class Driven:
    """An `AdapterServer` of the stand-in."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._requests: list[VllmRequest] = []

    @property
    def tokens_per_block(self) -> int:
        return self._engine.server.tokens_per_block

    @property
    def pool(self) -> FakePool:
        return self._engine.server.pool

    def submit(self, tokens: Sequence[int], *, new_tokens: int = 1, salt: str | None = None) -> int:
        number = len(self._requests)
        self._requests.append(self._engine.add(str(number), tokens, new_tokens, cache_salt=salt))
        return number

    def run(self) -> None:
        self._engine.run()

    def run_until_loading(self, request: int) -> None:
        self._engine.until(lambda: self._requests[request].status is Status.WAITING_FOR_REMOTE_KVS)

    def run_until_generating(self, request: int, tokens: int) -> None:
        served = self._requests[request]
        self._engine.until(lambda: served.num_tokens - served.num_prompt_tokens >= tokens)

    def planned_in_vain(self) -> None:
        """VLLM has no such pass."""

    def preempt(self, request: int) -> None:
        self._engine.preempt(str(request))

    def cancel(self, request: int) -> None:
        self._engine.abort(str(request))

    def hold(self, kind: CallKind) -> Callable[[], None]:
        gate = self._engine.call(self._engine.server.runner.hold, kind)
        return lambda: self._engine.call(gate.release)

    def tokens_of(self, request: int) -> list[int]:
        return list(self._requests[request].all_token_ids)

    def loaded_tokens(self, request: int) -> int:
        return self._engine.loaded.get(str(request), 0)

    def left_behind(self) -> list[str]:
        wrong: list[str] = self._engine.call(self._engine.server.wrong_values)
        held = [f"block {block.block_id}" for block in self._engine.pool.blocks[1:] if block.ref_cnt]
        known = [f"request {name}" for name in self._engine.session.requests]
        self._engine.close()
        return [*wrong, *held, *known]


@pytest.fixture(params=[True, False], ids=["ahead", "in step"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestAkvConnector(AdapterConformance):
    @pytest.fixture
    def new_server(self, make: Any, ahead: bool) -> Callable[[FakeStore], AdapterServer]:
        def one(store: FakeStore) -> AdapterServer:
            server = FakeServer(layout=tiny_layout(), store=store, pages=BLOCKS, slots=BLOCKS)
            return Driven(make(server, ahead=ahead, blocks=BLOCKS))

        return one
