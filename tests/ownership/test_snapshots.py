"""Slots for the window pages of planned passes: asked for with the plan, given back on every path (S2, S3, S4, M6)."""

from collections import Counter

import pytest

from akv.ownership.saves import Saves
from akv.ownership.slots import SlotPool
from akv.ownership.snapshots import SnapshotClaims
from akv.values.messages import GroupPages, SaveOrder


def order(save_id: int, pages: int) -> SaveOrder:
    numbers = tuple(range(pages))
    columns = GroupPages(0, numbers, numbers, (b"h" * 16,) * pages)
    return SaveOrder(save_id=save_id, request_id="r", incarnation=1, groups=(columns,), window=True, snapshot=True)


class Ring:
    """Five slots on the host, and so many on the device."""

    def __init__(self, device: int | None = None) -> None:
        self.host = SlotPool(5)
        self.device = None if device is None else SlotPool(device)
        self.claims = SnapshotClaims(self.host, self.device)
        self.wakes: Counter[int] = Counter()

    def ask(self, plan_id: int, *pages: int) -> None:
        orders = [order(10 * plan_id + index, count) for index, count in enumerate(pages)]
        self.claims.ask(plan_id, orders, lambda: self.wakes.update([plan_id]))

    @property
    def free(self) -> tuple[int, int | None]:
        return self.host.free, None if self.device is None else self.device.free


def test_S4_a_plan_that_copies_nothing_asks_for_nothing() -> None:
    ring = Ring()
    ring.ask(1)
    assert ring.claims.plans == 0
    assert ring.claims.take(1) == []


def test_S4_each_order_of_a_plan_has_a_claim_of_its_own_and_each_grant_wakes() -> None:
    ring = Ring()
    ring.ask(1, 2, 3, 1)
    assert (ring.claims.plans, ring.free, ring.wakes[1]) == (1, (0, None), 2)
    fits, too, waits = ring.claims.take(1)
    assert [claim.order.save_id for claim in (fits, too, waits)] == [10, 11, 12]
    assert [claim.granted for claim in (fits, too, waits)] == [True, True, False]
    assert [claim.waiting for claim in (fits, too, waits)] == [False, False, True]
    fits.leave()
    assert (waits.granted, waits.waiting, ring.wakes[1]) == (True, False, 3)
    assert ring.claims.plans == 0, "its claims are the caller's now"
    for claim in (fits, too, waits):
        claim.leave()
    assert ring.free == (5, None)


def test_S4_an_order_of_more_pages_than_the_ring_has_is_never_granted_and_holds_up_nobody() -> None:
    ring = Ring()
    ring.ask(1, 6, 5)
    large, other = ring.claims.take(1)
    assert (large.host, large.granted, large.waiting) == (None, False, False)
    assert other.granted
    large.leave()
    assert ring.free == (0, None)
    other.leave()
    assert ring.free == (5, None)


def test_S2_a_dropped_plan_gives_back_what_it_has_and_what_it_waits_for() -> None:
    ring = Ring(device=5)
    ring.ask(1, 4)
    ring.ask(2, 3)
    ring.claims.drop(2)
    ring.claims.drop(2)
    ring.claims.drop(7)
    assert ring.free == (1, 1)
    ring.ask(3, 2)
    assert ring.wakes == {1: 1}
    ring.claims.drop(1)
    assert (ring.wakes[2], ring.wakes[3]) == (0, 1), "the dropped plan is not granted any more"
    assert ring.free == (3, 3)


def test_S2_a_plan_that_was_taken_is_dropped_without_effect() -> None:
    ring = Ring()
    ring.ask(1, 2)
    [claim] = ring.claims.take(1)
    ring.claims.drop(1)
    assert (claim.granted, ring.free) == (True, (3, None))


def test_S2_when_the_connector_closes_every_plan_gives_back() -> None:
    ring = Ring(device=2)
    for plan_id in (1, 2, 3):
        ring.ask(plan_id, 2)
    ring.claims.drop_all()
    assert (ring.claims.plans, ring.free) == (0, (5, 2))
    ring.claims.drop_all()
    assert ring.free == (5, 2)


def test_S3_a_copy_passes_through_the_device_where_slots_are_there_when_it_is_queued() -> None:
    ring = Ring(device=2)
    ring.ask(1, 2, 1)
    first, second = ring.claims.take(1)
    first.settle()
    second.settle()
    assert first.device is not None
    assert first.device.granted
    assert second.device is None, "straight to the host"
    assert second.granted, "device slots are no condition"
    first.leave()
    assert ring.free == (4, 2), "and the second has withdrawn its wait for the device"
    second.leave()
    assert ring.free == (5, 2)


def test_S3_a_device_slot_that_came_before_the_copy_is_used() -> None:
    ring = Ring(device=2)
    ring.ask(1, 2)
    ring.ask(2, 2)
    ring.claims.drop(1)
    [claim] = ring.claims.take(2)
    claim.settle()
    assert claim.device is not None
    assert ring.free == (3, 0)
    claim.leave()
    assert ring.free == (5, 2)


@pytest.mark.parametrize("device", [None, 2])
def test_S3_an_order_larger_than_the_device_goes_to_the_host_alone(device: int | None) -> None:
    ring = Ring(device)
    ring.ask(1, 3)
    [claim] = ring.claims.take(1)
    claim.settle()
    assert (claim.device, claim.granted) == (None, True)
    claim.leave()
    assert ring.free == (5, device)


def test_M3_a_claim_that_is_left_while_a_copy_runs_keeps_its_slots_until_the_copy_ended() -> None:
    ring = Ring(device=3)
    ring.ask(1, 3)
    [claim] = ring.claims.take(1)
    assert claim.host is not None
    assert claim.device is not None
    for ticket in (claim.host, claim.device):
        ticket.hold()
    claim.leave()
    claim.leave()
    assert (ring.free, ring.host.quarantined) == ((2, 0), 3)
    claim.device.release()
    assert ring.free == (2, 3), "the side stream has passed the pages on, the put still reads them"
    claim.host.release()
    assert ring.free == (5, 3)


@pytest.mark.parametrize("ends", ["taken up", "withdrawn"])
def test_S4_a_save_gives_its_slots_back_when_it_ends(ends: str) -> None:
    ring, saves = Ring(), Saves([1])
    ring.ask(1, 2)
    [claim] = ring.claims.take(1)

    class Copied:
        def __init__(self) -> None:
            self.claim = claim

    saves.accept(claim.order, None, Copied())
    assert ring.free == (3, None)
    if ends == "withdrawn":
        results, unread = saves.withdraw("r", 1)
        assert ([result.dropped for result in results], len(unread)) == ([(0, 1)], 1)
    else:
        ticket = saves.next()
        assert ticket is not None
        saves.end(ticket)
    assert ring.free == (5, None)


def test_M3_slots_that_are_withheld_are_missing_to_every_later_end() -> None:
    ring = Ring()
    ring.ask(1, 2)
    (first,) = ring.claims.take(1)
    ring.ask(2, 4)
    (waits,) = ring.claims.take(2)
    assert waits.waiting
    assert first.host is not None
    first.host.withhold([0, 1])
    assert (waits.waiting, waits.granted, ring.wakes[2]) == (False, False, 1)
    waits.leave()
    first.leave()
    ring.ask(3, 4, 3)
    too_large, fits = ring.claims.take(3)
    assert (too_large.host, fits.granted) == (None, True)
    fits.leave()
    assert ring.free == (3, None)
