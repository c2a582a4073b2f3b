"""Which puts are tried again, when, and what each page comes to: answers by table, and any answers at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.put_attempts import (
    MOST_ATTEMPTS,
    PASSING,
    PAUSES_S,
    RETRY_WINDOW_S,
    Probe,
    Put,
    PutAttempts,
    Wait,
)
from akv.ports.pool import KeyState

STATES = [str(state) for state in KeyState]


def put(attempts: PutAttempts, *answers: str, at: float = 0.0, took: float = 0.0) -> None:
    """The pool answers the put that is due."""
    assert isinstance(attempts.step, Put)
    attempts.answered(answers, at - took, at)


def waited(attempts: PutAttempts) -> Probe:
    """The pause is over; what is asked then."""
    assert isinstance(attempts.step, Wait)
    attempts.waited()
    assert isinstance(attempts.step, Probe)
    return attempts.step


def due(attempts: PutAttempts) -> object:
    """What comes next."""
    return attempts.step


def is_over(attempts: PutAttempts) -> bool:
    """Whether nothing comes next."""
    return attempts.step is None


def test_S5_what_is_accepted_is_put_once() -> None:
    attempts = PutAttempts(["a", "b"])
    assert attempts.step == Put((0, 1))
    put(attempts, "ok", "ok")
    assert is_over(attempts)
    assert (attempts.stored, attempts.found, attempts.refused) == ([True, True], [False, False], ["", ""])
    assert (attempts.retried, attempts.in_vain) == ((), False)


def test_S5_nothing_to_put_is_no_step() -> None:
    assert PutAttempts([]).step is None


def test_S5_only_the_keys_that_failed_are_tried_again_and_a_probe_comes_before_each_put() -> None:
    attempts = PutAttempts(["a", "b", "c", "d"])
    put(attempts, "ok", "no_space", "no_space", "ok")
    assert attempts.step == Wait(PAUSES_S[0])
    assert waited(attempts) == Probe((1, 2))
    attempts.probed(["missing", "ok"], 0.02)
    assert due(attempts) == Put((1,))
    put(attempts, "ok", at=0.02)
    assert is_over(attempts)
    assert attempts.stored == [True, True, False, True]
    assert attempts.found == [False, False, True, False]
    assert attempts.refused == ["", "", "", ""]
    assert (attempts.attempts, attempts.retried, attempts.first_trouble, attempts.in_vain) == (2, (1, 2), "no_space", False)


def test_S5_after_the_third_attempt_the_last_answer_stands() -> None:
    attempts = PutAttempts(["a"])
    put(attempts, "no_space")
    waited(attempts)
    attempts.probed(["missing"], 0.02)
    put(attempts, "unavailable", at=0.02)
    assert attempts.step == Wait(PAUSES_S[1])
    waited(attempts)
    attempts.probed(["missing"], 0.08)
    put(attempts, "no_space", at=0.08)
    assert is_over(attempts)
    assert (attempts.attempts, attempts.refused, attempts.in_vain) == (MOST_ATTEMPTS, ["no_space"], True)


@pytest.mark.parametrize("state", STATES)
def test_S5_which_answers_are_worth_another_attempt(state: str) -> None:
    attempts = PutAttempts(["a"])
    put(attempts, state)
    worth = state in {"no_space", "unavailable", "holder_lost", "missing"}
    assert isinstance(attempts.step, Wait) is worth
    assert attempts.refused == ["" if state == "ok" else state]
    assert set(STATES) >= PASSING


def test_S5_with_one_attempt_nothing_is_tried_again_and_trouble_counts_as_in_vain() -> None:
    attempts = PutAttempts(["a", "b"], 1)
    put(attempts, "no_space", "ok")
    assert (attempts.step, attempts.refused, attempts.in_vain) == (None, ["no_space", ""], True)


# -- the window


def test_S5_the_window_begins_with_the_first_answer_so_that_a_long_put_may_be_tried_again() -> None:
    attempts = PutAttempts(["a", "b"])
    put(attempts, "no_space", "ok", at=5.0, took=5.0)
    assert attempts.step == Wait(PAUSES_S[0])


def test_S5_the_pauses_leave_time_in_the_window() -> None:
    assert len(PAUSES_S) == MOST_ATTEMPTS - 1
    assert sum(PAUSES_S) < RETRY_WINDOW_S


@pytest.mark.parametrize(("at", "again"), [(0.04, True), (0.041, False)])
def test_S5_an_attempt_that_would_begin_behind_the_window_is_not_waited_for(at: float, again: bool) -> None:
    attempts = PutAttempts(["a"])
    put(attempts, "no_space")
    waited(attempts)
    attempts.probed(["missing"], 0.02)
    put(attempts, "no_space", at=at)
    assert (attempts.step is not None) is again


@pytest.mark.parametrize(("at", "again"), [(0.1, True), (0.101, False)])
def test_S5_a_probe_that_took_longer_than_the_window_is_the_last_call(at: float, again: bool) -> None:
    attempts = PutAttempts(["a", "b"])
    put(attempts, "no_space", "no_space")
    waited(attempts)
    attempts.probed(["ok", "missing"], at)
    assert (attempts.step is not None) is again
    # What it found counts all the same.
    assert attempts.found == [True, False]
    assert attempts.refused == ["", "no_space"]


@pytest.mark.parametrize(("took", "again"), [(0.099, True), (0.1, False)])
def test_S5_a_store_that_was_unavailable_for_long_is_not_asked_again(took: float, again: bool) -> None:
    attempts = PutAttempts(["a", "b"])
    put(attempts, "unavailable", "no_space", took=took)
    assert waited(attempts).pages == ((0, 1) if again else (1,))
    assert attempts.refused == ["unavailable", "no_space"]


def test_S5_what_a_probe_finds_unavailable_is_not_put_and_the_attempt_counts() -> None:
    attempts = PutAttempts(["a", "b"])
    put(attempts, "unavailable", "unavailable")
    waited(attempts)
    attempts.probed(["unavailable", "missing"], 0.02)
    assert due(attempts) == Put((1,))
    put(attempts, "ok", at=0.02)
    waited(attempts)
    attempts.probed(["unavailable"], 0.08)
    assert (attempts.step, attempts.attempts) == (None, MOST_ATTEMPTS)
    assert (attempts.stored, attempts.refused) == ([False, True], ["unavailable", ""])


# -- answers that are no answers


@pytest.mark.parametrize("answers", [[], ["ok"], ["ok", "ok", "ok"]])
def test_S5_a_list_of_another_length_says_nothing_about_any_page(answers: list[str]) -> None:
    attempts = PutAttempts(["a", "b"])
    put(attempts, *answers)
    assert (attempts.step, attempts.stored, attempts.refused) == (None, [False, False], ["refused", "refused"])


@pytest.mark.parametrize("states", [[], ["ok"], ["ok", "ok", "ok"]])
def test_L2_a_probe_of_another_length_finds_nothing_and_the_keys_are_put_again(states: list[str]) -> None:
    attempts = PutAttempts(["a", "b"])
    put(attempts, "no_space", "no_space")
    waited(attempts)
    attempts.probed(states, 0.02)
    assert (attempts.step, attempts.found) == (Put((0, 1)), [False, False])


def test_a_step_that_is_not_due_is_a_fault_of_akv() -> None:
    attempts = PutAttempts(["a"])
    with pytest.raises(AssertionError, match="not a Probe"):
        attempts.probed(["ok"], 0.0)


# -- duplicates


def test_S5_pages_of_one_key_are_put_once_and_share_the_outcome() -> None:
    attempts = PutAttempts(["a", "b", "a", "c", "c"])
    assert attempts.step == Put((0, 1, 3))
    put(attempts, "no_space", "ok", "refused")
    assert waited(attempts) == Probe((0,))
    attempts.probed(["ok"], 0.02)
    assert is_over(attempts)
    assert attempts.stored == [False, True, False, False, False]
    assert attempts.found == [True, False, True, False, False]
    assert attempts.refused == ["", "", "", "refused", "refused"]


# -- any answers at all


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    st.lists(st.lists(st.sampled_from(STATES), max_size=5), min_size=9, max_size=9),
    st.lists(st.floats(0, 0.2), min_size=9, max_size=9),
)
def test_S5_whatever_is_answered_it_ends_in_time_and_each_page_has_one_outcome(
    keys: list[str], lists: list[list[str]], durations: list[float]
) -> None:
    attempts = PutAttempts(keys)
    now = first_answer = 0.0
    puts: list[tuple[int, ...]] = []
    accepted: set[str] = set()
    for answers, duration in zip(lists, durations, strict=True):
        step = attempts.step
        if step is None:
            break
        if isinstance(step, Wait):
            assert now + step.seconds <= first_answer + RETRY_WINDOW_S
            now += step.seconds
            attempts.waited()
            continue
        names = [keys[page] for page in step.pages]
        assert len(set(names)) == len(names), "each key once"
        assert accepted.isdisjoint(names), "what was accepted or found is never touched again"
        if isinstance(step, Put) and puts:
            assert now <= first_answer + RETRY_WINDOW_S
            assert set(step.pages) <= set(attempts.retried)
        began, now = now, now + duration
        accepted.update(
            name for name, answer in zip(names, answers, strict=False) if answer == "ok" and len(answers) == len(names)
        )
        if isinstance(step, Put):
            puts.append(step.pages)
            attempts.answered(answers, began, now)
            first_answer = first_answer if len(puts) > 1 else now
        else:
            attempts.probed(answers, now)
    assert is_over(attempts)
    assert len(puts) <= MOST_ATTEMPTS
    for key, stored, found, refused in zip(keys, attempts.stored, attempts.found, attempts.refused, strict=True):
        assert [stored, found, bool(refused)].count(True) == 1
        assert (stored or found) == (key in accepted)
