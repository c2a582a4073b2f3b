"""Requests in the scheduler half: their incarnation, their one load, the marks of their saves (S1, S2, S7, D8, D9, M7).

Methods return effects, in the order in which they are to be carried out: a `Withdrawal` or `SaveOrder` goes to the worker
half, a `LoadHold` that ended or a `SavesCompleted` is told to the engine, a `Shed` to the event log. What the worker reports
for an earlier incarnation, or for a request that has closed, changes nothing here.
"""

from collections.abc import Collection, Iterable
from itertools import count

from akv.errors import EngineContractError
from akv.ownership.backlog import SaveBacklog, Shed
from akv.ownership.known_hashes import KnownHashes
from akv.ownership.listing import Listing, hashes_of
from akv.ownership.marks import UNLIMITED, SaveMarks
from akv.ownership.page_book import PageBook
from akv.ownership.queueable import queueable
from akv.ownership.request_record import LoadHold, RequestRecord
from akv.plan.backlog import BacklogBounds
from akv.plan.hashing import Chain
from akv.plan.lifecycle import WITHDRAWN, Happening, Phase, next_phase
from akv.values.messages import (
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    PagesReleased,
    PagesUnread,
    SaveOrder,
    SaveResult,
    Withdrawal,
    select_pages,
)
from akv.values.requests import LoadCompleted, SavesCompleted

Effect = Withdrawal | SaveOrder | Shed | LoadHold | SavesCompleted | PagesReleased


class Requests:
    """Every request that has not closed."""

    def __init__(
        self, *, groups: int, backoff_s: float, windows: Collection[int] = (), backlog: SaveBacklog | None = None
    ) -> None:
        """`windows`: which of the layer groups forget; the marks of blocks follow the others. `backlog`: one without bounds by
        default.
        """
        self._backoff_s = backoff_s
        self._open: dict[str, RequestRecord] = {}
        #: The pages that are in the connector's hands.
        self.pages = PageBook(groups)
        self._known = KnownHashes()
        #: What was handed over for saving and has not ended.
        self.backlog = SaveBacklog([1] * groups, BacklogBounds(UNLIMITED, UNLIMITED)) if backlog is None else backlog
        #: Numbers incarnations, loads and saves.
        self._ids = count(1)
        #: What passes and ends list for saving.
        self.listing = Listing(self._ids, self._known, groups, windows)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def records(self) -> list[RequestRecord]:
        """The requests that have not closed, oldest first."""
        return list(self._open.values())

    def open(self, request_id: str, chain: Chain, *, reads_cache: bool) -> RequestRecord:
        """A request begins. Raises EngineContractError if its id is in use: two owners of one id cannot be told apart."""
        present = self._open.get(request_id)
        if present is not None:
            raise EngineContractError(
                f"request {request_id!r} is open already ({present.phase.value}): ids may be used again once "
                "finished() or cancel() returned; give concurrent requests different ids"
            )
        marks = SaveMarks(self._backoff_s)
        record = RequestRecord(request_id, next(self._ids), chain, marks, reads_cache=reads_cache)
        self._open[request_id] = record
        return record

    def must_go_on(self, record: RequestRecord, verb: str) -> None:
        """Raise EngineContractError if the request has begun to end."""
        if record.phase is not Phase.PREEMPTING:
            self.must_be_open(record, verb)

    def must_be_open(self, record: RequestRecord, verb: str) -> None:
        """Raise EngineContractError if the request has begun to end, or its pages are being taken away."""
        if not record.is_open:
            then = "await preempted() first" if record.phase is Phase.PREEMPTING else "open a new request for further work"
            raise EngineContractError(
                f"cannot {verb} request {record.request_id!r}: it is {record.phase.value}; {then} under this id"
            )

    def scheduled(self, request_id: str, incarnation: int) -> RequestRecord:
        """The open request that a pass names. Raises EngineContractError if there is none, or if it has begun to end."""
        record = self._record(request_id, incarnation)
        if record is None:
            raise EngineContractError(
                f"request {request_id!r} is scheduled but not open (incarnation {incarnation}): it was finished or cancelled, "
                "or belongs to another connector"
            )
        self.must_be_open(record, "schedule")
        return record

    def matched_locally(self, record: RequestRecord, local_tokens: int) -> None:
        """A lookup reported the engine's local match: KV that is valid whatever became of an earlier load."""
        if record.valid_to is not None:
            record.valid_to = max(record.valid_to, local_tokens)

    def not_found(self, record: RequestRecord, first: int | None, missing: Iterable[tuple[int, Iterable[bytes]]] = ()) -> None:
        """A lookup found a hole at block `first`. From there on nothing is known to be in the pool any more (S13). None: it
        found none. Nor are the `missing` pages known, of a window group each, by hash, that it asked for in vain.
        """
        if first is not None:
            self._known.forget(record.chain.hashes(first, record.chain.hash_up_to(0)))
        for group, hashes in missing:
            self._known.forget_pages(hashes, group)

    # -- loads

    def reserve(
        self, record: RequestRecord, groups: tuple[GroupPages, ...], local_tokens: int, tokens: int
    ) -> tuple[LoadOrder, LoadHold]:
        """Lend pages to a load. All or nothing; raises EngineContractError naming request, block and group."""
        self.must_be_open(record, "reserve pages for")
        if record.load is not None:
            raise EngineContractError(
                f"request {record.request_id!r} has a load under way: one reservation at a time; wait for it, or cancel the "
                "request"
            )
        if (busy := self.pages.in_use(groups)) is not None:
            block, group, page, by = busy
            raise EngineContractError(
                f"request {record.request_id!r}, block {block}, group {group}: destination page {page} is in use, {by} it; a "
                "page belongs to the connector until its load ended or its request's saves ended"
            )
        hold = record.load = LoadHold(next(self._ids), groups, local_tokens, tokens)
        self._move(record, Happening.RESERVE)
        self.pages.lend(groups)
        order = LoadOrder(load_id=hold.load_id, request_id=record.request_id, incarnation=record.incarnation, groups=groups)
        return order, hold

    def load_ended(self, result: LoadResult) -> list[Effect]:
        """The worker reached the terminal state of a load: its pages are the engine's again."""
        # Also of a request that was lost (M8): the end of the calls is told, whoever waits for it.
        self.pages.quarantine((result.request_id, result.incarnation), result.quarantined)
        record = self._record(result.request_id, result.incarnation)
        if record is None or record.load is None or record.load.load_id != result.load_id:
            return []
        hold, record.load = record.load, None
        self._move(record, Happening.LOAD_ENDED)
        self.pages.returned(hold.groups)
        if result.state is LoadState.LOADED:
            for group in hold.groups:
                if group.group in self.listing.full:
                    record.marks.stored(group.blocks)
                    # Under the names of the weights that computed them.
                    self._known.add(() if record.outdated else group.hashes)
            record.windows.loaded = record.windows.loaded or hold.tokens > 0
            valid = hold.local_tokens + hold.tokens
            self.matched_locally(record, valid)
        else:
            # What landed is discarded: from here on only the local match is KV, and a pass that builds on more is refused.
            valid = record.valid_to = hold.local_tokens
            if result.state is LoadState.FAILED:
                record.failed_loads += 1
                # The pool may have lost them, so they are listed for saving again once they were computed.
                for group in hold.groups:
                    self._known.forget(group.hashes)
        if hold.groups:
            # What passes had computed behind it may be written over, and `finish` must not publish it (S1). Window pages that
            # are left below it make no end resumable. A load of nothing says nothing about pages.
            record.computed = min(record.computed, valid)
            record.windows.held = ()
        hold.failed_key = result.failed_key
        hold.completed = LoadCompleted(
            request_id=record.request_id,
            incarnation=record.incarnation,
            state=result.state,
            tokens=hold.tokens if result.state is LoadState.LOADED else 0,
            reason=result.reason,
        )
        return [hold, *self._close_if_done(record)]

    # -- saves

    def ran(
        self,
        record: RequestRecord,
        computed: int,
        end: int,
        first: int,
        tail: tuple[tuple[int, ...], ...],
        most: int = UNLIMITED,
        *,
        history: int = 0,
    ) -> None:
        """A pass of this request ran: `computed` tokens have KV now, and `history` if its drafts are accepted; `tail` are its
        pages from block `first` on.

        Of the first `most` open blocks below `end` those that the pool is known to hold are marked as stored, so that later
        passes do not look at them again. Blocks without a hash are left to them.
        """
        record.computed = max(record.computed, computed)
        record.tail_first, record.tail = first, tail
        open_blocks = record.marks.to_offer(min(end, record.chain.hash_up_to(0)), float("inf"), most)
        if open_blocks:
            chain = hashes_of(record.chain, open_blocks)
            record.marks.stored([block for block in open_blocks if chain[block] in self._known])
        if record.valid_to is not None:
            record.valid_to = max(record.valid_to, computed, history)

    def queue_saves(self, orders: Iterable[SaveOrder], now: float) -> tuple[list[SaveOrder], Shed | None]:
        """The listed saves of one pass are handed over now. Left out are blocks that an earlier pass handed over meanwhile,
        blocks with a page that a load fills (S1), and all of a request that has begun to end: its pages may be given back
        before they are read. What the backlog has no room for is the second value: its blocks count as refused (S6).
        """
        wanted: list[SaveOrder] = []
        for order in orders:
            record = self._record(order.request_id, order.incarnation)
            if record is not None and record.is_open:
                wanted.append(queueable(record, order, self.pages))
        return self._queue(wanted, now, is_pass=True)

    def stored_pages(self, result: SaveResult) -> list[GroupPages]:
        """The pages that a save which ends now brought to the pool. Ask before `save_ended`."""
        record = self._record(result.request_id, result.incarnation)
        order = None if record is None else record.saves.get(result.save_id)
        if order is None:
            return []
        stored = set(result.stored)
        return [select_pages(group, [block in stored for block in group.blocks]) for group in order.groups]

    def save_ended(self, result: SaveResult, now: float) -> list[Effect]:
        """The worker ended a save. Its mark stays, or steps back to what was refused (S2)."""
        self.backlog.ended(result.save_id)
        record = self._record(result.request_id, result.incarnation)
        order = record.saves.pop(result.save_id, None) if record is not None else None
        if record is None or order is None:
            return []
        if not order.snapshot:
            self.pages.unpin(order.groups)
        stored, refused = frozenset(result.stored), frozenset(result.refused)
        # Under the names of the weights that computed them.
        learnt = frozenset() if record.outdated else stored
        if order.window:
            for columns in order.groups:
                self._known.put(columns, learnt, refused, columns.group)
                record.windows.ended(columns, stored)
            return self._close_if_done(record)
        # The groups of a save list the same blocks, so the first names each block's hash.
        self._known.put(order.groups[0], learnt, refused)
        record.marks.stored(result.stored)
        if result.refused:
            record.marks.refused(result.refused, now)
        if not order.probe_first:
            # One that was asked for again was there before, was counted then, and is there still if nobody asked.
            record.stored_blocks += len(result.stored)
            record.marks.dropped(result.dropped)
        return self._close_if_done(record)

    def reset(self) -> None:
        """The weights changed: nothing is known to be in the pool under the new names, and no request that is open, all of
        them cancelled, can say otherwise.
        """
        self._known.clear()
        for record in self._open.values():
            record.outdated = True

    def new_generation(self) -> None:
        """The pool may have been lost: what was saved before is listed for saving again (S13)."""
        self._known.clear()
        for record in self._open.values():
            record.marks.lost()
            record.windows.new_generation()

    # -- ends

    def finish(self, record: RequestRecord, *, upto: int) -> list[Effect]:
        """The request is complete. What it computed below block `upto` and no pass has listed is saved now (S12), read live.

        Finishing while a load is under way, or while the pages are being taken away, keeps nothing. Idempotent.
        """
        if record.phase is not Phase.OPEN:
            return self._end(record, Happening.FINISH)
        orders = [self.listing.windows(record, record.windows.held, snapshot=False)]
        if record.tail:
            # All of it: there is no later pass.
            orders.append(self.listing.blocks(record, upto, record.tail, record.tail_first, float("inf")))
        wanted = [queueable(record, order, self.pages) for order in orders if order is not None]
        queued, shed = self._queue(wanted, float("inf"), is_pass=False)
        return [*queued, *([] if shed is None else [shed]), *self._end(record, Happening.FINISH)]

    def cancel(self, record: RequestRecord) -> list[Effect]:
        """The request is not wanted any more. Idempotent; a finishing request may still be cancelled."""
        return self._end(record, Happening.CANCEL)

    def preempt(self, record: RequestRecord) -> list[Effect]:
        """The engine takes the request's pages away, and goes on with it later, with others. Idempotent while under way.

        Without effect on a request that has begun to end.
        """
        return self._end(record, Happening.PREEMPT)

    def hold_expired(self, record: RequestRecord) -> list[Effect]:
        """The pages of a finished request were held for as long as an engine can be asked to (S7): what has not begun to be
        saved is given up.
        """
        return self._end(record, Happening.HELD_TOO_LONG)

    def lose(self, record: RequestRecord) -> list[GroupPages]:
        """Nobody will say when its pages are free. Its id may be used again; its pages, which are returned, never are."""
        self._move(record, Happening.UNSEEN)
        del self._open[record.request_id]
        saved = [group for order in record.saves.values() if not order.snapshot for group in order.groups]
        return [*saved, *(() if record.load is None else record.load.groups)]

    def pages_unread(self, message: PagesUnread) -> list[Effect]:
        """The worker says that nothing reads pages of a withdrawn incarnation any more, but for those in quarantine."""
        self.pages.quarantine((message.request_id, message.incarnation), message.quarantined)
        record = self._record(message.request_id, message.incarnation)
        if record is None:
            return []
        record.awaits_unread = False
        return self._close_if_done(record)

    def pages_released(self, message: PagesReleased) -> list[Effect]:
        """The worker says that a given-up call on pages returned; their request may have closed long ago."""
        released = self.pages.release(message)
        return [] if released is None else [released]

    def _move(self, record: RequestRecord, happening: Happening) -> bool:
        """Whether this moved the request on."""
        then = next_phase(record.phase, happening)
        record.phase = record.phase if then is None else then
        return then is not None

    def _end(self, record: RequestRecord, happening: Happening) -> list[Effect]:
        """What ends an incarnation happened: withdraw what is to be withdrawn, and close what has nothing to wait for."""
        if not self._move(record, happening):
            return []
        if record.phase in WITHDRAWN:
            record.awaits_unread = True
            preempted = happening is Happening.PREEMPT
            return [Withdrawal(request_id=record.request_id, incarnation=record.incarnation, preempted=preempted)]
        return self._close_if_done(record)

    def _queue(self, orders: list[SaveOrder], now: float, *, is_pass: bool) -> tuple[list[SaveOrder], Shed | None]:
        """Hand over what the backlog has room for. Every order is of an open request."""
        orders = [order for order in orders if order.pages]
        marks = {order.incarnation: self._open[order.request_id].marks for order in orders}
        was_shed = {incarnation: shed for incarnation, own in marks.items() if (shed := own.shed_blocks)}
        fit = self.backlog.admit(orders, was_shed, is_pass=is_pass)
        for order in fit.kept:
            record = self._open[order.request_id]
            record.saves[order.save_id] = order
            if order.window:
                record.windows.queued(order.groups)
            elif not order.probe_first:
                record.marks.queued(order.groups[0].blocks)
            if not order.snapshot:
                self.pages.pin(order.groups)
        for order in fit.dropped:
            if not order.window and not order.probe_first:
                marks[order.incarnation].shed(order.groups[0].blocks, now)
        return list(fit.kept), Shed(fit.dropped, self.backlog.under_way) if fit.dropped else None

    def _close_if_done(self, record: RequestRecord) -> list[Effect]:
        if not record.is_free:
            return []
        self._move(record, Happening.PAGES_FREE)
        for order in record.saves.values():
            # Withdrawn with puts still under way: they read slots, or pages that are in quarantine.
            if not order.snapshot:
                self.pages.unpin(order.groups)
        ended = SavesCompleted(
            request_id=record.request_id,
            incarnation=record.incarnation,
            stored_blocks=record.stored_blocks,
            refused_blocks=record.marks.refused_count,
        )
        if record.phase is Phase.CLOSED:
            del self._open[record.request_id]
        else:
            record.begin_incarnation(next(self._ids))
        return [ended]

    def _record(self, request_id: str, incarnation: int) -> RequestRecord | None:
        record = self._open.get(request_id)
        return record if record is not None and record.incarnation == incarnation else None
