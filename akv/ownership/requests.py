"""Requests in the scheduler half: their incarnation, their one load, the marks of their saves (S1, S2, S7, D8, D9, M7).

Methods return effects, in the order in which they are to be carried out: a `Withdrawal` or `SaveOrder` goes to the worker
half, a `LoadHold` that ended or a `SavesCompleted` is told to the engine. What the worker reports for an earlier incarnation,
or for a request that has closed, changes nothing here.
"""

from collections.abc import Sequence
from enum import Enum, auto
from itertools import compress, islice

from akv.errors import EngineContractError
from akv.ownership.known_hashes import KnownHashes
from akv.ownership.marks import UNLIMITED, BlockState, SaveMarks
from akv.ownership.page_book import PageBook
from akv.plan.hashing import Chain
from akv.units import NO_PAGE
from akv.values.messages import (
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    PagesUnread,
    SaveOrder,
    SaveResult,
    Withdrawal,
)
from akv.values.requests import LoadCompleted, SavesCompleted


class Phase(Enum):
    """Where a request stands. Open: may load and be scheduled. Closed: nothing of akv's touches its pages any more."""

    OPEN = auto()
    #: `finish()`: its saves go on, the pages are held until they ended (S7).
    FINISHING = auto()
    #: `cancel()`: what is queued is withdrawn, the pages are held until no copy touches them (D6).
    CANCELLING = auto()
    CLOSED = auto()


class LoadHold:
    """Pages that a request lent to a load, until its terminal state."""

    __slots__ = ("completed", "failed_key", "groups", "load_id", "local_tokens", "tokens")

    def __init__(self, load_id: int, groups: tuple[GroupPages, ...], local_tokens: int, tokens: int) -> None:
        self.load_id = load_id
        self.groups = groups
        self.local_tokens = local_tokens
        self.tokens = tokens
        #: The terminal state; None while the pages are the connector's.
        self.completed: LoadCompleted | None = None
        self.failed_key = ""


class RequestRecord:
    """One request from `open_request` to the return of its pages."""

    def __init__(self, request_id: str, incarnation: int, chain: Chain, marks: SaveMarks, *, reads_cache: bool) -> None:
        self.request_id = request_id
        #: Counts the lives of pages under one id, over requests that reuse the id too: a late message cannot meet a new owner.
        self.incarnation = incarnation
        self.chain = chain
        self.marks = marks
        self.reads_cache = reads_cache
        self.prompt_tokens = chain.length
        self.phase = Phase.OPEN
        self.load: LoadHold | None = None
        #: Saves that the worker has not ended, with the blocks of each.
        self.saves: dict[int, SaveOrder] = {}
        #: Blocks that this request's own saves brought to the pool.
        self.stored_blocks = 0
        #: A withdrawal is under way; the worker will say when no copy reads the pages.
        self.awaits_unread = False
        #: Tokens that passes are known to have computed, counted from the sequence's start.
        self.computed = 0
        #: After a failed or cancelled load: tokens below which the pages hold valid KV. None: no load of this life was lost.
        self.valid_to: int | None = None
        #: For `finish`: where the tables below begin (a block), and the pages from there on of each group.
        self.tail_first = 0
        self.tail: tuple[tuple[int, ...], ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        """What messages name it by."""
        return (self.request_id, self.incarnation)


Effect = Withdrawal | SaveOrder | LoadHold | SavesCompleted


class Requests:
    """Every request that has not closed."""

    def __init__(self, *, groups: int, backoff_s: float) -> None:
        self._groups = groups
        self._backoff_s = backoff_s
        self._open: dict[str, RequestRecord] = {}
        #: The pages that are in the connector's hands.
        self.pages = PageBook(groups)
        self._known = KnownHashes()
        self._last_id = 0

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
                f"request {request_id!r} is open already ({present.phase.name.lower()}): ids may be used again once "
                "finished() or cancel() returned; give concurrent requests different ids"
            )
        self._last_id += 1
        marks = SaveMarks(self._backoff_s)
        record = RequestRecord(request_id, self._last_id, chain, marks, reads_cache=reads_cache)
        self._open[request_id] = record
        return record

    def must_be_open(self, record: RequestRecord, verb: str) -> None:
        """Raise EngineContractError if the request has begun to end."""
        if record.phase is not Phase.OPEN:
            raise EngineContractError(
                f"cannot {verb} request {record.request_id!r}: it is {record.phase.name.lower()}; "
                "open a new request for further work under this id"
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

    def not_found(self, record: RequestRecord, first: int) -> None:
        """A lookup found a hole at block `first`. From there on nothing is known to be in the pool any more (S13)."""
        self._known.forget(record.chain.hashes(first, record.chain.hash_up_to(0)))

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
        self._last_id += 1
        hold = record.load = LoadHold(self._last_id, groups, local_tokens, tokens)
        self.pages.lend(groups)
        order = LoadOrder(load_id=hold.load_id, request_id=record.request_id, incarnation=record.incarnation, groups=groups)
        return order, hold

    def load_ended(self, result: LoadResult) -> list[Effect]:
        """The worker reached the terminal state of a load: its pages are the engine's again."""
        record = self._record(result.request_id, result.incarnation)
        if record is None or record.load is None or record.load.load_id != result.load_id:
            return []
        hold, record.load = record.load, None
        self.pages.returned(hold.groups)
        if result.state is LoadState.LOADED:
            for group in hold.groups:
                record.marks.stored(group.blocks)
                self._known.add(group.hashes)
            self.matched_locally(record, hold.local_tokens + hold.tokens)
        else:
            # What landed is discarded: from here on only the local match is KV, and a pass that builds on more is refused.
            # What passes had computed behind it may be written over, and `finish` must not publish it (S1).
            record.valid_to = hold.local_tokens
            record.computed = min(record.computed, hold.local_tokens)
            if result.state is LoadState.FAILED:
                # The pool may have lost them, so they are listed for saving again once they were computed.
                for group in hold.groups:
                    self._known.forget(group.hashes)
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

    def list_saves(
        self, record: RequestRecord, end: int, tables: Sequence[Sequence[int]], first: int, now: float
    ) -> SaveOrder | None:
        """`list_some` without a bound."""
        return self.list_some(record, end, tables, first, now, UNLIMITED)[1]

    def list_some(
        self, record: RequestRecord, end: int, tables: Sequence[Sequence[int]], first: int, now: float, most: int
    ) -> tuple[int, SaveOrder | None]:
        """What a pass would have to save of this request, of the first `most` blocks below `end` that are open and have their
        pages; and how many blocks these were. Changes no mark (S2).

        `tables` are the page tables of each group from block `first` on. A block that lacks a page in a group is not listed,
        since a lookup could never count it (L2), and does not count; one that the pool is known to hold is not listed either.
        """
        with_pages = (
            block
            # Bounded too where many blocks have no page: those are only passed over.
            for block in record.marks.to_offer(end, now, 16 * most)
            if block >= first and all(_page(table, block - first) != NO_PAGE for table in tables)
        )
        blocks = list(islice(with_pages, most))
        looked_at = len(blocks)
        if blocks:
            chain = _hashes(record.chain, blocks)
            blocks = [block for block in blocks if chain[block] not in self._known]
        if not blocks:
            return looked_at, None
        hashes = tuple(chain[block] for block in blocks)
        self._last_id += 1
        return looked_at, SaveOrder(
            save_id=self._last_id,
            request_id=record.request_id,
            incarnation=record.incarnation,
            groups=tuple(
                GroupPages(group, tuple(blocks), tuple(int(tables[group][block - first]) for block in blocks), hashes)
                for group in range(self._groups)
            ),
        )

    def ran(
        self,
        record: RequestRecord,
        computed: int,
        end: int,
        first: int,
        tail: tuple[tuple[int, ...], ...],
        most: int = UNLIMITED,
    ) -> None:
        """A pass of this request ran: `computed` tokens have KV now; `tail` are its pages from block `first` on.

        Of the first `most` open blocks below `end` those that the pool is known to hold are marked as stored, so that later
        passes do not look at them again. Blocks without a hash are left to them.
        """
        record.computed = max(record.computed, computed)
        record.tail_first, record.tail = first, tail
        open_blocks = record.marks.to_offer(min(end, record.chain.hash_up_to(0)), float("inf"), most)
        if open_blocks:
            chain = _hashes(record.chain, open_blocks)
            record.marks.stored([block for block in open_blocks if chain[block] in self._known])
        if record.valid_to is not None:
            record.valid_to = max(record.valid_to, computed)

    def queue_save(self, order: SaveOrder) -> SaveOrder | None:
        """A listed save is handed over now. Left out are blocks that an earlier pass handed over meanwhile, blocks with a page
        that a load fills (S1), and all of a request that has begun to end: its pages may be given back before they are read.
        """
        record = self._record(order.request_id, order.incarnation)
        if record is None or record.phase is not Phase.OPEN:
            return None
        return self._queue(record, order)

    def save_ended(self, result: SaveResult, now: float) -> list[Effect]:
        """The worker ended a save. Its mark stays, or steps back to what was refused (S2)."""
        record = self._record(result.request_id, result.incarnation)
        order = record.saves.pop(result.save_id, None) if record is not None else None
        if record is None or order is None:
            return []
        self.pages.unpin(order.groups)
        if result.stored:
            # The groups of a save list the same blocks, so the first names each block's hash.
            hashes = dict(zip(order.groups[0].blocks, order.groups[0].hashes, strict=True))
            self._known.add(hashes[block] for block in result.stored)
            record.marks.stored(result.stored)
            record.stored_blocks += len(result.stored)
        if result.refused:
            record.marks.refused(result.refused, now)
        record.marks.dropped(result.dropped)
        return self._close_if_done(record)

    # -- ends

    def finish(self, record: RequestRecord, *, upto: int) -> list[Effect]:
        """The request is complete. What it computed below block `upto` and no pass has listed is saved now (S12), read live.

        Finishing while a load is under way cancels the load and keeps nothing. Idempotent.
        """
        if record.phase is not Phase.OPEN:
            return []
        if record.load is not None:
            return self._withdraw(record, Phase.FINISHING)
        order = None
        if record.tail:
            # All of it: there is no later pass.
            order = self.list_saves(record, upto, record.tail, record.tail_first, float("inf"))
        effects: list[Effect] = []
        if order is not None and (queued := self._queue(record, order)) is not None:
            effects.append(queued)
        record.phase = Phase.FINISHING
        return [*effects, *self._close_if_done(record)]

    def cancel(self, record: RequestRecord) -> list[Effect]:
        """The request is not wanted any more. Idempotent; a finishing request may still be cancelled."""
        if record.phase in (Phase.CANCELLING, Phase.CLOSED):
            return []
        return self._withdraw(record, Phase.CANCELLING)

    def pages_unread(self, message: PagesUnread) -> list[Effect]:
        """The worker says that no copy reads pages of a withdrawn incarnation any more."""
        record = self._record(message.request_id, message.incarnation)
        if record is None:
            return []
        record.awaits_unread = False
        return self._close_if_done(record)

    def _withdraw(self, record: RequestRecord, phase: Phase) -> list[Effect]:
        record.phase = phase
        record.awaits_unread = True
        return [Withdrawal(request_id=record.request_id, incarnation=record.incarnation)]

    def _queue(self, record: RequestRecord, order: SaveOrder) -> SaveOrder | None:
        keep = [record.marks.is_open(block) for block in order.groups[0].blocks]
        for group in order.groups:
            keep = [k and not self.pages.is_filled(group.group, page) for k, page in zip(keep, group.pages, strict=True)]
        if not all(keep):
            order = SaveOrder(
                save_id=order.save_id,
                request_id=order.request_id,
                incarnation=order.incarnation,
                groups=tuple(_only(group, keep) for group in order.groups),
            )
        if not order.groups[0].blocks:
            return None
        record.saves[order.save_id] = order
        record.marks.queued(order.groups[0].blocks)
        self.pages.pin(order.groups)
        return order

    def _close_if_done(self, record: RequestRecord) -> list[Effect]:
        if record.phase in (Phase.OPEN, Phase.CLOSED) or record.load is not None or record.awaits_unread:
            return []
        if record.saves and record.phase is Phase.FINISHING:
            return []
        record.phase = Phase.CLOSED
        del self._open[record.request_id]
        for order in record.saves.values():
            # Cancelled with puts still under way: they read slots, not pages.
            self.pages.unpin(order.groups)
        return [
            SavesCompleted(
                request_id=record.request_id,
                incarnation=record.incarnation,
                stored_blocks=record.stored_blocks,
                refused_blocks=record.marks.count(BlockState.REFUSED),
            )
        ]

    def _record(self, request_id: str, incarnation: int) -> RequestRecord | None:
        record = self._open.get(request_id)
        return record if record is not None and record.incarnation == incarnation else None


def _hashes(chain: Chain, blocks: Sequence[int]) -> dict[int, bytes]:
    # From the first of the blocks on and not from the sequence's first: a pass of a long request has a few new blocks.
    return dict(enumerate(chain.hashes(blocks[0], blocks[-1] + 1), blocks[0]))


def _page(table: Sequence[int], index: int) -> int:
    return table[index] if index < len(table) else NO_PAGE


def _only(group: GroupPages, keep: Sequence[bool]) -> GroupPages:
    return GroupPages(
        group.group,
        tuple(compress(group.blocks, keep)),
        tuple(compress(group.pages, keep)),
        tuple(compress(group.hashes, keep)),
    )
