"""Which portion of a lookup is asked next, in whatever order the answers come (L3)."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.lookup import LookupRange, ProbeWalk


@given(
    st.integers(0, 5),
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_L3_any_order_of_answers_finds_what_asking_for_everything_finds(
    first: int, there: list[bool], groups: int, head: int, chunk: int, at_a_time: int, order: random.Random
) -> None:
    naive = there.index(False) if False in there else len(there)
    walk = ProbeWalk(LookupRange(first, first + len(there), 4), groups, head, chunk)
    flying: list[range] = []
    asked: list[range] = []
    while not walk.settled:
        while len(flying) < at_a_time and (portion := walk.next()) is not None:
            # Nothing is asked before the head's answer, nor beyond a hole that is known.
            assert not asked or asked[0] not in flying
            flying.append(portion)
            asked.append(portion)
        portion = flying.pop(order.randrange(len(flying)))
        blocks = there[portion.start - first : portion.stop - first]
        walk.answered(portion, blocks.index(False) if False in blocks else len(blocks))
        assert walk.found <= naive
    assert walk.found == naive
    assert [block for portion in asked for block in portion] == list(range(first, asked[-1].stop))


def test_L3_the_head_is_asked_alone() -> None:
    walk = ProbeWalk(LookupRange(0, 100, 4), groups=1, head=2, chunk=10)
    assert walk.next() == range(2)
    assert walk.next() is None
    walk.answered(range(2), 2)
    assert [walk.next(), walk.next()] == [range(2, 12), range(12, 22)]


@pytest.mark.parametrize(("answers", "found", "settled"), [([3], 3, True), ([8, 2], 10, True), ([8, 8], 16, False)])
def test_L3_it_is_settled_at_the_first_hole(answers: list[int], found: int, settled: bool) -> None:
    walk = ProbeWalk(LookupRange(0, 24, 4), groups=1, head=8, chunk=8)
    for whole in answers:
        portion = walk.next()
        assert portion is not None
        walk.answered(portion, whole)
    assert (walk.found, walk.settled) == (found, settled)
    assert (walk.next() is None) is settled


def test_L3_an_answer_beyond_a_hole_changes_nothing() -> None:
    walk = ProbeWalk(LookupRange(0, 24, 4), groups=1, head=8, chunk=8)
    head = walk.next()
    assert head is not None
    walk.answered(head, 8)
    middle, last = walk.next(), walk.next()
    assert middle is not None
    assert last is not None
    walk.answered(last, 8)
    assert (walk.found, walk.settled) == (8, False)
    walk.answered(middle, 5)
    assert (walk.found, walk.settled) == (13, True)
