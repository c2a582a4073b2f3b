"""A plan ends once: by itself, or with the end of a later one (S2, L6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import EngineContractError
from akv.ownership.plans import Plans, UnknownPlan


def made(*contents: str) -> Plans[str]:
    plans: Plans[str] = Plans()
    for content in contents:
        plans.add(content)
    return plans


def test_S2_plans_are_numbered_in_order_and_the_next_number_is_known() -> None:
    plans: Plans[str] = Plans()
    assert plans.next_id() == 1
    assert plans.add("a") == 1
    assert plans.next_id() == 2
    plans.end(1)
    assert plans.next_id() == 2, "a number is never used again"
    assert plans.add("b") == 2


def test_S2_a_plan_ends_once() -> None:
    plans = made("a")
    assert plans.end(1) == ("a", {})
    assert plans.open == 0
    with pytest.raises(EngineContractError, match="pass plan 1 has ended already") as caught:
        plans.end(1)
    assert not isinstance(caught.value, UnknownPlan), "this engine's own mistake trips no latch"


def test_S2_earlier_plans_end_with_a_later_one_and_later_ones_do_not() -> None:
    plans = made("a", "b", "c", "d")
    plans.end(2)
    assert plans.open == 2
    plans = made("a", "b", "c", "d")
    assert plans.end(3) == ("c", {1: "a", 2: "b"})
    assert plans.open == 1
    for ended in (1, 2, 3):
        with pytest.raises(EngineContractError, match=f"pass plan {ended} has ended already"):
            plans.end(ended)
    assert plans.end(4) == ("d", {})


@pytest.mark.parametrize("plan_id", [-1, 0, 3])
def test_L6_a_plan_that_was_never_made_is_told_from_one_that_ended(plan_id: int) -> None:
    plans = made("a", "b")
    with pytest.raises(UnknownPlan, match=rf"pass plan {plan_id} was never made .* newest is 2"):
        plans.end(plan_id)
    assert plans.open == 2, "nothing was taken"


@given(st.lists(st.one_of(st.just("make"), st.integers(0, 12)), max_size=30))
def test_S2_every_plan_ends_exactly_once_whatever_the_order(steps: list[str | int]) -> None:
    plans: Plans[int] = Plans()
    last, ended = 0, []
    for step in steps:
        if isinstance(step, str):
            last += 1
            assert plans.add(last) == last
        elif not 1 <= step <= last:
            with pytest.raises(UnknownPlan):
                plans.end(step)
        elif step in ended:
            with pytest.raises(EngineContractError, match="has ended already"):
                plans.end(step)
        else:
            own, earlier = plans.end(step)
            assert own == step
            assert list(earlier) == list(earlier.values()) == [plan for plan in range(1, step) if plan not in ended]
            ended += [*earlier, own]
        assert len(set(ended)) == len(ended)
        assert plans.open == last - len(ended)


def test_S2_open_plans_are_counted_and_their_contents_named_oldest_first() -> None:
    plans = made("a", "b", "c")
    plans.end(1)
    assert (plans.open, list(plans.contents)) == (2, ["b", "c"])
    assert [plans.peek(number) for number in (1, 2, 9)] == [None, "b", None]
