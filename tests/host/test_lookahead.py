"""Beside a drafter whose KV depends on later tokens: blocks are shared with those that have these tokens too (K2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import SettingsError
from akv.host import PagedCache
from akv.plan.hashing import Chain, scope_seed
from akv.values.scope import EMPTY_SCOPE

T = 4
short = st.lists(st.integers(0, 1), min_size=1, max_size=22)


def computed(cache: PagedCache, tokens: list[int]) -> None:
    sequence = cache.admit(tokens, len(tokens))
    assert sequence is not None
    sequence.commit(len(tokens))
    sequence.release()


@pytest.mark.parametrize(("length", "matched"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_K2_a_block_is_cached_once_its_lookahead_is_known(length: int, matched: int) -> None:
    cache = PagedCache(T, [32], lookahead_tokens=1)
    computed(cache, list(range(12)))
    assert cache.match(range(length)) == matched
    assert cache.check() == []


def test_K2_what_is_appended_later_is_a_lookahead_too() -> None:
    cache = PagedCache(T, [32], lookahead_tokens=1)
    sequence = cache.admit(range(8), 9)
    assert sequence is not None
    sequence.commit(8)
    assert cache.cached_blocks == 1
    sequence.append([8])
    sequence.commit(8)
    assert cache.cached_blocks == 2
    assert cache.match(range(9)) == 8
    assert cache.match([*range(8), 77]) == 4
    sequence.release()
    assert cache.check() == []


@given(short, short, st.integers(0, 6))
def test_K2_L1_a_match_is_what_the_names_of_the_pool_have_in_common(one: list[int], other: list[int], lookahead: int) -> None:
    cache = PagedCache(T, [32], lookahead_tokens=lookahead)
    computed(cache, one)
    chains = [Chain(scope_seed(EMPTY_SCOPE, lookahead=lookahead), T, lookahead=lookahead) for _ in range(2)]
    for chain, tokens in zip(chains, (one, other), strict=True):
        chain.append(tokens)
    names = [chain.hashes(0, chain.hashable_blocks) for chain in chains]
    common = next((at for at, (a, b) in enumerate(zip(*names, strict=False)) if a != b), min(map(len, names)))
    assert cache.match(other) == T * min(common, (len(other) - 1) // T)
    assert cache.check() == []


def test_K2_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(SettingsError, match="lookahead_tokens"):
        PagedCache(T, [32], lookahead_tokens=-1)
