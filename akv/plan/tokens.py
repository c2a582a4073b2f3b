"""Token ids become little-endian int64 bytes here, once, or are refused by position (K6, K7)."""

import operator
import struct
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from akv.errors import TokenError

#: Bytes of one encoded token.
TOKEN_BYTES = 8
#: What engines write at the end of a sequence for a token that is scheduled and not sampled yet (K6).
PLACEHOLDER = -1
_ENCODED_PLACEHOLDER = struct.pack("<q", PLACEHOLDER)
#: The range of a token id (K1: the hash takes eight bytes for each).
_INT64 = np.iinfo(np.int64)

#: Bytes up to which they are searched as such.
_SHORT_BYTES = 4096
#: Tokens from which on it pays to have a whole list looked at in C.
_LONG = 16

#: What a caller may hand in. A numpy array costs about 3 ns per token to encode, a list about 30 (each element is looked at).
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


def encode_confirmed(tokens: Tokens, start: int) -> bytes | bytearray:
    """Encode the confirmed tokens of `tokens`: all but a trailing run of `PLACEHOLDER`, which nobody has sampled yet (K6).

    `start` is the position of the first one in the whole sequence, for messages. Any sequence of integers will do (a list, a
    tuple, the bytes of a byte-level vocabulary), and any one-dimensional numpy array of an integer dtype.

    Raises TokenError (fault of the caller of this request), naming the first wrong position and never what stands there: an
    integer outside int64; anything but an integer (a bool is none: it is a mask in the wrong place); a placeholder that a
    confirmed token follows. The last would put a hash on tokens that nobody knows, and the pool would serve its page to
    whatever sequence really has that placeholder.
    """
    encoded = _encode_array(tokens, start) if isinstance(tokens, np.ndarray) else _encode_sequence(tokens, start)
    return _without_tail(encoded, start) if _may_have_placeholder(encoded) else encoded


def first_difference(left: bytes | bytearray, right: bytes | bytearray) -> int | None:
    """The position of the first token in which two encodings of equal length differ, None if they are equal."""
    if left == right:
        return None
    differs = np.frombuffer(left, dtype="<i8") != np.frombuffer(right, dtype="<i8")
    return int(differs.argmax())


def _may_have_placeholder(encoded: bytes | bytearray) -> bool:
    """Almost no call has one, and most are one sampled token long: then a search of bytes is far cheaper than numpy's calls.

    It may also match across two tokens, and then nothing is found to take off. A prompt of 100,000 tokens would be searched
    for a quarter of a millisecond, fifteen times as long as numpy compares.
    """
    if len(encoded) <= _SHORT_BYTES:
        return _ENCODED_PLACEHOLDER in encoded
    return bool((np.frombuffer(encoded, dtype="<i8") == PLACEHOLDER).any())


def _without_tail(encoded: bytes | bytearray, start: int) -> bytes | bytearray:
    known = np.flatnonzero(np.frombuffer(encoded, dtype="<i8") != PLACEHOLDER)
    holes = np.flatnonzero(known != np.arange(len(known)))
    if holes.size:
        _refuse(start + int(holes[0]), "a placeholder for an unconfirmed token stands before a confirmed one")
    return encoded[: len(known) * TOKEN_BYTES]


def _encode_array(tokens: npt.NDArray[Any], start: int) -> bytearray:
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        _refuse(start, f"a token array is one-dimensional and of an integer dtype, not {tokens.ndim}-d {tokens.dtype}")
    if tokens.dtype.kind == "u" and tokens.dtype.itemsize == TOKEN_BYTES:
        # A cast would wrap these silently into negative tokens, and two sequences would share a hash.
        outside = np.flatnonzero(tokens > np.uint64(_INT64.max))
        if outside.size:
            _refuse(start + int(outside[0]), "the token is outside the range of int64")
    # Into its place at once: a prompt of 100,000 tokens is most of a megabyte, and each copy of it holds the loop.
    encoded = bytearray(tokens.size * TOKEN_BYTES)
    np.frombuffer(encoded, dtype="<i8")[:] = tokens
    return encoded


def _encode_sequence(tokens: object, start: int) -> bytes:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        _refuse(start, f"tokens are a sequence of integers, not a {type(tokens).__name__}")
    if _are_plain(tokens):
        try:
            return struct.pack(f"<{len(tokens)}q", *tokens)
        except struct.error:
            pass  # one of them is outside int64: the pass below finds out where
    return b"".join(_encode_one(token, start + offset) for offset, token in enumerate(tokens))


def _are_plain(tokens: Sequence[Any]) -> bool:
    """Whether every element is an int and none a bool: struct would take True for 1."""
    if len(tokens) < _LONG or not isinstance(tokens, list | tuple):
        return set(map(type, tokens)) <= {int}
    try:
        # What prompts come as, by the thousand tokens: decided in C, in a seventh of the time that a set of types takes.
        msgspec.convert(tokens, list[int])
    except msgspec.ValidationError:
        return False
    return True


def _encode_one(token: Any, position: int) -> bytes:
    """Encode one element of a sequence that is not plain integers throughout, such as a list of numpy integers."""
    # `index` also refuses numpy's bools, but turns Python's own into 0 and 1.
    if isinstance(token, bool) or (value := _index(token)) is None:
        _refuse(position, f"a token is an integer, not a {type(token).__name__}")
    if not _INT64.min <= value <= _INT64.max:
        _refuse(position, "the token is outside the range of int64")
    return struct.pack("<q", value)


def _index(token: Any) -> int | None:
    try:
        return operator.index(token)
    except TypeError:
        return None


def _refuse(position: int, why: str) -> NoReturn:
    raise TokenError(f"token at position {position}: {why}; nothing was appended") from None
