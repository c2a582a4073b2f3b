"""Requests of one scheduler half, and what a test says to them in one line; the flows of one worker half, step by step."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from akv.ownership.request_record import LoadHold, RequestRecord
from akv.ownership.requests import Effect, Requests
from akv.ownership.reservations import LoadRecord, Reservations
from akv.ownership.saves import Saves, SaveTicket
from akv.plan.ending import WindowPages
from akv.plan.hashing import Chain, scope_seed
from akv.values.messages import (
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    PagesPerGroup,
    PagesUnread,
    SaveOrder,
    SaveResult,
    Withdrawal,
)
from akv.values.requests import SavesCompleted
from akv.values.scope import EMPTY_SCOPE


class Scene:
    """`Requests` of two layer groups, T = 2, prompts of 8 blocks and one token."""

    T = 2
    BACKOFF_S = 1.0
    BLOCKS = 8
    #: The page table of each group.
    TABLES = (tuple(range(10, 18)), tuple(range(30, 38)))

    def __init__(self, windows: Collection[int] = ()) -> None:
        self.requests = Requests(groups=2, backoff_s=self.BACKOFF_S, windows=windows)

    def opened(self, request_id: str = "r", *, first_token: int = 0, reads_cache: bool = True) -> RequestRecord:
        chain = Chain(scope_seed(EMPTY_SCOPE), self.T)
        chain.append(range(first_token, first_token + self.BLOCKS * self.T + 1))
        return self.requests.open(request_id, chain, reads_cache=reads_cache)

    def columns(
        self, record: RequestRecord, blocks: range, tables: Sequence[Sequence[int]] = TABLES
    ) -> tuple[GroupPages, ...]:
        hashes = tuple(record.chain.hashes(blocks.start, blocks.stop))
        return tuple(
            GroupPages(group, tuple(blocks), tuple(table[block] for block in blocks), hashes)
            for group, table in enumerate(tables)
        )

    # -- what an engine does

    def reserved(
        self, record: RequestRecord, blocks: range, tables: Sequence[Sequence[int]] = TABLES
    ) -> tuple[LoadOrder, LoadHold]:
        groups = self.columns(record, blocks, tables) if blocks else ()
        return self.requests.reserve(record, groups, blocks.start * self.T, len(blocks) * self.T)

    def listed(self, record: RequestRecord, end: int, now: float = 0.0) -> tuple[int, ...]:
        """The blocks that a plan would list."""
        order = self.requests.listing.blocks(record, end, self.TABLES, 0, now)
        return order.groups[0].blocks if order is not None else ()

    def queued(self, record: RequestRecord, end: int, now: float = 0.0) -> SaveOrder:
        """A save of everything below `end` that was planned and handed over."""
        order = self.requests.listing.blocks(record, end, self.TABLES, 0, now)
        assert order is not None
        handed_over = self.handed_over(order)
        assert handed_over is not None
        return handed_over

    def handed_over(self, order: SaveOrder, now: float = 0.0) -> SaveOrder | None:
        """What the pass that listed this order hands over of it."""
        queued, _ = self.requests.queue_saves([order], now)
        return queued[0] if queued else None

    def passed(self, record: RequestRecord, end: int) -> None:
        """A pass computed blocks [0, end), and nothing of it was handed over."""
        self.requests.ran(record, end * self.T, 0, 0, tuple(table[:end] for table in self.TABLES))

    def held(self, record: RequestRecord, blocks: range, groups: Sequence[int] = (1,)) -> None:
        """A pass ran, and left these window pages to the request."""
        columns = tuple(
            WindowPages(group, tuple(blocks), tuple(self.TABLES[group][block] for block in blocks)) for group in groups
        )
        record.windows.ran(0, columns, closes=False)

    def closing(self, record: RequestRecord, blocks: range) -> SaveOrder:
        """What a closing pass lists of the window group 1."""
        columns = WindowPages(1, tuple(blocks), tuple(self.TABLES[1][block] for block in blocks))
        order = self.requests.listing.windows(record, [columns], snapshot=True)
        assert order is not None
        return order

    # -- what a worker half says

    def load_end(self, order: LoadOrder, state: LoadState, **more: Any) -> LoadResult:
        who = {"load_id": order.load_id, "request_id": order.request_id, "incarnation": order.incarnation}
        return LoadResult(**{**who, "state": state, **more})

    def save_end(self, order: SaveOrder, now: float = 0.0, **lists: Any) -> list[Effect]:
        who = {"save_id": order.save_id, "request_id": order.request_id, "incarnation": order.incarnation}
        return self.requests.save_ended(SaveResult(**{**who, **lists}), now)

    def unread(self, record: RequestRecord, quarantined: PagesPerGroup = ()) -> PagesUnread:
        return PagesUnread(request_id=record.request_id, incarnation=record.incarnation, quarantined=quarantined)

    # -- what a scheduler half answers

    def withdrawal(self, record: RequestRecord, *, preempted: bool = False) -> Withdrawal:
        return Withdrawal(request_id=record.request_id, incarnation=record.incarnation, preempted=preempted)

    def completed(self, record: RequestRecord, stored: int = 0, refused: int = 0) -> SavesCompleted:
        return SavesCompleted(
            request_id=record.request_id, incarnation=record.incarnation, stored_blocks=stored, refused_blocks=refused
        )


class Worker:
    """A worker half's ownership, and what its flows do with it in any order. A page is a group and an index in its cache."""

    def __init__(self, groups: int) -> None:
        self.reservations = Reservations([1] * groups)
        self.saves = Saves([1] * groups)
        self.reports: deque[LoadResult | SaveResult | PagesUnread] = deque()
        #: What each page holds: the hash of its block, or None for anything else.
        self.content: dict[tuple[int, int], bytes | None] = {}
        #: Incarnations whose pages are the engine's again, for good.
        self.given_back: set[int] = set()
        self.loaders: list[LoadRecord] = []
        self.savers: list[SaveTicket] = []
        self.copies: list[LoadRecord] = []
        self.reads: list[SaveTicket] = []

    def hears(self, message: LoadOrder | SaveOrder | Withdrawal) -> None:
        match message:
            case LoadOrder():
                record = self.reservations.accept(message, None)
                if not message.groups:
                    self._report(self.reservations.landed(record))
            case SaveOrder():
                self.saves.accept(message, None)
            case Withdrawal():
                _, loads = self.reservations.withdraw(message.request_id, message.incarnation)
                results, unread = self.saves.withdraw(message.request_id, message.incarnation)
                self._report(*loads, *results, *unread)

    def take_up_load(self) -> None:
        if (record := self.reservations.next()) is not None:
            assert record.verdict is None
            self.loaders.append(record)

    def begin_copy(self, record: LoadRecord) -> None:
        if self.reservations.begin_copy(record):
            self.copies.append(record)
            self.content.update(dict.fromkeys(self._touched(record.order)))

    def end_copy(self, record: LoadRecord) -> None:
        self.copies.remove(record)
        self.content.update(self._touched(record.order))
        self._report(self.reservations.end_copy(record))

    def end_load(self, record: LoadRecord, *, arrives: bool) -> None:
        self.loaders.remove(record)
        if arrives and record not in self.copies and self.hold(record.order.groups):
            self._report(self.reservations.landed(record))
        else:
            self._report(self.reservations.fail(record, "key", "missing"))

    def take_up_save(self) -> None:
        if (ticket := self.saves.next()) is not None:
            assert not ticket.withdrawn
            self.savers.append(ticket)

    def begin_read(self, ticket: SaveTicket) -> None:
        if self.saves.begin_read(ticket):
            self.reads.append(ticket)

    def end_read(self, ticket: SaveTicket) -> None:
        self.reads.remove(ticket)
        self._touched(ticket.order)
        assert self.hold(ticket.order.groups), "bytes are published under a hash that is not theirs"
        self._report(*self.saves.end_read(ticket))

    def end_save(self, ticket: SaveTicket, *, refused: set[int]) -> None:
        """All of it was read and put, or it was withdrawn."""
        self.savers.remove(ticket)
        if self.saves.begin_read(ticket):
            self.reads.append(ticket)
            self.end_read(ticket)
            for group in ticket.order.groups:
                ticket.pages_stored([block for block in group.blocks if block not in refused], 1)
                ticket.pages_refused([block for block in group.blocks if block in refused], "full")
        self._report(self.saves.end(ticket))

    def run_out(self) -> None:
        """Whatever is under way ends, as after a cancel of everything."""
        for record in list(self.copies):
            self.end_copy(record)
        for reading in list(self.reads):
            self.end_read(reading)
        for ticket in list(self.savers):
            self.end_save(ticket, refused=set())
        assert (self.reservations.active, self.saves.active, self.saves._unread) == (0, 0, set())

    def hold(self, groups: Iterable[GroupPages]) -> bool:
        """Whether each of these pages holds what its block's hash promises."""
        return all(self.content.get(page) == block_hash for page, block_hash in self.pages_of(groups).items())

    def pages_of(self, groups: Iterable[GroupPages]) -> dict[tuple[int, int], bytes]:
        return {
            (group.group, page): block_hash
            for group in groups
            for page, block_hash in zip(group.pages, group.hashes, strict=True)
        }

    def _touched(self, order: LoadOrder | SaveOrder) -> dict[tuple[int, int], bytes]:
        assert order.incarnation not in self.given_back, "pages are touched for a request to which they were given back"
        return self.pages_of(order.groups)

    def _report(self, *messages: LoadResult | SaveResult | PagesUnread | None) -> None:
        self.reports.extend(message for message in messages if message is not None)


@pytest.fixture
def worker() -> type[Worker]:
    return Worker


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def window_scene() -> Scene:
    """Of its two layer groups the second forgets."""
    return Scene(windows=(1,))
