"""A scheduler half and what it speaks to: the worker half of the same process, by calls, or those of several ranks in others,
by messages. Keeps what ended and nobody fetched.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from akv import observe
from akv.errors import DeviceError, PagesLost, SettingsError
from akv.flow.snapshot import Taken
from akv.ownership.plans import UnknownPlan
from akv.ownership.request_record import LoadHold, RequestRecord
from akv.plan.keys import KeySpace, ServerKeys
from akv.plan.lifecycle import Phase
from akv.plan.terms import check_terms
from akv.ports import Ports
from akv.scheduler import SchedulerHalf
from akv.services.notices import Changed, Notices
from akv.services.teller import StatsTeller
from akv.settings import Settings
from akv.side import DEGRADED, Side, sealed
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import Layout
from akv.values.messages import LoadState, PagesPerGroup, PagesReleased, PassPlan, pages_per_group
from akv.values.requests import Completion, LoadCompleted, SavesCompleted
from akv.worker import WorkerHalf
from akv.workers import RemoteWorkers, Workers

#: Completions that are kept for `completed()`. An engine that polls fetches them every pass; one that never does must not grow
#: by those whose waits were cancelled.
MOST_UNFETCHED = 65_536


Ended = TypeVar("Ended")


#: What to do about a reset without a name.
NAME_IT = "Give the revision of the weights, 'step-1200' say: the same in every server that runs them."


def _is_over(record: RequestRecord) -> bool:
    return record.phase in (Phase.CLOSED, Phase.LOST)


class Halves(Side):
    """One server's scheduler half and the worker half of its one rank, with what both of them hang on; or, where its worker
    halves live in other processes, the former with those as messages reach them.
    """

    worker: Workers

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        ports: Ports,
        capabilities: EngineCapabilities,
        ranks: RemoteWorkers | None = None,
    ) -> None:
        """`ranks`: the worker halves of other processes; None: the one worker half is in this process."""
        keys = KeySpace.of_settings(settings, layout)
        ports = sealed(settings, ports)
        super().__init__(settings, ports, keys.space)
        self._layout = layout
        self.groups = len(layout.groups)
        self.notices = Notices(self.latch)
        self.changed = Changed(self.latch)
        #: What ended and nobody fetched, by the number of the load or of the request's incarnation (one counter gives both).
        self._completions: dict[int, LoadCompleted | SavesCompleted] = {}
        #: Pages that left quarantine, for `completed()`.
        self._released: list[PagesReleased] = []
        #: Requests whose pages nobody can give back, by incarnation; and those among them that nobody was told of.
        self._lost: dict[int, PagesLost] = {}
        self._lost_untold: list[PagesLost] = []
        #: Whole blocks that passes computed without a cache.
        self.unsaved_blocks = 0
        self._tokens_per_block = layout.tokens_per_block
        desk, breaker = self._desk, self.breaker
        counts = ports.device.page_counts if ranks is None else ranks.page_counts
        asked = ServerKeys.of_settings(settings, layout)
        self.scheduler = SchedulerHalf(settings, layout, asked, counts, ports.pool, desk, breaker, self._ended, capabilities)
        self.worker = ranks or WorkerHalf(
            settings, layout, keys, ports, desk, breaker, self._poller, self.scheduler.on_report, capabilities
        )
        self._teller = StatsTeller(settings, ports.board, desk.run, self.worker.reads)
        breaker.quarantine_full = self.worker.quarantine_full
        breaker.on_open = self.worker.refuse_queued
        breaker.on_close = self.scheduler.requests.new_generation if ranks is None else ranks.pool_returned
        for terms in self.worker.all_terms:
            check_terms(self.scheduler.terms, terms)
        self._join(self.worker)
        if ranks is not None:
            ranks.listen(self.scheduler.on_report, self.scheduler.requests.new_generation, self._rank_degraded)

    @property
    def local_worker(self) -> WorkerHalf:
        """The worker half of this process, where that is where it lives."""
        if not isinstance(self.worker, WorkerHalf):
            raise AssertionError("the worker halves live in other processes")  # noqa: TRY004 - a slip of ours, and no argument
        return self.worker

    def _join(self, worker: Workers) -> None:
        entries = self.scheduler.worker
        entries.fence = worker.fence
        entries.accept_load = worker.accept_load
        entries.accept_saves = worker.accept_saves
        entries.withdraw = worker.withdraw
        entries.pass_begins = worker.pass_begins
        entries.plan_arrived = worker.plan_arrived
        entries.plan_dropped = worker.plan_dropped
        self.scheduler.no_cache = lambda: bool(self.latch.degraded)
        self.scheduler.gets_hang = worker.gets_hang

    async def _open_rest(self, group: TaskGroup) -> None:
        start = partial(self.services.start, group)
        await start(self.scheduler.holds.run)
        await self.worker.open(start)
        if self.settings.key_format != "akv":
            observe.emit(observe.KEYS_FOREIGN, key_format=self.settings.key_format)

    def _end_work(self, *, orderly: bool) -> None:
        self.scheduler.passes.no_more_passes()
        for record in self.scheduler.requests.records:
            if not orderly or not self._finished(record):
                self.scheduler.cancel(record)

    @property
    def requests(self) -> int:
        """Those that have not ended."""
        return len(self.scheduler.requests)

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
        self.scheduler.reset(ServerKeys.of_settings(self.settings, self._layout, revision=revision))
        self.worker.reset(keys, revision)
        observe.emit(observe.CONNECTOR_RESET, key_space=keys.space, requests=len(ending))
        await checkpoint()
        for record in ending:
            await self.notices.until(record.incarnation, partial(_is_over, record))

    @property
    def touched_pages(self) -> PagesPerGroup:
        """The engine's pages that a store call touches; and copies, once nobody but the shutdown waits for their end."""
        unseen = self.worker.copied_pages if self.latch.tripped or self.latch.degraded else []
        lost = [lost.pages for lost in self._lost.values()]
        touched = pages_per_group([*self.calls.pages, *self.worker.called_pages, *unseen], self.groups)
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
        snapshots: dict[int, Taken] = {}
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

    def _rank_degraded(self, rank: int, why: str) -> None:
        """The worker half of a rank serves no more, and a block without one rank's page is of no use to any (L2)."""
        observe.emit(observe.RANK_DEGRADED, rank=rank, reason=why)
        if self.latch.degrade(f"rank {rank} serves no more: {why}"):
            self._serve_no_more()

    def _end_waiting(self) -> None:
        self.worker.no_more_work(DEGRADED)
        for record in self.scheduler.requests.records:
            if record.phase is Phase.FINISHING:
                self.scheduler.cancel(record)

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
