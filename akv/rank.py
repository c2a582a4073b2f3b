"""One rank's side of a server with several: a worker half, to which orders come as messages, and whose reports leave as such.

The engine carries both: orders to every rank, in the order in which the scheduler half said them, and each rank's report back.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec
from anyio import Event, Lock
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from akv.errors import DeviceError, EngineContractError, PagesLost
from akv.flow.snapshot import Taken
from akv.plan.keys import KeySpace
from akv.ports import Ports
from akv.services.notices import Changed
from akv.services.teller import StatsTeller
from akv.settings import Settings
from akv.side import DEGRADED, Side, sealed
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import Layout
from akv.values.messages import (
    MESSAGE_VERSION,
    LoadOrder,
    LoadResult,
    LoadState,
    NoMoreWork,
    PagesPerGroup,
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
    SaveResult,
    SavesNow,
    Withdrawal,
    pages_per_group,
)
from akv.values.pressure import BreakerState
from akv.worker import WorkerHalf

#: The reason with which loads fail and saves are refused when this rank closes.
CLOSED = "closed"
#: The reasons with which a save or a load ends that never began here: no slots for window pages, a device that failed.
NO_SNAPSHOT, NO_FENCE = "no_snapshot", "device"


class Rank(Side):
    """The worker half of one rank, with what it hangs on."""

    worker: WorkerHalf

    def __init__(self, settings: Settings, layout: Layout, ports: Ports, capabilities: EngineCapabilities, rank: int) -> None:
        keys = KeySpace.of_settings(settings, layout, rank=rank)
        ports = sealed(settings, ports)
        super().__init__(settings, ports, keys.space)
        self._layout = layout
        self.rank = rank
        #: By layer group, whether this rank stores it: of ranks whose pages are equal one does (K3).
        self._writes = [keys.writes(group) for group in range(len(layout.groups))]
        #: Set while there is something to report.
        self.changed = Changed(self.latch)
        self.worker = WorkerHalf(
            settings, layout, keys, ports, self._desk, self.breaker, self._poller, self._ended, capabilities
        )
        self.breaker.quarantine_full = self.worker.quarantine_full
        self.breaker.on_open = self._on_pool_gone
        self.breaker.on_close = self._on_pool_returned
        self._teller = StatsTeller(settings, ports.board, self._desk.run, self.worker.reads)
        #: What ended since the last report, in the order of the ends.
        self._unreported: list[PassReport] = []
        self._pool_returned = False
        #: What was said last of whether it loads nothing at present.
        self._loads_nothing = False
        #: Orders that were handed over and not carried out: whoever carries them out may be cancelled in between.
        self._orders: deque[RankOrder] = deque()
        self._turn = Lock()
        #: Open plans, by number.
        self._plans: dict[int, PassPlan] = {}
        #: Loads that have not ended, by number, and whose they are.
        self._loads: dict[int, tuple[str, int]] = {}
        #: Preempted incarnations whose pages something still reads, loads that still write some, and what wakes whoever waits.
        self._read_still: set[tuple[str, int]] = set()
        self._written_still: set[int] = set()
        self._let_go = Event()

    @property
    def hello(self) -> bytes:
        """What the scheduler half is to be opened with."""
        return msgspec.msgpack.encode(RankHello(rank=self.rank, terms=self.worker.terms, layout=self._layout))

    async def _open_rest(self, group: TaskGroup) -> None:
        start = partial(self.services.start, group)
        await self.worker.open(start)

    def _end_work(self, *, orderly: bool) -> None:
        """Loads are of no use to anybody any more."""
        self._end_orders()
        if orderly:
            self.worker.fail_loads(CLOSED)
        else:
            self.worker.no_more_work(CLOSED)

    @property
    def touched_pages(self) -> PagesPerGroup:
        """As `Worker.touched_pages`."""
        unseen = self.worker.copied_pages if self.latch.tripped or self.latch.degraded else []
        return pages_per_group([*self.calls.pages, *unseen], len(self._layout.groups))

    @property
    def requests(self) -> int:
        """None: it knows orders alone."""
        return 0

    # -- orders

    async def carry_out(self, orders: bytes) -> None:
        """As `Worker.carry_out`."""
        if orders:
            self._orders.extend(_decoded(orders))
        async with self._turn:
            await checkpoint()
            # Whatever comes behind a preemption, the engine's next pass too, may write the pages that it gave back.
            await self._until_let_go()
            while self._orders:
                await self._carry_out(self._orders.popleft())
                await self._until_let_go()

    def _end_orders(self) -> None:
        """What was ordered and not carried out never will be: whoever waits for it hears so, as of what was."""
        while self._orders:
            order = self._orders.popleft()
            match order:
                case LoadOrder():
                    self._fail_load(order, CLOSED)
                case SavesNow():
                    self._end_saves(order.saves, reason=CLOSED)
                case PlanEnded():
                    plan = self._plans.pop(order.plan_id, PassPlan(plan_id=order.plan_id))
                    self._end_saves((each for each in plan.saves if each.save_id in order.saves), reason=CLOSED)
                case PassPlan():
                    self._plans[order.plan_id] = order
                case Withdrawal():
                    self.worker.withdraw(order)
                case _:
                    pass

    async def _until_let_go(self) -> None:
        """Wait until nothing touches pages of preempted requests any more. Raises PagesLost, once, if nobody will see that."""
        while self._read_still or self._written_still:
            if self._overdue:
                request_id, incarnation = next(iter(self._read_still or [self._loads[next(iter(self._written_still))]]))
                self._read_still.clear()
                self._written_still.clear()
                raise PagesLost(request_id, incarnation, self.touched_pages)
            self._let_go = Event()
            await self._let_go.wait()

    def _lose_overdue(self) -> None:
        self._let_go.set()

    async def _carry_out(self, order: RankOrder) -> None:
        match order:
            case LoadOrder():
                self._load(order)
            case PassBegins():
                self.worker.pass_begins()
            case PassPlan():
                self._plans[order.plan_id] = order
                self.worker.plan_arrived(msgspec.structs.replace(order, saves=self._own(order.saves)))
            case PlanEnded():
                await self._end(order)
            case PlanDropped():
                self._plans.pop(order.plan_id, None)
                self.worker.plan_dropped(order.plan_id)
            case SavesNow():
                self._save(order.saves, {})
            case Withdrawal():
                if order.preempted:
                    who = (order.request_id, order.incarnation)
                    self._read_still.add(who)
                    self._written_still.update(number for number, of in self._loads.items() if of == who)
                self.worker.withdraw(order)
            case Renamed():
                keys = KeySpace.of_settings(self.settings, self._layout, revision=order.revision, rank=self.rank)
                self.worker.reset(keys, order.revision)
            case NoMoreWork():
                self.breaker.shut()
                self.worker.no_more_work(order.reason)

    def _load(self, order: LoadOrder) -> None:
        self._loads[order.load_id] = (order.request_id, order.incarnation)
        try:
            fence = self.worker.fence()
        except DeviceError:
            self._fail_load(order, NO_FENCE)
        else:
            self.worker.accept_load(order, fence)

    def _fail_load(self, order: LoadOrder, reason: str) -> None:
        """Its pages are untouched, and whoever waits for it must hear of it."""
        failed = LoadResult(
            load_id=order.load_id,
            request_id=order.request_id,
            incarnation=order.incarnation,
            state=LoadState.FAILED,
            reason=reason,
        )
        self._ended(PassReport(loads=(failed,)))

    async def _end(self, ended: PlanEnded) -> None:
        """The pass is queued on the execution stream: copy its window pages, then hand its saves over."""
        plan = self._plans.pop(ended.plan_id, None)
        if plan is None:
            return
        wanted = set(ended.saves)
        orders = tuple(order for order in plan.saves if order.save_id in wanted)
        taken: dict[int, Taken] = {}
        try:
            # Asked always: slots of orders that are not wanted any more go back.
            await self.worker.snapshot(msgspec.structs.replace(plan, saves=self._own(orders)), taken)
        finally:
            # Also where the wait was cancelled: the pass ran all the same, and its pages hold KV.
            self._save(orders, taken)

    def _own(self, orders: Sequence[SaveOrder]) -> tuple[SaveOrder, ...]:
        """The orders without what another rank stores; those of which nothing is left are not among them."""
        if all(self._writes):
            return tuple(orders)
        own = (
            msgspec.structs.replace(order, groups=tuple(columns for columns in order.groups if self._writes[columns.group]))
            for order in orders
        )
        return tuple(order for order in own if order.groups)

    def _save(self, orders: Sequence[SaveOrder], taken: Mapping[int, Taken]) -> None:
        own = self._own(orders)
        if len(own) < len(orders):
            # Another rank's report says how they end; for this one nothing is left to do.
            mine = {order.save_id for order in own}
            self._end_saves((order for order in orders if order.save_id not in mine), stored=True)
        there = [order for order in own if order.save_id in taken or not order.snapshot]
        try:
            after = self.worker.fence()
        except DeviceError:
            for snapshot in taken.values():
                snapshot.leave()
            self._end_saves(own, reason=NO_FENCE)
            return
        self._end_saves((order for order in own if order.snapshot and order.save_id not in taken), reason=NO_SNAPSHOT)
        self.worker.accept_saves(None, there, after, taken)

    def _end_saves(self, orders: Iterable[SaveOrder], *, stored: bool = False, reason: str = "") -> None:
        """What ends here without having begun: all of it stored, as far as this rank is concerned, or all refused."""
        ended = []
        for order in orders:
            blocks = tuple(sorted({block for columns in order.groups for block in columns.blocks}))
            ended.append(
                SaveResult(
                    save_id=order.save_id,
                    request_id=order.request_id,
                    incarnation=order.incarnation,
                    stored=blocks if stored else (),
                    refused=() if stored else blocks,
                    reason=reason,
                )
            )
        if ended:
            self._ended(PassReport(saves=tuple(ended)))

    # -- reports

    def take_report(self) -> bytes:
        """As `Worker.take_report`."""
        # A lookup's offer would be in vain on every rank: the load of one has failed for all (D3).
        loads_nothing = self.worker.gets_hang() or self.breaker.state is not BreakerState.CLOSED
        if loads_nothing == self._loads_nothing and not self.changed.is_set():
            return b""
        reports, self._unreported = self._unreported, []
        said = RankReport(
            rank=self.rank,
            report=reports[0] if len(reports) == 1 else _joined(reports),
            pool_returned=self._pool_returned,
            loads_nothing=loads_nothing,
            degraded=self.latch.degraded,
        )
        self._pool_returned, self._loads_nothing = False, loads_nothing
        self.changed.clear()
        return msgspec.msgpack.encode(said)

    def _ended(self, report: PassReport) -> None:
        self._unreported.append(report)
        for unread in report.unread:
            self._read_still.discard((unread.request_id, unread.incarnation))
        for load in report.loads:
            self._loads.pop(load.load_id, None)
            self._written_still.discard(load.load_id)
        if report.unread or report.loads:
            self._let_go.set()
        self.changed.set()

    def _on_pool_gone(self) -> None:
        self.worker.refuse_queued()
        self.changed.set()

    def _on_pool_returned(self) -> None:
        self._pool_returned = True
        self.changed.set()

    def _end_waiting(self) -> None:
        self.worker.no_more_work(DEGRADED)
        self.changed.set()


def _joined(reports: list[PassReport]) -> PassReport:
    return PassReport(
        loads=tuple(load for report in reports for load in report.loads),
        saves=tuple(save for report in reports for save in report.saves),
        unread=tuple(unread for report in reports for unread in report.unread),
        released=tuple(released for report in reports for released in report.released),
    )


def _decoded(orders: bytes) -> tuple[RankOrder, ...]:
    try:
        said = msgspec.msgpack.decode(orders, type=RankOrders)
    except msgspec.MsgspecError as error:
        raise EngineContractError(
            f"{len(orders)} bytes are no orders ({error}): hand over what Scheduler.take_orders() returned, as it is"
        ) from error
    if said.version != MESSAGE_VERSION:
        raise EngineContractError(
            f"orders of version {said.version}, and this worker half takes version {MESSAGE_VERSION}: run one version of akv "
            "on all ranks"
        )
    return said.orders
