"""The worker's role: the cache, the end of each pass, and what has ended since the last one."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from akv.engines.vllm.scheduler import FINAL, STEP_TAIL_S
from akv.engines.vllm.session import Session
from akv.engines.vllm.tracked import Tracked
from akv.errors import PagesLost
from akv.values.messages import LoadState, PassPlan
from akv.values.pressure import Reads
from akv.values.requests import LoadCompleted, SavesCompleted

#: Seconds that a step which computes nothing waits for something to end. vLLM would come again after a millisecond, and its
#: loop would keep the interpreter from the threads that it waits for; a request that arrives meanwhile waits as long at most.
IDLE_WAIT_S = 0.01
#: The same on a CPU, and in all, as long as one thing after the other ends in that time. There a pass and the loads beside it
#: share the cores: with two of them the pass of a request whose load ended first took four times as long while others' went
#: on, and so did they. A pass of a prompt takes longer than either.
CPU_WAIT_S = 0.025
CPU_MOST_S = 0.05
#: The same where requests have ended and their saves alone go on, which keep nobody from computing.
HELD_WAIT_S = 0.003


class Results(NamedTuple):
    """What ended, by vLLM's ids. A load that failed stands in two of them."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class WorkerRole:
    """The hooks that vLLM's model runner calls, in plain values."""

    def __init__(self, session: Session, *, windows: bool, on_cpu: bool) -> None:
        """`windows`: whether the model has any. `on_cpu`: whether it is computed there."""
        self._session = session
        self._windows = windows
        self._on_cpu = on_cpu
        #: What loads had read when it was counted last.
        self._read = Reads()

    def after_forward(self, planned: "Future[PassPlan | None]") -> None:
        """The planned pass is queued on the device. Waits until copies of window pages are queued, and for nothing else."""
        serving = self._session.serving
        if serving is None:
            return
        if self._snapshots(planned):
            self._session.ask(serving.loop.after_forward, planned, otherwise=None)
        else:
            self._session.begin(serving.loop.after_forward, planned, within_s=STEP_TAIL_S)

    def _snapshots(self, planned: "Future[PassPlan | None]") -> bool:
        """Whether window pages are copied behind this pass; also where the loop has not said so yet."""
        if not self._windows:
            return False
        if not planned.done() or planned.exception() is not None:
            return True
        plan = planned.result()
        return plan is not None and any(order.snapshot for order in plan.saves)

    def results(self, *, idle: bool) -> Results:
        """What ended since the last call. Never blocks, but in a step that computes nothing: for `IDLE_WAIT_S`, on a CPU for
        `CPU_MOST_S` at most.
        """
        session = self._session
        if idle:
            limit_s, most_s = (CPU_WAIT_S, CPU_MOST_S) if self._on_cpu else (IDLE_WAIT_S, IDLE_WAIT_S)
            session.wait(limit_s, most_s, HELD_WAIT_S)
        session.see()
        results = Results(set(), set(), set())
        while session.ends:
            ended = session.ends.popleft()
            if isinstance(ended, Tracked):
                self._over(ended, results)
                continue
            if isinstance(ended, Reads):
                session.counts.reads_grew(self._read, ended)
                self._read = ended
                continue
            tracked = session.requests.get(ended.request_id)
            match ended:
                case LoadCompleted():
                    self._load_ended(tracked, ended, results)
                case SavesCompleted():
                    self._request_ended(tracked, ended, results)
                case PagesLost():
                    self._lost(tracked, ended.pages, results)
                case _:
                    pass
        if session.failed or session.serving is None:
            self._give_back_all(results)
        return results

    def _load_ended(self, tracked: Tracked | None, ended: LoadCompleted, results: Results) -> None:
        counts = self._session.counts
        if ended.state is LoadState.LOADED:
            counts.add("loads")
            counts.add("loaded_tokens", ended.tokens)
        elif ended.state is LoadState.FAILED:
            counts.add("failed_loads")
        if tracked is None or not tracked.receiving or tracked.reported:
            return
        if ended.state is not LoadState.LOADED:
            results.failed.add(tracked.id)
            tracked.local_only = tracked.local_only or ended.reason in FINAL
            self._begin_again(tracked)
        self._received(tracked, results)

    def _begin_again(self, tracked: Tracked) -> None:
        """VLLM frees all blocks of a request whose load failed, its local match with them, and schedules it like a new one:
        from whatever its own cache holds by then, by passes of which akv is told those alone that complete a block. What the
        load left behind says nothing about any of them.
        """
        serving = self._session.serving
        if serving is not None and not tracked.ended:
            tracked.noted = ()
            self._session.ask(serving.loop.preempt, [tracked], otherwise=None)

    def _request_ended(self, tracked: Tracked | None, ended: SavesCompleted, results: Results) -> None:
        self._session.counts.add("saved_requests")
        self._session.counts.add("stored_blocks", ended.stored_blocks)
        self._session.counts.add("refused_blocks", ended.refused_blocks)
        # An incarnation that was preempted ends, too, and its request goes on.
        if tracked is not None and tracked.request is not None and tracked.request.closed:
            self._over(tracked, results)

    def _lost(self, tracked: Tracked | None, pages: Sequence[Sequence[int]], results: Results) -> None:
        self._session.lose(pages)
        if tracked is not None:
            # For akv it is over; vLLM computes it, in other blocks.
            self._over(tracked, results, failed=True)
            self._session.requests.pop(tracked.id, None)

    def _over(self, tracked: Tracked, results: Results, *, failed: bool = False) -> None:
        """Nothing touches the request's blocks any more, or nobody can say so and the blocks are lost."""
        if tracked.receiving:
            if not tracked.reported:
                if failed:
                    results.failed.add(tracked.id)
                self._received(tracked, results)
        elif tracked.held:
            tracked.held = False
            results.sent.add(tracked.id)
            del self._session.requests[tracked.id]

    @staticmethod
    def _received(tracked: Tracked, results: Results) -> None:
        tracked.reported = True
        results.received.add(tracked.id)

    def _give_back_all(self, results: Results) -> None:
        """There is no cache any more, and what a copy may touch was taken out of use."""
        for tracked in list(self._session.requests.values()):
            if tracked.receiving or tracked.held:
                self._over(tracked, results, failed=True)
