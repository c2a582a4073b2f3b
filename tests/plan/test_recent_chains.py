"""Chains of recent requests: hashes are the same with and without them (K7)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.hashing import Chain, scope_seed
from akv.plan.identity import Hashing
from akv.plan.recent_chains import MOST_COMPARED, RecentChains
from akv.values.scope import EMPTY_SCOPE, Media, Scope

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

    def __init__(self, of: int, cut: int, new: list[int], hashed: int, salt: str, pictures: list[tuple[int, int]]) -> None:
        self.of, self.cut, self.new, self.hashed, self.salt = of, cut, new, hashed, salt
        #: Position and content of each picture, of one token.
        self.pictures = pictures

    def scope(self, length: int) -> Scope:
        """Its scope, with those of the pictures that a prompt of this length has room for."""
        places = {position: content for position, content in self.pictures if position < length}
        media = (Media(digest=bytes([places[at]] * 32), position=at, tokens=1) for at in sorted(places))
        return Scope(salt=self.salt, media=tuple(media))


turns = st.builds(
    Turn,
    of=st.integers(0, 20),
    cut=st.integers(0, 60),
    new=st.lists(st.integers(0, 1), max_size=40),
    hashed=st.integers(0, 30),
    salt=st.sampled_from(["a", "b"]),
    pictures=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1)), max_size=3),
)


@given(st.lists(turns, max_size=8), st.integers(1, 5), st.sampled_from([0, 0, 1, 3]), st.sampled_from([0, 7, 60, 1000]))
def test_K7_hashes_are_byte_identical_with_and_without_recent_chains(
    requests: list[Turn], tokens_per_block: int, lookahead: int, capacity: int
) -> None:
    hashing = Hashing(tokens_per_block, lookahead)
    recent = RecentChains(capacity)
    sequences: list[list[int]] = [[]]
    for turn in requests:
        sequences.append(sequences[turn.of % len(sequences)][: turn.cut] + turn.new)
        scope = turn.scope(len(sequences[-1]))
        chain = hashing.chain(scope, sequences[-1])
        recent.adopt(chain)
        chain.hash_up_to(min(turn.hashed, chain.hashable_blocks))
        recent.adopt(chain)
        alone = hashing.chain(scope, sequences[-1])
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


def picture(position: int, content: int) -> Media:
    return Media(digest=bytes([content] * 32), position=position, tokens=2)


@pytest.mark.parametrize(
    ("media", "shared"),
    [
        ((picture(2, 1), picture(18, 1)), 10),
        ((picture(2, 1), picture(18, 2)), 4),
        ((picture(2, 1),), 4),
        ((picture(2, 1), picture(17, 1)), 4),
        ((picture(2, 2), picture(18, 1)), 0),
        ((), 0),
    ],
)
def test_K7_media_are_compared_and_not_assumed(media: tuple[Media, ...], shared: int) -> None:
    """Equal placeholders of different pictures share nothing from the first one that differs."""
    recent, hashing = RecentChains(1000), Hashing(4)
    first = hashing.chain(Scope(media=(picture(2, 1), picture(18, 1))), [0] * 40)
    recent.adopt(first)
    first.hashes(0, 10)
    follow_up = hashing.chain(Scope(media=media), [0] * 44)
    recent.adopt(follow_up)
    assert known(follow_up) == shared


def test_K2_K7_a_block_whose_lookahead_parts_is_not_adopted() -> None:
    recent, hashing = RecentChains(1000), Hashing(4, lookahead=1)
    first = hashing.chain(EMPTY_SCOPE, list(range(41)))
    recent.adopt(first)
    first.hashes(0, 10)
    same = hashing.chain(EMPTY_SCOPE, list(range(41)))
    recent.adopt(same)
    assert known(same) == 10
    # The eighth block is equal, the token behind it is not.
    parted = hashing.chain(EMPTY_SCOPE, [*range(32), 99, *range(33, 41)])
    recent.adopt(parted)
    assert known(parted) == 7
    with pytest.raises(ValueError, match="lookaheads share no hash"):
        Hashing(4).chain(EMPTY_SCOPE, range(40)).adopt(first)


def test_K2_K7_a_prompt_without_its_first_lookahead_is_not_kept() -> None:
    recent = RecentChains(1000)
    recent.adopt(Hashing(4, lookahead=2).chain(EMPTY_SCOPE, range(5)))
    assert len(recent) == 0
