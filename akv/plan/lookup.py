"""Which blocks a lookup asks for, in which portions, and what its answers amount to (L1, L2, L3, W7 without windows)."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from akv.errors import EngineContractError
from akv.values.offers import LookupOutcome


class LookupRange(msgspec.Struct, frozen=True):
    """The blocks [first, last) that a lookup asks the pool for. Never empty."""

    #: The first block beyond the engine's own local match.
    first: int
    #: One past the last block that may be offered.
    last: int
    #: T, which turns blocks into tokens again.
    tokens_per_block: int


def lookup_range(
    tokens: int, local_tokens: int, tokens_per_block: int, *, request_id: str = ""
) -> LookupRange | LookupOutcome:
    """What to ask for a sequence of `tokens` tokens of which the engine has `local_tokens` itself; or why nothing (L1).

    The range ends at floor((n - 1) / T) blocks and not at floor(n / T): one token must be left to compute, or the pass would
    have no logits to sample from. A local match off a block boundary is UNALIGNED even where nothing beyond it could be
    offered, so that the count tells how often the engine does not align.

    Raises EngineContractError, naming the request, for a local match that is negative or longer than the sequence.
    """
    if not 0 <= local_tokens <= tokens:
        raise EngineContractError(
            f"request {request_id!r}: a local match of {local_tokens} tokens in a sequence of {tokens}; "
            "it must be between 0 and the sequence's length"
        )
    if local_tokens % tokens_per_block:
        return LookupOutcome.UNALIGNED
    first = local_tokens // tokens_per_block
    last = (tokens - 1) // tokens_per_block
    return LookupRange(first, last, tokens_per_block) if first < last else LookupOutcome.SKIPPED


def probe_batches(first: int, last: int, groups: int, head: int, chunk: int) -> Iterator[range]:
    """Cut blocks [first, last) into the portions that are probed, in order: a small head, then chunks (L3).

    `head` and `chunk` are bounds in keys, one per block and layer group, because the client's cost on the loop goes by keys; a
    portion holds at least one block whatever they say. The head is small so that a cold prompt costs one small call.
    """
    size = max(1, head // groups)
    while first < last:
        end = min(last, first + size)
        yield range(first, end)
        first, size = end, max(1, chunk // groups)


def prefix_length(answers: Iterable[Sequence[bool]]) -> int:
    """How many blocks from the first on are there whole, given for each block whether each group's page is there (L2).

    The first hole ends it: a later page without those before it is of no use. Lazy: nothing is read past the hole.
    """
    length = 0
    for block in answers:
        if not all(block):
            break
        length += 1
    return length


def offer_of(asked: LookupRange, found_blocks: int) -> tuple[int, LookupOutcome]:
    """The tokens to offer and the outcome to count, when the first `found_blocks` blocks of the range are in the pool (W7).

    Without window groups a request can resume behind any block, so the offer is whatever was found.

    Raises ValueError for a count that is not in the range (a fault of akv: it would offer blocks that nobody asked for).
    """
    if not 0 <= found_blocks <= asked.last - asked.first:
        raise ValueError(f"{found_blocks} blocks found of the {asked.last - asked.first} asked for")
    if not found_blocks:
        return 0, LookupOutcome.FULL_ATTENTION_MISS
    return found_blocks * asked.tokens_per_block, LookupOutcome.FULL
