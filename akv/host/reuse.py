"""What the tree calls a block (K2), and where a sequence can resume in it: the latest end whose windows are there too (W2)."""

from collections.abc import Sequence
from typing import NamedTuple

from akv.host.booking import WindowRule
from akv.host.pages import Block
from akv.plan.hashing import whole_blocks
from akv.plan.tokens import TOKEN_BYTES


class Blocks(NamedTuple):
    """How a sequence of encoded tokens is cut."""

    tokens_per_block: int
    #: L: tokens behind a block that its KV depends on. They belong to its key.
    lookahead_tokens: int

    def named(self, tokens: int) -> int:
        """Blocks whose keys are known, of a sequence of so many tokens."""
        return whole_blocks(tokens, self.tokens_per_block, self.lookahead_tokens)

    def key(self, encoded: bytes | bytearray, number: int) -> bytes:
        """What the tree calls a block: its tokens, and those behind it on which its KV depends."""
        start = number * self.tokens_per_block
        return bytes(encoded[start * TOKEN_BYTES : (start + self.tokens_per_block + self.lookahead_tokens) * TOKEN_BYTES])


def resumable_blocks(chain: Sequence[Block], rules: Sequence[WindowRule]) -> int:
    """The latest end in `chain`, in blocks, at which every window group has what is read from there on; 0 if there is none.

    The chain has all pages of full attention; it begins at block 0. `rules` are in the order of `Block.windows`.
    """
    runs = [_runs(chain, position) for position in range(len(rules))]
    for end in range(len(chain), 0, -1):
        if all(_is_there(rule, run, end) for rule, run in zip(rules, runs, strict=True)):
            return end
    return 0


def _runs(chain: Sequence[Block], position: int) -> list[int]:
    """For each end, how many blocks in a row before it have a page of this window group."""
    runs = [0]
    for block in chain:
        runs.append(0 if block.windows[position] is None else runs[-1] + 1)
    return runs


def _is_there(rule: WindowRule, runs: list[int], end: int) -> bool:
    # First what costs nothing: a chain of thousands of blocks has window pages at few of its ends.
    if rule.window_tokens > 1 and not runs[end]:
        return False
    return all(runs[blocks.stop] >= len(blocks) for blocks in rule.needed(end))
