"""What the pool answered, one answer for each key."""

from collections.abc import Sequence

from akv.ports.pool import KeyAnswer, KeyState


def answer_each(answered: object, keys: int) -> Sequence[KeyAnswer]:
    """The pool's answers to `keys` keys. REFUSED for each if there is not one for each: nobody knows which key an answer is
    about, and a page that counts by another one's answer is wrong bytes (L2).
    """
    if isinstance(answered, Sequence) and len(answered) == keys:
        return answered
    return [KeyAnswer(KeyState.REFUSED)] * keys
