"""What runs on the scheduler half's loop where the ranks have processes of their own: as in one process, but nothing of it
waits for what only a rank's report can end, since reports come with the steps of the thread that would wait.
"""

from collections.abc import Callable, Sequence

import msgspec
from anyio import CancelScope

from akv.engines.vllm.loop_side import End, Loading, LoopSide, Part, Step
from akv.engines.vllm.tracked import Tracked
from akv.ranks import Scheduler
from akv.request import Request
from akv.values.offers import Offer
from akv.values.requests import Scheduled


class Said(msgspec.Struct, frozen=True):
    """What a step has for the ranks: what they carry out before the forward, and behind it."""

    orders: bytes = b""
    ended: bytes = b""
    #: Requests whose loads are among the orders.
    loads: tuple[str, ...] = ()
    #: Whether blocks were taken away that the forward may write, so that nobody may read them by then.
    preempts: bool = False
    #: Whether window pages are copied behind the forward, before anything else is queued.
    copies: bool = False


class RankedLoopSide(LoopSide):
    """The scheduler half as the scheduler's role uses it."""

    def __init__(self, scheduler: Scheduler, tell: Callable[[End], None]) -> None:
        super().__init__(scheduler, tell)
        self._scheduler = scheduler
        self._preempts = False
        #: Requests whose blocks were taken away, with the incarnation that had them, until every rank has said that it reads
        #: them no more; and the loads that wait for that, since these blocks may be among theirs.
        self._ending: list[tuple[Request, int]] = []
        self._waiting: list[Loading] = []

    @property
    def has_orders(self) -> bool:
        """Whether there is something to say that the ranks have not been told. From any thread."""
        return self._scheduler.has_orders or bool(self._waiting)

    async def preempt(self, preempted: Sequence[Tracked]) -> None:
        """The engine took the blocks of these requests away. Each rank stops reading them before the next forward."""
        for tracked in preempted:
            if tracked.request is not None:
                self._preempts = True
                self._ending.append((tracked.request, tracked.request.incarnation))
                with CancelScope() as scope:
                    # They are taken away all the same; only the wait for the ranks is not.
                    scope.cancel()
                    await tracked.request.preempted()

    async def look_up(self, tracked: Tracked, local_tokens: int) -> Offer:
        """As in one process; behind the end of a preemption, of which the ranks report."""
        request = tracked.request
        if request is not None and not tracked.ended and not (request.is_open or request.closed):
            await request.preempted()
        return await super().look_up(tracked, local_tokens)

    async def step_of_ranks(self, preempted: Sequence[Tracked], step: Step) -> Said:
        """Take up the loads, plan the pass, and end it: vLLM runs what it has scheduled, on every rank, in order."""
        await self.preempt(preempted)
        loads = tuple(load.tracked.id for load in self._that_may_begin(step.loads) if self._reserve(load))
        scheduled = [part for part in map(self._scheduled, step.parts) if part is not None]
        plan = self._plan(scheduled) if scheduled else None
        orders, ended = self._scheduler.take_orders(), b""
        if plan is not None:
            await self._scheduler.after_forward(plan)
            ended = self._scheduler.take_orders()
        preempts, self._preempts = self._preempts, False
        copies = plan is not None and any(order.snapshot for order in plan.saves)
        return Said(orders, ended, loads, preempts, copies)

    def _that_may_begin(self, loads: Sequence[Loading]) -> list[Loading]:
        """Of the loads that wait and these: all, or none while a rank may still read blocks that were taken away."""
        self._ending = [one for one in self._ending if _is_ending(*one)]
        waiting, self._waiting = [*self._waiting, *loads], []
        if not self._ending:
            return waiting
        self._waiting = waiting
        return []

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """What ranks reported. What ended by it has been told when this returns."""
        for report in reports:
            self._scheduler.take_report(report)
        self._tell_ends()
        self._tell_reads()

    def _scheduled(self, part: Part) -> Scheduled | None:
        request = part.tracked.request
        if request is not None and not part.tracked.ended and not request.is_open:
            # Preempted, and a rank has not said so yet: what this pass computes is saved by a later one, or not.
            return None
        return super()._scheduled(part)


def _is_ending(request: Request, incarnation: int) -> bool:
    return request.incarnation == incarnation and not (request.closed or request.lost)
