"""Lives of requests with window groups, whose loads and saves are store calls on pages: nobody waits for a call.

The engine frees what it is given back at once, but for pages named as quarantined, which it keeps until they are released. No
free page may be touched by a call, a copy or a read; each named page is released once; no mark follows a window's order.
Covers D2, D6, M1, M3, S2, S7, S8, S12.
"""

from collections import deque
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from akv.ownership.backlog import Shed
from akv.ownership.request_record import LoadHold, RequestRecord
from akv.ownership.requests import Effect, Requests
from akv.ownership.reservations import LoadRecord, Reservations
from akv.ownership.saves import Saves, SaveTicket
from akv.plan.ending import WindowPages
from akv.plan.hashing import Chain, scope_seed
from akv.plan.lifecycle import Phase
from akv.units import NO_PAGE
from akv.values.messages import (
    GroupPages,
    LoadOrder,
    LoadResult,
    PagesPerGroup,
    PagesReleased,
    PagesUnread,
    SaveOrder,
    SaveResult,
    Withdrawal,
)
from akv.values.requests import SavesCompleted
from akv.values.scope import EMPTY_SCOPE

T, BLOCKS, PAGES = 2, 3, 10
FULL, WINDOW = 0, 1
Page = tuple[int, int]
Work = LoadRecord | SaveTicket


def pages_of(columns: GroupPages) -> set[Page]:
    return {(columns.group, page) for page in columns.pages}


class Life:
    """What the engine knows of one request."""

    def __init__(self, record: RequestRecord, tables: list[list[int]]) -> None:
        self.record = record
        self.tables = tables
        #: A load whose end the engine has not heard of: it schedules nothing before.
        self.loading = False
        self.done = 0


class QuarantineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests = Requests(groups=2, backoff_s=0.0, windows=[WINDOW])
        self.reservations, self.saves = Reservations([1, 1]), Saves([1, 1])
        self.free: list[list[int]] = [list(range(PAGES)), list(range(PAGES))]
        self.lives: dict[int, Life] = {}
        self.to_worker: deque[LoadOrder | SaveOrder | Withdrawal] = deque()
        self.reports: deque[LoadResult | SaveResult | PagesUnread | PagesReleased] = deque()
        self.ends: list[LoadHold | SavesCompleted] = []
        self.released: list[PagesReleased] = []
        #: Named to the engine and not released, by incarnation.
        self.named: dict[int, set[Page]] = {}
        self.works: list[Work] = []
        self.calls: list[tuple[Work, GroupPages]] = []
        self.copies: list[Work] = []
        self.names = map(str, count())

    # -- the engine

    @precondition(lambda self: all(len(free) >= BLOCKS for free in self.free))
    @rule(prompt=st.sampled_from([0, 0, 50]))
    def open(self, prompt: int) -> None:
        chain = Chain(scope_seed(EMPTY_SCOPE), T)
        chain.append(range(prompt, prompt + BLOCKS * T + 1))
        record = self.requests.open(next(self.names), chain, reads_cache=True)
        self.lives[record.incarnation] = Life(record, [[free.pop(0) for _ in range(BLOCKS)] for free in self.free])

    def idle(self) -> list[Life]:
        """Requests that may load or be scheduled."""
        return [life for life in self.lives.values() if life.record.phase is Phase.OPEN and not life.loading]

    def columns(self, life: Life, group: int, blocks: list[int]) -> GroupPages:
        hashes = life.record.chain.hashes(0, BLOCKS)
        pages = tuple(life.tables[group][block] for block in blocks)
        return GroupPages(group, tuple(blocks), pages, tuple(hashes[block] for block in blocks))

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), first=st.integers(0, BLOCKS - 1))
    def reserve(self, data: st.DataObject, first: int) -> None:
        life = data.draw(st.sampled_from(self.idle()))
        groups = []
        for group, table in enumerate(life.tables):
            blocks = [block for block in range(first, BLOCKS) if table[block] != NO_PAGE]
            groups += [self.columns(life, group, blocks)] if blocks else []
        if self.requests.pages.in_use(groups) is not None or not groups:
            return
        order, _ = self.requests.reserve(life.record, tuple(groups), first * T, (BLOCKS - first) * T)
        life.loading, life.done = True, first
        self.to_worker.append(order)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), more=st.integers(1, BLOCKS), asks_again=st.booleans())
    def a_pass_runs(self, data: st.DataObject, more: int, asks_again: bool) -> None:
        life = data.draw(st.sampled_from(self.idle()))
        record, listing = life.record, self.requests.listing
        done = min(BLOCKS, life.done + more)
        orders = [listing.blocks(record, done, life.tables, 0, 0.0)]
        closes = done == BLOCKS and not record.windows.closed
        if closes:
            orders.append(listing.windows(record, self.held(life), snapshot=True))
        if asks_again:
            orders.append(listing.again(record, done, life.tables))
        for order in orders:
            if order is not None and (queued := self.queue(record, order)) is not None:
                self.to_worker.append(queued)
        if closes:
            # Copied: the engine moves its window on, and uses one page of it anew.
            self.gives_back(life, {(WINDOW, life.tables[WINDOW][0])})
        self.requests.ran(record, done * T, done, 0, (tuple(life.tables[FULL][:done]), ()))
        record.windows.ran(life.done * T, self.held(life), closes=closes)
        life.done = done

    def queue(self, record: RequestRecord, order: SaveOrder) -> SaveOrder | None:
        before = bytes(record.marks._states), record.marks.mark
        queued, _ = self.requests.queue_saves([order], 0.0)
        if order.window or order.probe_first:
            assert (bytes(record.marks._states), record.marks.mark) == before, "a mark follows a window, or what is stored"
        return queued[0] if queued else None

    def held(self, life: Life) -> tuple[WindowPages, ...]:
        blocks = [block for block, page in enumerate(life.tables[WINDOW]) if page != NO_PAGE]
        return (WindowPages(WINDOW, tuple(blocks), tuple(life.tables[WINDOW][block] for block in blocks)),)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), cancels=st.booleans(), another_time=st.booleans())
    def end(self, data: st.DataObject, cancels: bool, another_time: bool) -> None:
        if another_time:
            return
        record = data.draw(st.sampled_from(list(self.lives.values()))).record
        self.carry_out(self.requests.cancel(record) if cancels else self.requests.finish(record, upto=record.computed // T))

    @rule()
    def the_engine_fetches(self) -> None:
        for ended in self.ends:
            completed = ended if isinstance(ended, SavesCompleted) else ended.completed
            assert completed is not None
            life = self.lives[completed.incarnation]
            named = self.paged(self.requests.pages.tell(life.record.key))
            known = self.named.setdefault(completed.incarnation, set())
            assert not named & known, "a page is named twice"
            known |= named
            # It takes other pages for these, or none.
            self.gives_back(life, named, into=known)
            life.loading = False
            if isinstance(ended, SavesCompleted):
                self.gives_back(life, {(g, page) for g, table in enumerate(life.tables) for page in table if page != NO_PAGE})
                del self.lives[completed.incarnation]
        for message in self.released:
            for group, page in self.paged(message.pages):
                self.named[message.incarnation].remove((group, page))
                self.free[group].append(page)
        self.ends.clear()
        self.released.clear()

    def paged(self, pages: PagesPerGroup) -> set[Page]:
        return {(group, page) for group, some in enumerate(pages) for page in some}

    def gives_back(self, life: Life, pages: set[Page], into: set[Page] | None = None) -> None:
        for group, table in enumerate(life.tables):
            for block, page in enumerate(table):
                if (group, page) in pages:
                    table[block] = NO_PAGE
                    if into is None:
                        self.free[group].append(page)

    # -- messages

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Withdrawal() | SaveOrder():
                    self.to_worker.append(effect)
                case PagesReleased():
                    self.released.append(effect)
                case Shed():
                    raise AssertionError("this backlog has no bounds")
                case _:
                    self.ends.append(effect)

    @precondition(lambda self: self.to_worker)
    @rule()
    def the_worker_hears(self) -> None:
        match self.to_worker.popleft():
            case LoadOrder() as order:
                self.reservations.accept(order, None)
            case SaveOrder() as save:
                self.saves.accept(save, None)
            case Withdrawal() as message:
                self.reports += self.reservations.withdraw(message.request_id, message.incarnation)[1]
                results, unread = self.saves.withdraw(message.request_id, message.incarnation)
                self.reports += [*results, *unread]

    @precondition(lambda self: self.reports)
    @rule()
    def the_scheduler_hears(self) -> None:
        match self.reports.popleft():
            case LoadResult() as load:
                self.carry_out(self.requests.load_ended(load))
            case SaveResult() as save:
                life = self.lives.get(save.incarnation)
                order = None if life is None else life.record.saves.get(save.save_id)
                before = b"" if life is None else bytes(life.record.marks._states)
                self.carry_out(self.requests.save_ended(save, 0.0))
                if life is not None and order is not None and (order.window or (order.probe_first and not save.refused)):
                    assert bytes(life.record.marks._states) == before
            case PagesUnread() as unread:
                self.carry_out(self.requests.pages_unread(unread))
            case PagesReleased() as released:
                self.carry_out(self.requests.pages_released(released))

    # -- loaders and savers

    @rule(saves=st.booleans())
    def work_is_taken_up(self, saves: bool) -> None:
        work: Work | None = self.saves.next() if saves else self.reservations.next()
        self.works += [] if work is None else [work]

    @precondition(lambda self: self.works)
    @rule(data=st.data(), copy=st.integers(0, 2))
    def something_begins(self, data: st.DataObject, copy: int) -> None:
        work = data.draw(st.sampled_from(self.works))
        columns = data.draw(st.sampled_from(work.order.groups))
        if isinstance(work, LoadRecord):
            began = self.reservations.begin_copy(work) if not copy else self.reservations.begin_call(work, columns)
        elif work.order.snapshot:
            return
        else:
            began = self.saves.begin_read(work) if not copy else self.saves.begin_call(work, columns)
        if began and not copy:
            self.copies.append(work)
        elif began:
            self.calls.append((work, columns))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def a_call_returns(self, data: st.DataObject) -> None:
        self.returned(data.draw(st.sampled_from(self.calls)))

    def returned(self, call: tuple[Work, GroupPages]) -> None:
        self.calls.remove(call)
        work, columns = call
        if isinstance(work, LoadRecord):
            released = self.reservations.end_call(work, columns)
        else:
            released = self.saves.end_call(work, columns)
        self.reports += [] if released is None else [released]

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def a_copy_ends(self, data: st.DataObject) -> None:
        self.copied(data.draw(st.sampled_from(self.copies)))

    def copied(self, work: Work) -> None:
        self.copies.remove(work)
        if isinstance(work, LoadRecord):
            result = self.reservations.end_copy(work)
            self.reports += [] if result is None else [result]
        else:
            self.reports += self.saves.end_read(work)

    @precondition(lambda self: self.works)
    @rule(data=st.data(), well=st.booleans())
    def work_ends(self, data: st.DataObject, well: bool) -> None:
        self.ended(data.draw(st.sampled_from(self.works)), well=well)

    def ended(self, work: Work, *, well: bool) -> None:
        """A load may fail while its calls run; a save, and a load that lands, has waited for them."""
        busy = work in self.copies or any(work is other for other, _ in self.calls)
        if isinstance(work, LoadRecord):
            landed = well and not busy
            result = self.reservations.landed(work) if landed else self.reservations.fail(work, "key", "deadline")
            self.reports += [] if result is None else [result]
        elif busy:
            return
        else:
            blocks = {block for columns in work.order.groups for block in columns.blocks}
            if not work.withdrawn and well:
                for columns in work.order.groups:
                    work.pages_stored(columns.blocks, 1)
            elif not work.withdrawn:
                work.pages_refused(blocks, "full")
            self.reports.append(self.saves.end(work))
        self.works.remove(work)

    # -- what must hold

    @invariant()
    def nothing_touches_a_free_page(self) -> None:
        free = {(group, page) for group, pages in enumerate(self.free) for page in pages}
        assert sum(map(len, self.free)) == len(free), "a page was given back twice"
        touched = {page for _, columns in self.calls for page in pages_of(columns)}
        touched |= {page for work in self.copies for columns in work.order.groups for page in pages_of(columns)}
        assert not free & touched, "a page is free that something touches"

    @invariant()
    def bytes_in_quarantine_belong_to_calls(self) -> None:
        in_quarantine = self.reservations.quarantined_bytes + self.saves.quarantined_bytes
        assert in_quarantine <= sum(len(columns.pages) for _, columns in self.calls)

    def teardown(self) -> None:
        """Whatever happened: cancelling everything and letting it run out leaves nothing, and each page is free once."""
        for life in self.lives.values():
            self.carry_out(self.requests.cancel(life.record))
        while self.to_worker:
            self.the_worker_hears()
        for work in list(self.copies):
            self.copied(work)
        for call in list(self.calls):
            self.returned(call)
        for work in list(self.works):
            self.ended(work, well=True)
        while self.reports:
            self.the_scheduler_hears()
        self.the_engine_fetches()
        self.nothing_touches_a_free_page()
        assert (self.reservations.quarantined_bytes, self.saves.quarantined_bytes) == (0, 0)
        assert (self.lives, len(self.requests), any(self.named.values())) == ({}, 0, False)
        pages = self.requests.pages
        assert (pages.loading, pages.saving, pages.quarantined) == (set(), {}, {})
        assert sum(map(len, self.free)) == 2 * PAGES


QuarantineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestD2D6M3S7QuarantineMachine = QuarantineMachine.TestCase
