"""Random schedules of several requests on two servers that share a store: right bytes or none, and everything given back."""

import random

import anyio
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from akv import Connector, LoadEnded, LookupOutcome, Request, Scheduled
from akv.ports.pool import KeyState
from akv_testing import FakeStore, run_virtual
from akv_testing.calls import Latency
from akv_testing.clock import BACKENDS
from akv_testing.server import FakeServer, PageTable

#: Prompts share prefixes, as those of conversations do.
PROMPTS = [
    [1] * 8 + [2] * 11,
    [1] * 8 + [3] * 7,
    [1] * 8 + [2] * 11 + [4] * 9,
    [5] * 5,
    [1] * 4,
]

TROUBLE = [state for state in KeyState if state is not KeyState.OK]


class Engine:
    """Runs requests on one server, one task each, with choices from a seeded source."""

    def __init__(self, store: FakeStore, name: str, choice: random.Random) -> None:
        self.choice = choice
        self.server = FakeServer(
            store=store,
            name=name,
            slots=choice.choice([2, 3, 8]),
            latency=Latency(
                probe_s=choice.choice([0, 0.001]), get_s=choice.choice([0, 0.004]), put_s=choice.choice([0, 0.003])
            ),
        )
        self.server.device.copy_s = lambda nbytes: choice.choice([0.0, 0.0005, 0.003])

    async def run(self, requests: int) -> None:
        self.plant_faults()
        async with self.server.open(lookup_deadline_s=0.05, load_deadline_s=0.02, save_backoff_s=0.002) as kv:
            self.slots = [staging.slots for staging in kv._halves.local_worker.memory.stagings]
            async with anyio.create_task_group() as group:
                for number in range(requests):
                    group.start_soon(self.serve, kv, f"r{number}")
            assert len(kv._halves.scheduler.requests) == 0
        assert self.server.left_behind() == []
        assert kv._halves.calls.outstanding == 0
        assert [pool.free for pool in self.slots] == [pool.count for pool in self.slots]
        assert self.server.free_pages == [64, 64]

    def plant_faults(self) -> None:
        pick = self.choice
        for operation in ("probe", "get", "put"):
            for _ in range(pick.randrange(3)):
                self.server.pool.answer(operation, pick.choice(TROUBLE), skip=pick.randrange(20), times=pick.randrange(1, 4))
        for kind in ("gather", "scatter"):
            if pick.random() < 0.3:
                self.server.device.script.fail_copy(kind, RuntimeError("ECC"), nth=pick.randrange(1, 6))
            if pick.random() < 0.2:
                self.server.device.script.fail_call(kind, RuntimeError("refused"), nth=pick.randrange(1, 6))

    async def serve(self, kv: Connector, name: str) -> None:
        pick = self.choice
        await anyio.sleep(pick.choice([0, 0.001, 0.01, 0.02]))
        tokens = list(pick.choice(PROMPTS))
        table = self.server.allocate(10)
        request = kv.open_request(name, tokens, reads_cache=pick.random() < 0.9)
        try:
            with anyio.move_on_after(pick.choice([0.0005, 0.002, 0.006, 60, 60, 60])):
                await self.live(kv, request, tokens, table)
                request.finish()
                if pick.random() < 0.7:
                    await request.finished()
        finally:
            with anyio.CancelScope(shield=True):
                await request.cancel()
        # The pages are the engine's again: overwriting them is a race if anything still copies.
        self.server.free(table)

    async def live(self, kv: Connector, request: Request, tokens: list[int], table: PageTable) -> None:
        computed = await self.load(request, tokens, table)
        if self.choice.random() < 0.1:
            return
        while computed < len(tokens):
            computed = await self.one_pass(kv, request, tokens, table, computed, self.choice.choice([3, 8, 50]))
        for step in range(0 if request.closed else self.choice.randrange(6)):
            request.append([step])
            tokens.append(step)
            computed = await self.one_pass(kv, request, tokens, table, computed, 1)
            await anyio.sleep(self.choice.choice([0, 0, 0.002]))

    async def load(self, request: Request, tokens: list[int], table: PageTable) -> int:
        """Tokens that have KV before the first pass: a local match, and what was loaded behind it."""
        local = self.choice.choice([0, 0, 4]) if len(tokens) > 4 else 0
        self.server.write(tokens, table, 0, local // 4)
        offer = await request.lookup(local)
        assert offer.outcome is not LookupOutcome.UNALIGNED
        honoured = self.choice.choice([offer, offer, offer.at_most(4)])
        load = request.reserve(honoured, honoured.tokens, table)
        if self.choice.random() < 0.1 and load.state is None:
            await request.finished()
        try:
            loaded = (await load.wait()).tokens
        except LoadEnded:
            return len(tokens) if request.closed else local
        assert self.server.wrong_pages(tokens, table, local // 4, (local + loaded) // 4) == []
        return local + loaded

    async def one_pass(
        self, kv: Connector, request: Request, tokens: list[int], table: PageTable, computed: int, chunk: int
    ) -> int:
        chunk = min(chunk, len(tokens) - computed)
        part = Scheduled(request=request, computed_before=computed, tokens=chunk, pages=table)
        if self.choice.random() < 0.2:
            kv.drop_pass(kv.plan_pass([part]))
        plan = kv.plan_pass([part])
        self.server.write(tokens[: computed + chunk], table, computed // 4, duration_s=self.choice.choice([0, 0.001, 0.004]))
        await kv.after_forward(plan)
        return computed + chunk


async def two_servers(seed: int, requests: int) -> list[str]:
    """Keys whose value is wrong; everything else that may go wrong is asserted on the way."""
    choice = random.Random(seed)
    store = FakeStore(anyio.current_time, capacity_bytes=choice.choice([None, 400, 1000]), lease_s=0.05)
    engines = [Engine(store, name, choice) for name in ("one", "two")]
    with anyio.fail_after(600):
        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(engine.run, requests)
    return engines[0].server.wrong_values()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 5))
def test_D2_S1_D6_M6_every_schedule_ends_with_right_bytes_and_nothing_held(backend: str, seed: int, requests: int) -> None:
    assert run_virtual(backend, two_servers, seed, requests) == []
