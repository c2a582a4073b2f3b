"""The worker's role: the cache, the end of each pass, and what has ended since the last one."""

from concurrent.futures import Future

from akv.engines.vllm.ends import Ends, Results
from akv.engines.vllm.scheduler import STEP_TAIL_S
from akv.engines.vllm.session import Session
from akv.values.messages import PassPlan

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


def idle_waits(*, on_cpu: bool) -> tuple[float, float]:
    """Seconds that a step which computes nothing waits for the next end, and in all."""
    return (CPU_WAIT_S, CPU_MOST_S) if on_cpu else (IDLE_WAIT_S, IDLE_WAIT_S)


class WorkerRole:
    """The hooks that vLLM's model runner calls, in plain values."""

    def __init__(self, session: Session, *, windows: bool, on_cpu: bool) -> None:
        """`windows`: whether the model has any. `on_cpu`: whether it is computed there."""
        self._session = session
        self._windows = windows
        self._on_cpu = on_cpu
        self._ends = Ends(session)

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
            session.wait(*idle_waits(on_cpu=self._on_cpu), HELD_WAIT_S)
        return self._ends.take()
