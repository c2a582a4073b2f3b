"""From a row of a trace to a request that a small model on two cores can answer: the prefix structure kept, all else smaller.

A trace tells which prompts share which blocks, and no text. So each block is given tokens that are a pure function of its id:
what was equal is equal, in every process, and what was not is not. A block becomes a whole number of the engine's blocks, so
two prompts share exactly the blocks of tokens that stand for blocks of the trace that they share.
"""

from functools import lru_cache
from hashlib import shake_128
from struct import iter_unpack

import msgspec

from akv.cli.demo.trace import MOST_IDS, TRACE_BLOCK_TOKENS, TraceRow

#: Tokens that the replaying model knows.
VOCABULARY = 4096
#: Tokens at the beginning of a block that name its id; no block is cut shorter, so no two blocks become alike.
ID_TOKENS = 2
#: Blocks whose tokens are kept: a few MiB.
_KEPT_BLOCKS = 8192

if VOCABULARY**ID_TOKENS < MOST_IDS:
    raise AssertionError("an id has to fit into the tokens that name it")


class ReplayedRequest(msgspec.Struct, frozen=True):
    """A request as it is replayed."""

    #: Seconds after the replay's beginning.
    start_s: float
    prompt: tuple[int, ...]
    new_tokens: int


def scaled_lengths(row: TraceRow, divisor: int) -> tuple[int, int]:
    """Tokens of the prompt and of the answer at a scale of 1 to `divisor`, a divisor of `TRACE_BLOCK_TOKENS`.

    The last block of a prompt is cut in proportion, rounded up, at least to the tokens that name its id. So a prompt's length
    is off its proportion by less than `ID_TOKENS` tokens.
    """
    whole, rest = divmod(row.input_length, TRACE_BLOCK_TOKENS)
    last = max(ID_TOKENS, -(-rest // divisor)) if rest else 0
    return whole * (TRACE_BLOCK_TOKENS // divisor) + last, max(1, -(-row.output_length // divisor))


def scaled(row: TraceRow, divisor: int, speed: float, began_ms: float = 0.0) -> ReplayedRequest:
    """The request that stands for a row, at a scale of 1 to `divisor` and `speed` times as fast as a trace that began then."""
    size = TRACE_BLOCK_TOKENS // divisor
    length, new_tokens = scaled_lengths(row, divisor)
    prompt = [token for block in row.hash_ids for token in block_tokens(block, size)]
    return ReplayedRequest((row.timestamp - began_ms) / 1000 / speed, tuple(prompt[:length]), new_tokens)


@lru_cache(_KEPT_BLOCKS)
def block_tokens(block: int, size: int) -> tuple[int, ...]:
    """The `size` tokens of a trace's block. A smaller size gives the beginning of them."""
    noise = shake_128(block.to_bytes(8, "little")).digest(2 * size)
    high, low = divmod(block, VOCABULARY)
    # The low half first: neighbours in a trace, whose ids are close, then differ from their first token on.
    return (low, high, *(number % VOCABULARY for (number,) in iter_unpack("<H", noise)))[:size]
