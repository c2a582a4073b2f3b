"""What a scheduler half speaks to: the worker half of its own process, or the worker halves of all ranks, in theirs.

`RemoteWorkers` is the latter. What it is told becomes messages, which the engine carries to each rank; what the ranks report
it gives on once it is true of all of them (`ownership/ranks.py`). It moves no byte and waits for nobody.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from anyio.lowlevel import checkpoint

from akv.errors import EngineContractError, SettingsError
from akv.flow.snapshot import Taken
from akv.ownership.backlog import SaveBacklog
from akv.ownership.ranks import RankLedger
from akv.ownership.store_calls import StoreCalls
from akv.plan.keys import KeySpace
from akv.ports.device import PassEvent
from akv.values.layout import Layout
from akv.values.messages import (
    MESSAGE_VERSION,
    GroupPages,
    LoadOrder,
    NoMoreWork,
    PassBegins,
    PassPlan,
    PassReport,
    PlanDropped,
    PlanEnded,
    RankHello,
    RankOrder,
    RankOrders,
    RankReport,
    Renamed,
    SaveOrder,
    SavesNow,
    Terms,
    Withdrawal,
)
from akv.values.pressure import BreakerState, Pressure, Reads, StagingPressure
from akv.worker import WorkerHalf

Start = Callable[[Callable[..., Any]], Awaitable[None]]


class _Elsewhere:
    """An event, or a copy, of another process: nothing of it is here to wait for, nor to give back."""

    def query(self) -> bool:
        return True

    def leave(self) -> None:
        return None


_ELSEWHERE = _Elsewhere()
#: Slots are the ranks' own, and each of them tells how many are free.
_NO_SLOTS = StagingPressure(slots=0, free=0, quarantined=0, withheld=0)


class RemoteWorkers:
    """The worker halves of all ranks of one server, each in its own process: what a `WorkerHalf` is to a scheduler's side,
    and synchronous but for what that would wait for.
    """

    def __init__(self, hellos: Sequence[RankHello], max_parked_loads: int) -> None:
        """`hellos`: one of each rank. Raises SettingsError (fault of whoever starts the ranks) for one missing or doubled."""
        ranks = sorted(hello.rank for hello in hellos)
        world = hellos[0].layout.world if hellos else 1
        if ranks != list(range(world)):
            why = f"a layout of world {world} has one worker half for each rank from 0 to {world - 1}"
            raise SettingsError("ranks", ranks, why, "Open one worker for each rank, and hand over what each says of itself.")
        self._hellos = sorted(hellos, key=lambda hello: hello.rank)
        self._max_parked_loads = max_parked_loads
        self._ledger = RankLedger(world)
        self._orders: list[RankOrder] = []
        #: Plans that the ranks know and that have not ended.
        self._plans: set[int] = set()
        #: Loads and saves that have not ended on every rank.
        self._loading: set[int] = set()
        self._saving: set[int] = set()
        #: Ranks that load nothing at present.
        self._loading_nothing: set[int] = set()
        #: Ranks that have ended, and say nothing more.
        self._ended: set[int] = set()
        #: Ranks that serve no more.
        self._gone: set[int] = set()
        self._reads = Reads()
        self._report: Callable[[PassReport], None]
        self._pool_returned: Callable[[], None]
        self._degraded: Callable[[int, str], None]

    def listen(
        self,
        report: Callable[[PassReport], None],
        pool_returned: Callable[[], None],
        degraded: Callable[[int, str], None],
    ) -> None:
        """Whom to tell: of what ended on every rank; that the pool was lost and is back; that a rank serves no more, and why.
        Once, before anything else.
        """
        self._report, self._pool_returned, self._degraded = report, pool_returned, degraded

    @property
    def layout(self) -> Layout:
        """As the ranks describe it."""
        return self._hellos[0].layout

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages in each group's cache: as many on each rank."""
        return self._hellos[0].terms.page_counts

    @property
    def all_terms(self) -> tuple[Terms, ...]:
        """What each rank says of itself."""
        return tuple(hello.terms for hello in self._hellos)

    @property
    def has_orders(self) -> bool:
        """Whether anything was said since they were taken last."""
        return bool(self._orders)

    def take_orders(self) -> bytes:
        """What was said since the last call, for every rank to carry out; empty for nothing."""
        if not self._orders:
            return b""
        orders, self._orders = tuple(self._orders), []
        return msgspec.msgpack.encode(RankOrders(orders=orders))

    def take_report(self, data: bytes) -> None:
        """What one rank reports. Raises EngineContractError for anything else (fault of the engine that carries it)."""
        try:
            said = msgspec.msgpack.decode(data, type=RankReport)
        except msgspec.MsgspecError as error:
            raise EngineContractError(
                f"{len(data)} bytes are no report of a rank ({error}): hand over what Worker.take_report() returned, as it is"
            ) from error
        if said.version != MESSAGE_VERSION or not 0 <= said.rank < len(self._hellos):
            raise EngineContractError(
                f"a report of version {said.version} by rank {said.rank}, and this scheduler half takes version "
                f"{MESSAGE_VERSION} of {len(self._hellos)} ranks: each engine carries the reports of its own ranks alone"
            )
        if said.loads_nothing:
            self._loading_nothing.add(said.rank)
        else:
            self._loading_nothing.discard(said.rank)
        self._tell(self._ledger.reported(said.rank, said.report))
        if said.ended:
            self._ended.add(said.rank)
            self._answer_for_ended()
        if said.pool_returned:
            self.pool_returned()
        if said.degraded and said.rank not in self._gone:
            self._gone.add(said.rank)
            self._degraded(said.rank, said.degraded)

    def pool_returned(self) -> None:
        """The pool was lost for some process of this server, and is back. A save that has not ended on all ranks may have done
        so on some before that, whenever it is heard of (S13).
        """
        self._ledger.doubt_saves()
        self._pool_returned()

    def _answer_for_ended(self) -> None:
        for rank in self._ended:
            self._tell(self._ledger.reported(rank, self._ledger.unanswered(rank)))

    def _tell(self, merged: PassReport) -> None:
        for load in merged.loads:
            self._loading.discard(load.load_id)
            self._reads = Reads(
                direct_pages=self._reads.direct_pages + load.direct_pages,
                direct_bytes=self._reads.direct_bytes + load.direct_bytes,
                staged=_sum(self._reads.staged, load.staged),
                staged_bytes=_sum(self._reads.staged_bytes, load.staged_bytes),
            )
        self._saving.difference_update(save.save_id for save in merged.saves)
        if merged.loads or merged.saves or merged.unread or merged.released:
            self._report(merged)

    # -- what a scheduler half says

    def fence(self) -> PassEvent:
        """Each rank marks its own stream, when it is told."""
        return _ELSEWHERE

    def accept_load(self, order: LoadOrder, fence: PassEvent) -> None:
        """For each rank to load."""
        self._ledger.load_sent(order)
        self._loading.add(order.load_id)
        self._orders.append(order)
        self._answer_for_ended()

    def accept_saves(
        self, plan_id: int | None, orders: Sequence[SaveOrder], after: PassEvent, snapshots: Mapping[int, Taken]
    ) -> None:
        """For each rank to save, behind the pass that it will have queued by then."""
        if plan_id is None:
            self._orders.append(SavesNow(saves=tuple(orders)))
        elif plan_id in self._plans:
            self._plans.remove(plan_id)
            self._orders.append(PlanEnded(plan_id=plan_id, saves=tuple(order.save_id for order in orders)))
        elif orders:
            raise AssertionError(f"plan {plan_id} saves something, and no rank was told of it")
        self._ledger.saves_sent(orders)
        self._saving.update(order.save_id for order in orders)
        self._answer_for_ended()

    def pass_begins(self) -> None:
        """Of use to each rank while it loads. A step of decoding that saves nothing says nothing else, as a rule, and costs no
        message otherwise.
        """
        if self._loading:
            self._orders.append(PassBegins())

    def plan_arrived(self, plan: PassPlan) -> None:
        """For each rank to ask for slots, and to know what its end is about."""
        self._plans.add(plan.plan_id)
        self._orders.append(plan)

    def plan_dropped(self, plan_id: int) -> None:
        """The pass will not run."""
        if plan_id in self._plans:
            self._plans.remove(plan_id)
            self._orders.append(PlanDropped(plan_id=plan_id))

    def no_more_passes(self) -> None:
        """Each rank ends with its own connector."""

    async def snapshot(self, plan: PassPlan, taken: dict[int, Taken]) -> None:
        """Each rank copies behind its own pass; one that has no slots refuses that save.

        **Cancellation:** they do all the same.
        """
        taken.update((order.save_id, _ELSEWHERE) for order in plan.saves if order.snapshot)
        await checkpoint()

    def withdraw(self, message: Withdrawal) -> None:
        """For each rank to stop; at once over where no rank has anything of it."""
        unread = self._ledger.withdrawn(message)
        if unread is None:
            self._orders.append(message)
            self._answer_for_ended()
        else:
            self._report(PassReport(unread=(unread,)))

    def reset(self, keys: KeySpace, revision: str) -> None:
        """Each rank spells its own keys."""
        self._orders.append(Renamed(revision=revision))

    def refuse_queued(self) -> None:
        """Each rank sees by itself whether the pool answers it."""

    def no_more_work(self, reason: str) -> None:
        """The server goes on without a cache."""
        self._orders.append(NoMoreWork(reason=reason))

    # -- what it is asked

    @property
    def copied_pages(self) -> list[GroupPages]:
        """Pages that a copy or a call of some rank may touch, as far as anybody here has heard."""
        untold = {number for order in self._orders for number in _begun_by(order)}
        return self._ledger.touched_but_for(untold)

    @property
    def called_pages(self) -> list[GroupPages]:
        """Pages in quarantine on some rank."""
        return self._ledger.quarantined

    def quarantine_full(self) -> bool:
        """No memory of this process is in quarantine."""
        return False

    def gets_hang(self) -> bool:
        """Whether what is loaded now would come to nothing on some rank."""
        return bool(self._loading_nothing)

    def reads(self) -> Reads:
        """Which way pages came, on all ranks together. Segments are the ranks' own."""
        return self._reads

    def pressure(
        self, calls: StoreCalls, backlog: SaveBacklog, breaker: BreakerState, degraded: str, unsaved_blocks: int
    ) -> Pressure:
        """As far as it shows here: slots and quarantine are the ranks' own (V4)."""
        return Pressure(
            backlog_bytes=backlog.bytes,
            backlog_passes=backlog.passes,
            backlog_refused_blocks=backlog.refused_blocks,
            backlog_saves=len(self._saving),
            queued_loads=0,
            parked_loads=len(self._loading),
            loads_left=max(0, self._max_parked_loads - len(self._loading)),
            loading=_NO_SLOTS,
            saving=_NO_SLOTS,
            ring=None,
            outstanding_calls=calls.outstanding,
            given_up_calls=calls.given_up,
            quarantined_page_bytes=0,
            breaker=breaker,
            degraded=degraded,
            unsaved_blocks=unsaved_blocks,
            reads=self._reads,
        )

    async def open(self, start: Start) -> None:
        """They are open."""
        await checkpoint()

    async def drained(self) -> None:
        """What the ranks have under way ends with their own connectors: nobody carries messages while this one closes."""
        await checkpoint()

    def unregister(self) -> None:
        """Nothing of this process is registered."""


#: What a scheduler's side speaks to.
Workers: TypeAlias = WorkerHalf | RemoteWorkers


def _begun_by(order: RankOrder) -> Iterable[int]:
    """The numbers of the loads and saves that begin with this order; one counter gives both."""
    match order:
        case LoadOrder():
            return (order.load_id,)
        case SavesNow():
            return (save.save_id for save in order.saves)
        case PlanEnded():
            return order.saves
        case _:
            return ()


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in {**one, **other}}
