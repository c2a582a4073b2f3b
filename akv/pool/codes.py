"""What the store's codes mean in akv's words. Only what is known to be good counts as good (L2)."""

from collections.abc import Callable, Sequence
from typing import Any

from akv.ports.pool import KeyAnswer, KeyState

#: Codes that mean the same whatever was asked. What stands in none of these tables is REFUSED.
_COMMON = {
    -900: KeyState.UNAVAILABLE,  # the master did not answer, or does not know this call
    -901: KeyState.UNAVAILABLE,  # the master's answer could not be read
    -800: KeyState.HOLDER_LOST,  # the transfer failed: the holder of the memory is gone
}
_GET = _COMMON | {
    -704: KeyState.MISSING,
    -703: KeyState.MISSING,  # its writer has not finished
    -707: KeyState.LEASE_EXPIRED,
    # Invalid parameters. The adapter checks the form of a call before it goes out, which leaves the one case that it cannot
    # know: the value does not fit in the room for it. The client looks before it transfers, so nothing was written.
    -600: KeyState.WRONG_SIZE,
}
_PUT = _COMMON | {
    -200: KeyState.NO_SPACE,
}
_REMOVE = _COMMON | {
    0: KeyState.OK,
    -704: KeyState.MISSING,
}
_PROBE = _COMMON | {
    1: KeyState.OK,
    0: KeyState.MISSING,
}


def probe_answer(code: int) -> KeyAnswer:
    """The answer for a key that `batch_is_exist` gave `code`."""
    return KeyAnswer(_PROBE.get(code, KeyState.REFUSED), code)


def get_answer(code: int, size: int) -> KeyAnswer:
    """The answer for a key whose `batch_get_into` gave `code`, where `size` bytes had to arrive."""
    if code >= 0:
        # The code is the size of the value, and a value shorter than the room for it is no error to the client.
        return KeyAnswer(KeyState.OK if code == size else KeyState.WRONG_SIZE, code)
    return KeyAnswer(_GET.get(code, KeyState.REFUSED), code)


def put_answer(code: int) -> KeyAnswer:
    """The answer for a key that `batch_put_from` gave `code`. 0 says accepted, not present (S5)."""
    return KeyAnswer(KeyState.OK if code == 0 else _PUT.get(code, KeyState.REFUSED), code)


def remove_answer(code: int) -> KeyAnswer:
    """The answer for a key that `batch_remove` gave `code`. OK: it was there and is gone.

    REFUSED among others for a key whose writer has not finished (-703), and for a leased one that is not forced (-706).
    """
    return KeyAnswer(_REMOVE.get(code, KeyState.REFUSED), code)


class _Answers(dict[int, KeyAnswer]):
    """Answers by code, each made once: a call answers thousands of keys with a handful of codes, and does so while it holds
    the interpreter lock.
    """

    def __init__(self, answer: Callable[[int], KeyAnswer]) -> None:
        super().__init__()
        self._answer = answer

    def __missing__(self, code: int) -> KeyAnswer:
        self[code] = made = self._answer(code)
        return made


def read_codes(raw: Any, count: int, answer: Callable[[int], KeyAnswer]) -> list[KeyAnswer]:
    """One answer per key from what the client returned; `answer(code)` says what a code means.

    A reply that is not a list of `count` integers cannot be matched to keys, so all of it is REFUSED: a guess would read one
    key's answer as another's.
    """
    if not isinstance(raw, list) or len(raw) != count or not set(map(type, raw)) <= {int}:
        return [KeyAnswer(KeyState.REFUSED)] * count
    return list(map(_Answers(answer).__getitem__, raw))


def read_sizes(raw: Any, sizes: Sequence[int]) -> list[KeyAnswer]:
    """One answer per key from what `batch_get_into` returned, where `sizes` had to arrive. As `read_codes()`."""
    if len(distinct := set(sizes)) == 1:
        (size,) = distinct
        return read_codes(raw, len(sizes), lambda code: get_answer(code, size))
    codes = read_codes(raw, len(sizes), lambda code: KeyAnswer(KeyState.OK, code))
    return [
        get_answer(read.code, size) if read.state is KeyState.OK else read for read, size in zip(codes, sizes, strict=True)
    ]
