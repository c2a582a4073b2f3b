"""The worker half: moves the pages of one rank between the engine's cache and the pool.

It knows orders, pages and hashes, and nothing of prompts: what to move is decided by the scheduler half (`akv/scheduler.py`),
which speaks to it in the messages of `values/messages.py`. `flow/load.py` and `flow/save.py` are its two ways.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from anyio import CancelScope, Event, current_time
from anyio.lowlevel import checkpoint

from akv.flow.calls import CallDesk
from akv.flow.copying import report_load
from akv.flow.gate import PoolGate
from akv.flow.load import load
from akv.flow.lull import Lulls
from akv.flow.parts import WorkerParts
from akv.flow.reads import DirectReads
from akv.flow.save import save
from akv.flow.snapshot import Ring, RingNews, Taken, take_snapshots
from akv.flow.staging import Staging
from akv.ownership.backlog import SaveBacklog
from akv.ownership.reservations import LoadRecord, Reservations
from akv.ownership.saves import Saves, SaveTicket
from akv.ownership.slots import SlotPool
from akv.ownership.store_calls import StoreCalls
from akv.plan.breaker import NOT_ASKED
from akv.plan.direct import off_by_settings
from akv.plan.keys import KeySpace
from akv.plan.terms import terms_of
from akv.ports import Ports
from akv.ports.calls import CallKind
from akv.ports.device import CopyStream, HostRegion, PassEvent
from akv.services.lanes import Lanes
from akv.services.poller import StreamPoller
from akv.services.reporter import TransferReporter
from akv.services.scout import SegmentScout
from akv.settings import Settings
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import Layout
from akv.values.messages import GroupPages, LoadOrder, PassPlan, PassReport, SaveOrder, Terms, Withdrawal
from akv.values.pressure import BreakerState, Pressure, Reads, StagingPressure
from akv.worker_memory import WorkerMemory

#: The reason with which a save is refused whose saver failed.
SAVER_FAILED = "saver_failed"


class WorkerHalf:
    """One rank's pages. Made by `open_connector()`. Called on the loop; all but `open` and `drained` is synchronous."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        keys: KeySpace,
        ports: Ports,
        desk: CallDesk,
        gate: PoolGate,
        poller: StreamPoller,
        report: Callable[[PassReport], None],
        capabilities: EngineCapabilities,
    ) -> None:
        self._settings = settings
        self._capabilities = capabilities
        self._ports = ports
        self._desk = desk
        self._tell_scheduler = report
        page_bytes = tuple(group.bytes_per_page for group in layout.groups)
        self._scout = SegmentScout(ports, desk.run, off_by_settings(settings))
        #: Filled when it opens: before that nothing moves.
        self._regions: list[HostRegion | None] = [None] * len(layout.groups)
        self._parts = WorkerParts(
            pool=ports.pool,
            device=ports.device,
            desk=desk,
            events=poller,
            keys=keys,
            page_bytes=page_bytes,
            reservations=Reservations(page_bytes),
            saves=Saves(page_bytes),
            regions=self._regions,
            report=self._report,
            load_deadline_s=settings.load_deadline_s,
            lease_s=settings.lease_s,
            probe_chunk=settings.probe_chunk,
            gate=gate,
            reads=DirectReads(self._scout, Lulls(useful=ports.device.copies_behind_calls)),
        )
        #: Those of a load or a save are taken when it begins, so a reset changes no name of what is under way (K8).
        self._loads = Lanes(self._parts.reservations.next)
        self._saves = Lanes(self._parts.saves.next)
        self._reporter = TransferReporter(page_bytes)
        #: Where window pages are copied at the pass; None for models without windows, and for roles that save nothing.
        self._ring: Ring | None = None
        self._ring_news = RingNews()
        self.memory = WorkerMemory(settings, layout, ports, desk)
        self._idle = Event()
        #: With which reason work ends that the gate does not let through.
        self._refusal = NOT_ASKED
        #: What it would tell a scheduler half in another process.
        counts, ahead = ports.device.page_counts, capabilities.lookahead
        self.terms = terms_of(settings, layout, keys, counts, ahead)

    async def open(self, start: Callable[[Callable[..., Any]], Awaitable[None]]) -> None:
        """Allocate and register memory for the store, then start loaders and savers, each as a service by `start`."""
        loading = await self.memory.staging(self._settings.loaders)
        saving = await self.memory.staging(self._settings.savers)
        self._ring = await self.memory.ring()
        # What follows a page in the engine's own memory is another page, and no place for a trailer.
        keeps = self._capabilities.keeps_quarantined_pages and not self.memory.trailer_bytes
        if keeps and self._ports.pool.lets_go_at_return:
            await self.memory.reach_pages(self._regions)
        if self._scout.off is None:
            await start(self._scout.run)
        for index in range(self._settings.loaders):
            stream = self._ports.device.open_stream(f"akv-load-{index}")
            await start(partial(self._loads.run, partial(self._load, loading, stream)))
        for index in range(self._settings.savers):
            stream = self._ports.device.open_stream(f"akv-save-{index}")
            await start(partial(self._saves.run, partial(self._save, saving, stream)))

    def fence(self) -> PassEvent:
        """Mark the present end of the execution stream. Taken before anything is handed over: a device that fails here has
        taken nothing with it (M6). Raises DeviceError.
        """
        return self._ports.device.record()

    def accept_load(self, order: LoadOrder, fence: PassEvent) -> None:
        """Take over the order's pages: the fence orders every copy behind what the engine had queued by then (D5)."""
        record = self._parts.reservations.accept(order, fence, current_time())
        self._reporter.load_queued(order)
        if not order.groups:
            # Honoured with nothing: complete at once, and told in the same way as any other (D9).
            report_load(self._parts, self._parts.reservations.landed(record))
        elif not self._parts.gate.lets_through():
            self.refuse_queued()
        else:
            self._loads.wake()

    def pass_begins(self) -> None:
        """The engine has planned a pass, whatever it saves."""
        if self._parts.reads is not None:
            self._parts.reads.lulls.pass_begins()

    def plan_arrived(self, plan: PassPlan) -> None:
        """A pass is planned: ask for the slots of its window pages (S4)."""
        if self._ring is not None:
            self._ring.claims.ask(plan.plan_id, (o for o in plan.saves if o.snapshot), self._ring_news.wake)

    def plan_dropped(self, plan_id: int) -> None:
        """The pass will not run: its slots go back."""
        if self._ring is not None:
            self._ring.claims.drop(plan_id)

    def no_more_passes(self) -> None:
        """The connector closes: plans that are open will not run, and no segment is mapped any more."""
        self._scout.stop()
        if self._ring is not None:
            self._ring.claims.drop_all()

    async def snapshot(self, plan: PassPlan, taken: dict[int, Taken]) -> None:
        """Copy the window pages of a pass that has been queued (S3). As `take_snapshots`."""
        if self._ring is not None and self._ring.claims.has(plan.plan_id):
            # Whoever is cancelled or preempted meanwhile gets its pages back behind the copies: a load that filled them again
            # would not wait for these.
            owners = self._parts.saves.begin_copying(order for order in plan.saves if order.snapshot)
            try:
                await take_snapshots(self._ring, self._ring_news, self._ports.device, self._desk, plan, taken)
            finally:
                self._report(PassReport(unread=tuple(self._parts.saves.end_copying(owners))))

    def accept_saves(
        self, plan_id: int | None, orders: Sequence[SaveOrder], after: PassEvent, snapshots: Mapping[int, Taken]
    ) -> None:
        """The pass that computed these pages has been queued on the execution stream: read them behind its event, or, where
        they were copied at the pass, from their slots. `plan_id`: of the plan that ended with it, if one did.
        """
        if not orders:
            return
        for order in orders:
            self._parts.saves.accept(order, after, snapshots.get(order.save_id))
            self._reporter.save_queued(order)
        if not self._parts.gate.lets_through():
            self.refuse_queued()
        else:
            self._saves.wake()

    def refuse_queued(self) -> None:
        """The pool cannot be asked: what is queued ends now, and its pages and slots go back (O7).

        Of what is under way nothing further begins; it ends with the call or the copy that it waits for.
        """
        loads = self._parts.reservations.refuse_queued(self._refusal)
        self._report(PassReport(loads=tuple(loads), saves=tuple(self._parts.saves.refuse(self._refusal))))

    def no_more_work(self, reason: str) -> None:
        """The gate is shut for good. Loads fail when nothing can write into their pages, queued saves are refused (O8)."""
        self._refusal = reason
        self.no_more_passes()
        self.fail_loads(reason)
        self.refuse_queued()

    def fail_loads(self, reason: str) -> None:
        """No load is wanted any more. Each fails when nothing can write into its pages."""
        records, loads = self._parts.reservations.fail_all(reason)
        for record in records:
            if record.interrupt is not None:
                record.interrupt()
        self._report(PassReport(loads=tuple(loads)))

    @property
    def copied_pages(self) -> list[GroupPages]:
        """The engine's pages that copies write or read whose end nobody has seen."""
        return [*self._parts.reservations.written, *self._parts.saves.read]

    def quarantine_full(self) -> bool:
        """Whether given-up calls, and peers after a call's end, hold more memory than `quarantine_max_bytes` (M3); or so many
        slots of one direction for good that a batch has no place there.
        """
        pools = [staging.slots for staging in self.memory.stagings]
        if self._ring is not None:
            pools.append(self._ring.claims.host)
        slots = sum(pool.quarantined_bytes for pool in pools)
        pages = self._parts.reservations.quarantined_bytes + self._parts.saves.quarantined_bytes
        half_of_slots = sum(pool.count * pool.slot_bytes for pool in pools) // 2
        full = slots + pages > (self._settings.quarantine_max_bytes or half_of_slots)
        return full or any(staging.slots.usable < staging.batch for staging in self.memory.stagings)

    def pressure(
        self, calls: StoreCalls, backlog: SaveBacklog, breaker: BreakerState, degraded: str, unsaved_blocks: int
    ) -> Pressure:
        """How busy it is (V4)."""
        reservations, saves = self._parts.reservations, self._parts.saves
        loading, saving = (_pressure(staging.slots) for staging in self.memory.stagings)
        return Pressure(
            backlog_bytes=backlog.bytes,
            backlog_passes=backlog.passes,
            backlog_refused_blocks=backlog.refused_blocks,
            backlog_saves=saves.active,
            queued_loads=reservations.queued,
            parked_loads=reservations.active,
            loads_left=max(0, self._settings.max_parked_loads - reservations.active),
            loading=loading,
            saving=saving,
            ring=None if self._ring is None else _pressure(self._ring.claims.host),
            outstanding_calls=calls.outstanding,
            given_up_calls=calls.given_up,
            quarantined_page_bytes=reservations.quarantined_bytes + saves.quarantined_bytes,
            breaker=breaker,
            degraded=degraded,
            unsaved_blocks=unsaved_blocks,
            reads=self.reads(),
        )

    def reads(self) -> Reads:
        """Which way the pages of loads came."""
        return self._reporter.reads(self._scout.segments)

    def withdraw(self, message: Withdrawal) -> None:
        """Stop what this incarnation still has queued. What runs is waited for, by its events, and reported then."""
        records, loads = self._parts.reservations.withdraw(message.request_id, message.incarnation)
        for record in records:
            if record.interrupt is not None:
                record.interrupt()
        saves, unread = self._parts.saves.withdraw(message.request_id, message.incarnation)
        self._report(PassReport(loads=tuple(loads), saves=tuple(saves), unread=tuple(unread)))

    def gets_hang(self) -> bool:
        """Whether a get stands still: the client waits a minute for a holder that does, and no load could begin in time."""
        return self._desk.hangs(CallKind.GET)

    @property
    def all_terms(self) -> tuple[Terms, ...]:
        """Its own."""
        return (self.terms,)

    @property
    def called_pages(self) -> list[GroupPages]:
        """None beside those that calls of this process touch."""
        return []

    def reset(self, keys: KeySpace, revision: str) -> None:
        """New weights, of this name: whatever begins from here on has these names. What was queued has been withdrawn."""
        self._parts = msgspec.structs.replace(self._parts, keys=keys)

    async def drained(self) -> None:
        """Return when no load and no save is under way. Cancellation: nothing is held."""
        await checkpoint()
        while self._parts.reservations.active or self._parts.saves.active:
            self._idle = Event()
            await self._idle.wait()

    def unregister(self) -> None:
        """Take back from the store what it was told of. Only when no call is outstanding."""
        self.memory.unregister()
        self._scout.segments.clear()

    async def _load(self, staging: Staging, stream: CopyStream, record: LoadRecord) -> None:
        with CancelScope() as scope:
            record.interrupt = scope.cancel
            try:
                await load(self._parts, staging, stream, record)
            finally:
                record.interrupt = None

    async def _save(self, staging: Staging, stream: CopyStream, ticket: SaveTicket) -> None:
        try:
            await save(self._parts, staging, stream, ticket)
        except Exception:
            # It has no saver any more, and would never end.
            self._parts.saves.abandon(ticket, SAVER_FAILED, lambda result: self._report(PassReport(saves=(result,))))
            raise

    def _report(self, report: PassReport) -> None:
        for result in report.loads:
            self._reporter.load_ended(result)
            self._reporter.quarantined(result)
        for save_result in report.saves:
            self._reporter.save_ended(save_result)
        for unread in report.unread:
            self._reporter.quarantined(unread)
        for released in report.released:
            self._reporter.released(released)
        if report.loads or report.saves or report.unread or report.released:
            self._tell_scheduler(report)
            self._idle.set()


def _pressure(slots: SlotPool) -> StagingPressure:
    return StagingPressure(slots=slots.count, free=slots.free, quarantined=slots.quarantined, withheld=slots.withheld)
