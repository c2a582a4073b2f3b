"""A load ends exactly once, and never while a copy into its pages runs (D2, D6, D9, M2)."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from akv.ownership.reservations import LoadRecord, Reservations
from akv.values.messages import BadPage, GroupPages, LoadOrder, LoadResult, LoadState

PAGE_BYTES = (100, 7)


def order(load_id: int, request_id: str = "r", incarnation: int = 1, blocks: int = 2) -> LoadOrder:
    columns = tuple(range(blocks))
    hashes = tuple(bytes([block]) * 16 for block in columns)
    groups = tuple(GroupPages(group, columns, columns, hashes) for group in range(2)) if blocks else ()
    return LoadOrder(load_id=load_id, request_id=request_id, incarnation=incarnation, groups=groups)


def dispatched(reservations: Reservations, load_id: int = 1) -> LoadRecord:
    record = reservations.accept(order(load_id), "fence")
    assert reservations.next() is record
    return record


def test_D2_loads_are_dispatched_in_the_order_in_which_they_were_accepted() -> None:
    reservations = Reservations(PAGE_BYTES)
    records = [reservations.accept(order(load_id), f"fence {load_id}") for load_id in (1, 2)]
    assert (reservations.active, reservations.queued) == (2, 2)
    assert [reservations.next(), reservations.next(), reservations.next()] == [*records, None]
    assert (reservations.active, reservations.queued) == (2, 0)
    assert records[1].fence == "fence 2"


def test_D2_a_load_that_landed_tells_pages_and_bytes_of_every_group() -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    assert reservations.begin_copy(record)
    assert reservations.end_copy(record) is None, "no verdict yet: more batches may follow"
    assert reservations.landed(record) == LoadResult(
        load_id=1, request_id="r", incarnation=1, state=LoadState.LOADED, pages=4, bytes=2 * 100 + 2 * 7
    )
    assert record.ended
    assert reservations.active == 0


def test_D2_a_failed_load_names_the_first_key_and_discards_what_landed() -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    assert reservations.begin_copy(record)
    assert reservations.fail(record, "first", "missing") is None
    assert reservations.fail(record, "second", "deadline") is None
    assert reservations.end_copy(record) == LoadResult(
        load_id=1, request_id="r", incarnation=1, state=LoadState.FAILED, failed_key="first", reason="missing"
    )


def test_D2_the_terminal_state_waits_for_the_last_of_several_copies() -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    assert reservations.begin_copy(record)
    assert reservations.begin_copy(record)
    assert reservations.landed(record) is None
    assert reservations.end_copy(record) is None
    assert not record.ended
    result = reservations.end_copy(record)
    assert result is not None
    assert result.state is LoadState.LOADED


@pytest.mark.parametrize("verdict", ["landed", "failed", "withdrawn"])
def test_D2_no_copy_begins_after_a_verdict(verdict: str) -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    assert reservations.begin_copy(record)
    match verdict:
        case "landed":
            reservations.landed(record)
        case "failed":
            reservations.fail(record, "key", "missing")
        case _:
            reservations.withdraw("r", 1)
    assert not reservations.begin_copy(record)
    assert record.copies == 1


def test_M2_a_withdrawn_load_ends_although_its_store_call_hangs() -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    found, results = reservations.withdraw("r", 1)
    assert found == [record], "its work is to be interrupted"
    assert [result.state for result in results] == [LoadState.CANCELLED]
    assert reservations.active == 0


def test_D6_a_withdrawn_load_keeps_its_pages_until_its_copy_ended() -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    assert reservations.begin_copy(record)
    assert reservations.withdraw("r", 1) == ([record], [])
    assert reservations.withdraw("r", 1) == ([record], []), "asking again changes nothing"
    result = reservations.end_copy(record)
    assert result == LoadResult(load_id=1, request_id="r", incarnation=1, state=LoadState.CANCELLED)


@pytest.mark.parametrize("first", ["deadline", "missing"])
def test_L8_bad_pages_are_those_of_the_verdict_that_stands(first: str) -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    assert reservations.begin_copy(record)
    bad = (BadPage(0, b"h" * 16, named=True),)
    reservations.fail(record, "k", first, bad if first == "missing" else ())
    reservations.fail(record, "other", "unavailable", (BadPage(0, b"i" * 16, named=True),))
    result = reservations.end_copy(record)
    assert result is not None
    assert (result.reason, result.bad_pages) == (first, bad if first == "missing" else ())


@pytest.mark.parametrize("first", ["landed", "failed"])
def test_D6_the_first_verdict_stands_when_a_cancel_comes_in_the_same_instant(first: str) -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    assert reservations.begin_copy(record)
    if first == "landed":
        reservations.landed(record)
    else:
        reservations.fail(record, "key", "missing")
    assert reservations.withdraw("r", 1) == ([record], [])
    result = reservations.end_copy(record)
    assert result is not None
    assert result.state is (LoadState.LOADED if first == "landed" else LoadState.FAILED)


def test_D6_a_failure_after_a_cancel_does_not_speak_of_a_key() -> None:
    reservations = Reservations(PAGE_BYTES)
    record = dispatched(reservations)
    assert reservations.begin_copy(record)
    reservations.withdraw("r", 1)
    assert reservations.fail(record, "key", "missing") is None
    result = reservations.end_copy(record)
    assert result is not None
    assert (result.state, result.failed_key, result.reason) == (LoadState.CANCELLED, "", "")


def test_D9_a_queued_load_is_withdrawn_at_once_and_never_dispatched() -> None:
    reservations = Reservations(PAGE_BYTES)
    first, second, third = (reservations.accept(order(n, f"r{n}", n), None) for n in (1, 2, 3))
    found, results = reservations.withdraw("r2", 2)
    assert found == [second]
    assert [(result.request_id, result.state) for result in results] == [("r2", LoadState.CANCELLED)]
    assert (reservations.active, reservations.queued) == (2, 2)
    assert [reservations.next(), reservations.next(), reservations.next()] == [first, third, None]


def test_D8_another_incarnation_of_the_same_request_is_not_withdrawn() -> None:
    reservations = Reservations(PAGE_BYTES)
    old = reservations.accept(order(1, "r", 1), None)
    new = reservations.accept(order(2, "r", 2), None)
    assert reservations.withdraw("r", 1)[0] == [old]
    assert reservations.withdraw("other", 2) == ([], [])
    assert new.verdict is None
    assert reservations.next() is new


def test_D9_an_order_of_nothing_lands_without_a_loader_and_leaves_the_other_loads_queued() -> None:
    reservations = Reservations(PAGE_BYTES)
    waiting = reservations.accept(order(1), None)
    empty = reservations.accept(order(2, "s", 2, blocks=0), None)
    assert reservations.landed(empty) == LoadResult(load_id=2, request_id="s", incarnation=2, state=LoadState.LOADED)
    assert [reservations.next(), reservations.next()] == [waiting, None]


class ReservationsMachine(RuleBasedStateMachine):
    """Loads beside what a naive observer notes: the copies that run, and every result that came."""

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations(PAGE_BYTES)
        self.loads: list[LoadRecord] = []
        self.queue: list[LoadRecord] = []
        self.copies: dict[int, int] = {}
        self.verdicts: dict[int, LoadState] = {}
        self.results: dict[int, LoadResult] = {}

    def note(self, *results: LoadResult | None) -> None:
        for result in results:
            if result is not None:
                assert result.load_id not in self.results, "a load ended twice"
                assert not self.copies[result.load_id], "a load ended while a copy wrote into its pages"
                assert result.state is self.verdicts[result.load_id]
                self.results[result.load_id] = result

    def decide(self, record: LoadRecord, verdict: LoadState) -> None:
        self.verdicts.setdefault(record.order.load_id, verdict)

    def one(self, data: st.DataObject, fits: Callable[[LoadRecord], bool]) -> LoadRecord | None:
        fitting = [record for record in self.loads if record not in self.queue and fits(record)]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(request_id=st.sampled_from("ab"), incarnation=st.integers(1, 2), blocks=st.integers(1, 3))
    def accept(self, request_id: str, incarnation: int, blocks: int) -> None:
        load_id = len(self.loads) + 1
        record = self.reservations.accept(order(load_id, request_id, incarnation, blocks), None)
        self.loads.append(record)
        self.queue.append(record)
        self.copies[load_id] = 0

    @rule()
    def next(self) -> None:
        expected = self.queue.pop(0) if self.queue else None
        assert self.reservations.next() is expected

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def begin_copy(self, data: st.DataObject) -> None:
        record = self.one(data, lambda _: True)
        if record is not None:
            began = self.reservations.begin_copy(record)
            assert began is (record.order.load_id not in self.verdicts)
            self.copies[record.order.load_id] += began

    @precondition(lambda self: any(self.copies.values()))
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        record = self.one(data, lambda r: self.copies[r.order.load_id] > 0)
        assert record is not None
        self.copies[record.order.load_id] -= 1
        self.note(self.reservations.end_copy(record))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def landed(self, data: st.DataObject) -> None:
        record = self.one(data, lambda r: not self.copies[r.order.load_id])
        if record is not None:
            self.decide(record, LoadState.LOADED)
            self.note(self.reservations.landed(record))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), key=st.sampled_from(["k1", "k2"]))
    def fail(self, data: st.DataObject, key: str) -> None:
        record = self.one(data, lambda _: True)
        if record is not None:
            first = record.order.load_id not in self.verdicts
            self.decide(record, LoadState.FAILED)
            self.note(self.reservations.fail(record, key, "missing"))
            assert record.failed_key == key or not first

    @rule(request_id=st.sampled_from("abc"), incarnation=st.integers(1, 2))
    def withdraw(self, request_id: str, incarnation: int) -> None:
        named = [r for r in self.loads if (r.order.request_id, r.order.incarnation) == (request_id, incarnation)]
        live = [record for record in named if record.order.load_id not in self.results]
        for record in live:
            self.decide(record, LoadState.CANCELLED)
        self.queue = [record for record in self.queue if record not in named]
        found, results = self.reservations.withdraw(request_id, incarnation)
        assert found == live
        self.note(*results)

    @invariant()
    def every_load_that_may_end_has_ended(self) -> None:
        for record in self.loads:
            load_id = record.order.load_id
            assert (load_id in self.results) is (load_id in self.verdicts and not self.copies[load_id])
            assert record.ended is (load_id in self.results)
        assert self.reservations.active == len(self.loads) - len(self.results)
        assert self.reservations.queued == len(self.queue)

    def teardown(self) -> None:
        for request_id in "ab":
            for incarnation in (1, 2):
                self.withdraw(request_id, incarnation)
        for record in self.loads:
            while self.copies[record.order.load_id]:
                self.copies[record.order.load_id] -= 1
                self.note(self.reservations.end_copy(record))
        assert self.results.keys() == {record.order.load_id for record in self.loads}
        assert (self.reservations.active, self.reservations.queued) == (0, 0)


ReservationsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestD2D6D9M2ReservationsMachine = ReservationsMachine.TestCase


def test_O7_loads_that_nobody_took_up_are_refused_without_a_key_and_others_go_on() -> None:
    reservations = Reservations(PAGE_BYTES)
    taken = dispatched(reservations)
    reservations.accept(order(2), "fence")
    (refused,) = reservations.refuse_queued("breaker_open")
    assert (refused.load_id, refused.state, refused.failed_key, refused.reason) == (2, LoadState.FAILED, "", "breaker_open")
    assert reservations.queued == 0
    assert reservations.landed(taken) is not None


def test_O8_M8_every_load_fails_and_those_with_copies_under_way_when_these_ended() -> None:
    reservations = Reservations(PAGE_BYTES)
    copying, waiting = dispatched(reservations), dispatched(reservations, 2)
    queued = reservations.accept(order(3), "fence")
    assert reservations.begin_copy(copying)
    records, results = reservations.fail_all("degraded")
    assert records == [copying, waiting, queued]
    assert [(result.load_id, result.reason) for result in results] == [(2, "degraded"), (3, "degraded")]
    assert reservations.next() is None
    assert reservations.written == list(copying.order.groups)
    ended = reservations.end_copy(copying)
    assert ended is not None
    assert (ended.state, reservations.written) == (LoadState.FAILED, [])
