"""A call is on record from its start to its return, whoever still waits for it (M1, M3)."""

import pytest

from akv.ownership.slots import SlotPool
from akv.ownership.store_calls import StoreCalls
from akv.values.messages import GroupPages


def nothing() -> None:
    """A wake that nobody listens to."""


def test_M1_a_call_stands_on_record_from_its_start_to_its_return() -> None:
    calls = StoreCalls()
    probe, get = calls.begin("probe"), calls.begin("get")
    assert (calls.outstanding, calls.given_up) == (2, 0)
    calls.ended(probe)
    assert calls.outstanding == 1
    calls.ended(get)
    assert calls.outstanding == 0
    assert get.kind == "get"


def test_M1_a_call_that_was_given_up_is_outstanding_and_keeps_its_slots_until_it_returned() -> None:
    calls, pool = StoreCalls(), SlotPool(3)
    ticket = pool.request(2, nothing)
    with ticket:
        record = calls.begin("get", ticket)
        calls.give_up(record)
        calls.give_up(record)
    assert (calls.outstanding, calls.given_up) == (1, 1)
    assert (pool.quarantined, pool.free) == (2, 1)
    calls.ended(record)
    assert (calls.outstanding, calls.given_up) == (0, 0)
    assert (pool.quarantined, pool.free) == (0, 3)


def test_M1_giving_up_a_call_that_returned_changes_nothing() -> None:
    calls = StoreCalls()
    record = calls.begin("get")
    calls.ended(record)
    calls.give_up(record)
    assert not record.given_up
    assert (calls.outstanding, calls.given_up) == (0, 0)


def test_M1_only_calls_that_nobody_waits_for_count_as_given_up() -> None:
    calls = StoreCalls()
    calls.begin("get")
    calls.give_up(calls.begin("get"))
    assert (calls.outstanding, calls.given_up) == (2, 1)


def test_M1_a_call_returns_once() -> None:
    calls, pool = StoreCalls(), SlotPool(1)
    ticket = pool.request(1, nothing)
    record = calls.begin("put", ticket)
    calls.ended(record)
    with pytest.raises(KeyError):
        calls.ended(record)
    assert pool.free == 0, "the second end must not let go of the asker's hold"


def test_M6_a_call_on_slots_that_were_given_back_never_begins() -> None:
    calls, pool = StoreCalls(), SlotPool(1)
    ticket = pool.request(1, nothing)
    ticket.leave()
    with pytest.raises(AssertionError, match="given back"):
        calls.begin("get", ticket)
    assert calls.outstanding == 0


def test_M6_a_call_that_cannot_hold_all_of_its_tickets_holds_none() -> None:
    calls, pool = StoreCalls(), SlotPool(3)
    host, device, gone = (pool.request(1, nothing) for _ in range(3))
    gone.leave()
    with pytest.raises(AssertionError, match="given back"):
        calls.begin("snapshot", host, device, gone)
    assert calls.outstanding == 0
    host.leave()
    device.leave()
    assert (pool.free, pool.quarantined) == (3, 0)


def test_M1_a_call_on_several_tickets_keeps_the_slots_of_each() -> None:
    calls, pool = StoreCalls(), SlotPool(3)
    host, device = pool.request(2, nothing), pool.request(1, nothing)
    record = calls.begin("snapshot", host, device)
    host.leave()
    device.leave()
    assert (pool.free, pool.quarantined) == (0, 3)
    calls.ended(record)
    assert (pool.free, pool.quarantined) == (3, 0)


def test_O7_calls_that_were_given_up_are_counted_by_their_kind() -> None:
    calls = StoreCalls()
    for kind in ("get", "get", "put"):
        calls.give_up(calls.begin(kind))
    calls.begin("get")
    assert [calls.given_up_of(kind) for kind in ("get", "put", "probe")] == [2, 1, 0]


def test_M3_the_pages_of_calls_that_have_not_returned_are_named() -> None:
    calls = StoreCalls()
    pages = GroupPages(1, (3,), (7,), (b"h",))
    calls.begin("get")
    record = calls.begin("put", pages=pages)
    assert calls.pages == [pages]
    calls.ended(record)
    assert calls.pages == []
