"""Real text for the demo, without a download: the help topics that every CPython ships."""

from collections.abc import Sequence
from pydoc_data.topics import topics

from akv.cli.demo.jobs import Turn
from akv.plan.hashing import whole_blocks
from akv_testing.engine.text import conversation, encode

#: How a prompt goes on that leaves a conversation.
_ASIDE = "Leave this, and tell me instead what else there is to know, in a few words that a newcomer understands."
#: Bytes of a conversation's first question and of each later one. Tokens are bytes, so these are their lengths in tokens too:
#: a first prompt long enough that computing it takes clearly longer than loading it.
FIRST_QUESTION_BYTES = 1800
NEXT_QUESTION_BYTES = 500
#: Bytes by which a question grows per conversation and turn, so that prompts end at every place of a block and not all at one.
STEP_BYTES = 13


def questions(conversation: int, turns: int) -> list[str]:
    """The questions of one conversation; no two conversations begin alike."""
    texts = [topics[name] for name in sorted(topics) if len(topics[name]) > FIRST_QUESTION_BYTES]
    # One text after the other, each conversation from a place of its own: any number of conversations and turns finds text.
    book = "\n".join(texts[conversation % len(texts) :] + texts[: conversation % len(texts)])
    asked = []
    at = conversation // len(texts) * FIRST_QUESTION_BYTES
    for turn in range(turns):
        length = (FIRST_QUESTION_BYTES if turn == 0 else NEXT_QUESTION_BYTES) + STEP_BYTES * (conversation + turn)
        at %= len(book) - length
        asked.append(f"Conversation {conversation}. Explain this: {book[at : at + length]}")
        at += length
    return asked


def ending_at(told: Sequence[tuple[str, Sequence[int]]], question: str, residue: int, modulus: int) -> str:
    """The question, cut so that the prompt's length has this residue: so prompts end at every place of a block."""
    length = len(conversation(told, question))
    while length % modulus != residue:
        length -= len(question[-1].encode())
        question = question[:-1]
    return question


def forks(turns: Sequence[Turn], number: int, rewind_tokens: int) -> list[tuple[int, ...]]:
    """Prompts that leave a conversation, of which the pool holds these turns, where none of the turns ended.

    Window pages are stored at the ends of prompts and of answers, and for `rewind_tokens` before an end of a prompt. One of
    these prompts leaves inside the first one, with no such end before it; one shortly behind the first answer; and one as far
    behind that as before the second prompt's end. `number` keeps the forks of different conversations apart.
    """
    first = turns[0].prompt + turns[0].answer
    leaving = [first[: len(first) // 2]]
    if len(turns) > 1:
        second = turns[1].prompt
        leaving += [second[: len(first) + rewind_tokens // 2], second[: (len(first) + len(second)) // 2]]
    return [(*begin, *encode(f"{number}.{at}: {_ASIDE}")) for at, begin in enumerate(leaving)]


def aside(turn: Turn, number: int) -> tuple[int, ...]:
    """A prompt that goes on where another one ended, without its answer: what is new in it nobody has computed before.

    Longer than a window, so that most of what can be resumed from at its end is its own.
    """
    return (*turn.prompt, *encode(f"{number}: {_ASIDE}" * 4))


def common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that two sequences have in common from their beginning."""
    for at, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return at
    return min(len(one), len(other))


def reusable_tokens(
    prompt: tuple[int, ...], stored: list[tuple[int, ...]], local_tokens: int, tokens_per_block: int, lookahead: int = 0
) -> int:
    """What of a prompt could come from the pool, in tokens (Q2). `stored` are sequences whose saves had ended before.

    With a lookahead (K2) a block counts if the tokens behind it that it depends on are common, too.
    """
    common = max((common_prefix(prompt, sequence) for sequence in stored), default=0)
    blocks = min(whole_blocks(common, tokens_per_block, lookahead), (len(prompt) - 1) // tokens_per_block)
    return tokens_per_block * max(0, blocks - local_tokens // tokens_per_block)
