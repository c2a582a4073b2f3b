"""Lives of a server of several ranks, whose reports come in any order, late, and twice.

Whatever the order: each load, save and withdrawal has one end, when every rank said so; a page that an end named is released
once, when no call of any rank touches it, and no page that one touches is forgotten. Covers D1, D2, D6, M3, S2, S7.
"""

from collections import Counter
from itertools import count
from typing import NamedTuple

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from akv.ownership.ranks import RankLedger
from akv.values.messages import (
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    PagesPerGroup,
    PagesReleased,
    PagesUnread,
    PassReport,
    SaveOrder,
    SaveResult,
    Withdrawal,
)

GROUPS, INCARNATIONS = 2, 3
BLOCKS = range(4)
PAGES: PagesPerGroup = ((10, 11, 12, 13), (20, 21, 22, 23))


class Call(NamedTuple):
    """A store call of a rank on a page, which its end named; `source` is that end's number, or 0 for a withdrawal's."""

    rank: int
    incarnation: int
    group: int
    page: int
    source: int


Kept = tuple[int, int, int]


def columns(incarnation: int) -> tuple[GroupPages, ...]:
    hashes = tuple(bytes([incarnation, block]) * 8 for block in BLOCKS)
    return tuple(GroupPages(group, tuple(BLOCKS), pages, hashes) for group, pages in enumerate(PAGES))


def loaded(order: LoadOrder) -> LoadResult:
    return LoadResult(
        load_id=order.load_id,
        request_id="r",
        incarnation=order.incarnation,
        state=LoadState.LOADED,
        pages=8,
        direct_pages=1,
    )


def saved(order: SaveOrder) -> SaveResult:
    return SaveResult(save_id=order.save_id, request_id="r", incarnation=order.incarnation, stored=tuple(BLOCKS))


some_pages = st.tuples(*(st.lists(st.sampled_from(pages), max_size=3).map(tuple) for pages in PAGES))
incarnations = st.integers(1, INCARNATIONS)


class RanksMachine(RuleBasedStateMachine):
    @initialize(world=st.integers(1, 3))
    def open(self, world: int) -> None:
        self.world = world
        self.ledger = RankLedger(world)
        self.numbers = count(1)
        self.loads: dict[int, LoadOrder] = {}
        self.saves: dict[int, SaveOrder] = {}
        self.withdrawn: set[int] = set()
        #: What ranks said of what is outstanding.
        self.load_parts: dict[int, dict[int, LoadResult]] = {}
        self.save_parts: dict[int, dict[int, SaveResult]] = {}
        self.unread_parts: dict[int, set[int]] = {}
        #: What each rank has still to say.
        self.due: list[list[LoadOrder | SaveOrder | Withdrawal]] = [[] for _ in range(world)]
        self.said: list[tuple[int, PassReport]] = []
        self.calls: Counter[Call] = Counter()
        #: What the engine keeps out of use, as it was told.
        self.kept: set[Kept] = set()

    # -- the scheduler half

    def send(self, order: LoadOrder | SaveOrder | Withdrawal) -> None:
        for due in self.due:
            due.append(order)

    @rule(incarnation=incarnations)
    def load(self, incarnation: int) -> None:
        groups = columns(incarnation)
        order = LoadOrder(load_id=next(self.numbers), request_id="r", incarnation=incarnation, groups=groups)
        self.ledger.load_sent(order)
        self.loads[order.load_id], self.load_parts[order.load_id] = order, {}
        self.send(order)

    @rule(incarnation=incarnations, snapshot=st.booleans())
    def save(self, incarnation: int, snapshot: bool) -> None:
        number, groups = next(self.numbers), columns(incarnation)
        order = SaveOrder(save_id=number, request_id="r", incarnation=incarnation, groups=groups, snapshot=snapshot)
        self.ledger.saves_sent([order])
        self.saves[number], self.save_parts[number] = order, {}
        self.send(order)

    @rule(incarnation=incarnations)
    def withdraw(self, incarnation: int) -> None:
        message = Withdrawal(request_id="r", incarnation=incarnation)
        orders: list[LoadOrder | SaveOrder] = [*self.loads.values(), *self.saves.values()]
        busy = incarnation in self.withdrawn or any(order.incarnation == incarnation for order in orders)
        answer = self.ledger.withdrawn(message)
        assert answer == (None if busy else PagesUnread(request_id="r", incarnation=incarnation))
        if busy and incarnation not in self.withdrawn:
            self.withdrawn.add(incarnation)
            self.unread_parts[incarnation] = set()
            self.send(message)

    @rule(really=st.integers(0, 9))
    def lose(self, really: int) -> None:
        if not really:
            self.ledger.lost()
            for outstanding in (self.loads, self.saves, self.withdrawn, self.calls, self.kept):
                outstanding.clear()

    # -- the ranks

    @precondition(lambda self: any(self.due))
    @rule(data=st.data())
    def a_rank_reports(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank, due in enumerate(self.due) if due]))
        loads: list[LoadResult] = []
        saves: list[SaveResult] = []
        unread: list[PagesUnread] = []
        for _ in range(data.draw(st.integers(1, 3))):
            if not self.due[rank]:
                break
            order = self.due[rank].pop(data.draw(st.integers(0, len(self.due[rank]) - 1)))
            match order:
                case LoadOrder():
                    loads.append(self.load_end(order, data))
                case SaveOrder():
                    saves.append(self.save_end(order, data))
                case Withdrawal():
                    pages = data.draw(some_pages)
                    unread.append(PagesUnread(request_id="r", incarnation=order.incarnation, quarantined=pages))
        own = sorted(call for call in self.calls if call.rank == rank)
        returned = data.draw(st.sets(st.sampled_from(own), max_size=3)) if own else set()
        released = tuple(self.release(call) for call in sorted(returned))
        self.hear(rank, PassReport(loads=tuple(loads), saves=tuple(saves), unread=tuple(unread), released=released))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def a_call_returns(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted(self.calls)))
        self.hear(call.rank, PassReport(released=(self.release(call),)))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def a_report_comes_again(self, data: st.DataObject) -> None:
        rank, report = data.draw(st.sampled_from(self.said))
        assert self.ledger.reported(rank, PassReport(loads=report.loads, saves=report.saves)) == PassReport()

    def load_end(self, order: LoadOrder, data: st.DataObject) -> LoadResult:
        state = data.draw(st.sampled_from(LoadState))
        if state is LoadState.LOADED:
            return loaded(order)
        pages = data.draw(some_pages)
        return msgspec.structs.replace(loaded(order), state=state, pages=0, quarantined=pages)

    def save_end(self, order: SaveOrder, data: st.DataObject) -> SaveResult:
        ends = data.draw(st.lists(st.sampled_from("srd"), min_size=len(BLOCKS), max_size=len(BLOCKS)))
        stored, refused, dropped = (tuple(b for b, end in zip(BLOCKS, ends, strict=True) if end == e) for e in "srd")
        return msgspec.structs.replace(saved(order), stored=stored, refused=refused, dropped=dropped, bytes=len(stored))

    def release(self, call: Call) -> PagesReleased:
        pages = tuple((call.page,) if group == call.group else () for group in range(GROUPS))
        return PagesReleased(request_id="r", incarnation=call.incarnation, pages=pages)

    # -- what is told

    def hear(self, rank: int, report: PassReport) -> None:
        self.said.append((rank, report))
        loads, saves, unread = self.expected(rank, report)
        told = self.ledger.reported(rank, report)
        assert [result.load_id for result in told.loads] == loads
        assert [result.save_id for result in told.saves] == saves
        assert [message.incarnation for message in told.unread] == unread
        for load in told.loads:
            self.check_load(load)
        for save in told.saves:
            self.check_save(save)
        for message in told.unread:
            self.withdrawn.remove(message.incarnation)
        ends = [(load.incarnation, load.quarantined) for load in told.loads]
        ends += [(message.incarnation, message.quarantined) for message in told.unread]
        for incarnation, quarantined in ends:
            named = self.named(incarnation, quarantined)
            assert not named & self.kept
            self.kept |= named
        for released in told.released:
            freed = self.named(released.incarnation, released.pages)
            assert freed <= self.kept
            self.kept -= freed

    def named(self, incarnation: int, tables: PagesPerGroup) -> set[Kept]:
        pages = [(incarnation, group, page) for group, table in enumerate(tables) for page in table]
        assert len(pages) == len(set(pages))
        return set(pages)

    def expected(self, rank: int, report: PassReport) -> tuple[list[int], list[int], list[int]]:
        """Count what a rank says, and say what has ended with it."""
        loads: list[int] = []
        saves: list[int] = []
        unread: list[int] = []
        for load in report.loads:
            if load.load_id in self.loads:
                self.load_parts[load.load_id][rank] = load
                self.touch(rank, load.incarnation, load.quarantined, load.load_id)
                loads += [load.load_id] * (len(self.load_parts[load.load_id]) == self.world)
        for save in report.saves:
            if save.save_id in self.saves:
                self.save_parts[save.save_id][rank] = save
                saves += [save.save_id] * (len(self.save_parts[save.save_id]) == self.world)
        for message in report.unread:
            if message.incarnation in self.withdrawn and rank not in self.unread_parts[message.incarnation]:
                self.unread_parts[message.incarnation].add(rank)
                self.touch(rank, message.incarnation, message.quarantined, 0)
                unread += [message.incarnation] * (len(self.unread_parts[message.incarnation]) == self.world)
        for released in report.released:
            ((group, page),) = [(group, page) for group, table in enumerate(released.pages) for page in table]
            # Which of a rank's calls on a page it was nobody can tell: the one whose end was told first.
            own = [c for c in self.calls if c[:4] == (rank, released.incarnation, group, page)]
            self.calls -= Counter(own[:1])
        return loads, saves, unread

    def touch(self, rank: int, incarnation: int, tables: PagesPerGroup, source: int) -> None:
        self.calls.update(Call(rank, incarnation, group, page, source) for group, table in enumerate(tables) for page in table)

    def check_load(self, load: LoadResult) -> None:
        order, parts = self.loads.pop(load.load_id), self.load_parts[load.load_id].values()
        states = {part.state for part in parts}
        worst = next(state for state in (LoadState.FAILED, LoadState.CANCELLED, LoadState.LOADED) if state in states)
        assert (load.state, load.incarnation) == (worst, order.incarnation)
        assert load.pages == (8 * self.world if worst is LoadState.LOADED else 0)
        assert load.direct_pages == self.world

    def check_save(self, save: SaveResult) -> None:
        order, parts = self.saves.pop(save.save_id), self.save_parts[save.save_id].values()
        assert (save.incarnation, save.bytes) == (order.incarnation, sum(part.bytes for part in parts))
        assert Counter([*save.stored, *save.refused, *save.dropped]) == Counter(BLOCKS)
        for block in BLOCKS:
            assert (block in save.refused) == any(block in part.refused for part in parts)
            assert (block in save.stored) == all(block in part.stored for part in parts)

    # -- what holds at any moment

    @invariant()
    def no_page_that_a_call_touches_is_free_and_none_is_kept_for_no_call(self) -> None:
        touched = {call[1:4] for call in self.calls}
        assert self.kept <= touched
        told = [c for c in self.calls if (c.source not in self.loads if c.source else c.incarnation not in self.withdrawn)]
        assert {call[1:4] for call in told} <= self.kept

    @invariant()
    def what_ranks_may_touch_is_known(self) -> None:
        assert self.ledger.active == len(self.loads) + len(self.saves) + len(self.withdrawn)
        live = [order for order in self.saves.values() if not order.snapshot]
        assert self.ledger.touched == [g for load in self.loads.values() for g in load.groups] + [
            g for s in live for g in s.groups
        ]
        in_quarantine = {call[2:4] for call in self.calls}
        assert {(group.group, page) for group in self.ledger.quarantined for page in group.pages} == in_quarantine
        pages = {(g, page) for g, table in enumerate(PAGES) for page in table} if self.loads or live else in_quarantine
        tables = tuple(tuple(sorted(page for g, page in pages if g == group)) for group in range(GROUPS))
        assert self.ledger.touched_pages(GROUPS) == (tables if pages else ())

    def teardown(self) -> None:
        """Whatever happened: when every rank has said all that it has to say, nothing is outstanding and nothing is kept."""
        for rank, due in enumerate(self.due):
            for order in due:
                self.hear(rank, self.good_end(order))
        for call in list(self.calls.elements()):
            self.hear(call.rank, PassReport(released=(self.release(call),)))
        assert (self.ledger.active, self.ledger.quarantined, self.kept) == (0, [], set())
        traces = [*self.ledger._outstanding, *self.ledger._quarantine._kept]
        assert not traces, "an incarnation left a trace"

    def good_end(self, order: LoadOrder | SaveOrder | Withdrawal) -> PassReport:
        match order:
            case LoadOrder():
                return PassReport(loads=(loaded(order),))
            case SaveOrder():
                return PassReport(saves=(saved(order),))
            case Withdrawal():
                return PassReport(unread=(PagesUnread(request_id="r", incarnation=order.incarnation),))


RanksMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestD1D2D6M3S7RanksMachine = RanksMachine.TestCase
