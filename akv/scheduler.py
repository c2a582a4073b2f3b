"""The scheduler half: looks up, offers, plans each pass, keeps the marks. Moves no byte.

It decides with `plan/`, keeps what it decided in `ownership/requests.py`, and speaks to the worker half (`akv/worker.py`) in
the messages of `values/messages.py`. What ends is told through the three callables that it is given.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
from anyio import Lock, current_time
from anyio.lowlevel import checkpoint

from akv import observe
from akv.door import Door
from akv.flow.calls import CallDesk
from akv.flow.gate import PoolGate
from akv.flow.lookup import LookupParts, hash_in_slices, look_up
from akv.flow.reserve import reserve
from akv.ownership.backlog import SaveBacklog, Shed
from akv.ownership.negative_keys import NegativeKeys
from akv.ownership.request_record import LoadHold, RequestRecord
from akv.ownership.requests import Effect, Requests
from akv.pass_parts import PassParts
from akv.passes import Passes, WorkerEntries
from akv.plan.backlog import BacklogBounds
from akv.plan.ending import Ending
from akv.plan.identity import Hashing
from akv.plan.keys import ServerKeys
from akv.plan.lifecycle import Phase
from akv.plan.recent_chains import RecentChains
from akv.plan.save_bounds import closing_blocks, whole_number
from akv.plan.terms import terms_of
from akv.plan.tokens import Tokens
from akv.plan.window_search import window_groups
from akv.ports.device import PassEvent
from akv.ports.pool import PagePool
from akv.services.holds import HoldClock
from akv.services.reporter import report_shed
from akv.settings import Settings
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import Layout
from akv.values.messages import PagesReleased, PassReport, SaveOrder, Withdrawal
from akv.values.offers import LookupOutcome, Offer
from akv.values.requests import SavesCompleted
from akv.values.scope import Scope


class SchedulerHalf:
    """Requests, lookups and plans of one server. Every method but `lookup` is synchronous and called on the loop."""

    #: Whether the connector goes on without a cache (O8): nothing is offered and nothing listed for saving. Set once.
    no_cache: Callable[[], bool]
    #: Whether a get stands still, so that no load could begin before its deadline. Set once.
    gets_hang: Callable[[], bool]

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        keys: ServerKeys,
        page_counts: tuple[int, ...],
        pool: PagePool,
        desk: CallDesk,
        gate: PoolGate,
        ended: Callable[[LoadHold | SavesCompleted | PagesReleased], None],
        capabilities: EngineCapabilities,
    ) -> None:
        self._settings = settings
        self._tokens_per_block = layout.tokens_per_block
        windows, ahead = window_groups(layout.groups), capabilities.lookahead
        hashing = Hashing(layout.tokens_per_block, ahead, settings.key_format, settings.key_secret.encode())
        self._page_counts = counts = page_counts
        recent = RecentChains(settings.recent_chains_tokens)
        self._negative = NegativeKeys(len(layout.groups), settings.negative_ttl_s)
        self._lookup = LookupParts(
            pool=pool,
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
            recent=recent,
            negative=self._negative,
            deadline_s=settings.lookup_deadline_s,
            gate=gate,
        )
        self._ended = ended
        #: What it expects of a worker half (D1).
        self.terms = terms_of(settings, layout, keys, counts, ahead)
        kept = capabilities.window_retention_tokens
        self._ending = Ending(windows, layout.tokens_per_block, settings.rewind_tokens, kept, ahead)
        # Under a drafter only the blocks of prompts are saved (S1).
        generated = settings.save_generated and capabilities.drafter == "none"
        saves = settings.role != "consumer"
        self._reader = PassParts(layout, counts, self._ending, saves=saves, save_generated=generated)
        bounds = BacklogBounds(settings.backlog_bytes, settings.backlog_passes)
        self.backlog = SaveBacklog([group.bytes_per_page for group in layout.groups], bounds)
        self.requests = Requests(
            groups=len(layout.groups),
            backoff_s=settings.save_backoff_s,
            windows=[window.group for window in windows],
            backlog=self.backlog,
        )
        self._door = Door(self.requests, hashing, recent, require_salt=settings.require_salt)
        self.holds = HoldClock(settings.save_hold_max_s, lambda record: self._carry_out(self.requests.hold_expired(record)))
        self.worker = WorkerEntries()
        self.passes = Passes(
            settings, self.requests, self._reader, self._ending, self.worker, hashing.slice_blocks, lambda: self._saves
        )

    def open(self, request_id: str, tokens: Tokens, scope: Scope, *, reads_cache: bool, dummy: bool) -> RequestRecord:
        """A request begins. Raises as `Door.open` does; then nothing was opened."""
        return self._door.open(request_id, tokens, scope, reads_cache=reads_cache, dummy=dummy)

    async def lookup(self, record: RequestRecord, local_tokens: int) -> Offer:
        """Ask the pool. Moves no mark and may be repeated (L5)."""
        self.requests.must_be_open(record, "look up")
        local_tokens = whole_number(record.request_id, "local_tokens", local_tokens)
        began, incarnation = current_time(), record.incarnation
        if (nothing := self._offers_nothing(record)) is not None:
            await checkpoint()
            answer = self._lookup.nothing(nothing)
        else:
            answer = await look_up(self._lookup, record.chain, record.request_id, local_tokens)
            # Evicted, or the pool was lost: whoever computes them saves them again.
            self.requests.not_found(record, answer.hole, answer.missing)
            if self.no_cache():
                answer = self._lookup.nothing(LookupOutcome.DEGRADED, answer.probed)
        if not answer.probed and self._lookup.windows and self._reader.saves(record):
            # The pass that completes the prompt names its window pages, and has no time to hash it from the start (L3).
            await hash_in_slices(record.chain, record.prompt_blocks, self._lookup.turn)
        if record.incarnation == incarnation:
            self.requests.matched_locally(record, local_tokens)
        if not record.dummy:
            observe.emit(
                observe.LOOKUP_COMPLETE,
                request_id=record.request_id,
                incarnation=incarnation,
                outcome=answer.outcome.value,
                tokens=answer.tokens,
                local_tokens=local_tokens,
                probed_keys=answer.probed,
                duration_s=current_time() - began,
            )
        return Offer(
            request_id=record.request_id,
            # Of the pages that it was asked for: the local match is gone with them.
            incarnation=incarnation,
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
        fence = self.worker.fence()
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
        self.worker.accept_load(msgspec.structs.replace(order, priority=priority), fence)
        return hold

    def finish(self, record: RequestRecord) -> None:
        """The request is complete; what it computed and no pass listed is saved now (S12)."""
        if self.no_cache():
            # Its saves were refused; what still reads its pages is waited for, and no store call.
            self.cancel(record)
        if record.phase is not Phase.OPEN:
            self._carry_out(self.requests.finish(record, upto=0))
            return
        after = self.worker.fence()
        end = self._closing(record)
        began_at = (record.windows.began_at or 0) // self._tokens_per_block
        if record.windows.held:
            kept = self._kept(record)
            record.windows.held = self._ending.finishing(kept, began_at, record.windows.held)
        self._carry_out(self.requests.finish(record, upto=end), after)
        if record.is_held:
            self.holds.begin(record)
        # What it resumed from lies in the pool, or in other requests' pages, whose matter it is.
        if end > began_at and self._ending.lacks(end, lambda g, block: block < began_at or record.windows.saved(g, block)):
            observe.emit(observe.WINDOW_TAIL_MISSING, request_id=record.request_id, incarnation=record.incarnation, block=end)

    async def hash_rest(self, record: RequestRecord) -> None:
        """Hash in slices what `finish` will list, so that it does not hold the loop for a long sequence (L3).

        Cancellation: nothing is held; `finish` was not called.
        """
        await hash_in_slices(record.chain, self._closing(record), self._lookup.turn)

    def reset(self, keys: ServerKeys) -> None:
        """New weights: ask under these names. The open requests were cancelled. Chains of tokens stay what they are."""
        # A lookup that is under way goes on with the old names; its request has ended, so nobody can take its offer up.
        self._lookup = msgspec.structs.replace(self._lookup, keys=keys)
        self.requests.reset()
        self._negative.clear()

    def cancel(self, record: RequestRecord) -> None:
        """The request is not wanted any more."""
        self._carry_out(self.requests.cancel(record))

    def preempt(self, record: RequestRecord) -> None:
        """The engine takes the request's pages away."""
        self._carry_out(self.requests.preempt(record))

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
                    self.worker.withdraw(effect)
                case SaveOrder():
                    if after is None:
                        raise AssertionError("a save needs the event of the pass that computed it")
                    self.worker.accept_saves(None, [effect], after, {})
                case Shed():
                    report_shed(effect)
                case SavesCompleted():
                    self.holds.end(effect.request_id, effect.incarnation)
                    self._ended(effect)
                case LoadHold() | PagesReleased():
                    self._ended(effect)

    def _offers_nothing(self, record: RequestRecord) -> LookupOutcome | None:
        """Why a lookup of this request does not ask the pool; None if it does."""
        if record.excluded is not None:
            return record.excluded
        if self._settings.role == "producer" or not record.reads_cache:
            return LookupOutcome.NOT_READING
        if self.no_cache():
            return LookupOutcome.DEGRADED
        if record.failed_loads >= self._settings.max_load_attempts:
            return LookupOutcome.LOADS_FAILED
        if self.gets_hang():
            # A holder that stands still: the client waits for it a minute, and no load could begin before its deadline.
            return LookupOutcome.UNAVAILABLE
        parked = sum(other.load is not None for other in self.requests.records)
        return LookupOutcome.OVERLOADED if parked >= self._settings.max_parked_loads else None

    @property
    def _saves(self) -> bool:
        return self._settings.role != "consumer" and not self.no_cache()

    def _closing(self, record: RequestRecord) -> int:
        """Blocks that a request which finishes now may have published (S12)."""
        return closing_blocks(self._kept(record), self._tokens_per_block)

    def _kept(self, record: RequestRecord) -> int:
        """Its tokens."""
        return self._reader.kept(record, min(record.computed, record.chain.length)) if self._saves else 0
