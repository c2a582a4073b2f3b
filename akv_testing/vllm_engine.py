"""vLLM's scheduler and model runner in the order in which they call a connector, around the roles of akv's.

    engine = VllmEngine(FakeServer(layout=tiny_layout()))
    engine.add("a", range(18))
    engine.run()                        # steps, until nothing is left to do

What it does with blocks is what vLLM 0.32 does: it frees them when a request is preempted, when a load failed, when a window
has moved on, and at a request's end unless the connector holds them; and it asserts what vLLM asserts. The model is a
`FakeServer`'s: a page's content follows from what it stands for, and the device refuses what no event orders.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from akv.engines.vllm.configuration import Configuration
from akv.engines.vllm.ends import Results
from akv.engines.vllm.layout import Cache
from akv.engines.vllm.scheduler import SchedulerRole
from akv.engines.vllm.session import Session, join_session
from akv.engines.vllm.worker import WorkerRole
from akv.settings import check_settings
from akv.values.scope import Scope
from akv_testing.server import FakeServer
from akv_testing.vllm_objects import BlockPool, Blocks, Status, VllmRequest, scheduler_output, windows_of

#: Calls a function where fakes live, and returns what it returns.
Call: TypeAlias = Callable[..., Any]
#: Steps after which a request that never ends is a fault.
MOST_STEPS = 20_000


class VllmEngine:
    """One engine. `chunk`: tokens that one step computes at most. `grace_s`: as the setting, in seconds. `ahead`: it schedules
    a step before it has read what the one before sampled, as vLLM does by default.
    """

    def __init__(
        self,
        server: FakeServer,
        *,
        chunk: int = 64,
        grace_s: float = 0.01,
        blocks: int = 64,
        ahead: bool = False,
        name: str = "engine",
    ) -> None:
        self.server = server
        self.ahead = ahead
        self.chunk = chunk
        self.pool = BlockPool(blocks)
        self.session: Session = join_session(name)
        self.windows = windows_of(server.layout)
        self.scheduler = self._open(Configuration(check_settings(server.settings), server.capabilities, grace_s))
        self.scheduler.block_pool = self.pool
        self.requests: dict[str, VllmRequest] = {}
        self.waiting: list[VllmRequest] = []
        self.running: list[VllmRequest] = []
        self.tables: dict[str, list[list[int]]] = {}
        #: Outputs that vLLM has not acted upon, with the token that each request's pass sampled.
        self.outputs: list[tuple[Results, dict[str, int]]] = []
        #: All tokens of each request, as the model runner knows them.
        self._tokens: dict[str, list[int]] = {}
        #: What ended since the beginning.
        self.ended: dict[str, VllmRequest] = {}
        #: Tokens of each request that a load brought.
        self.loaded: dict[str, int] = {}
        #: Loads that failed, by request.
        self.failures: list[str] = []
        #: Whether a copy or a call never ends: what it touches stays registered.
        self.left_behind = False
        self._admits = True
        self._received: set[str] = set()
        self._preempted: list[str] = []
        self._finished: list[str] = []

    def _open(self, configuration: Configuration) -> SchedulerRole:
        """Both roles, in one process."""
        self.session.open(configuration, Cache(self.server.layout, []), ports=self.server.ports)
        self.worker = WorkerRole(self.session, windows=bool(self.windows), on_cpu=True)
        loads, size = configuration.settings.role != "producer", self.server.tokens_per_block
        return SchedulerRole(self.session, size, self.windows, configuration.grace_s, loads=loads)

    @property
    def devices(self) -> list[tuple[FakeServer, Call]]:
        """Whose pages there are, and how to call something where these fakes live; none once there is no connector."""
        return [] if self.session.serving is None else [(self.server, self.call)]

    # -- what a client does

    def add(self, request_id: str, tokens: Sequence[int], max_tokens: int = 2, **fields: Any) -> VllmRequest:
        """A request arrives."""
        request = VllmRequest(request_id, tokens, max_tokens, **fields)
        self.requests[request_id] = request
        self._tokens[request_id] = list(tokens)
        self.waiting.append(request)
        self.scheduler.on_new_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """Its client is gone."""
        request = self.requests[request_id]
        for queue in (self.waiting, self.running):
            with suppress(ValueError):
                queue.remove(request)
        loading = request.status is Status.WAITING_FOR_REMOTE_KVS and request_id not in self._received
        self._received.discard(request_id)
        request.status = Status.FINISHED_ABORTED
        self._free_request(request, delayed=loading)

    def preempt(self, request_id: str, *, between_steps: bool = False) -> None:
        """Its blocks are wanted: it goes back to the queue without any. `between_steps`: for a reset of the local cache,
        behind which the next step may take it again; else that step admits nobody.
        """
        request = self.requests[request_id]
        self._admits = between_steps
        # What is under way of it was sampled before, and is sampled again.
        self._tokens[request_id] = list(request.all_token_ids)
        request.num_output_placeholders = 0
        self.outputs = [
            (results, {name: token for name, token in sampled.items() if name != request_id})
            for results, sampled in self.outputs
        ]
        self.running.remove(request)
        self._free_blocks(request_id)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self._preempted.append(request_id)

    def run(self, *names: str) -> None:
        """Step until these requests ended and their blocks are free; without names, until nothing is left."""
        for _ in range(MOST_STEPS):
            if not (set(names) & set(self.requests) if names else self.requests):
                return
            self.step()
        raise AssertionError(f"after {MOST_STEPS} steps these go on: {sorted(self.requests)}")

    def until(self, holds: Any) -> None:
        """Step until `holds()`."""
        for _ in range(MOST_STEPS):
            if holds():
                return
            self.step()
        raise AssertionError(f"after {MOST_STEPS} steps it does not hold")

    def call(self, function: Any, *args: Any) -> Any:
        """Run a function on the connector's loop, where the fakes live."""
        if self.session.serving is None:
            raise AssertionError("there is no connector any more")
        return self.session.serving.bridge.call(function, *args)

    def close(self) -> None:
        """The engine ends."""
        self.session.close()

    # -- a step

    def step(self, *, act: bool = True) -> None:
        """Schedule, execute, act upon what came of it. `act`: False leaves that to the next step."""
        order, scheduled = self.schedule()
        self.outputs.append(self.execute(order, scheduled))
        # Ahead, the last output is left to the next step, unless there is nothing else to do.
        while act and len(self.outputs) > (self.ahead and bool(scheduled)):
            self.act_upon(*self.outputs.pop(0))

    def schedule(self) -> tuple[Any, dict[str, int]]:
        """The scheduler's part."""
        budget, scheduled = self.chunk, {}
        for request in list(self.running):
            tokens = min(budget, request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)
            if tokens and self._allocate(request, request.num_computed_tokens + tokens, request.num_computed_tokens):
                scheduled[request.request_id] = tokens
                budget -= tokens
        for request in list(self.waiting) if self._admits else ():
            tokens = self._admit(request, budget)
            if tokens:
                scheduled[request.request_id] = tokens
                budget -= tokens
        blocks_of = lambda request_id: Blocks(self.tables[request_id]).get_block_ids()  # noqa: E731
        output = scheduler_output(scheduled, self._preempted, self._finished, blocks_of)
        self._preempted, self._finished, self._admits = [], [], True
        order = self._said(output)
        for request_id, tokens in scheduled.items():
            request = self.requests[request_id]
            request.num_computed_tokens += tokens
            if self.ahead and request.num_computed_tokens == request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1
        return order, scheduled

    def execute(self, order: Any, scheduled: dict[str, int]) -> tuple[Results, dict[str, int]]:
        """The model runner's part. Returns what ended, and what was sampled."""
        self._overwrite()
        sampled = self._forwards(scheduled)
        if order.plan is not None:
            self.worker.after_forward(order.plan)
        return self.worker.results(idle=order.idle), sampled

    def _said(self, output: Any) -> Any:
        """What a step says to the model runner."""
        return self.scheduler.step(output)

    def _read(self, results: Results) -> None:
        """What ended is about to be acted upon."""
        self.scheduler.received(results.received)

    def _forwards(self, scheduled: dict[str, int]) -> dict[str, int]:
        """The step's forward. Returns what was sampled."""
        sampled = {}
        for request_id, tokens in scheduled.items():
            request, known = self.requests[request_id], self._tokens[request_id]
            self._forward(request, tokens)
            if request.num_computed_tokens == len(known):
                sampled[request_id] = sum(known) % 89
                known.append(sampled[request_id])
        return sampled

    def act_upon(self, results: Results, sampled: dict[str, int]) -> None:
        """The scheduler reads the output."""
        for request_id in results.failed:
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self.failures.append(request_id)
                self.loaded.pop(request_id, None)
        for request in [self.requests[request_id] for request_id in sampled if request_id in self.requests]:
            if not request.is_finished():
                self._sampled(request, sampled[request.request_id])
        self._read(results)
        for request_id in results.received:
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._received.add(request_id)
            else:
                assert request.is_finished(), f"{request_id} received and is {request.status}"
                self._forget(request)
        for request_id in results.sent:
            self._forget(self.requests[request_id])

    # -- pieces

    def _admit(self, request: VllmRequest, budget: int) -> int:
        """Take a request from the queue, or begin its load. Returns how many tokens of it are computed in this step."""
        request_id = request.request_id
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            if request_id not in self._received:
                return 0
            self._received.remove(request_id)
            if request.num_computed_tokens:
                self._check_pages(request)
            else:
                self._free_blocks(request_id)
            request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        if request.num_computed_tokens == 0:
            tokens, loads = self.scheduler.matched(request, 0)
            if tokens is None:
                return 0
            if loads:
                assert tokens > 0, "vLLM asserts that"
                return self._begin_load(request, tokens)
            assert tokens == 0
        tokens = min(budget, request.num_tokens - request.num_computed_tokens)
        if not tokens or not self._allocate(request, request.num_computed_tokens + tokens, request.num_computed_tokens):
            return 0
        self.scheduler.allocated(request, Blocks(self.tables[request_id]), 0)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        return tokens

    def _begin_load(self, request: VllmRequest, tokens: int) -> int:
        if self._allocate(request, tokens, tokens):
            self.scheduler.allocated(request, Blocks(self.tables[request.request_id]), tokens)
            request.status = Status.WAITING_FOR_REMOTE_KVS
            request.num_computed_tokens = tokens
            self.loaded[request.request_id] = tokens
        return 0

    def _allocate(self, request: VllmRequest, upto: int, computed: int) -> bool:
        """A block for every token below `upto`, but for those that a window leaves behind once `computed` tokens have KV."""
        table = self.tables.setdefault(request.request_id, [[] for _ in self.server.layout.groups])
        size = self.server.tokens_per_block
        wanted: list[tuple[list[int], int]] = []
        for stale, blocks in zip(self._leave_behind(request, computed), table, strict=True):
            wanted += [(blocks, index) for index in range(max(stale, len(blocks)), -(-upto // size))]
        free = self.pool.free
        if len(free) < len(wanted):
            return False
        for (blocks, index), block in zip(wanted, free, strict=False):
            self.pool.touch([self.pool.blocks[block]])
            blocks.extend([0] * (index - len(blocks)))
            blocks.append(block)
        return True

    def _leave_behind(self, request: VllmRequest, computed: int) -> list[int]:
        """Free the blocks that windows leave behind once `computed` tokens have KV. Returns how many, by group."""
        size, behind = self.server.tokens_per_block, []
        for group, blocks in zip(self.server.layout.groups, self.tables.get(request.request_id, ()), strict=False):
            behind.append(max(0, computed + 1 - group.window_tokens) // size if group.is_window else 0)
            for index in range(min(behind[-1], len(blocks))):
                self.pool.release([blocks[index]])
                blocks[index] = 0
        return behind

    def _overwrite(self) -> None:
        """What was given back may be written by whoever comes next, into any layer: here it is at once."""
        released, self.pool.released = [number for number in self.pool.released if not self.pool.blocks[number].ref_cnt], []
        groups = range(len(self.server.layout.groups))
        writes = [(group, block, 0xAA) for group in groups for block in set(released)]
        for server, call in self.devices if released else ():
            call(partial(server.device.kernel, writes=writes))

    def _forward(self, request: VllmRequest, tokens: int) -> None:
        """Write the whole blocks that end in this pass. A partial one is written when it is whole."""
        size, after = self.server.tokens_per_block, request.num_computed_tokens
        hashes = self._hashes(request, self._tokens[request.request_id][:after])
        first = (after - tokens) // size
        table = self.tables[request.request_id]
        groups = range(len(table))
        for server, call in self.devices:
            writes: list[tuple[int, int, int | bytes]] = [
                (group, table[group][block], server.content(hashes[block], group))
                for group in groups
                for block in range(first, len(hashes))
            ]
            if len(table[0]) > len(hashes):
                writes += [(group, table[group][len(hashes)], 0x55) for group in groups if table[group][len(hashes)]]
            call(partial(server.device.kernel, writes=writes))

    def _hashes(self, request: VllmRequest, tokens: Sequence[int]) -> list[bytes]:
        return self.server.hashes(tokens, Scope(salt=request.cache_salt))

    def _sampled(self, request: VllmRequest, token: int) -> None:
        request.all_token_ids.append(token)
        request.num_output_placeholders = max(0, request.num_output_placeholders - 1)
        if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
            self.running.remove(request)
            request.status = Status.FINISHED_STOPPED
            self._free_request(request, delayed=False)

    def _check_pages(self, request: VllmRequest) -> None:
        """What is computed next reads these."""
        table, size = self.tables[request.request_id], self.server.tokens_per_block
        hashes = self._hashes(request, request.all_token_ids)
        for server, call in self.devices:
            for group, blocks in enumerate(table):
                for block in range(request.num_computed_tokens // size):
                    if blocks[block]:
                        held = call(server.device.read_page, group, blocks[block])
                        assert held == server.content(hashes[block], group), f"{request.request_id}: block {block} is wrong"

    def _free_request(self, request: VllmRequest, *, delayed: bool) -> None:
        self._leave_behind(request, request.num_computed_tokens)
        holds = self.scheduler.finished(request, aborted=request.status is Status.FINISHED_ABORTED)
        self.ended[request.request_id] = request
        self._finished.append(request.request_id)
        if not (delayed or holds):
            self._forget(request)

    def _forget(self, request: VllmRequest) -> None:
        self._free_blocks(request.request_id)
        del self.requests[request.request_id]

    def _free_blocks(self, request_id: str) -> None:
        for blocks in self.tables.pop(request_id, []):
            self.pool.release(blocks)
