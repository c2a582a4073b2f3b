"""Calls that learn off the loop whether they will write into a load's pages (D2, D6)."""

import pytest

from akv.ownership.reservations import LoadRecord, Reservations
from akv.values.messages import GroupPages, LoadOrder, LoadState


class Permit:
    def __init__(self, *, writing: bool) -> None:
        self.writing = writing

    def take_back(self) -> bool:
        return not self.writing


def dispatched() -> tuple[Reservations, LoadRecord]:
    reservations = Reservations((100,))
    pages = GroupPages(0, (0,), (0,), (b"h" * 16,))
    record = reservations.accept(LoadOrder(load_id=1, request_id="r", incarnation=1, groups=(pages,)), "fence")
    reservations.next()
    return reservations, record


def test_D6_a_call_that_does_not_write_is_not_waited_for() -> None:
    reservations, record = dispatched()
    permit = Permit(writing=False)
    assert reservations.begin_read(record, permit)
    _, (result,) = reservations.withdraw("r", 1)
    assert result.state is LoadState.CANCELLED
    assert reservations.end_read(record, permit) is None
    assert record.copies == 0


def test_D2_a_call_that_writes_is_waited_for() -> None:
    reservations, record = dispatched()
    permit = Permit(writing=True)
    assert reservations.begin_read(record, permit)
    assert reservations.withdraw("r", 1)[1] == []
    result = reservations.end_read(record, permit)
    assert result is not None
    assert result.state is LoadState.CANCELLED


def test_D2_of_several_calls_those_are_waited_for_that_write() -> None:
    reservations, record = dispatched()
    permits = [Permit(writing=writing) for writing in (False, True, False)]
    assert all(reservations.begin_read(record, permit) for permit in permits)
    assert reservations.fail(record, "key", "deadline") is None
    assert reservations.end_read(record, permits[0]) is None
    result = reservations.end_read(record, permits[1])
    assert result is not None
    assert result.state is LoadState.FAILED
    assert reservations.end_read(record, permits[2]) is None


@pytest.mark.parametrize("writing", [False, True])
def test_D2_a_call_that_ended_before_the_verdict_counts_no_more(writing: bool) -> None:
    reservations, record = dispatched()
    permit = Permit(writing=writing)
    assert reservations.begin_read(record, permit)
    assert reservations.end_read(record, permit) is None
    result = reservations.landed(record)
    assert result is not None
    assert result.state is LoadState.LOADED


def test_D2_nothing_begins_behind_a_verdict() -> None:
    reservations, record = dispatched()
    reservations.landed(record)
    assert not reservations.begin_read(record, Permit(writing=False))
