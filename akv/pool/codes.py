"""What the store's codes mean in akv's words. Only what is known to be good counts as good (L2)."""

from collections.abc import Callable
from typing import Any

from akv.ports.pool import KeyAnswer, KeyState

#: Codes that mean the same whatever was asked. What stands in none of these tables is REFUSED.
_COMMON = {
    -900: KeyState.UNAVAILABLE,  # the master did not answer, or does not know this call
    -901: KeyState.UNAVAILABLE,  # the master's answer could not be read
    -800: KeyState.UNAVAILABLE,  # the transfer failed: the holder of the memory is gone
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


def read_codes(raw: Any, count: int, answer: Callable[[int, int], KeyAnswer]) -> list[KeyAnswer]:
    """One answer per key from what the client returned; `answer(code, index)` says what a code means.

    A reply that is not a list of `count` integers cannot be matched to keys, so all of it is REFUSED: a guess would read one
    key's answer as another's.
    """
    if not isinstance(raw, list) or len(raw) != count or any(type(code) is not int for code in raw):
        return [KeyAnswer(KeyState.REFUSED)] * count
    return [answer(code, index) for index, code in enumerate(raw)]
