"""The two halves of a connector joined in one process: their messages in memory, their tasks, and what ended and nobody
fetched.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
from anyio import Event, current_time, move_on_after, sleep
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint

from akv import observe
from akv.errors import DeviceError, PagesLost, SettingsError
from akv.flow.calls import CallDesk
from akv.flow.sealing import SealedPool
from akv.flow.snapshot import Snapshot
from akv.ownership.plans import UnknownPlan
from akv.ownership.request_record import LoadHold, RequestRecord
from akv.ownership.store_calls import StoreCalls
from akv.plan.keys import KeySpace
from akv.plan.lifecycle import Phase
from akv.plan.terms import check_terms
from akv.ports import Ports
from akv.ports.calls import CallKind, CallSize
from akv.scheduler import SchedulerHalf
from akv.services.breaker import PoolBreaker
from akv.services.health import HealthLatch
from akv.services.notices import Changed, Notices
from akv.services.poller import StreamPoller
from akv.services.supervisor import Supervisor
from akv.services.teller import StatsTeller
from akv.settings import Settings
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import Layout
from akv.values.messages import LoadState, PagesPerGroup, PagesReleased, PassPlan, pages_per_group
from akv.values.requests import Completion, LoadCompleted, SavesCompleted
from akv.worker import WorkerHalf

#: Completions that are kept for `completed()`. An engine that polls fetches them every pass; one that never does must not grow
#: by those whose waits were cancelled.
MOST_UNFETCHED = 65_536
#: The reason with which loads fail and saves are refused once the connector goes on without a cache.
DEGRADED = "degraded"
#: Seconds beyond the shutdown deadline in which the threads that are idle by then may end.
THREADS_GRACE_S = 1.0


Ended = TypeVar("Ended")


#: What to do about a reset without a name.
NAME_IT = "Give the revision of the weights, 'step-1200' say: the same in every server that runs them."


def _is_over(record: RequestRecord) -> bool:
    return record.phase in (Phase.CLOSED, Phase.LOST)


class Halves:
    """One server's scheduler half and the worker half of its one rank, with what both of them hang on."""

    def __init__(self, settings: Settings, layout: Layout, ports: Ports, capabilities: EngineCapabilities) -> None:
        self.settings = settings
        self._layout = layout
        self.groups = len(layout.groups)
        self.latch = HealthLatch()
        self.notices = Notices(self.latch)
        self.changed = Changed(self.latch)
        self.calls = StoreCalls()
        #: What ended and nobody fetched, by the number of the load or of the request's incarnation (one counter gives both).
        self._completions: dict[int, LoadCompleted | SavesCompleted] = {}
        #: Pages that left quarantine, for `completed()`.
        self._released: list[PagesReleased] = []
        self._runner = ports.runner
        self.services = Supervisor(self._service_failed)
        #: Set when it turns into "no cache".
        self._degraded = Event()
        #: Whether what is under way since then has had its time; what has no end by now has none.
        self._overdue = False
        #: Requests whose pages nobody can give back, by incarnation; and those among them that nobody was told of.
        self._lost: dict[int, PagesLost] = {}
        self._lost_untold: list[PagesLost] = []
        #: Whole blocks that passes computed without a cache.
        self.unsaved_blocks = 0
        self._tokens_per_block = layout.tokens_per_block
        self._poller = StreamPoller(settings.poll_tick_s)
        keys = KeySpace.of_settings(settings, layout)
        if settings.integrity != "off":
            ports = msgspec.structs.replace(ports, pool=SealedPool(ports.pool, settings.integrity_secret.encode()))
        self.breaker = breaker = PoolBreaker()
        self._desk = desk = CallDesk(ports.runner, self.calls, self._poller, breaker)
        # Every key of a page has more parts, so nobody writes this one.
        self._ask = partial(desk.run, CallKind.PROBE, partial(ports.pool.probe, [f"{keys.space}/breaker"]), CallSize(1))
        self.scheduler = SchedulerHalf(settings, layout, keys, ports, desk, breaker, self._ended, capabilities)
        report = self.scheduler.on_report
        self.worker = WorkerHalf(settings, layout, keys, ports, desk, breaker, self._poller, report, capabilities)
        self._teller = StatsTeller(settings, ports.board, desk.run, self.worker.reads)
        breaker.quarantine_full = self.worker.quarantine_full
        breaker.on_open = self.worker.refuse_queued
        breaker.on_close = self.scheduler.requests.new_generation
        check_terms(self.scheduler.terms, self.worker.terms)
        entries = self.scheduler.worker
        entries.fence = self.worker.fence
        entries.accept_load = self.worker.accept_load
        entries.accept_saves = self.worker.accept_saves
        entries.withdraw = self.worker.withdraw
        entries.pass_begins = self.worker.pass_begins
        entries.plan_arrived = self.worker.plan_arrived
        entries.plan_dropped = self.worker.plan_dropped
        self.scheduler.no_cache = lambda: bool(self.latch.degraded)

    async def open(self, group: TaskGroup) -> None:
        """Start every service in `group`; usable when it returns. What fails is raised, and `close` undoes the rest."""
        start = partial(self.services.start, group)
        await start(self._deliver_ends, sees_ends=True)
        await start(self._poller.run, sees_ends=True)
        await start(partial(self.breaker.run, self._ask))
        await start(self.scheduler.holds.run)
        await start(self._name_lost)
        await self.worker.open(start)
        await start(self._teller.run)
        self.services.all_started = True
        if self.settings.key_format != "akv":
            observe.emit(observe.KEYS_FOREIGN, key_format=self.settings.key_format)

    async def close(self, *, orderly: bool) -> int:
        """Refuse new work, end or cancel what is under way, and return how many calls are still outstanding (O6).

        An orderly end lets queued saves run out, any other withdraws them, and so does a broken connector, whose marks nobody
        may trust. Shielded; takes at most the shutdown deadline. The services go on until `stop`, since they deliver the ends.
        """
        deadline = current_time() + self.settings.shutdown_deadline_s
        orderly = orderly and not self.latch.tripped
        self.latch.close()
        self.scheduler.passes.no_more_passes()
        self.worker.no_more_passes()
        self.breaker.stop()
        self._teller.stop()
        for record in self.scheduler.requests.records:
            if not orderly or not self._finished(record):
                self.scheduler.cancel(record)
        with move_on_after(self.settings.shutdown_deadline_s, shield=True):
            await self.worker.drained()
            # Calls that nobody waits for any more, too: a registration of memory, a get that was given up.
            await self._desk.drained()
        self._teller.tell()
        with move_on_after(max(0.0, deadline - current_time()) + THREADS_GRACE_S, shield=True):
            await self._runner.close(max(0.0, deadline - current_time()))
        return self.calls.outstanding

    async def reset(self, revision: str) -> None:
        """New weights (K8). All that is open ends; the names change before anything waits, so nothing gets in between."""
        if not revision:
            raise SettingsError(
                "revision", revision, "new weights need a name, or their pages would be found under the old one's", NAME_IT
            )
        keys = KeySpace.of_settings(self.settings, self._layout, revision=revision)
        ending = self.scheduler.requests.records
        for record in ending:
            self.cancel(record)
        self.scheduler.reset(keys)
        self.worker.reset(keys)
        observe.emit(observe.CONNECTOR_RESET, key_space=keys.space, requests=len(ending))
        await checkpoint()
        for record in ending:
            await self.notices.until(record.incarnation, partial(_is_over, record))

    @property
    def touched_pages(self) -> PagesPerGroup:
        """The engine's pages that a store call touches; and copies, once nobody but the shutdown waits for their end."""
        unseen = self.worker.copied_pages if self.latch.tripped or self.latch.degraded else []
        lost = [lost.pages for lost in self._lost.values()]
        touched = pages_per_group([*self.calls.pages, *unseen], self.groups)
        return _merged([touched, *lost]) if lost else touched

    def fetch(self) -> list[Completion]:
        """What ended since the last fetch, oldest first. Raises PagesLost once for each request that nobody was told of."""
        if self._lost_untold:
            raise self._lost_untold.pop(0)
        completions = [self._naming(ended) for ended in self._completions.values()]
        # Behind them: an engine first learns which pages are in quarantine, then that they left it.
        completions += self._released
        self._completions.clear()
        self._released.clear()
        self.changed.clear()
        return completions

    def fetched(self, number: int) -> None:
        """The end of this load or request was told by the return of a wait, and is not told again."""
        self._completions.pop(number, None)
        if not self._completions and not self._released and not self._lost_untold:
            self.changed.clear()

    async def until(self, number: int, record: RequestRecord, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`, woken by what ends under `number`. Raises PagesLost if nobody will see that end any more, and
        what the latch says. Cancellation: nothing is held.
        """

        def ended() -> bool:
            if holds():
                return True
            lost = self._lost.get(record.incarnation)
            if lost is not None:
                if lost in self._lost_untold:
                    self._lost_untold.remove(lost)
                raise lost
            return False

        await self.notices.until(number, ended)

    def is_lost(self, record: RequestRecord) -> bool:
        """Whether nobody can give this request's pages back."""
        return record.phase is Phase.LOST

    def cancel(self, record: RequestRecord) -> None:
        """The request is not wanted any more."""
        self.scheduler.cancel(record)
        self._lose_overdue()

    def preempt(self, record: RequestRecord) -> None:
        """The request's pages are wanted back."""
        self.scheduler.preempt(record)
        self._lose_overdue()

    def finish(self, record: RequestRecord) -> None:
        """The request is complete."""
        self.scheduler.finish(record)
        self._lose_overdue()

    def _naming(self, ended: LoadCompleted | SavesCompleted) -> Completion:
        """The completion, with the pages of its incarnation that are in quarantine at this moment and were not named yet."""
        if isinstance(ended, LoadCompleted) and ended.state is LoadState.LOADED:
            # Its own pages are all in place; what a save left in quarantine comes with the end of the request.
            return ended
        quarantined = self.scheduler.requests.pages.tell((ended.request_id, ended.incarnation))
        return msgspec.structs.replace(ended, quarantined=quarantined) if quarantined else ended

    async def after_forward(self, plan: PassPlan) -> None:
        """Copy the window pages of a pass that has been queued, then hand its saves over."""
        planned, after = self.end_plan(lambda: self.scheduler.passes.take(plan))
        if self.latch.degraded and self.settings.role != "consumer":
            self.unsaved_blocks += sum(max(0, p.end - p.before // self._tokens_per_block) for p in planned.parts)
        snapshots: dict[int, Snapshot] = {}
        try:
            # Asked always: slots of orders that are not wanted any more go back.
            with self.latch.ending_waits():
                await self.worker.snapshot(planned.plan, snapshots)
        except BaseException:
            # Cancelled, as a rule: the pass ran all the same, and its pages hold KV. What ended the wait goes first.
            with suppress(DeviceError):
                self.scheduler.passes.hand_over(planned, after, snapshots)
            raise
        self.scheduler.passes.hand_over(planned, after, snapshots)
        await checkpoint()

    def end_plan(self, end: Callable[[], Ended]) -> Ended:
        """End a plan. One that was never made means that passes are misreported: the marks can no longer be trusted (L6)."""
        try:
            return end()
        except UnknownPlan as error:
            self._fail(str(error), error)
            raise

    def _ended(self, ended: LoadHold | SavesCompleted | PagesReleased) -> None:
        if isinstance(ended, PagesReleased):
            # Never dropped: the pages would be out of use for ever. There are no more than the pages in quarantine.
            self._released.append(ended)
            self.changed.set()
            return
        if isinstance(ended, LoadHold):
            if ended.completed is None:
                raise AssertionError("a load that ended has a terminal state")
            number = ended.load_id
            self._completions[number] = ended.completed
        else:
            number = ended.incarnation
            self._completions[number] = ended
        if len(self._completions) > MOST_UNFETCHED:
            del self._completions[next(iter(self._completions))]
        self.notices.wake(number)
        self.changed.set()

    def _finished(self, record: RequestRecord) -> bool:
        """Finish a request that its owner left open. False if the device cannot say any more what it has computed."""
        with suppress(DeviceError):
            self.scheduler.finish(record)
            return True
        return False

    async def _deliver_ends(self, *, task_status: TaskStatus[None]) -> None:  # noqa: ASYNC128 - the runner says it
        """Run the runner's service, and say so when it ends."""
        try:
            await self._runner.serve(task_status=task_status)
        finally:
            self._desk.no_more_ends()

    def _service_failed(self, error: Exception) -> bool:
        """Whether the program around the connector goes on (O8)."""
        return self._fail(f"a service failed with {type(error).__name__}: {error}", error)

    def _fail(self, why: str, error: BaseException) -> bool:
        """The connector is broken or, where that is wanted and it is open, without a cache. Says whether the block goes on."""
        if self.settings.on_failure == "degrade" and self.services.all_started:
            # Each of them is told: what fails later may be another fault.
            observe.emit(observe.CONNECTOR_DEGRADED, reason=type(error).__name__, error=error)
            if self.latch.degrade(why):
                self._serve_no_more()
            return True
        self.latch.break_(why)
        observe.emit(observe.CONNECTOR_BROKEN, reason=type(error).__name__, error=error)
        # In the midst of closing, too: what nobody takes up any more must not be waited for.
        self.worker.refuse_queued()
        return False

    def _serve_no_more(self) -> None:
        """From now on there is no cache. What waits ends: at once, or when what touches its pages has ended."""
        self.breaker.shut()
        self.worker.no_more_work(DEGRADED)
        for record in self.scheduler.requests.records:
            if record.phase is Phase.FINISHING:
                self.scheduler.cancel(record)
        self._degraded.set()

    async def _name_lost(self, *, task_status: TaskStatus[None]) -> None:
        """Once degraded, give the copies that are under way as long as a shutdown would; then tell whose pages are lost.

        Nothing begins any more, so what has no end by then was the failed service's to see, or hangs in the device.
        """
        task_status.started()
        await self._degraded.wait()
        await sleep(self.settings.shutdown_deadline_s)
        self._overdue = True
        self._lose_overdue()
        # A pass whose snapshot no thread has queued by now: nobody will use the copy.
        self._desk.no_more_ends()

    def _lose_overdue(self) -> None:
        for record in self.scheduler.requests.records if self._overdue else ():
            hold = record.load
            if hold is None and record.phase is Phase.OPEN:
                continue
            pages = pages_per_group(self.scheduler.requests.lose(record), self.groups)
            lost = self._lost[record.incarnation] = PagesLost(record.request_id, record.incarnation, pages)
            self._lost_untold.append(lost)
            observe.emit(
                observe.PAGES_LOST,
                request_id=record.request_id,
                incarnation=record.incarnation,
                pages=sum(map(len, pages)),
            )
            for number in (record.incarnation, *(() if hold is None else (hold.load_id,))):
                self.notices.wake(number)
            self.changed.set()


def _merged(tables: Iterable[PagesPerGroup]) -> PagesPerGroup:
    """Every page of these once, per group."""
    filled = [pages for pages in tables if pages]
    return tuple(tuple(sorted(set().union(*columns))) for columns in zip(*filled, strict=True))
