"""What counts as a token, and what is refused where (K6)."""

import array
import traceback
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import TokenError
from akv.plan.hashing import Chain, scope_seed
from akv.plan.tokens import PLACEHOLDER, encode_confirmed, first_difference
from akv.values.scope import EMPTY_SCOPE

INT64 = st.integers(-(2**63), 2**63 - 1).filter(lambda token: token != PLACEHOLDER)
#: A number that must not show in any message.
SECRET = 2**63 + 424242


def expected(tokens: list[int]) -> bytes:
    """The encoding, spelt out."""
    return b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)


@given(st.lists(INT64))
def test_K1_tokens_are_little_endian_int64(tokens: list[int]) -> None:
    assert encode_confirmed(tokens, 0) == expected(tokens)
    assert encode_confirmed(np.array(tokens, dtype=np.int64), 0) == expected(tokens)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">u8"])
def test_K7_a_numpy_array_of_any_integer_dtype_encodes_like_a_list(dtype: str) -> None:
    assert encode_confirmed(np.array([0, 5, 100], dtype=dtype), 0) == expected([0, 5, 100])


@pytest.mark.parametrize(
    "tokens",
    [
        (1, 2, 3),
        range(1, 4),
        b"\x01\x02\x03",
        bytearray(b"\x01\x02\x03"),
        memoryview(b"\x01\x02\x03"),
        array.array("i", [1, 2, 3]),
        [np.int32(1), 2, np.uint8(3)],
        list(np.array([1, 2, 3])),
        np.array([1, 9, 2, 9, 3, 9])[::2],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_K7_every_sequence_of_integers_encodes_alike(tokens: Any) -> None:
    assert encode_confirmed(tokens, 0) == expected([1, 2, 3])


def test_K7_nothing_encodes_to_nothing() -> None:
    assert encode_confirmed([], 3) == encode_confirmed(np.array([], dtype=np.int32), 3) == b""


@pytest.mark.parametrize(
    ("tokens", "position"),
    [
        ([1, SECRET, 2], 101),
        ([SECRET], 100),
        ([1, -SECRET], 101),
        ([2**63], 100),
        ([-(2**63) - 1], 100),
        ([np.int64(1), SECRET], 101),
        (np.array([1, 2, SECRET], dtype=np.uint64), 102),
        (np.array([2**63], dtype=np.uint64), 100),
    ],
)
def test_K6_token_outside_int64_names_its_position_and_never_its_value(tokens: Any, position: int) -> None:
    with pytest.raises(TokenError, match=rf"position {position}: .*int64") as raised:
        encode_confirmed(tokens, 100)
    assert str(SECRET) not in "".join(traceback.format_exception(raised.value))


def test_K6_the_ends_of_int64_are_tokens() -> None:
    ends = [-(2**63), 2**63 - 1]
    assert encode_confirmed(ends, 0) == expected(ends)
    assert encode_confirmed(np.array([2**63 - 1], dtype=np.uint64), 0) == expected(ends[1:])


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (True, "bool"),
        (np.bool_(True), "bool"),
        (1.0, "float"),
        (np.float32(1), "float32"),
        ("1", "str"),
        (None, "NoneType"),
        ([1], "list"),
    ],
)
@pytest.mark.parametrize("more", [0, 100], ids=["few", "many"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_K6_an_element_that_is_no_integer_is_refused_by_position_and_type(
    wrong: Any, name: str, more: int, kind: type[list[Any]]
) -> None:
    with pytest.raises(TokenError, match=rf"position 12: .*{name}"):
        encode_confirmed(kind([1, 2, wrong, 3, *range(more)]), 10)


@pytest.mark.parametrize(
    "tokens",
    [
        "",
        "12",
        None,
        7,
        {1, 2},
        iter([1, 2]),
        np.array([1.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([1], dtype=object),
        np.array([[1, 2]]),
        np.array(1),
    ],
    ids=lambda tokens: repr(tokens).partition(" at 0x")[0],  # Of an iterator it has an address in it.
)
def test_K6_what_is_no_sequence_of_integers_is_refused(tokens: Any) -> None:
    with pytest.raises(TokenError, match="position 10"):
        encode_confirmed(tokens, 10)


@given(st.lists(INT64), st.integers(0, 5), st.booleans())
def test_K6_a_trailing_run_of_placeholders_is_not_confirmed(tokens: list[int], tail: int, as_array: bool) -> None:
    given_tokens = tokens + [PLACEHOLDER] * tail
    assert encode_confirmed(np.array(given_tokens, dtype=np.int64) if as_array else given_tokens, 0) == expected(tokens)


@given(st.lists(INT64, min_size=1), st.lists(INT64), st.integers(1, 3))
def test_K6_a_placeholder_before_a_confirmed_token_is_refused_by_position(
    after: list[int], before: list[int], run: int
) -> None:
    with pytest.raises(TokenError, match=f"position {7 + len(before)}: a placeholder"):
        encode_confirmed(before + [PLACEHOLDER] * run + after, 7)


@pytest.mark.parametrize("as_array", [True, False])
def test_K6_placeholders_of_a_long_prompt_are_found_too(as_array: bool) -> None:
    prompt = list(range(5000))

    def given_as(tokens: list[int]) -> Any:
        return np.array(tokens) if as_array else tokens

    assert encode_confirmed(given_as([*prompt, PLACEHOLDER, PLACEHOLDER]), 0) == expected(prompt)
    with pytest.raises(TokenError, match="position 5000: a placeholder"):
        encode_confirmed(given_as([*prompt, PLACEHOLDER, 1]), 0)
    # Bytes of minus one that belong to two tokens.
    assert encode_confirmed(given_as([*prompt, -(2**32), 2**32 - 1]), 0) == expected([*prompt, -(2**32), 2**32 - 1])


def test_K6_bytes_of_minus_one_across_two_tokens_are_no_placeholder() -> None:
    straddling = [-(2**32), 2**32 - 1]
    assert b"\xff" * 8 in expected(straddling)
    assert encode_confirmed(straddling, 0) == expected(straddling)


@given(st.lists(st.one_of(INT64, st.just(SECRET), st.just(True), st.just(1.5))))
def test_K6_a_refused_append_keeps_no_token(tokens: list[Any]) -> None:
    chain = Chain(scope_seed(EMPTY_SCOPE), 2)
    chain.append([1, 2, 3])
    good = all(type(token) is int and token != SECRET for token in tokens)
    if good:
        chain.append(tokens)
    else:
        with pytest.raises(TokenError):
            chain.append(tokens)
    assert chain.length == 3 + (len(tokens) if good else 0)


@given(st.lists(INT64, min_size=1), st.data())
def test_K7_the_first_difference_is_found(tokens: list[int], data: st.DataObject) -> None:
    encoded = expected(tokens)
    assert first_difference(encoded, encoded) is None
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], *(token ^ 1 for token in tokens[at:])]
    assert first_difference(encoded, bytearray(expected(other))) == at
