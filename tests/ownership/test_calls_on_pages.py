"""Store calls on pages themselves: nobody waits for one that was given up, and its pages are in quarantine until it returned
(D2, D6, M1, M3).
"""

from collections.abc import Callable
from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from akv.ownership.reservations import LoadRecord, Reservations
from akv.ownership.saves import Saves, SaveTicket
from akv.values.messages import GroupPages, LoadOrder, LoadResult, LoadState, PagesReleased, PagesUnread, SaveOrder

PAGE_BYTES = (100, 7)
COLUMNS = tuple(GroupPages(group, (0, 1), (10 + group, 20 + group), (b"a" * 16, b"b" * 16)) for group in range(2))
#: What quarantine holds of them, in bytes, and how it is named.
BYTES = (200, 14)
NAMED: tuple[tuple[tuple[int, ...], ...], ...] = (((10, 20), ()), ((), (11, 21)))


def released(group: int) -> PagesReleased:
    return PagesReleased(request_id="r", incarnation=1, pages=NAMED[group])


def unread(quarantined: tuple[tuple[int, ...], ...] = ()) -> PagesUnread:
    return PagesUnread(request_id="r", incarnation=1, quarantined=quarantined)


class Load:
    """A load that a loader works on."""

    def __init__(self) -> None:
        self.reservations = Reservations(PAGE_BYTES)
        order = LoadOrder(load_id=1, request_id="r", incarnation=1, groups=COLUMNS)
        self.record: LoadRecord = self.reservations.accept(order, None)
        self.reservations.next()

    def begin(self, group: int) -> bool:
        return self.reservations.begin_call(self.record, COLUMNS[group])

    def end(self, group: int) -> PagesReleased | None:
        return self.reservations.end_call(self.record, COLUMNS[group])

    def withdraw(self) -> LoadResult | None:
        _, results = self.reservations.withdraw("r", 1)
        return results[0] if results else None

    def fail(self) -> LoadResult | None:
        return self.reservations.fail(self.record, "key", "deadline")


class Save:
    """A save that a saver works on."""

    def __init__(self) -> None:
        self.saves = Saves(PAGE_BYTES)
        self.ticket: SaveTicket = self.saves.accept(self.order(1), None)
        self.saves.next()

    def order(self, save_id: int) -> SaveOrder:
        return SaveOrder(save_id=save_id, request_id="r", incarnation=1, groups=COLUMNS)

    def begin(self, group: int) -> bool:
        return self.saves.begin_call(self.ticket, COLUMNS[group])

    def end(self, group: int) -> PagesReleased | None:
        return self.saves.end_call(self.ticket, COLUMNS[group])

    def withdraw(self) -> list[PagesUnread]:
        return self.saves.withdraw("r", 1)[1]


# -- loads


def test_D2_a_load_whose_calls_returned_has_nothing_in_quarantine() -> None:
    load = Load()
    for group in (0, 1):
        assert load.begin(group)
        assert load.end(group) is None
    result = load.reservations.landed(load.record)
    assert result is not None
    assert (result.state, result.pages, result.quarantined) == (LoadState.LOADED, 4, ())
    assert load.reservations.quarantined_bytes == 0


@pytest.mark.parametrize(("end", "state"), [(Load.withdraw, LoadState.CANCELLED), (Load.fail, LoadState.FAILED)])
def test_D2_a_cancel_or_a_deadline_waits_for_no_call_and_names_its_pages(
    end: Callable[[Load], LoadResult | None], state: LoadState
) -> None:
    load = Load()
    assert load.begin(0)
    assert load.begin(1)
    assert load.end(0) is None
    result = end(load)
    assert result is not None
    assert (result.state, result.quarantined, result.pages, result.bytes) == (state, NAMED[1], 0, 0)
    assert (load.reservations.active, load.reservations.quarantined_bytes) == (0, BYTES[1])
    assert load.end(1) == released(1)
    assert load.reservations.quarantined_bytes == 0


@pytest.mark.parametrize("end", [Load.withdraw, Load.fail])
def test_D6_no_call_begins_after_a_verdict(end: Callable[[Load], LoadResult | None]) -> None:
    load = Load()
    assert load.reservations.begin_copy(load.record)
    assert end(load) is None
    assert not load.begin(0)
    assert load.record.calls == []


def test_D6_asking_again_names_nothing_twice() -> None:
    load = Load()
    assert load.begin(0)
    assert load.withdraw() is not None
    assert (load.withdraw(), load.fail(), load.reservations.landed(load.record)) == (None, None, None)
    assert load.reservations.quarantined_bytes == BYTES[0]
    assert load.end(0) == released(0)
    assert load.reservations.quarantined_bytes == 0


def test_D2_each_call_that_outlives_the_load_releases_its_own_pages() -> None:
    load = Load()
    assert load.begin(0)
    assert load.begin(1)
    result = load.withdraw()
    assert result is not None
    assert result.quarantined == ((10, 20), (11, 21))
    assert load.end(1) == released(1)
    assert load.reservations.quarantined_bytes == BYTES[0]
    assert load.end(0) == released(0)
    assert load.reservations.quarantined_bytes == 0


@pytest.mark.parametrize("ends", [*permutations(("copy", "call", "withdraw", "fail"))], ids="-".join)
def test_D2_D6_with_a_copy_and_a_call_at_once_the_copy_is_waited_for_and_the_call_is_named(ends: tuple[str, ...]) -> None:
    load = Load()
    assert load.reservations.begin_copy(load.record)
    assert load.begin(1)
    results: list[LoadResult] = []
    freed: list[PagesReleased] = []
    for end in ends:
        match end:
            case "copy":
                result = load.reservations.end_copy(load.record)
            case "call":
                result = None
                message = load.end(1)
                freed += [] if message is None else [message]
                assert (message is None) is not load.record.ended
            case "withdraw":
                result = load.withdraw()
            case _:
                result = load.fail()
        results += [] if result is None else [result]
    first_verdict = min(ends.index("withdraw"), ends.index("fail"))
    ended_at = max(first_verdict, ends.index("copy"))
    [result] = results
    assert result.state is (LoadState.CANCELLED if ends[first_verdict] == "withdraw" else LoadState.FAILED)
    outlived = ends.index("call") > ended_at
    assert (result.quarantined, freed) == ((NAMED[1], [released(1)]) if outlived else ((), []))
    assert load.reservations.quarantined_bytes == 0


# -- saves


def test_D6_a_save_whose_calls_returned_has_nothing_in_quarantine() -> None:
    save = Save()
    assert save.begin(0)
    assert save.end(0) is None
    assert save.withdraw() == [unread()]
    assert not save.begin(1), "the pages may be the engine's again"
    assert (save.ticket.calls, save.saves.quarantined_bytes) == ([], 0)


def test_D6_a_withdrawal_waits_for_no_put_on_pages_and_names_them() -> None:
    save = Save()
    assert save.begin(0)
    assert save.begin(1)
    assert save.withdraw() == [unread(((10, 20), (11, 21)))]
    assert save.saves.quarantined_bytes == sum(BYTES)
    assert save.end(1) == released(1)
    assert save.end(0) == released(0)
    assert save.saves.quarantined_bytes == 0


def test_D6_a_put_that_returns_while_a_read_is_waited_for_was_never_in_quarantine() -> None:
    save = Save()
    assert save.saves.begin_read(save.ticket)
    assert save.begin(0)
    assert save.begin(1)
    assert save.withdraw() == []
    assert save.end(0) is None
    assert save.saves.quarantined_bytes == 0
    assert save.saves.end_read(save.ticket) == [unread(NAMED[1])]
    assert save.end(1) == released(1)
    assert save.saves.quarantined_bytes == 0


def test_D6_a_request_that_is_withdrawn_twice_names_and_counts_its_calls_once() -> None:
    """As one that is finished while it loads, and then cancelled. Counted twice, pages would stay out of reach for good."""
    save = Save()
    assert save.begin(0)
    assert save.withdraw() == [unread(NAMED[0])]
    assert save.withdraw() == [unread()], "it is answered all the same"
    assert save.saves.quarantined_bytes == BYTES[0]
    assert save.end(0) == released(0)
    assert save.saves.quarantined_bytes == 0


def test_S8_two_saves_of_the_same_pages_name_them_for_each_call() -> None:
    save = Save()
    again = save.saves.accept(save.order(2), None)
    assert save.saves.next() is again
    assert save.begin(0)
    assert save.saves.begin_call(again, COLUMNS[0])
    assert save.withdraw() == [unread(((10, 20, 10, 20), ()))]
    assert save.end(0) == released(0)
    assert save.saves.end_call(again, COLUMNS[0]) == released(0)
    assert save.saves.quarantined_bytes == 0


def test_D6_calls_of_another_incarnation_are_not_named() -> None:
    save = Save()
    other = save.saves.accept(SaveOrder(save_id=2, request_id="r", incarnation=2, groups=COLUMNS), None)
    assert save.saves.begin_call(other, COLUMNS[0])
    assert save.withdraw() == [unread()]
    assert save.saves.begin_call(other, COLUMNS[1])
    assert save.saves.end_call(other, COLUMNS[0]) is None


# -- at random


class CallsMachine(RuleBasedStateMachine):
    """Loads and saves of one incarnation each, whose copies, reads and calls end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations(PAGE_BYTES)
        self.saves = Saves(PAGE_BYTES)
        self.loads: list[LoadRecord] = []
        self.tickets: list[SaveTicket] = []
        self.copies: list[LoadRecord] = []
        self.reads: list[SaveTicket] = []
        self.calls: list[tuple[LoadRecord | SaveTicket, GroupPages]] = []
        #: (load or save, group) of each call that was named; and whether it was released.
        self.named: list[tuple[int, int]] = []
        self.let_go: set[int] = set()
        self.withdrawn: set[int] = set()
        self.numbers = 0

    def one(self, data: st.DataObject) -> LoadRecord | SaveTicket:
        works: list[LoadRecord | SaveTicket] = [*self.loads, *self.tickets]
        return data.draw(st.sampled_from(works))

    def number(self, work: LoadRecord | SaveTicket) -> int:
        return work.order.incarnation

    def ended(self, result: LoadResult | None) -> None:
        if result is not None:
            self.note(result.incarnation, result.quarantined)

    def note(self, number: int, quarantined: tuple[tuple[int, ...], ...]) -> None:
        assert number not in {self.number(record) for record in self.copies}, "pages are given back while a copy touches them"
        assert number not in {self.number(ticket) for ticket in self.reads}, "pages are given back while a read touches them"
        now = [] if number in self.let_go else [columns for work, columns in self.calls if self.number(work) == number]
        named = [page for pages in quarantined for page in pages]
        assert sorted(named) == sorted(page for columns in now for page in columns.pages)
        self.let_go.add(number)
        self.named += [(number, columns.group) for columns in now]

    @rule(saves=st.booleans())
    def accept(self, saves: bool) -> None:
        self.numbers += 1
        if saves:
            order = SaveOrder(save_id=self.numbers, request_id="r", incarnation=self.numbers, groups=COLUMNS)
            self.tickets.append(self.saves.accept(order, None))
            assert self.saves.next() is self.tickets[-1]
        else:
            load = LoadOrder(load_id=self.numbers, request_id="r", incarnation=self.numbers, groups=COLUMNS)
            self.loads.append(self.reservations.accept(load, None))
            assert self.reservations.next() is self.loads[-1]

    @precondition(lambda self: self.loads or self.tickets)
    @rule(data=st.data(), columns=st.sampled_from(COLUMNS))
    def a_call_begins(self, data: st.DataObject, columns: GroupPages) -> None:
        work = self.one(data)
        if isinstance(work, LoadRecord):
            began = self.reservations.begin_call(work, columns)
        else:
            began = self.saves.begin_call(work, columns)
        assert began is (self.number(work) not in self.withdrawn)
        if began:
            self.calls.append((work, columns))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def a_call_returns(self, data: st.DataObject) -> None:
        self.returned(data.draw(st.sampled_from(self.calls)))

    def returned(self, call: tuple[LoadRecord | SaveTicket, GroupPages]) -> None:
        self.calls.remove(call)
        work, columns = call
        if isinstance(work, LoadRecord):
            message = self.reservations.end_call(work, columns)
        else:
            message = self.saves.end_call(work, columns)
        if self.number(work) in self.let_go:
            self.named.remove((self.number(work), columns.group))
            assert message == PagesReleased(request_id="r", incarnation=self.number(work), pages=NAMED[columns.group])
        else:
            assert message is None

    @precondition(lambda self: self.loads or self.tickets)
    @rule(data=st.data())
    def a_copy_begins(self, data: st.DataObject) -> None:
        work = self.one(data)
        if isinstance(work, LoadRecord):
            self.copies += [work] if self.reservations.begin_copy(work) else []
        else:
            self.reads += [work] if self.saves.begin_read(work) else []

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def a_copy_ends(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.copies))
        self.copies.remove(record)
        self.ended(self.reservations.end_copy(record))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def a_read_ends(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.reads))
        self.reads.remove(ticket)
        for message in self.saves.end_read(ticket):
            self.note(message.incarnation, message.quarantined)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def a_load_fails(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.loads))
        self.withdrawn.add(self.number(record))
        self.ended(self.reservations.fail(record, "key", "deadline"))

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.withdraws(data.draw(st.integers(1, self.numbers)))

    def withdraws(self, number: int) -> None:
        self.withdrawn.add(number)
        for result in self.reservations.withdraw("r", number)[1]:
            self.ended(result)
        for message in self.saves.withdraw("r", number)[1]:
            if number in {self.number(ticket) for ticket in self.tickets}:
                self.note(number, message.quarantined)

    @invariant()
    def bytes_in_quarantine_are_those_that_were_named_and_not_released(self) -> None:
        in_quarantine = self.reservations.quarantined_bytes + self.saves.quarantined_bytes
        assert in_quarantine == sum(BYTES[group] for _, group in self.named)

    def teardown(self) -> None:
        for number in range(1, self.numbers + 1):
            self.withdraws(number)
        for record in list(self.copies):
            self.copies.remove(record)
            self.ended(self.reservations.end_copy(record))
        for ticket in list(self.reads):
            self.reads.remove(ticket)
            for message in self.saves.end_read(ticket):
                self.note(message.incarnation, message.quarantined)
        for call in list(self.calls):
            self.returned(call)
        assert self.named == []
        assert (self.reservations.quarantined_bytes, self.saves.quarantined_bytes) == (0, 0)


CallsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestD2D6M3CallsMachine = CallsMachine.TestCase
