"""The scheduler half: looks up, offers, plans each pass, keeps the marks. Moves no byte.

It decides with `plan/`, keeps what it decided in `ownership/requests.py`, and speaks to the worker half (`akv/worker.py`) in
the messages of `values/messages.py`. What ends is told through the three callables that it is given.
"""

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import NamedTuple, NoReturn

import msgspec
from anyio import Lock, current_time
from anyio.lowlevel import checkpoint

from akv import observe
from akv.errors import EngineContractError
from akv.flow.calls import CallDesk
from akv.flow.lookup import LookupAnswer, LookupParts, hash_in_slices, look_up
from akv.flow.reserve import reserve
from akv.ownership.plans import Plans
from akv.ownership.requests import Effect, LoadHold, Phase, RequestRecord, Requests
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import KeySpace
from akv.plan.recent_chains import RecentChains
from akv.plan.save_bounds import check_scheduled, closing_blocks, savable_blocks, whole_number
from akv.plan.terms import terms_of
from akv.plan.tokens import Tokens
from akv.ports import Ports
from akv.ports.device import PassEvent
from akv.settings import Settings
from akv.units import NO_PAGE
from akv.values.layout import Layout
from akv.values.messages import LoadOrder, PassPlan, PassReport, SaveOrder, Withdrawal
from akv.values.offers import LookupOutcome, Offer
from akv.values.requests import SavesCompleted, Scheduled
from akv.values.scope import Scope


class Part(NamedTuple):
    """What a plan keeps of one scheduled request until it ends."""

    record: RequestRecord
    #: Tokens that have KV once the pass ran.
    computed: int
    #: Blocks that are whole then, and whose hashes are known.
    end: int
    #: The first block that was not saved yet, and the pages from there on: what `finish` may still have to save.
    first: int
    tail: tuple[tuple[int, ...], ...]


class Planned(NamedTuple):
    """An open plan."""

    plan: PassPlan
    parts: tuple[Part, ...]


class SchedulerHalf:
    """Requests, lookups and plans of one server. Every method but `lookup` is synchronous and called on the loop."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        keys: KeySpace,
        ports: Ports,
        desk: CallDesk,
        ended: Callable[[LoadHold | SavesCompleted], None],
    ) -> None:
        self._settings = settings
        self._tokens_per_block = layout.tokens_per_block
        self._page_counts = ports.device.page_counts
        self._recent = RecentChains(settings.recent_chains_tokens)
        self._lookup = LookupParts(
            pool=ports.pool,
            desk=desk,
            keys=keys,
            groups=len(layout.groups),
            probe_head=settings.probe_head,
            probe_chunk=settings.probe_chunk,
            probe_concurrency=settings.probe_concurrency,
            turn=Lock(),
            recent=self._recent,
            deadline_s=settings.lookup_deadline_s,
        )
        self._ended = ended
        #: What it expects of a worker half (D1).
        self.terms = terms_of(layout, keys, self._page_counts, role=settings.role, load_mode=settings.load_mode)
        self._plans: Plans[Planned] = Plans()
        #: Blocks that one pass looks at for saving: what can be hashed in a quarter of a millisecond (L3). A pass computes
        #: fewer, as a rule; what is left of a long local match, say, comes with the next passes.
        self._most_blocks = Chain(b"", layout.tokens_per_block).slice_blocks
        self.requests = Requests(groups=len(layout.groups), backoff_s=settings.save_backoff_s)
        #: The worker half's entries; set once, before the first request.
        self.fence: Callable[[], PassEvent]
        self.accept_load: Callable[[LoadOrder, PassEvent], None]
        self.accept_saves: Callable[[Sequence[SaveOrder], PassEvent], None]
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
            answer = LookupAnswer(0, nothing)
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
        )

    def reserve(
        self, record: RequestRecord, offer: Offer, honoured_tokens: int, pages: Sequence[Sequence[int]], priority: int
    ) -> LoadHold:
        """Settle the engine's answer to an offer, and hand the pages to the worker half."""
        honoured_tokens = whole_number(record.request_id, "honoured_tokens", honoured_tokens)
        priority = whole_number(record.request_id, "priority", priority)
        # First what may fail: nothing is taken before it.
        fence = self.fence()
        order, hold = reserve(self.requests, record, offer, honoured_tokens, pages, self._page_counts, self._tokens_per_block)
        self.accept_load(msgspec.structs.replace(order, priority=priority), fence)
        return hold

    def plan(self, scheduled: Iterable[Scheduled]) -> PassPlan:
        """What the coming pass is to save (S1). Changes no request and no mark (S2)."""
        now = current_time()
        parts: list[Part] = []
        saves: list[SaveOrder] = []
        seen: set[int] = set()
        most = self._most_blocks
        for item in scheduled:
            record = self._checked(item, seen)
            part = self._part(record, item)
            parts.append(part)
            if self._saves and most:
                looked_at, order = self.requests.list_some(record, part.end, part.tail, part.first, now, most)
                most -= looked_at
                if order is not None:
                    saves.append(order)
        plan = PassPlan(plan_id=self._plans.next_id(), saves=tuple(saves))
        self._plans.add(Planned(plan, tuple(parts)))
        return plan

    def ran(self, plan: PassPlan) -> None:
        """The planned pass has been queued on the execution stream: move the marks, hand its saves over."""
        # First what may fail: then the plan is still open, and may be dropped.
        after = self.fence()
        planned = self._end(plan, "superseded by a later pass")
        queued = [q for order in planned.plan.saves if (q := self.requests.queue_save(order)) is not None]
        for part in planned.parts:
            end = part.end if self._saves else 0
            self.requests.ran(part.record, part.computed, end, part.first, part.tail, self._most_blocks)
        if queued:
            self.accept_saves(queued, after)

    def drop(self, plan: PassPlan, reason: str) -> None:
        """The planned pass will not run."""
        planned = self._end(plan, "superseded by a later pass")
        self._dropped(planned, reason)

    def finish(self, record: RequestRecord) -> None:
        """The request is complete; what it computed and no pass listed is saved now (S12)."""
        if record.phase is not Phase.OPEN:
            return
        after = self.fence()
        self._carry_out(self.requests.finish(record, upto=self._closing(record)), after)

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
            self._carry_out(self.requests.load_ended(load))
        for save in report.saves:
            self._carry_out(self.requests.save_ended(save, now))
        for unread in report.unread:
            self._carry_out(self.requests.pages_unread(unread))

    def _carry_out(self, effects: Iterable[Effect], after: PassEvent | None = None) -> None:
        """Do what ownership decided, in order. Saves come from `finish` alone, which gives the event that they wait for."""
        for effect in effects:
            match effect:
                case Withdrawal():
                    self.withdraw(effect)
                case SaveOrder():
                    if after is None:
                        raise AssertionError("a save needs the event of the pass that computed it")
                    self.accept_saves([effect], after)
                case LoadHold() | SavesCompleted():
                    self._ended(effect)

    def _offers_nothing(self, record: RequestRecord) -> LookupOutcome | None:
        """Why a lookup of this request does not ask the pool; None if it does."""
        if self._settings.role == "producer" or not record.reads_cache:
            return LookupOutcome.NOT_READING
        parked = sum(other.load is not None for other in self.requests.records)
        return LookupOutcome.OVERLOADED if parked >= self._settings.max_parked_loads else None

    @property
    def _saves(self) -> bool:
        return self._settings.role != "consumer"

    def _closing(self, record: RequestRecord) -> int:
        """Blocks that a request which finishes now may have published (S12)."""
        computed = self._kept(record, min(record.computed, record.chain.length)) if self._saves else 0
        return closing_blocks(computed, self._tokens_per_block)

    def _kept(self, record: RequestRecord, computed: int) -> int:
        """Tokens whose KV may be published, of `computed` ones."""
        return computed if self._settings.save_generated else min(computed, record.prompt_tokens)

    def _checked(self, item: Scheduled, seen: set[int]) -> RequestRecord:
        record = self.requests.scheduled(item.request.request_id, item.request.incarnation)
        check_scheduled(record.request_id, item.computed_before, item.tokens, item.draft_tokens)
        if record.incarnation in seen:
            raise EngineContractError(
                f"request {record.request_id!r} is scheduled twice in one pass: give each request one part"
            )
        seen.add(record.incarnation)
        if record.load is not None:
            raise EngineContractError(
                f"request {record.request_id!r} is scheduled while its load is under way: its pages are the connector's; "
                "schedule it once Load.wait() returned or completed() delivered its LoadCompleted"
            )
        if record.valid_to is not None and item.computed_before > record.valid_to:
            raise EngineContractError(
                f"request {record.request_id!r} is scheduled with computed_before = {item.computed_before}, but its load did "
                f"not deliver and its pages hold KV for {record.valid_to} tokens only: schedule it from there, or report a "
                "longer local match with lookup(local_tokens)"
            )
        tables: object = item.pages
        found = len(tables) if isinstance(tables, Sized) else 0
        if found != len(self._page_counts):
            raise EngineContractError(
                f"request {record.request_id!r}: {found} page tables for a layout of {len(self._page_counts)} layer groups: "
                "`pages` holds one for each"
            )
        return record

    def _part(self, record: RequestRecord, item: Scheduled) -> Part:
        before, tokens = int(item.computed_before), int(item.tokens)
        computed = before + tokens
        # Computed, and confirmed (K6), and wanted: the least of the three.
        end = min(
            savable_blocks(before, 0, tokens, self._tokens_per_block),
            closing_blocks(self._kept(record, record.chain.length), self._tokens_per_block),
        )
        first = record.marks.mark
        last = -(-computed // self._tokens_per_block)
        tail = tuple(self._pages(record, group, table, first, last) for group, table in enumerate(item.pages))
        return Part(record, computed, end, first, tail)

    def _pages(self, record: RequestRecord, group: int, table: Sequence[int], first: int, last: int) -> tuple[int, ...]:
        """The pages of blocks [first, last), every one that this pass or `finish` may list: each in the cache, none twice."""
        # Blocks below the mark are stored or on their way, so their pages are not looked at: a pass of many long decoding
        # requests costs a few entries for each.
        pages = tuple(map(int, table[first:last]))
        held = [page for page in pages if page != NO_PAGE]
        count = self._page_counts[group]
        if held and not (min(held) >= 0 and max(held) < count and len(set(held)) == len(held)):
            self._refuse_pages(record, group, pages, first)
        return pages

    def _refuse_pages(self, record: RequestRecord, group: int, pages: Sequence[int], first: int) -> NoReturn:
        at = next(
            index
            for index, page in enumerate(pages)
            if page != NO_PAGE and (not 0 <= page < self._page_counts[group] or page in pages[index + 1 :])
        )
        page = pages[at]
        # Two blocks of one page: at least one of them would be stored with the other's KV.
        why = (
            "is also listed for a later block; each block of a request has a page of its own"
            if 0 <= page < self._page_counts[group]
            else f"is not in the cache, which has {self._page_counts[group]} pages"
        )
        raise EngineContractError(f"request {record.request_id!r}, block {first + at}, group {group}: page {page} {why}")

    def _end(self, plan: PassPlan, reason: str) -> Planned:
        planned, earlier = self._plans.end(plan.plan_id)
        for other in earlier.values():
            self._dropped(other, reason)
        return planned

    def _dropped(self, planned: Planned, reason: str) -> None:
        observe.emit(observe.PLAN_DROPPED, plan_id=planned.plan.plan_id, saves=len(planned.plan.saves), reason=reason)
