"""Chains of recent requests: hashes are the same with and without them (K7)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.hashing import Chain, scope_seed
from akv.plan.recent_chains import MOST_COMPARED, RecentChains
from akv.values.scope import Scope

SEED = scope_seed(Scope())


def chain_of(tokens: list[int], seed: bytes = SEED, tokens_per_block: int = 4) -> Chain:
    chain = Chain(seed, tokens_per_block)
    chain.append(tokens)
    return chain


def known(chain: Chain) -> int:
    """Blocks that have a hash already."""
    return chain.hash_up_to(0)


class Turn:
    """A request of the property test: which earlier one it continues, how far, with what."""

    def __init__(self, of: int, cut: int, new: list[int], hashed: int, salt: str) -> None:
        self.of, self.cut, self.new, self.hashed, self.salt = of, cut, new, hashed, salt


turns = st.builds(
    Turn,
    of=st.integers(0, 20),
    cut=st.integers(0, 60),
    new=st.lists(st.integers(0, 1), max_size=40),
    hashed=st.integers(0, 30),
    salt=st.sampled_from(["a", "b"]),
)


@given(st.lists(turns, max_size=8), st.integers(1, 5), st.sampled_from([0, 7, 60, 1000]))
def test_K7_hashes_are_byte_identical_with_and_without_recent_chains(
    requests: list[Turn], tokens_per_block: int, capacity: int
) -> None:
    recent = RecentChains(capacity)
    sequences: list[list[int]] = [[]]
    for turn in requests:
        sequences.append(sequences[turn.of % len(sequences)][: turn.cut] + turn.new)
        seed = scope_seed(Scope(salt=turn.salt))
        chain = chain_of(sequences[-1], seed, tokens_per_block)
        recent.adopt(chain)
        chain.hash_up_to(min(turn.hashed, chain.hashable_blocks))
        recent.adopt(chain)
        alone = chain_of(sequences[-1], seed, tokens_per_block)
        assert chain.hashes(0, chain.hashable_blocks) == alone.hashes(0, alone.hashable_blocks)
        assert recent.tokens <= capacity


def test_K7_a_follow_up_adopts_the_longest_prefix_that_it_shares() -> None:
    recent = RecentChains(1000)
    for length in (8, 24, 16):
        chain = chain_of([*range(length), 99, 99, 99, 99])
        recent.adopt(chain)
        chain.hashes(0, chain.hashable_blocks)
    follow_up = chain_of(list(range(40)))
    recent.adopt(follow_up)
    assert known(follow_up) == 6


def test_K7_what_was_not_hashed_is_adopted_later() -> None:
    recent = RecentChains(1000)
    one, other = chain_of(list(range(40))), chain_of(list(range(40)))
    recent.adopt(one)
    recent.adopt(other)
    one.hash_up_to(3)
    recent.adopt(other)
    assert known(other) == 3
    one.hash_up_to(10)
    recent.adopt(other)
    assert known(other) == 10


def test_K7_scopes_share_nothing() -> None:
    recent = RecentChains(1000)
    mine, theirs = chain_of(list(range(40))), chain_of(list(range(40)), scope_seed(Scope(salt="x")))
    mine.hash_up_to(10)
    recent.adopt(mine)
    recent.adopt(theirs)
    assert known(theirs) == 0
    with pytest.raises(ValueError, match="share no hash"):
        theirs.adopt(mine)
    with pytest.raises(ValueError, match="share no hash"):
        chain_of(list(range(40)), tokens_per_block=8).adopt(mine)


def test_K7_a_prefix_gives_way_and_the_oldest_goes_first() -> None:
    recent = RecentChains(100)
    first = chain_of(list(range(40)))
    first.hash_up_to(10)
    recent.adopt(first)
    longer = chain_of(list(range(48)))
    longer.hash_up_to(12)
    recent.adopt(longer)
    assert (len(recent), recent.tokens) == (1, 48)
    recent.adopt(chain_of(list(range(100, 140))))
    recent.adopt(chain_of(list(range(200, 220))))
    assert (len(recent), recent.tokens) == (2, 60)
    late = chain_of(list(range(48)))
    recent.adopt(late)
    assert known(late) == 0


def test_K7_a_chain_that_grew_and_one_that_differs_early_are_compared_and_not_assumed() -> None:
    recent = RecentChains(1000)
    chain = chain_of(list(range(8)))
    recent.adopt(chain)
    chain.append(list(range(8, 40)))
    chain.hash_up_to(10)
    same = chain_of(list(range(32)))
    recent.adopt(same)
    assert known(same) == 8
    parted = chain_of([0, 1, 2, 3, 9, *range(5, 40)])
    recent.adopt(parted)
    assert known(parted) == 1
    # Equal as far as this one has hashed, or different there: only then are the later hashes of use.
    parted.hash_up_to(2)
    parted.adopt(chain)
    assert known(parted) == 2


def test_K7_a_sequence_below_one_block_is_not_kept() -> None:
    recent = RecentChains(1000)
    recent.adopt(chain_of([1, 2, 3]))
    assert len(recent) == 0


def test_K7_a_search_looks_at_a_bounded_number_of_chains() -> None:
    recent = RecentChains(10_000)
    oldest = chain_of(list(range(40)))
    oldest.hash_up_to(10)
    recent.adopt(oldest)
    for number in range(MOST_COMPARED):
        recent.adopt(chain_of([0, 1, 2, 3, *[number + 1000] * 8]))
    late = chain_of(list(range(40)))
    recent.adopt(late)
    assert known(late) == 1  # the first block, which the newer ones share
