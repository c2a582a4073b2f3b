"""Which blocks a window still reads, against a model that counts token by token (W1, W2, W8)."""

from collections.abc import Iterable
from itertools import chain, pairwise, product

import pytest

from akv.plan.window import kept_blocks, load_blocks, needed_blocks, sink_blocks, stale_blocks

WINDOWS = range(1, 41)
SINKS = range(10)
BLOCK_SIZES = range(1, 9)
HISTORIES = range(81)
#: Beyond every history by more than the longest block, so that the block of every position H is complete.
POSITIONS = range(96)


def read_by(position: int, window: int, sinks: int) -> set[int]:
    """The tokens that the query at a position reads: itself and those before it, if in its window or sinks."""
    return {token for token in range(position + 1) if token > position - window or token < sinks}


def read_from_on(window: int, sinks: int) -> list[set[int]]:
    """For each position the tokens that some query there or later reads."""
    reads: list[set[int]] = []
    later: set[int] = set()
    for position in reversed(POSITIONS):
        later = later | read_by(position, window, sinks)
        reads.append(later)
    return reads[::-1]


def flat(blocks: Iterable[range]) -> list[int]:
    return [*chain.from_iterable(blocks)]


def is_tidy(blocks: list[range]) -> bool:
    """At most two ranges, ascending, apart, none empty."""
    return len(blocks) <= 2 and all(blocks) and all(a.stop < b.start for a, b in pairwise(blocks))


@pytest.mark.parametrize("tokens_per_block", BLOCK_SIZES)
def test_W1_W2_stale_and_kept_are_what_a_model_counts_token_by_token(tokens_per_block: int) -> None:
    """The block of position H counts as live once it has begun: once a token of it has KV."""
    for window, sinks in product(WINDOWS, SINKS):
        shape = (window, sinks, tokens_per_block)
        for history, tokens in zip(HISTORIES, read_from_on(window, sinks), strict=False):
            live = {token // tokens_per_block for token in tokens}
            begun = range(-(-history // tokens_per_block))
            kept = [block for block in begun if block in live]
            assert [*stale_blocks(history, *shape)] == [block for block in begun if block not in live], (shape, history)
            answer = kept_blocks(history, *shape)
            assert is_tidy(answer), (shape, history)
            assert flat(answer) == kept, (shape, history)
            if history % tokens_per_block == 0:
                assert needed_blocks(history // tokens_per_block, *shape) == answer


@pytest.mark.parametrize("tokens_per_block", BLOCK_SIZES)
def test_W1_stale_begins_behind_the_sinks_that_have_begun_also_where_nothing_is_stale(tokens_per_block: int) -> None:
    for sinks, history in product(SINKS, HISTORIES):
        sinks_begun = {
            token // tokens_per_block for token in range(sinks) if token // tokens_per_block * tokens_per_block < history
        }
        for window in (0, *WINDOWS):
            stale = stale_blocks(history, window, sinks, tokens_per_block)
            assert stale.start == len(sinks_begun)
            # Where it ends is where the tail begins, which is never inside the sinks.
            assert stale.stop >= stale.start


@pytest.mark.parametrize("tokens_per_block", [1, 3, 8])
def test_W8_a_load_brings_what_is_needed_and_not_matched_locally(tokens_per_block: int) -> None:
    for window, sinks, end in product((0, 1, 2, 7, 8, 9, 40), SINKS, range(12)):
        needed = needed_blocks(end, window, sinks, tokens_per_block)
        for local in range(end + 1):
            blocks = load_blocks(local, end, window, sinks, tokens_per_block)
            assert is_tidy(blocks)
            assert flat(blocks) == [block for block in flat(needed) if block >= local]


def test_W1_nothing_is_stale_in_full_attention() -> None:
    for tokens_per_block, history in product(BLOCK_SIZES, HISTORIES):
        assert not stale_blocks(history, 0, 0, tokens_per_block)
        assert flat(kept_blocks(history, 0, 0, tokens_per_block)) == [*range(-(-history // tokens_per_block))]


@pytest.mark.parametrize(
    ("history", "window", "sinks", "stale", "kept"),
    [
        # The next token, at position 128, reads [65, 128]: block 2 begins at 64, so it is read still.
        (128, 64, 0, range(2), [range(2, 4)]),
        # One more and it reads [96, ...]: the + 1 at work, block 2 ended at position 95.
        (159, 64, 0, range(3), [range(3, 5)]),
        (158, 64, 0, range(2), [range(2, 5)]),
        # 40 sinks fill one block and part of the next, which is kept whole.
        (159, 64, 40, range(2, 3), [range(2), range(3, 5)]),
        # Sinks and window meet: nothing between them is stale.
        (158, 64, 40, range(2, 2), [range(5)]),
        # A prompt shorter than its sinks, and one shorter than its window.
        (20, 64, 40, range(1, 1), [range(1)]),
        (100, 2048, 0, range(0), [range(4)]),
        # The window of one token is the next one itself: between blocks nothing is read.
        (64, 1, 0, range(2), []),
        (65, 1, 0, range(2), [range(2, 3)]),
        (0, 64, 40, range(0), []),
    ],
)
def test_W1_table(history: int, window: int, sinks: int, stale: range, kept: list[range]) -> None:
    assert stale_blocks(history, window, sinks, 32) == stale
    assert kept_blocks(history, window, sinks, 32) == kept


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2)])
def test_W1_the_last_block_of_the_sinks_is_kept_whole(tokens: int, blocks: int) -> None:
    assert sink_blocks(tokens, 32) == blocks
