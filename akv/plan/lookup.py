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
    tokens: int, local_tokens: int, tokens_per_block: int, *, request_id: str = "", lookahead: int = 0
) -> LookupRange | LookupOutcome:
    """What to ask for a sequence of `tokens` tokens of which the engine has `local_tokens` itself; or why nothing (L1).

    The range ends at floor((n - 1) / T) blocks and not at floor(n / T): one token must be left to compute, or the pass would
    have no logits to sample from. With a lookahead of L tokens it ends at the chain's length, floor((n - L)/T): later blocks
    have no hash, and a local match beyond it is SKIPPED (K2). A local match off a block boundary is UNALIGNED even where
    nothing beyond it could be offered, so that the count tells how often the engine does not align.

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
    last = (tokens - max(1, lookahead)) // tokens_per_block
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


class ProbeWalk:
    """Which portion of a lookup is asked next, and what the answers amount to, in whatever order they come (L3).

    The head is asked alone, so that a cold prompt costs one small call. Behind it portions may be asked at the same time; none
    is asked beyond a hole that is known, and what was asked beyond it is of no interest any more.
    """

    def __init__(self, asked: LookupRange, groups: int, head: int, chunk: int) -> None:
        """`head` and `chunk` as for `probe_batches`."""
        self._asked = asked
        self._portions = probe_batches(asked.first, asked.last, groups, head, chunk)
        self._given = 0
        self._answered = 0
        #: Where each answered portion begins, with its blocks and how many of them are there whole from its first on.
        self._whole: dict[int, tuple[int, int]] = {}
        self._hole = asked.last

    def next(self) -> range | None:
        """The next portion to ask for; None if there is none now, which before the head's answer may change."""
        if self._given and not self._answered:
            return None
        portion = next(self._portions, None)
        if portion is None or portion.start >= self._hole:
            return None
        self._given += 1
        return portion

    def answered(self, portion: range, whole: int) -> None:
        """Of the portion's blocks the first `whole` are there in every group."""
        self._answered += 1
        self._whole[portion.start] = (len(portion), whole)
        if whole < len(portion):
            self._hole = min(self._hole, portion.start + whole)

    @property
    def found(self) -> int:
        """Blocks known to be there, from the first asked one on without a hole."""
        at = self._asked.first
        while (portion := self._whole.get(at)) is not None:
            size, whole = portion
            at += whole
            if whole < size:
                break
        return at - self._asked.first

    @property
    def settled(self) -> bool:
        """Whether no further answer can change `found`."""
        return self._asked.first + self.found == self._hole
