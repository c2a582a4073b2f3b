"""Slots are granted whole and in order, and come back when the last holder let go, in whatever order (M3, M6)."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from akv.ownership.slots import SlotPool, SlotTicket


def nothing() -> None:
    """A wake that nobody listens to."""


def test_M6_a_claim_takes_all_its_slots_or_none() -> None:
    pool = SlotPool(4)
    first = pool.request(3, nothing)
    second = pool.request(2, nothing)
    assert (first.slots, first.granted) == ((0, 1, 2), True)
    assert (second.slots, second.granted) == ((), False)
    assert pool.free == 1
    first.leave()
    assert second.slots == (0, 1)
    assert pool.free == 2


def test_M6_claims_are_granted_in_the_order_in_which_they_were_made() -> None:
    pool = SlotPool(4)
    woken: list[str] = []
    holder = pool.request(3, lambda: woken.append("holder"))
    large = pool.request(4, lambda: woken.append("large"))
    small = pool.request(1, lambda: woken.append("small"))
    assert woken == ["holder"], "one slot is free, but a small claim that passed a large one could starve it"
    holder.leave()
    assert woken == ["holder", "large"]
    large.leave()
    assert woken == ["holder", "large", "small"]
    assert small.slots == (0,)


def test_M6_a_withdrawn_claim_lets_those_behind_it_through() -> None:
    pool = SlotPool(2)
    holder = pool.request(1, nothing)
    blocking = pool.request(2, nothing)
    behind = pool.request(1, nothing)
    blocking.leave()
    assert behind.slots == (1,)
    assert not blocking.granted
    holder.leave()
    behind.leave()
    assert pool.free == 2


def test_M6_one_end_grants_every_claim_that_fits() -> None:
    pool = SlotPool(3)
    holder = pool.request(3, nothing)
    waiting = [pool.request(1, nothing) for _ in range(4)]
    holder.leave()
    assert [ticket.slots for ticket in waiting] == [(0,), (1,), (2,), ()]


def test_M6_slots_come_back_in_order_so_that_a_claim_gets_neighbours() -> None:
    pool = SlotPool(4)
    tickets = [pool.request(1, nothing) for _ in range(4)]
    for index in (2, 0, 3, 1):
        tickets[index].leave()
    assert pool.request(4, nothing).slots == (0, 1, 2, 3)


def test_M6_leaving_is_idempotent_and_leaves_with_the_block() -> None:
    pool = SlotPool(2)
    with pytest.raises(KeyError), pool.request(2, nothing) as ticket:
        assert pool.free == 0
        raise KeyError
    assert pool.free == 2
    ticket.leave()
    assert pool.free == 2


def test_M3_slots_whose_asker_left_stay_out_of_use_until_the_call_returned() -> None:
    pool = SlotPool(4)
    ticket = pool.request(3, nothing)
    ticket.hold()
    assert (ticket.quarantined, pool.quarantined) == (False, 0), "somebody still waits for this call"
    ticket.leave()
    assert (ticket.quarantined, pool.quarantined, pool.free) == (True, 3, 1)
    ticket.release()
    assert (ticket.quarantined, pool.quarantined, pool.free) == (False, 0, 4)


def test_M3_slots_whose_call_returned_stay_with_their_asker() -> None:
    pool = SlotPool(2)
    ticket = pool.request(1, nothing)
    ticket.hold()
    ticket.release()
    assert pool.free == 1
    assert not ticket.quarantined
    ticket.leave()
    assert pool.free == 2


def test_M6_a_release_too_many_is_refused_and_does_not_let_go_of_the_askers_hold() -> None:
    pool = SlotPool(1)
    ticket = pool.request(1, nothing)
    ticket.hold()
    ticket.release()
    with pytest.raises(AssertionError, match="released more often than it was held"):
        ticket.release()
    assert pool.free == 0


def test_M6_a_waiting_or_spent_ticket_cannot_be_held() -> None:
    pool = SlotPool(1)
    spent = pool.request(1, nothing)
    waiting = pool.request(1, nothing)
    with pytest.raises(AssertionError, match="granted and not given back"):
        waiting.hold()
    spent.leave()
    with pytest.raises(AssertionError, match="granted and not given back"):
        spent.hold()


@pytest.mark.parametrize("count", [-1, 0, 3])
def test_M6_a_claim_that_could_never_be_granted_is_refused_at_once(count: int) -> None:
    pool = SlotPool(2)
    with pytest.raises(AssertionError, match=f"{count} slots were asked for in one claim, of a pool of 2"):
        pool.request(count, nothing)
    assert pool.request(2, nothing).granted


def test_M3_a_withheld_slot_comes_back_to_nobody_and_counts_as_quarantined() -> None:
    pool = SlotPool(4, slot_bytes=100)
    ticket = pool.request(2, nothing)
    assert ticket.withhold([100])
    assert not ticket.withhold([0]), "they are the first once"
    assert (pool.withheld, pool.quarantined, pool.quarantined_bytes, pool.usable, pool.free) == (2, 2, 200, 2, 2)
    ticket.leave()
    assert (pool.withheld, pool.quarantined, pool.usable, pool.free) == (2, 2, 2, 2)
    assert pool.request(2, nothing).slots == (2, 3)


def test_M3_a_withheld_slot_of_a_call_that_was_given_up_counts_once() -> None:
    pool = SlotPool(4)
    ticket = pool.request(3, nothing)
    ticket.hold()
    ticket.leave()
    assert pool.quarantined == 3
    ticket.withhold([1])
    assert (pool.quarantined, pool.withheld) == (3, 1)
    ticket.release()
    assert (pool.quarantined, pool.withheld, pool.free) == (1, 1, 3)


def test_M3_nothing_withheld_is_no_first_and_slots_of_others_cannot_be() -> None:
    pool = SlotPool(4)
    ticket = pool.request(2, nothing)
    assert not ticket.withhold([])
    with pytest.raises(AssertionError, match=r"\[1, 2\] are not"):
        ticket.withhold([1, 2])
    ticket.leave()
    with pytest.raises(AssertionError, match="not any more"):
        ticket.withhold([0])
    assert (pool.withheld, pool.free) == (0, 4)


def test_M3_a_claim_that_can_never_be_granted_is_told_so_and_holds_up_nobody() -> None:
    pool = SlotPool(3)
    woken: list[str] = []
    holder = pool.request(2, nothing)
    large = pool.request(3, lambda: woken.append("large"))
    small = pool.request(1, lambda: woken.append("small"))
    holder.withhold([0])
    assert woken == ["large", "small"]
    assert (large.hopeless, large.granted, small.granted) == (True, False, True)
    large.leave()
    large.leave()
    late = pool.request(3, lambda: woken.append("late"))
    assert (late.hopeless, woken[-1]) == (True, "late")
    late.leave()
    holder.leave()
    small.leave()
    assert pool.free == 2


class Claim:
    """What the naive model knows of one ticket."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.woken = 0
        self.touching = 0
        self.asker_left = False

    @property
    def ended(self) -> bool:
        return self.asker_left and not self.touching

    def wake(self) -> None:
        self.woken += 1


class SlotPoolMachine(RuleBasedStateMachine):
    """A pool beside a list of claims in the order in which they were made."""

    SLOTS = 5

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(self.SLOTS)
        self.live: list[tuple[SlotTicket, Claim]] = []
        self.left: list[SlotTicket] = []
        self.withheld: set[int] = set()

    def among(self, data: st.DataObject, fits: Callable[[Claim], bool]) -> tuple[SlotTicket, Claim] | None:
        fitting = [pair for pair in self.live if fits(pair[1])]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(count=st.integers(1, SLOTS))
    def ask(self, count: int) -> None:
        claim = Claim(count)
        self.live.append((self.pool.request(count, claim.wake), claim))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_call_begins(self, data: st.DataObject) -> None:
        pair = self.among(data, lambda claim: bool(claim.woken))
        if pair is not None:
            pair[0].hold()
            pair[1].touching += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_call_returns(self, data: st.DataObject) -> None:
        pair = self.among(data, lambda claim: claim.touching > 0)
        if pair is not None:
            pair[0].release()
            pair[1].touching -= 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def the_asker_leaves(self, data: st.DataObject) -> None:
        ticket, claim = data.draw(st.sampled_from(self.live))
        ticket.leave()
        claim.asker_left = True
        self.left.append(ticket)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def the_asker_leaves_again(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.left)).leave()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), often=st.integers(0, 3))
    def a_slot_is_withheld(self, data: st.DataObject, often: int) -> None:
        pair = self.among(data, lambda claim: bool(claim.woken))
        if pair is not None and not often and pair[0].granted:
            slot = data.draw(st.sampled_from(pair[0].slots))
            assert pair[0].withhold([slot]) == (not self.withheld)
            self.withheld.add(slot)

    @invariant()
    def agrees_with_the_model(self) -> None:
        for ticket, claim in self.live:
            hopeless = not ticket.granted and claim.count > self.SLOTS - len(self.withheld)
            assert ticket.hopeless == hopeless
            if hopeless:
                assert claim.woken == 1
                ticket.leave()
                claim.asker_left = True
        self.live = [(ticket, claim) for ticket, claim in self.live if not claim.ended]
        granted = [(ticket, claim) for ticket, claim in self.live if claim.woken]
        waiting = [(ticket, claim) for ticket, claim in self.live if not claim.woken]
        assert all(claim.woken <= 1 for _, claim in self.live)
        assert granted + waiting == self.live, "a claim was granted before an older one"
        assert all(ticket.granted and len(set(ticket.slots)) == claim.count for ticket, claim in granted)
        assert all(not ticket.granted and ticket.slots == () for ticket, _ in waiting)
        held = [slot for ticket, _ in granted for slot in ticket.slots]
        assert len(set(held)) == len(held), "a slot has two holders"
        assert set(held) <= set(range(self.SLOTS))
        assert self.pool.free == self.SLOTS - len(self.withheld.union(held))
        if waiting:
            assert waiting[0][1].count > self.pool.free, "the oldest claim waits although it fits"
        given_up = {slot for ticket, claim in granted if claim.asker_left for slot in ticket.slots}
        assert self.pool.quarantined == len(given_up | self.withheld)

    def teardown(self) -> None:
        for ticket, claim in self.live:
            ticket.leave()
            for _ in range(claim.touching):
                ticket.release()
        usable = self.SLOTS - len(self.withheld)
        assert self.pool.free == self.pool.usable == usable
        assert not usable or self.pool.request(usable, nothing).granted


SlotPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestM3M6SlotPoolMachine = SlotPoolMachine.TestCase
