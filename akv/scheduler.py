"""The scheduler half: looks up, offers, plans each pass, keeps the marks. Moves no byte.

It decides with `plan/`, keeps what it decided in `ownership/requests.py`, and speaks to the worker half (`akv/worker.py`) in
the messages of `values/messages.py`. What ends is told through the three callables that it is given.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
from anyio import Lock, current_time
from anyio.lowlevel import checkpoint

from akv import observe
from akv.errors import EngineContractError
from akv.flow.calls import CallDesk
from akv.flow.gate import PoolGate
from akv.flow.lookup import LookupParts, hash_in_slices, look_up
from akv.flow.reserve import reserve
from akv.flow.snapshot import Snapshot
from akv.ownership.negative_keys import NegativeKeys
from akv.ownership.plans import Plans
from akv.ownership.request_record import LoadHold, Phase, RequestRecord
from akv.ownership.requests import Effect, Requests
from akv.pass_parts import Part, PassParts, Planned
from akv.plan.ending import Ending
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import KeySpace
from akv.plan.recent_chains import RecentChains
from akv.plan.save_bounds import closing_blocks, whole_number
from akv.plan.terms import terms_of
from akv.plan.tokens import Tokens
from akv.plan.window_search import window_groups
from akv.ports import Ports
from akv.ports.device import PassEvent
from akv.settings import Settings
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import Layout
from akv.values.messages import LoadOrder, PagesReleased, PassPlan, PassReport, SaveOrder, Withdrawal
from akv.values.offers import LookupOutcome, Offer
from akv.values.requests import SavesCompleted, Scheduled
from akv.values.scope import Scope


class SchedulerHalf:
    """Requests, lookups and plans of one server. Every method but `lookup` is synchronous and called on the loop."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        keys: KeySpace,
        ports: Ports,
        desk: CallDesk,
        gate: PoolGate,
        ended: Callable[[LoadHold | SavesCompleted | PagesReleased], None],
        capabilities: EngineCapabilities,
    ) -> None:
        self._settings = settings
        windows = window_groups(layout.groups)
        self._tokens_per_block = layout.tokens_per_block
        self._page_counts = ports.device.page_counts
        self._recent = RecentChains(settings.recent_chains_tokens)
        self._negative = NegativeKeys(len(layout.groups), settings.negative_ttl_s)
        self._lookup = LookupParts(
            pool=ports.pool,
            desk=desk,
            keys=keys,
            groups=len(layout.groups),
            windows=windows,
            rewind_tokens=settings.rewind_tokens,
            window_fallback=settings.window_fallback,
            probe_head=settings.probe_head,
            probe_chunk=settings.probe_chunk,
            probe_concurrency=settings.probe_concurrency,
            turn=Lock(),
            recent=self._recent,
            negative=self._negative,
            deadline_s=settings.lookup_deadline_s,
            gate=gate,
        )
        self._ended = ended
        #: What it expects of a worker half (D1).
        self.terms = terms_of(layout, keys, self._page_counts, role=settings.role, load_mode=settings.load_mode)
        self._plans: Plans[Planned] = Plans()
        #: Blocks that one pass looks at for saving: what can be hashed in a quarter of a millisecond (L3). A pass computes
        #: fewer, as a rule; what is left of a long local match, say, comes with the next passes.
        self._most_blocks = Chain(b"", layout.tokens_per_block).slice_blocks
        self._ending = Ending(windows, layout.tokens_per_block, settings.rewind_tokens, capabilities.window_retention_tokens)
        self._reader = PassParts(
            layout, self._page_counts, self._ending, saves=self._saves, save_generated=settings.save_generated
        )
        forgetful = [window.group for window in windows]
        self.requests = Requests(groups=len(layout.groups), backoff_s=settings.save_backoff_s, windows=forgetful)
        #: The worker half's entries; set once, before the first request.
        self.fence: Callable[[], PassEvent]
        self.accept_load: Callable[[LoadOrder, PassEvent], None]
        self.accept_saves: Callable[[Sequence[SaveOrder], PassEvent, dict[int, Snapshot]], None]
        #: A plan asks for slots; it was dropped and gives them back.
        self.plan_arrived: Callable[[PassPlan], None]
        self.plan_dropped: Callable[[int], None]
        self.withdraw: Callable[[Withdrawal], None]

    def open(self, request_id: str, tokens: Tokens, scope: Scope, *, reads_cache: bool) -> RequestRecord:
        """A request begins with its prompt's tokens. Raises TokenError, EngineContractError; then nothing was opened."""
        if not isinstance(request_id, str):
            raise EngineContractError(
                f"a request's id is a str, not {request_id!r}: it travels in messages and stands in events"
            )
        chain = Chain(scope_seed(scope), self._tokens_per_block)
        chain.append(tokens)
        self._recent.adopt(chain)
        return self.requests.open(request_id, chain, reads_cache=reads_cache)

    async def lookup(self, record: RequestRecord, local_tokens: int) -> Offer:
        """Ask the pool. Moves no mark and may be repeated (L5)."""
        self.requests.must_be_open(record, "look up")
        local_tokens = whole_number(record.request_id, "local_tokens", local_tokens)
        began = current_time()
        if (nothing := self._offers_nothing(record)) is not None:
            await checkpoint()
            if self._lookup.windows and self._saves:
                # The pass that completes the prompt names its window pages, and has no time to hash it from the start (L3).
                await hash_in_slices(record.chain, record.prompt_tokens // self._tokens_per_block, self._lookup.turn)
            answer = self._lookup.nothing(nothing)
        else:
            answer = await look_up(self._lookup, record.chain, record.request_id, local_tokens)
            if answer.hole is not None:
                # Evicted, or the pool was lost: whoever computes them saves them again.
                self.requests.not_found(record, answer.hole)
        self.requests.matched_locally(record, local_tokens)
        observe.emit(
            observe.LOOKUP_COMPLETE,
            request_id=record.request_id,
            incarnation=record.incarnation,
            outcome=answer.outcome.value,
            tokens=answer.tokens,
            local_tokens=local_tokens,
            probed_keys=answer.probed,
            duration_s=current_time() - began,
        )
        return Offer(
            request_id=record.request_id,
            incarnation=record.incarnation,
            local_tokens=local_tokens,
            tokens=answer.tokens,
            outcome=answer.outcome,
            tokens_per_block=self._tokens_per_block,
            ends=answer.ends,
        )

    def reserve(
        self, record: RequestRecord, offer: Offer, honoured_tokens: int, pages: Sequence[Sequence[int]], priority: int
    ) -> LoadHold:
        """Settle the engine's answer to an offer, and hand the pages to the worker half."""
        honoured_tokens = whole_number(record.request_id, "honoured_tokens", honoured_tokens)
        priority = whole_number(record.request_id, "priority", priority)
        # First what may fail: nothing is taken before it.
        fence = self.fence()
        order, hold = reserve(
            self.requests,
            record,
            offer,
            honoured_tokens,
            pages,
            self._page_counts,
            self._tokens_per_block,
            self._lookup.windows,
        )
        self.accept_load(msgspec.structs.replace(order, priority=priority), fence)
        return hold

    def plan(self, scheduled: Iterable[Scheduled]) -> PassPlan:
        """What the coming pass is to save (S1). Changes no request and no mark (S2)."""
        now = current_time()
        parts: list[Part] = []
        saves: list[SaveOrder] = []
        windows: list[SaveOrder] = []
        seen: set[int] = set()
        most = self._most_blocks
        ahead = self._ahead()
        for item in scheduled:
            record = self._scheduled(item, seen)
            part = self._reader.read(record, item, ahead.get(record.incarnation, ()))
            parts.append(part)
            windows += self._window_saves(part, item)
            if self._saves and most:
                looked_at, order = self.requests.listing.some_blocks(record, part.end, part.tail, part.first, now, most)
                most -= looked_at
                if order is not None:
                    saves.append(order)
            if part.closes and (again := self._saves_again(part, item)) is not None:
                saves.append(again)
        ordered = (*windows, *saves) if self._settings.window_first else (*saves, *windows)
        plan = PassPlan(plan_id=self._plans.next_id(), saves=ordered)
        self._plans.add(Planned(plan, tuple(parts)))
        if windows:
            self.plan_arrived(plan)
        return plan

    def _ahead(self) -> dict[int, list[Part]]:
        """The parts of plans that have not ended, oldest first, by the incarnation of their request."""
        ahead: dict[int, list[Part]] = {}
        for planned in self._plans.contents:
            for part in planned.parts:
                ahead.setdefault(part.record.incarnation, []).append(part)
        return ahead

    def _window_saves(self, part: Part, item: Scheduled) -> list[SaveOrder]:
        """The window pages that make the prompt's end resumable (W3); their slots are asked for with the plan (S4)."""
        order = self.requests.listing.windows(part.record, part.closing, snapshot=True)
        return [] if order is None else [order]

    def _saves_again(self, part: Part, item: Scheduled) -> SaveOrder | None:
        """A sequence that computed much lists its stored blocks again (S8)."""
        record, least = part.record, self._settings.resave_min_tokens
        began_at = part.before if record.windows.began_at is None else record.windows.began_at
        if not least or part.computed - began_at < least:
            return None
        order = self.requests.listing.again(record, part.end, item.pages)
        for columns in () if order is None else order.groups:
            self._reader.check_pages(record, columns.group, columns.pages, columns.blocks)
        return order

    def take(self, plan: PassPlan) -> tuple[Planned, PassEvent]:
        """The planned pass is queued on the execution stream: the plan ends, what it computed is noted, and `hand_over`
        follows, given the pass's event. Raises DeviceError.
        """
        # First what may fail: then the plan is still open, and may be dropped.
        try:
            after = self.fence()
        except BaseException:
            self._may_have_run(self._plans.peek(plan.plan_id))
            raise
        planned = self._end(plan, "superseded by a later pass")
        # Here, and not behind the wait for the copies: passes are noted in the order in which they ran, and one that is cut
        # short, or whose copies fail, computed and released the same pages as any other.
        for part in planned.parts:
            self._ran(part)
        # Nobody will store the pages of a request that has begun to end: it may have got them back.
        gone = {part.record.key for part in planned.parts if part.record.phase is not Phase.OPEN}
        wanted = tuple(o for o in planned.plan.saves if (o.request_id, o.incarnation) not in gone)
        return planned._replace(plan=msgspec.structs.replace(planned.plan, saves=wanted)), after

    def _ran(self, part: Part) -> None:
        end = part.end if self._saves else 0
        self.requests.ran(part.record, part.computed, end, part.first, part.tail, self._most_blocks, history=part.history)
        if part.closes and part.closing:
            self._tell_end(part)
        part.record.windows.ran(part.before, part.held, closes=part.closes)

    @staticmethod
    def _may_have_run(planned: Planned | None) -> None:
        """A pass of which nobody says whether it ran: the engine may have released window pages behind it."""
        for part in () if planned is None else planned.parts:
            part.record.windows.held = ()

    def no_more_passes(self) -> None:
        """The connector closes: nobody can say any more whether the passes under way ran."""
        for planned in self._plans.contents:
            self._may_have_run(planned)

    def hand_over(self, planned: Planned, after: PassEvent, snapshots: dict[int, Snapshot]) -> None:
        """What is to be copied at the pass has been: hand its saves over. Raises DeviceError."""
        queued: list[SaveOrder] = []
        try:
            if snapshots:
                # Behind the copies: whatever waits for the pass's event then waits for them, too (S3).
                after = self.fence()
            copied = (order for order in planned.plan.saves if order.save_id in snapshots or not order.snapshot)
            queued = [q for order in copied if (q := self.requests.queue_save(order)) is not None]
            if queued:
                self.accept_saves(queued, after, snapshots)
        finally:
            handed_over = {order.save_id for order in queued}
            for save_id, snapshot in snapshots.items():
                if save_id not in handed_over:
                    snapshot.claim.leave()

    def _tell_end(self, part: Part) -> None:
        """Count what a prompt's end was worth: how many of the ends that the rewind wants have their window (W4)."""
        record = part.record
        end = record.prompt_tokens // self._tokens_per_block
        observe.emit(
            observe.WINDOW_END,
            request_id=record.request_id,
            incarnation=record.incarnation,
            pages=sum(len(columns.pages) for columns in part.closing),
            ends=self._ending.covered_ends(end, part.closing),
            wanted_ends=min(end, self._settings.rewind_tokens // self._tokens_per_block + 1),
        )

    def drop(self, plan: PassPlan, reason: str) -> None:
        """The planned pass will not run."""
        planned = self._end(plan, "superseded by a later pass")
        self._dropped(planned, reason)

    def finish(self, record: RequestRecord) -> None:
        """The request is complete; what it computed and no pass listed is saved now (S12)."""
        if record.phase is not Phase.OPEN:
            return
        after = self.fence()
        end = self._closing(record)
        began_at = (record.windows.began_at or 0) // self._tokens_per_block
        if record.windows.held:
            kept = self._kept(record)
            record.windows.held = self._ending.finishing(kept, began_at, record.windows.held)
        self._carry_out(self.requests.finish(record, upto=end), after)
        # What it resumed from lies in the pool, or in other requests' pages, whose matter it is.
        if end > began_at and self._ending.lacks(end, lambda g, block: block < began_at or record.windows.saved(g, block)):
            observe.emit(observe.WINDOW_TAIL_MISSING, request_id=record.request_id, incarnation=record.incarnation, block=end)

    async def hash_rest(self, record: RequestRecord) -> None:
        """Hash in slices what `finish` will list, so that it does not hold the loop for a long sequence (L3).

        Cancellation: nothing is held; `finish` was not called.
        """
        await hash_in_slices(record.chain, self._closing(record), self._lookup.turn)

    def cancel(self, record: RequestRecord) -> None:
        """The request is not wanted any more."""
        self._carry_out(self.requests.cancel(record))

    def on_report(self, report: PassReport) -> None:
        """The worker half tells what ended."""
        now = current_time()
        for load in report.loads:
            self._negative.failed(load.bad_pages, now)
            self._carry_out(self.requests.load_ended(load))
        for save in report.saves:
            if self._negative:
                self._negative.stored(self.requests.stored_pages(save))
            self._carry_out(self.requests.save_ended(save, now))
        for unread in report.unread:
            self._carry_out(self.requests.pages_unread(unread))
        for released in report.released:
            self._carry_out(self.requests.pages_released(released))

    def _carry_out(self, effects: Iterable[Effect], after: PassEvent | None = None) -> None:
        """Do what ownership decided, in order. Saves come from `finish` alone, which gives the event that they wait for."""
        for effect in effects:
            match effect:
                case Withdrawal():
                    self.withdraw(effect)
                case SaveOrder():
                    if after is None:
                        raise AssertionError("a save needs the event of the pass that computed it")
                    self.accept_saves([effect], after, {})
                case LoadHold() | SavesCompleted() | PagesReleased():
                    self._ended(effect)

    def _offers_nothing(self, record: RequestRecord) -> LookupOutcome | None:
        """Why a lookup of this request does not ask the pool; None if it does."""
        if self._settings.role == "producer" or not record.reads_cache:
            return LookupOutcome.NOT_READING
        if record.failed_loads >= self._settings.max_load_attempts:
            return LookupOutcome.LOADS_FAILED
        parked = sum(other.load is not None for other in self.requests.records)
        return LookupOutcome.OVERLOADED if parked >= self._settings.max_parked_loads else None

    @property
    def _saves(self) -> bool:
        return self._settings.role != "consumer"

    def _scheduled(self, item: Scheduled, seen: set[int]) -> RequestRecord:
        record = self.requests.scheduled(item.request.request_id, item.request.incarnation)
        if record.incarnation in seen:
            raise EngineContractError(
                f"request {record.request_id!r} is scheduled twice in one pass: give each request one part"
            )
        seen.add(record.incarnation)
        return record

    def _closing(self, record: RequestRecord) -> int:
        """Blocks that a request which finishes now may have published (S12)."""
        return closing_blocks(self._kept(record), self._tokens_per_block)

    def _kept(self, record: RequestRecord) -> int:
        """Its tokens."""
        return self._reader.kept(record, min(record.computed, record.chain.length)) if self._saves else 0

    def _end(self, plan: PassPlan, reason: str) -> Planned:
        planned, earlier = self._plans.end(plan.plan_id)
        for other in earlier.values():
            self._dropped(other, reason)
        return planned

    def _dropped(self, planned: Planned, reason: str) -> None:
        self.plan_dropped(planned.plan.plan_id)
        observe.emit(observe.PLAN_DROPPED, plan_id=planned.plan.plan_id, saves=len(planned.plan.saves), reason=reason)
