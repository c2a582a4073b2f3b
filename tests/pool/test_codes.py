"""What each code of the store means, table by table."""

from typing import Any

import pytest

from akv.pool.codes import get_answer, probe_answer, put_answer, read_codes, read_sizes, remove_answer
from akv.ports.pool import KeyAnswer, KeyState

SIZE = 4096


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (1, KeyState.OK),
        (0, KeyState.MISSING),
        (-900, KeyState.UNAVAILABLE),
        (-901, KeyState.UNAVAILABLE),
        (-800, KeyState.HOLDER_LOST),
        (-600, KeyState.REFUSED),
        (-704, KeyState.REFUSED),
        (2, KeyState.REFUSED),
        (-1, KeyState.REFUSED),
    ],
)
def test_L2_only_one_means_that_a_key_is_there(code: int, state: KeyState) -> None:
    assert probe_answer(code) == KeyAnswer(state, code)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (SIZE, KeyState.OK),
        (SIZE - 1, KeyState.WRONG_SIZE),
        (SIZE + 1, KeyState.WRONG_SIZE),
        (0, KeyState.WRONG_SIZE),
        (-600, KeyState.WRONG_SIZE),
        (-703, KeyState.MISSING),
        (-704, KeyState.MISSING),
        (-707, KeyState.LEASE_EXPIRED),
        (-800, KeyState.HOLDER_LOST),
        (-900, KeyState.UNAVAILABLE),
        (-901, KeyState.UNAVAILABLE),
        (-1, KeyState.REFUSED),
        (-200, KeyState.REFUSED),
    ],
)
def test_D3_a_get_is_good_only_at_the_exact_size(code: int, state: KeyState) -> None:
    assert get_answer(code, SIZE) == KeyAnswer(state, code)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, KeyState.OK),
        (-200, KeyState.NO_SPACE),
        (-600, KeyState.REFUSED),
        (-703, KeyState.REFUSED),
        (-800, KeyState.HOLDER_LOST),
        (-900, KeyState.UNAVAILABLE),
        (-901, KeyState.UNAVAILABLE),
        (1, KeyState.REFUSED),
    ],
)
def test_S5_a_put_is_accepted_only_with_zero(code: int, state: KeyState) -> None:
    assert put_answer(code) == KeyAnswer(state, code)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, KeyState.OK),
        (-704, KeyState.MISSING),
        (-703, KeyState.REFUSED),
        (-706, KeyState.REFUSED),
        (-900, KeyState.UNAVAILABLE),
        (1, KeyState.REFUSED),
    ],
)
def test_a_value_is_removed_only_with_zero(code: int, state: KeyState) -> None:
    assert remove_answer(code) == KeyAnswer(state, code)


@pytest.mark.parametrize("raw", [None, 1, [], [1], [1, 1, 1], [1, None], [1, True], [1, 1.0], "11", b"\1\1", {0: 1, 1: 1}])
def test_L2_a_reply_that_cannot_be_matched_to_keys_is_refused_whole(raw: Any) -> None:
    assert read_codes(raw, 2, probe_answer) == [KeyAnswer(KeyState.REFUSED)] * 2
    assert read_sizes(raw, [1, 1]) == read_sizes(raw, [1, 2]) == [KeyAnswer(KeyState.REFUSED)] * 2


def test_D3_sizes_are_matched_by_position() -> None:
    answers = read_sizes([10, 30, 30, -704], [10, 20, 30, 40])
    assert [answer.state for answer in answers] == [KeyState.OK, KeyState.WRONG_SIZE, KeyState.OK, KeyState.MISSING]
    answers = read_sizes([10, 20, -704], [10, 10, 10])
    assert [answer.state for answer in answers] == [KeyState.OK, KeyState.WRONG_SIZE, KeyState.MISSING]
