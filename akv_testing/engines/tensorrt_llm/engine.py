"""A stand-in for TensorRT-LLM's executor: it has no model, keeps the executor's order of calls, and checks every byte.

    engine = StandInEngine(connector_classes(...), cache)
    engine.submit(StandInRequest(1, prompt))
    engine.run_until_done()
    assert engine.wrong == []

A pass: schedule; prepare (query, honour, update); take out what is parked; build and bind metadata, pickled; start loads; a
second vote that may veto the pass; forward; wait_for_save; get_finished, agreed with other ranks. What a request reads in a
forward is compared with what has to be there, and freed pages are poisoned at once.
"""

import pickle
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from akv_testing.engines.tensorrt_llm.contract import check_answer, check_classes
from akv_testing.engines.tensorrt_llm.interface import BAD_PAGE_INDEX, PrefixLoad, RequestData, SchedulerOutput
from akv_testing.engines.tensorrt_llm.memory import StandInCache
from akv_testing.engines.tensorrt_llm.requests import StandInRequest, State
from akv_testing.engines.tensorrt_llm.transfers import Transfers

#: Passes after which a test that waits for something is told that it never comes.
MOST_PASSES = 20_000
#: Seconds that a pass without a batch takes: an engine that spins would keep the interpreter from the connector's loop.
IDLE_S = 0.0005


def llm_args(**fields: Any) -> SimpleNamespace:
    """A server's arguments: one rank, no drafter, unless told otherwise."""
    defaults: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "enable_attention_dp": False,
        "speculative_config": None,
        "cache_transceiver_config": None,
        "kv_cache_config": SimpleNamespace(dtype="auto", sink_token_length=None),
        "attn_backend": "TRTLLM",
    }
    return SimpleNamespace(**(defaults | fields))


class StandInEngine:
    """One server: a scheduler half, a worker half, a cache, and requests."""

    def __init__(
        self,
        classes: Any,
        cache: StandInCache,
        *,
        args: SimpleNamespace | None = None,
        chunk: int = 64,
        asks_early: bool = False,
        lookahead: int = 0,
        drafts: int = 0,
    ) -> None:
        """`classes`: with `scheduler` and `worker`. `asks_early`: at admission, before the batch is final. `lookahead`: tokens
        behind a block that a drafter's KV in it depends on; `drafts`: tokens that it proposes, of which none is accepted.
        """
        self.args = llm_args() if args is None else args
        self.cache = cache
        self.chunk = chunk
        self.lookahead = lookahead
        self.drafts = drafts
        #: Of a trimmed answer so many tokens are taken up; all by default.
        self.honours: Callable[[StandInRequest, int], int] = lambda request, tokens: tokens
        #: Whether a request that was asked for is left out of this pass's batch.
        self.defers: Callable[[StandInRequest], bool] = lambda request: False
        self.asks_early = asks_early
        check_classes(classes, self.args, cache, asks_early=asks_early)
        self.worker = classes.worker(self.args)
        self.scheduler = classes.scheduler(self.args)
        self.worker.register_kv_cache_layout(cache.layout())
        self.scheduler.wait_for_initialization()
        self.requests: list[StandInRequest] = []
        self._idle = threading.Event()
        self.transfers = Transfers(self.scheduler, self.worker, restarts=classes.scheduler.reports_failed_loads is True)
        #: Every answer: request, tokens that were offered, and what was left of it after trimming.
        self.answers: list[tuple[int, int, int]] = []
        #: What a forward read and was not what had to be there: request, group, block.
        self.wrong: list[tuple[int, int, int]] = []
        #: Tokens that forwards computed, by request: what was not reused.
        self.computed_tokens: dict[int, int] = {}

    # -- what a test does

    def submit(self, *requests: StandInRequest) -> None:
        """Clients ask."""
        self.requests += requests

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Passes until something holds."""
        for _ in range(MOST_PASSES):
            if holds():
                return
            self.run_pass()
        raise AssertionError(f"after {MOST_PASSES} passes: {[(one.request_id, one.state) for one in self.requests]}")

    def run_until_done(self) -> None:
        """Passes until every request has ended and given its pages back."""
        self.run_until(lambda: all(one.state is State.DONE for one in self.requests))

    def serve(self, *requests: StandInRequest) -> None:
        """Submit, and run until everything is done."""
        self.submit(*requests)
        self.run_until_done()

    def shutdown(self) -> None:
        """End the server."""
        self.scheduler.shutdown()
        self.worker.shutdown()

    # -- a pass

    def run_pass(self, *, veto: bool = False) -> None:
        """One pass; with `veto` the second vote ends it after the connector has seen it."""
        batch, loads = self._prepare()
        output = SchedulerOutput(prefix_loads=loads)
        for request in batch:
            self._tell(output, request)
        metadata = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_meta(pickle.loads(pickle.dumps(metadata)))  # noqa: S301 - its own
        self._between_binding_and_loading()
        self.transfers.dispatched(loads)
        self.worker.start_load_kv(None)
        for request_id in self.transfers.failed_in_pass():
            failed = self._by_id(request_id)
            batch.remove(failed)
            self._restart(failed)
        if veto:
            return
        if batch:
            self._forward(batch)
            self.worker.wait_for_save(None)
        else:
            self._idle.wait(IDLE_S)
        self._settle_transfers()
        for request in batch:
            self._sample(request)

    def _between_binding_and_loading(self) -> None:
        """For tests: what happens after the metadata was bound and before loads begin."""

    def _prepare(self) -> tuple[list[StandInRequest], list[PrefixLoad]]:
        batch: list[StandInRequest] = []
        loads: list[PrefixLoad] = []
        for request in self.requests:
            if request.state is State.WAITING:
                self._admit(request)
            if request.state not in {State.CONTEXT, State.GENERATION}:
                continue
            if self.asks_early and not request.was_asked and not request.is_dummy_request:
                self._ask(request)
            if self.defers(request):
                continue
            if not request.allocated:
                if self.transfers.reserves:
                    loads += self._reserve(request)
                else:
                    self._allocate(request)
            if not self._is_parked(request):
                self._grow(request, request.computed, self._end(request) + (self.drafts if request.generated else 0))
                batch.append(request)
        return batch, loads

    @staticmethod
    def _is_parked(request: StandInRequest) -> bool:
        return request.state is State.PARKED

    def _admit(self, request: StandInRequest) -> None:
        """The local match: pages of the engine's own cache, as the blocks' earlier owner left them."""
        request.state = State.CONTEXT
        request.pages = [[] for _ in self.cache.groups]
        request.computed = request.local_blocks * self.cache.tokens_per_block
        self._grow(request, 0, request.computed, history=request.computed)
        for group, table in enumerate(request.pages):
            for block, page in enumerate(table):
                if page != BAD_PAGE_INDEX:
                    self.cache.write(group, page, self._right(request, block, group))

    def _ask(self, request: StandInRequest) -> None:
        """At most once per allocation."""
        request.was_asked = True
        answer = self.scheduler.get_num_new_matched_tokens(request, request.computed)
        check_answer(answer)
        self.transfers.loads_async = answer[1]
        request.offered = answer[0]

    def _trimmed(self, request: StandInRequest) -> int:
        """What of an answer can be used: at least the prompt's last token is computed here."""
        size = self.cache.tokens_per_block
        trimmed = min(request.offered, (request.length - 1 - request.computed) // size * size)
        self.answers.append((request.request_id, request.offered, trimmed))
        return self.honours(request, trimmed)

    def _allocate(self, request: StandInRequest) -> None:
        if not request.was_asked:
            self._ask(request)
        honoured, start = self._trimmed(request), request.computed
        if honoured < request.offered:
            self.scheduler.cancel_load(request, start + honoured, start + request.offered)
        self._give_pages(request, honoured)
        if request.offered:
            request.state = State.PARKED
            self.transfers.park(request.request_id)

    def _give_pages(self, request: StandInRequest, honoured: int) -> None:
        start = request.computed
        request.allocated = True
        request.computed += honoured
        self._grow(request, start, request.computed, history=request.computed)
        self._grow(request, request.computed, self._end(request))
        request.py_num_connector_matched_tokens = honoured
        if len(self.cache.groups) == 1:
            self.scheduler.update_state_after_alloc(request, list(request.pages[0]))
        else:
            self.scheduler.update_state_after_alloc_by_layer_group(request, [list(table) for table in request.pages])

    def _reserve(self, request: StandInRequest) -> list[PrefixLoad]:
        reservation_id, answer = self.transfers.reserve(request, request.computed)
        request.was_asked, request.offered = True, answer
        honoured, start = self._trimmed(request), request.computed
        if honoured < answer:
            self.scheduler.release_prefix_reservation(request, reservation_id, start + honoured, start + answer)
        self._give_pages(request, honoured)
        if not honoured:
            return []
        request.state = State.PARKED
        load = PrefixLoad(
            reservation_id=reservation_id,
            request_id=request.request_id,
            start=start,
            end=start + honoured,
            is_async=True,
            block_ids_by_layer_group=[list(table) for table in request.pages],
            tokens=request.get_tokens(0),
            cache_salt=request.cache_salt,
        )
        self.transfers.accepted(request, load)
        return [load]

    def _tell(self, output: SchedulerOutput, request: StandInRequest) -> None:
        """What was added since the last time; an entry that became -1 meanwhile is not told again."""
        first = request.told is None
        tokens_told, pages_told = request.told or (0, [0] * len(request.pages))
        tokens = request.get_tokens(0)
        added = [table[told:] for table, told in zip(request.pages, pages_told, strict=True)]
        request.told = len(tokens), [len(table) for table in request.pages]
        drafts = self.drafts if request.generated else 0
        data = RequestData(
            request_id=request.request_id,
            new_tokens=tokens[tokens_told:],
            new_block_ids=added[0] if len(added) == 1 else [],
            computed_position=request.computed,
            num_scheduled_tokens=self._end(request) - request.computed + drafts,
            cache_salt=request.cache_salt,
            new_block_ids_by_layer_group=added,
        )
        (output.new_requests if first else output.cached_requests).append(data)

    def _end(self, request: StandInRequest) -> int:
        return min(request.length, request.computed + self.chunk)

    def _forward(self, batch: Sequence[StandInRequest]) -> None:
        for request in batch:
            before, end, size = request.computed, self._end(request), self.cache.tokens_per_block
            for group, table in enumerate(request.pages):
                for block in (block for blocks in self.cache.kept(group, before) for block in blocks):
                    if (group, block) not in request.right:
                        request.right[group, block] = self._right(request, block, group)
                    if self.cache.read(group, table[block]) != request.right[group, block]:
                        self.wrong.append((request.request_id, group, block))
                for block in range(before // size, -(-end // size)):
                    content = request.right[group, block] = self._right(request, block, group, end)
                    self.cache.write(group, table[block], content)
            request.computed = end
            done = self.computed_tokens.setdefault(request.request_id, 0)
            self.computed_tokens[request.request_id] = done + end - before

    def _right(self, request: StandInRequest, block: int, group: int, computed: int | None = None) -> bytes:
        """What a page holds once its block is whole; with `computed` as many tokens are computed, perhaps a part of it."""
        upto = (block + 1) * self.cache.tokens_per_block
        seen = upto + self.lookahead if computed is None or computed >= upto else computed
        return self.cache.content(request.identity, request.seen_tokens[:seen], group)

    def _grow(self, request: StandInRequest, start: int, end: int, history: int | None = None) -> None:
        """Pages for blocks of [start, end); with `history` only for those that are read from there on."""
        size = self.cache.tokens_per_block
        for group, table in enumerate(request.pages):
            for block in range(start // size, -(-end // size)):
                wanted = history is None or self.cache.is_kept(group, history, block)
                if block == len(table):
                    table.append(self.cache.take(group) if wanted else BAD_PAGE_INDEX)

    def _sample(self, request: StandInRequest) -> None:
        """The pass is over: what the windows have left behind is freed, and a complete sequence gets its next token."""
        for group, table in enumerate(request.pages):
            for block, page in enumerate(table):
                computed = (block + 1) * self.cache.tokens_per_block <= request.computed
                if page != BAD_PAGE_INDEX and computed and not self.cache.is_kept(group, request.computed, block):
                    self.cache.give_back(group, page)
                    table[block] = BAD_PAGE_INDEX
        if request.computed < request.length:
            return
        request.generated.append(hash((request.request_id, request.length)) % 50000)
        request.state = State.GENERATION
        if len(request.generated) >= request.max_new_tokens:
            self.finish(request)

    # -- ends

    def finish(self, request: StandInRequest) -> None:
        """The request ends; its pages are held for as long as the connector reads them."""
        if len(self.cache.groups) == 1:
            held = self.scheduler.request_finished(request, list(request.pages[0]) if request.pages else [])
        else:
            held = self.scheduler.request_finished_by_layer_group(request, [list(table) for table in request.pages])
        if held:
            request.state = State.SAVING
            self.transfers.save(request.request_id)
        else:
            self._end_of(request)

    def cancel(self, request: StandInRequest) -> None:
        """The client is gone. A load that was dispatched is drained first."""
        request.cancelled = True
        if request.state is State.PARKED:
            if self.transfers.reserves and self.transfers.release_unstarted(request):
                self.finish(request)
        elif request.state is State.WAITING:
            request.state = State.DONE
        elif request.state in {State.CONTEXT, State.GENERATION}:
            if request.was_asked and request.told is None and request.offered:
                self.scheduler.cancel_load(request, request.computed, request.computed + request.offered)
            self.finish(request)

    def preempt(self, request: StandInRequest) -> None:
        """Its pages are wanted for another. Not while a load writes them."""
        if request.state is State.PARKED and not self.transfers.release_unstarted(request):
            raise AssertionError(f"request {request.request_id} is preempted while its load is under way")
        self._restart(request)

    def preempt_by_finishing(self, request: StandInRequest, *, tells_anew: bool = True) -> None:
        """As another path of the runtime does it: the connector sees an end, and later the same id again. Unless `tells_anew`
        the tokens and pages of its second life are told as if the first went on.
        """
        told = request.told
        self.finish(request)
        self.run_until(lambda: request.state is State.DONE)
        request.forget_allocation()
        if not tells_anew:
            request.told = told

    def _restart(self, request: StandInRequest) -> None:
        self.scheduler.request_reset(request)
        self._free(request)
        request.forget_allocation()

    def _settle_transfers(self) -> None:
        saved, loaded, failed = self.transfers.settle()
        for request_id in saved:
            self._end_of(self._by_id(request_id))
        for request_id in loaded:
            request = self._by_id(request_id)
            if request.cancelled:
                self.finish(request)
            elif request_id in failed:
                self._restart(request)
            elif request.state is State.PARKED:
                request.state = State.CONTEXT

    def _end_of(self, request: StandInRequest) -> None:
        self._free(request)
        request.state = State.DONE

    def _free(self, request: StandInRequest) -> None:
        for group, table in enumerate(request.pages):
            for page in table:
                self.cache.give_back(group, page)
        request.pages = []

    def _by_id(self, request_id: int) -> StandInRequest:
        return next(one for one in self.requests if one.request_id == request_id)
