"""Byte-level tokens of the reference engine."""

from hypothesis import given
from hypothesis import strategies as st

from akv_testing.engine.config import VOCABULARY
from akv_testing.engine.text import Special, conversation, decode, encode


@given(st.text())
def test_text_survives(text: str) -> None:
    surrogates = any("\ud800" <= character <= "\udfff" for character in text)
    if not surrogates:
        assert decode([Special.BEGIN, *encode(text), Special.END]) == text


def test_bytes_that_are_no_text_are_shown_and_not_refused() -> None:
    assert decode([0xFF, ord("a")]) == "\N{REPLACEMENT CHARACTER}a"


def test_the_next_turn_begins_with_the_whole_of_the_last_one() -> None:
    first = conversation([], "What is a list?")
    answer = [104, 105, 255]
    second = conversation([("What is a list?", answer)], "And a tuple?")
    assert second[: len(first) + 3] == first + answer
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in second)
