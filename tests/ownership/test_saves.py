"""What became of each block of a save, and when its pages are no longer read (L2, S2, S7, M7)."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from akv.ownership.saves import Saves, SaveTicket
from akv.values.messages import GroupPages, PagesUnread, SaveOrder, SaveResult

GROUPS = 2


def order(save_id: int, request_id: str = "r", incarnation: int = 1, blocks: tuple[int, ...] = (3, 4, 5)) -> SaveOrder:
    hashes = tuple(bytes([block]) * 16 for block in blocks)
    groups = tuple(GroupPages(group, blocks, blocks, hashes) for group in range(GROUPS))
    return SaveOrder(save_id=save_id, request_id=request_id, incarnation=incarnation, groups=groups)


def taken_up(saves: Saves, save_id: int = 1) -> SaveTicket:
    ticket = saves.accept(order(save_id), "event")
    assert saves.next() is ticket
    return ticket


def lists(result: SaveResult) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return result.stored, result.refused, result.dropped


def test_S2_saves_are_taken_up_in_the_order_in_which_their_passes_ran() -> None:
    saves = Saves([1] * 2)
    tickets = [saves.accept(order(save_id), f"event {save_id}") for save_id in (1, 2)]
    assert (saves.active, saves.queued) == (2, 2)
    assert [saves.next(), saves.next(), saves.next()] == [*tickets, None]
    assert (saves.active, saves.queued) == (2, 0)
    assert tickets[1].after == "event 2"


def test_L2_a_block_is_stored_when_its_pages_of_every_group_are() -> None:
    ticket = SaveTicket(order(1), None)
    ticket.pages_stored([3, 4, 5], page_bytes=10)
    assert lists(ticket.result()) == ((), (), (3, 4, 5))
    ticket.pages_stored([5, 3], page_bytes=1)
    assert lists(ticket.result()) == ((3, 5), (), (4,))
    assert ticket.result().bytes == 32


def test_S2_a_block_of_which_one_page_was_refused_is_refused() -> None:
    ticket = SaveTicket(order(1), None)
    ticket.pages_stored([3, 4, 5], page_bytes=10)
    ticket.pages_refused([4], "full")
    ticket.pages_stored([3], page_bytes=10)
    ticket.pages_refused([5], "unavailable")
    assert lists(ticket.result()) == ((3,), (4, 5), ())
    assert ticket.result().reason == "full", "the first reason is the cause, later ones often follow from it"


def test_S2_a_refused_block_stays_refused_whatever_comes_after() -> None:
    ticket = SaveTicket(order(1, blocks=(3,)), None)
    ticket.pages_refused([3], "full")
    ticket.pages_stored([3], page_bytes=10)
    ticket.pages_stored([3], page_bytes=10)
    assert lists(ticket.result()) == ((), (3,), ())


def test_S2_no_block_refused_is_no_reason() -> None:
    ticket = SaveTicket(order(1), None)
    ticket.pages_refused([], "full")
    assert ticket.result().reason == ""


def test_S7_a_result_names_the_save_and_its_incarnation() -> None:
    saves = Saves([1] * 2)
    ticket = taken_up(saves, 9)
    result = saves.end(ticket)
    assert (result.save_id, result.request_id, result.incarnation) == (9, "r", 1)
    assert saves.active == 0
    with pytest.raises(KeyError):
        saves.end(ticket)


def test_S7_a_withdrawal_drops_what_nobody_took_up_and_frees_the_pages_at_once() -> None:
    saves = Saves([1] * 2)
    saves.accept(order(1), None)
    other = saves.accept(order(2, "r", 2), None)
    saves.accept(order(3), None)
    results, unread = saves.withdraw("r", 1)
    assert [(result.save_id, result.dropped) for result in results] == [(1, (3, 4, 5)), (3, (3, 4, 5))]
    assert unread == [PagesUnread(request_id="r", incarnation=1)]
    assert (saves.active, saves.queued, other.withdrawn) == (1, 1, False)
    assert saves.next() is other


def test_S7_a_withdrawal_waits_for_the_reads_that_run_and_for_no_put() -> None:
    saves = Saves([1] * 2)
    reading, putting = taken_up(saves, 1), taken_up(saves, 2)
    assert saves.begin_read(putting)
    assert saves.end_read(putting) == [], "nobody asked for these pages back"
    assert saves.begin_read(reading)
    assert saves.begin_read(reading)
    assert saves.withdraw("r", 1) == ([], [])
    assert saves.end_read(reading) == []
    assert saves.end_read(reading) == [PagesUnread(request_id="r", incarnation=1)]
    assert saves.active == 2, "the puts of what was read go on"


def test_M7_a_withdrawn_ticket_begins_no_read() -> None:
    saves = Saves([1] * 2)
    ticket = taken_up(saves)
    assert saves.begin_read(ticket)
    saves.withdraw("r", 1)
    assert not saves.begin_read(ticket)
    assert ticket.reads == 1
    saves.end_read(ticket)
    ticket.pages_stored([3], page_bytes=10)
    ticket.pages_stored([3], page_bytes=10)
    assert lists(saves.end(ticket)) == ((3,), (), (4, 5))


def test_O7_what_is_refused_ends_if_nobody_took_it_up_and_else_begins_nothing_further() -> None:
    saves = Saves([1] * 2)
    ticket = taken_up(saves)
    saves.accept(order(2), None)
    ticket.pages_stored([3, 3], page_bytes=1)
    (result,) = saves.refuse("no pool")
    assert (result.save_id, lists(result), result.reason) == (2, ((), (3, 4, 5), ()), "no pool")
    assert (saves.active, saves.queued) == (1, 0)
    assert not saves.begin_read(ticket)
    assert not saves.begin_call(ticket, ticket.order.groups[0])
    assert lists(saves.end(ticket)) == ((3,), (4, 5), ())


def test_S7_a_second_withdrawal_while_reads_run_is_answered_with_the_first() -> None:
    saves = Saves([1] * 2)
    ticket = taken_up(saves)
    assert saves.begin_read(ticket)
    assert saves.withdraw("r", 1) == saves.withdraw("r", 1) == ([], [])
    assert saves.end_read(ticket) == [PagesUnread(request_id="r", incarnation=1)]
    assert saves.withdraw("r", 1) == ([], [PagesUnread(request_id="r", incarnation=1)])


def test_S7_reads_of_another_incarnation_do_not_hold_these_pages() -> None:
    saves = Saves([1] * 2)
    assert saves.begin_read(taken_up(saves))
    assert saves.withdraw("r", 2) == ([], [PagesUnread(request_id="r", incarnation=2)])


class SavesMachine(RuleBasedStateMachine):
    """Savers that take tickets up, read pages and put them, group by group, beside withdrawals at any moment."""

    names = st.tuples(st.sampled_from("ab"), st.integers(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.saves = Saves([1] * 2)
        self.orders: dict[int, SaveOrder] = {}
        self.queue: list[SaveTicket] = []
        self.working: list[SaveTicket] = []
        self.reads: Counter[int] = Counter()
        #: Pages that no answer was given for, per ticket.
        self.unanswered: dict[int, list[int]] = {}
        self.refused: dict[int, set[int]] = {}
        self.results: dict[int, SaveResult] = {}
        #: Withdrawals that were not answered yet.
        self.wanted: set[tuple[str, int]] = set()
        self.withdrawn: set[int] = set()

    def who(self, ticket: SaveTicket) -> tuple[str, int]:
        return ticket.order.request_id, ticket.order.incarnation

    def reading(self, who: tuple[str, int]) -> bool:
        return any(self.reads[ticket.order.save_id] for ticket in self.working if self.who(ticket) == who)

    def note(self, result: SaveResult) -> None:
        save_id = result.save_id
        assert save_id not in self.results, "a save ended twice"
        self.results[save_id] = result
        blocks = self.orders[save_id].groups[0].blocks
        assert Counter(result.stored + result.refused + result.dropped) == Counter(blocks), "each block in one list"
        assert set(result.refused) == self.refused[save_id]
        assert set(result.dropped) == set(self.unanswered[save_id]) - self.refused[save_id]
        assert bool(result.reason) is bool(result.refused)

    def note_unread(self, messages: list[PagesUnread], who: tuple[str, int]) -> None:
        if who in self.wanted and not self.reading(who):
            assert messages == [PagesUnread(request_id=who[0], incarnation=who[1])]
            self.wanted.remove(who)
        else:
            assert messages == []

    @rule(who=names, blocks=st.sets(st.integers(0, 5), min_size=1, max_size=3))
    def accept(self, who: tuple[str, int], blocks: set[int]) -> None:
        save_id = len(self.orders) + 1
        self.orders[save_id] = order(save_id, *who, tuple(sorted(blocks)))
        self.queue.append(self.saves.accept(self.orders[save_id], None))
        self.unanswered[save_id] = sorted(blocks) * GROUPS
        self.refused[save_id] = set()

    @rule()
    def next(self) -> None:
        expected = self.queue.pop(0) if self.queue else None
        assert self.saves.next() is expected
        if expected is not None:
            self.working.append(expected)

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def begin_read(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.working))
        began = self.saves.begin_read(ticket)
        assert began is (ticket.order.save_id not in self.withdrawn)
        self.reads[ticket.order.save_id] += began

    @precondition(lambda self: any(self.reads.values()))
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([t for t in self.working if self.reads[t.order.save_id]]))
        self.reads[ticket.order.save_id] -= 1
        self.note_unread(self.saves.end_read(ticket), self.who(ticket))

    @precondition(lambda self: self.working)
    @rule(data=st.data(), taken=st.booleans())
    def answer(self, data: st.DataObject, taken: bool) -> None:
        ticket = data.draw(st.sampled_from(self.working))
        left = self.unanswered[ticket.order.save_id]
        if left:
            block = data.draw(st.sampled_from(left))
            left.remove(block)
            if taken:
                ticket.pages_stored([block], page_bytes=1)
            else:
                ticket.pages_refused([block], "full")
                self.refused[ticket.order.save_id].add(block)

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.working))
        if not self.reads[ticket.order.save_id]:
            self.working.remove(ticket)
            self.note(self.saves.end(ticket))

    @rule(who=names)
    def withdraw(self, who: tuple[str, int]) -> None:
        here = [ticket for ticket in (*self.queue, *self.working) if self.who(ticket) == who]
        self.withdrawn.update(ticket.order.save_id for ticket in here)
        dropped = [ticket for ticket in self.queue if self.who(ticket) == who]
        self.queue = [ticket for ticket in self.queue if self.who(ticket) != who]
        self.wanted.add(who)
        results, unread = self.saves.withdraw(*who)
        assert [result.save_id for result in results] == [ticket.order.save_id for ticket in dropped]
        for result in results:
            self.note(result)
        self.note_unread(unread, who)

    @invariant()
    def counts_agree(self) -> None:
        assert self.saves.active == len(self.queue) + len(self.working) == len(self.orders) - len(self.results)
        assert self.saves.queued == len(self.queue)

    def teardown(self) -> None:
        for who in [(name, incarnation) for name in "ab" for incarnation in (1, 2)]:
            self.withdraw(who)
        for ticket in list(self.working):
            while self.reads[ticket.order.save_id]:
                self.reads[ticket.order.save_id] -= 1
                self.note_unread(self.saves.end_read(ticket), self.who(ticket))
            self.working.remove(ticket)
            self.note(self.saves.end(ticket))
        assert not self.wanted, "a withdrawal was never answered"
        assert self.saves.active == 0
        assert not self.saves._unread, "an incarnation left a trace"


SavesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestS2S7M7SavesMachine = SavesMachine.TestCase


def test_M8_a_ticket_whose_saver_failed_ends_when_nothing_of_it_reads_pages() -> None:
    saves = Saves([1] * GROUPS)
    ticket = taken_up(saves)
    results: list[SaveResult] = []
    assert saves.begin_read(ticket)
    saves.abandon(ticket, "saver_failed", results.append)
    assert not saves.begin_read(ticket)
    assert (results, saves.read) == ([], list(ticket.order.groups))
    saves.end_read(ticket)
    assert [lists(result) for result in results] == [((), (3, 4, 5), ())]
    assert (saves.active, saves.read) == (0, [])
    saves.abandon(ticket, "again", results.append)
    assert len(results) == 1, "it has ended"


def test_M8_a_ticket_whose_saver_failed_ends_when_the_store_has_let_go_of_its_pages() -> None:
    saves = Saves([1] * GROUPS)
    ticket = taken_up(saves)
    results: list[SaveResult] = []
    pages = ticket.order.groups[0]
    assert saves.begin_call(ticket, pages)
    saves.abandon(ticket, "saver_failed", results.append)
    assert results == []
    assert saves.end_call(ticket, pages) is None
    assert len(results) == 1
