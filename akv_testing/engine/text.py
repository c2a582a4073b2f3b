"""Byte-level tokens: a text's UTF-8 bytes, and a few special tokens above them."""

from collections.abc import Iterable, Sequence
from enum import IntEnum


class Special(IntEnum):
    """Tokens that no text can contain."""

    #: Begins every conversation.
    BEGIN = 256
    USER = 257
    ASSISTANT = 258
    #: Ends a turn.
    END = 259


def encode(text: str) -> list[int]:
    """A text's tokens: one per UTF-8 byte."""
    return list(text.encode())


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; special tokens are left out, and bytes that are no UTF-8 are shown as replacement characters."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def conversation(turns: Sequence[tuple[str, Sequence[int]]], question: str) -> list[int]:
    """The prompt of a conversation's next turn: what was asked and answered so far, then a question, then the model's turn.

    `turns` are questions with the tokens of their answers. Each prompt begins with the whole of the turn before it and its
    answer, so a follow-up finds all of that in a cache.
    """
    tokens: list[int] = [Special.BEGIN]
    for asked, answer in turns:
        tokens += [Special.USER, *encode(asked), Special.END, Special.ASSISTANT, *answer, Special.END]
    return [*map(int, tokens), int(Special.USER), *encode(question), int(Special.END), int(Special.ASSISTANT)]
