"""One rank's role, in a process of its own: carries out what the scheduler's role says, and tells what ended here.

vLLM counts: a load has ended when each rank has said so once, and has failed if one of them says that it did.
"""

import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec

from akv import observe
from akv.engines.vllm.configuration import Configuration
from akv.engines.vllm.ends import Results
from akv.engines.vllm.layout import Cache
from akv.engines.vllm.ranked_scheduler import RankStep
from akv.engines.vllm.scheduler import STEP_TAIL_S
from akv.engines.vllm.worker import HELD_WAIT_S, idle_waits
from akv.errors import AkvError, PagesLost
from akv.ports import Ports
from akv.rank_bridge import WorkerBridge, open_worker_bridge
from akv.values.messages import LoadState, RankReport


class RankRole:
    """The hooks that vLLM's model runner calls, in plain values. One thread calls them."""

    def __init__(self, rank: int, *, on_cpu: bool) -> None:
        """`rank`: among the tensor-parallel ones. `on_cpu`: whether the model is computed there."""
        self._rank = rank
        self._on_cpu = on_cpu
        #: None before the cache is there, and once nothing can be asked any more.
        self._bridge: WorkerBridge | None = None
        self._delivery: Future[None] | None = None
        #: Requests whose loads began here and have not ended.
        self._loading: set[str] = set()
        #: Reports that vLLM has not been given; what the loop adds stands behind, and what has been looked at before.
        self._arriving: deque[bytes] = deque()
        self._unsent: list[bytes] = []
        self._arrived = threading.Event()
        #: Faults of what was begun on the loop.
        self._faults: deque[BaseException] = deque()
        #: Whether the last report said that loads would come to nothing here. The end of that wakes nobody.
        self._loads_nothing = False
        #: Requests whose loads will not begin here, or have no copy under way any more, since there is no cache.
        self._given_up: set[str] = set()

    def open(self, configuration: Configuration, cache: Cache, *, stream: Any = None, ports: Ports | None = None) -> None:
        """Open this rank's worker half on its part of the engine's cache. Blocks until it is open; raises what that raises."""
        bridge = self._bridge = open_worker_bridge(
            configuration.settings,
            cache.layout,
            cache.tensors,
            rank=self._rank,
            stream=stream,
            capabilities=configuration.capabilities,
            ports=ports,
        )
        self._delivery = bridge.begin(self._deliver, bridge)

    @property
    def hello(self) -> bytes:
        """What the scheduler's role is to be opened with."""
        if self._bridge is None:
            raise AssertionError("a rank says hello once its cache is there")
        return self._bridge.worker.hello

    def close(self) -> None:
        """Close it. Later hooks are answered without a cache."""
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.close()

    def before_forward(self, step: RankStep) -> None:
        """The step's forward has not been queued. Waits if it may write blocks that were taken away, and for nothing else."""
        (self._given_up if self._bridge is None else self._loading).update(step.said.loads)
        carried = self._begin(step.said.orders)
        if carried is not None and step.said.preempts:
            self._waited(carried)

    def after_forward(self, step: RankStep) -> None:
        """It is queued. Waits until copies of window pages are, and for nothing else."""
        carried = self._begin(step.said.ended, within_s=0.0 if step.said.copies else STEP_TAIL_S)
        if carried is not None and step.said.copies:
            self._waited(carried)

    def results(self, step: RankStep | None) -> Results:
        """What ended since the last call. Never blocks, but in a step that computes nothing, for as long as `WorkerRole`."""
        results = Results(set(), set(), set(), set())
        if step is not None:
            results.sent.update(step.sent)
            results.received.update(step.received)
            results.failed.update(step.failed)
        self._look(results)
        if step is not None and step.idle:
            self._wait(results, held=step.held)
        for request_id in self._loading & step.lost if step is not None else ():
            self._ended(request_id, results, failed=True)
        self._see()
        for request_id in sorted(self._given_up):
            self._ended(request_id, results, failed=True)
        self._given_up.clear()
        return results

    def take_reports(self) -> list[bytes]:
        """What the scheduler's role is to be told of what `results` looked at."""
        reports, self._unsent = self._unsent, []
        return reports

    async def _deliver(self, bridge: WorkerBridge) -> None:
        """On the loop: whatever ends, for as long as the worker half lives."""
        while True:
            await bridge.worker.changed.wait()
            self._fetch(bridge)

    def _fetch(self, bridge: WorkerBridge) -> None:
        """On the loop."""
        if report := bridge.worker.take_report():
            self._arriving.append(report)
            self._arrived.set()

    @staticmethod
    async def _carry_out(bridge: WorkerBridge, orders: bytes) -> None:
        """On the loop."""
        try:
            await bridge.worker.carry_out(orders)
        except PagesLost as lost:
            # Degraded, which was told: no copy that was under way is stored. Whatever else was ordered ends, too.
            observe.emit(
                observe.PAGES_LOST,
                request_id=lost.request_id,
                incarnation=lost.incarnation,
                pages=sum(map(len, lost.pages)),
            )
            await bridge.worker.carry_out(b"")

    def _begin(self, orders: bytes, *, within_s: float = 0.0) -> "Future[None] | None":
        if not orders or self._bridge is None:
            return None
        try:
            carried: Future[None] = self._bridge.begin_within(within_s, self._carry_out, self._bridge, orders)
        except AkvError as error:
            self._fail(error)
            return None
        carried.add_done_callback(self._look_at)
        return carried

    def _waited(self, carried: "Future[None]") -> None:
        if self._bridge is not None:
            self._bridge.hurry()
        try:
            carried.result()
        except AkvError as error:
            self._fail(error)

    def _look_at(self, carried: "Future[None]") -> None:
        """On the loop, as a rule: orders have been carried out, or could not be, which the next look sees."""
        if not carried.cancelled() and (error := carried.exception()) is not None:
            self._faults.append(error)
            self._arrived.set()

    def _wait(self, results: Results, *, held: bool) -> None:
        """As `Session.wait`, for this rank's loads alone."""
        limit_s, most_s = idle_waits(on_cpu=self._on_cpu)
        deadline = monotonic() + most_s
        while self._bridge is not None:
            wanted_s = limit_s if self._loading else HELD_WAIT_S if held and not self._unsent else 0.0
            left = min(wanted_s, deadline - monotonic())
            if left <= 0:
                return
            self._bridge.hurry()
            if not self._arrived.wait(left):
                return
            self._look(results)

    def _look(self, results: Results) -> None:
        """Look at the reports that have come."""
        self._arrived.clear()
        while self._arriving:
            report = self._arriving.popleft()
            self._unsent.append(report)
            said = msgspec.msgpack.decode(report, type=RankReport)
            self._loads_nothing = said.loads_nothing
            for load in said.report.loads:
                self._ended(load.request_id, results, failed=load.state is not LoadState.LOADED)

    def _ended(self, request_id: str, results: Results, *, failed: bool) -> None:
        """Told once: vLLM counts."""
        if request_id in self._loading or request_id in self._given_up:
            self._loading.discard(request_id)
            results.received.add(request_id)
            if failed:
                results.failed.add(request_id)

    def _see(self) -> None:
        """Notice a worker half that broke while nothing was asked of it, or loads again."""
        delivery = self._delivery
        if self._bridge is None or delivery is None:
            return
        if self._loads_nothing:
            with suppress(AkvError):  # Looked at below, or by the next step.
                self._bridge.begin_within(STEP_TAIL_S, self._fetch, self._bridge)
        if self._faults:
            self._fail(self._faults[0])
        elif delivery.done() and (error := delivery.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """It serves no more, which the scheduler's role is told. Loads whose blocks nothing can touch any more have failed; of
        the others the scheduler's side says so, when their blocks are out of use.
        """
        bridge, self._bridge = self._bridge, None
        if bridge is None:
            return
        observe.emit(observe.ENGINE_WITHOUT_CACHE, error=error)
        closed = bridge.close()
        ended = closed and not any(bridge.worker.touched_pages)
        if closed:
            # Its loop is gone: what closing ended is there to be told.
            with suppress(AkvError):
                self._fetch(bridge)
        if ended:
            self._given_up |= self._loading
            self._loading.clear()
        last = RankReport(rank=self._rank, degraded=type(error).__name__, ended=ended)
        self._arriving.append(msgspec.msgpack.encode(last))
