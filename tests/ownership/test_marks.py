"""The mark follows what was queued, steps back to what was refused, and never passes an open block (S2, D9)."""

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from akv.ownership.marks import MOST_DOUBLINGS, BlockState, SaveMarks

BACKOFF_S = 0.5


def test_S2_the_mark_follows_queued_and_steps_back_on_refused() -> None:
    marks = SaveMarks(BACKOFF_S)
    marks.queued(range(4))
    assert marks.mark == 4
    marks.stored([0, 3])
    assert marks.mark == 4
    marks.refused([2, 1], now=10.0)
    assert marks.mark == 1
    marks.queued([1])
    assert marks.mark == 2
    marks.queued([2])
    assert marks.mark == 4, "blocks behind the refused ones were not open"


def steps(work: Callable[[], object]) -> int:
    """Lines of Python that run, those of loops once for each turn."""
    lines = 0

    def count(_: FrameType, event: str, __: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def test_L3_a_block_that_was_turned_away_at_the_start_of_a_long_chain_costs_passes_nothing() -> None:
    """A pass asks this of every request in it, twice, and most of all while the pool is full."""
    marks, many = SaveMarks(BACKOFF_S), 10_000
    marks.queued(range(many))
    marks.shed([1], now=0.0)
    marks.refused([0], now=0.0)
    assert marks.to_offer(many, math.inf) == [0, 1]
    assert steps(lambda: marks.to_offer(many, 0.0)) < 100
    assert steps(lambda: marks.to_offer(many, math.inf)) < 100
    assert steps(lambda: marks.shed_blocks) < 100
    assert steps(lambda: marks.stored([0, 1])) < 100, "the mark goes on to the end"
    assert marks.mark == many
    assert steps(marks.withdrawn) < 100


def test_S2_a_block_out_of_order_leaves_the_mark_at_the_first_open_one() -> None:
    marks = SaveMarks(BACKOFF_S)
    marks.queued([2])
    assert marks.mark == 0
    assert marks.to_offer(5, now=0.0) == [0, 1, 3, 4]
    marks.stored([0, 1])
    assert marks.mark == 3


def test_S2_refused_blocks_wait_for_their_back_off_and_unsaved_ones_do_not() -> None:
    marks = SaveMarks(BACKOFF_S)
    marks.queued([0, 1])
    marks.refused([0, 1], now=10.0)
    assert marks.to_offer(4, now=10.0 + BACKOFF_S - 0.01) == [2, 3]
    assert marks.to_offer(4, now=10.0 + BACKOFF_S) == [0, 1, 2, 3]
    assert marks.to_offer(4, now=math.inf) == [0, 1, 2, 3]
    assert marks.to_offer(1, now=math.inf) == [0]


def waits(marks: SaveMarks, rounds: int) -> list[float]:
    """How long each of so many refusals in a row makes block 0 wait, in back-offs."""
    found = []
    for _ in range(rounds):
        marks.queued([0])
        marks.refused([0], now=0.0)
        found.append(next(n for n in range(10_000) if marks.to_offer(1, now=n * BACKOFF_S)))
    return [float(n) for n in found]


def test_S2_the_back_off_doubles_with_each_refusal_in_a_row_up_to_a_bound() -> None:
    doubled = [2.0**n for n in range(MOST_DOUBLINGS + 1)]
    assert waits(SaveMarks(BACKOFF_S), MOST_DOUBLINGS + 3) == [*doubled, doubled[-1], doubled[-1]]


def test_S2_a_stored_block_ends_the_row_of_refusals() -> None:
    marks = SaveMarks(BACKOFF_S)
    assert waits(marks, 3) == [1.0, 2.0, 4.0]
    marks.stored([5])
    assert waits(marks, 2) == [1.0, 2.0]


@pytest.mark.parametrize("end", ["stored", "queued", "dropped"])
def test_S2_no_block_stored_is_no_sign_that_the_pool_takes_any(end: str) -> None:
    marks = SaveMarks(BACKOFF_S)
    assert waits(marks, 2) == [1.0, 2.0]
    getattr(marks, end)([])
    assert waits(marks, 2) == [4.0, 8.0]


def test_S2_dropped_blocks_are_as_if_no_pass_had_listed_them() -> None:
    marks = SaveMarks(BACKOFF_S)
    marks.queued(range(3))
    marks.dropped([1])
    assert marks.mark == 1
    assert marks.to_offer(3, now=-math.inf) == [1]
    assert marks.count(BlockState.REFUSED) == 0


def test_S2_counts_are_of_the_present_states() -> None:
    marks = SaveMarks(BACKOFF_S)
    marks.queued(range(5))
    marks.stored([0, 1])
    marks.refused([2], now=0.0)
    assert [marks.count(state) for state in (BlockState.QUEUED, BlockState.STORED, BlockState.REFUSED)] == [2, 2, 1]
    marks.stored([2])
    assert marks.count(BlockState.REFUSED) == 0


@given(st.integers(0, 20), st.integers(0, 20))
def test_S2_nothing_below_the_mark_is_offered(queued: int, end: int) -> None:
    marks = SaveMarks(BACKOFF_S)
    marks.queued(range(queued))
    assert marks.to_offer(end, now=0.0) == list(range(queued, end))


class SaveMarksMachine(RuleBasedStateMachine):
    """Marks beside a dictionary of states."""

    blocks = st.sets(st.integers(0, 9), max_size=5)

    def __init__(self) -> None:
        super().__init__()
        self.marks = SaveMarks(BACKOFF_S)
        self.states: dict[int, BlockState] = {}
        self.now = 0.0
        self.retry_at = 0.0
        self.refusals = 0

    def put(self, blocks: set[int], state: BlockState) -> None:
        self.states.update(dict.fromkeys(blocks, state))

    @rule(blocks=blocks)
    def queue(self, blocks: set[int]) -> None:
        self.marks.queued(blocks)
        self.put(blocks, BlockState.QUEUED)

    @rule(blocks=blocks)
    def store(self, blocks: set[int]) -> None:
        self.marks.stored(blocks)
        self.put(blocks, BlockState.STORED)
        if blocks:
            self.refusals = 0

    @rule(blocks=blocks.filter(bool))
    def refuse(self, blocks: set[int]) -> None:
        self.marks.refused(blocks, self.now)
        self.put(blocks, BlockState.REFUSED)
        self.retry_at = self.now + BACKOFF_S * 2.0 ** min(self.refusals, MOST_DOUBLINGS)
        self.refusals += 1

    @rule(blocks=blocks)
    def drop(self, blocks: set[int]) -> None:
        self.marks.dropped(blocks)
        self.put(blocks, BlockState.UNSAVED)

    @rule(backoffs=st.integers(1, 5))
    def time_passes(self, backoffs: int) -> None:
        self.now += backoffs * BACKOFF_S / 2

    @invariant()
    def agrees_with_the_model(self) -> None:
        states = [self.states.get(block, BlockState.UNSAVED) for block in range(12)]
        claimed = {BlockState.QUEUED, BlockState.STORED}
        assert self.marks.mark == next(block for block, state in enumerate(states) if state not in claimed)
        assert [self.marks.is_open(block) for block in range(12)] == [state not in claimed for state in states]
        for end in (0, 4, 12):
            ready = {BlockState.UNSAVED, BlockState.REFUSED} if self.now >= self.retry_at else {BlockState.UNSAVED}
            assert self.marks.to_offer(end, self.now) == [block for block in range(end) if states[block] in ready]
        for state in (*claimed, BlockState.REFUSED):
            assert self.marks.count(state) == states.count(state)


SaveMarksMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestS2SaveMarksMachine = SaveMarksMachine.TestCase


def test_S6_a_shed_block_holds_up_the_later_ones_until_its_back_off_has_passed() -> None:
    marks = SaveMarks(backoff_s=1.0)
    marks.queued([0, 1, 2, 3])
    marks.stored([0, 1, 3])
    marks.refused([2], now=9.5)
    marks.shed([5, 6], now=10.0)
    assert (marks.mark, marks.shed_blocks, marks.refused_count) == (2, [5, 6], 3)
    assert marks.to_offer(9, 10.9) == [4], "the pool takes later blocks than one that it refused, all the same"
    assert marks.to_offer(9, 11.0) == [2, 4, 5, 6, 7, 8]
    assert marks.is_open(5)
    assert not marks.is_stored(5)


def test_S6_a_block_that_was_shed_because_of_another_begins_no_back_off_and_does_not_lengthen_it() -> None:
    marks = SaveMarks(backoff_s=1.0)
    marks.shed([2, 3], now=10.0)
    marks.shed([4, 5], now=10.9)
    assert marks.to_offer(6, 11.0) == [0, 1, 2, 3, 4, 5]
    for now in (20.0, 30.0, 40.0):
        marks.shed([2, 3, 4, 5], now=now)
        assert marks.to_offer(6, now + 0.9) == [0, 1]
        assert marks.to_offer(6, now + 1.0) == [0, 1, 2, 3, 4, 5], "no store call was made: it does not double"


def test_S6_a_shed_block_does_not_shorten_the_back_off_of_the_pool() -> None:
    marks = SaveMarks(backoff_s=1.0)
    for _ in range(3):
        marks.refused([0], now=10.0)
    marks.shed([0, 1], now=10.0)
    assert marks.to_offer(2, 13.9) == []
    assert marks.to_offer(2, 14.0) == [0, 1]


def test_S6_what_another_request_saved_or_a_pass_queued_is_shed_no_more() -> None:
    marks = SaveMarks(backoff_s=1.0)
    marks.shed([0, 1, 2], now=10.0)
    marks.stored([0])
    assert (marks.mark, marks.shed_blocks) == (1, [1, 2])
    marks.queued([1, 2])
    assert (marks.mark, marks.shed_blocks, marks.refused_count) == (3, [], 0)


def test_S13_S2_a_lost_pool_and_taken_pages_step_the_mark_back_to_what_they_concern() -> None:
    marks = SaveMarks(1.0)
    marks.stored([0])
    marks.queued([1, 2])
    marks.withdrawn()
    assert (marks.mark, marks.to_offer(3, 0.0)) == (1, [1, 2])
    marks.queued([1, 2])
    marks.lost()
    assert (marks.mark, marks.to_offer(3, 0.0)) == (0, [0])
