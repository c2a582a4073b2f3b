"""The paged cache of the toolkit for engines (H1): what is shared, what is freed, what is refused."""

import pytest

from akv.errors import EngineContractError, SettingsError, TokenError
from akv.host import PagedCache
from akv.values.scope import Scope

T = 4


def cache_of(*page_counts: int) -> PagedCache:
    return PagedCache(T, page_counts)


def computed(cache: PagedCache, tokens: list[int], scope: Scope | None = None) -> None:
    """Have a request compute these tokens and leave."""
    sequence = cache.admit(tokens, len(tokens), scope or Scope())
    assert sequence is not None
    sequence.commit(len(tokens))
    sequence.release()


def test_H1_a_table_has_one_page_per_block_in_each_group_and_none_twice() -> None:
    cache = cache_of(8, 6)
    first = cache.admit(list(range(9)), 13)
    second = cache.admit(list(range(100, 104)), 5)
    assert first is not None
    assert second is not None
    assert [len(table) for table in first.page_tables()] == [4, 4]
    assert [len(table) for table in second.page_tables()] == [2, 2]
    for group in (0, 1):
        pages = first.page_tables()[group] + second.page_tables()[group]
        assert len(set(pages)) == 6
    assert cache.free_pages == (2, 0)
    assert cache.check() == []


def test_H1_computed_blocks_are_shared_and_released_pages_are_not_lost() -> None:
    cache = cache_of(8)
    tokens = list(range(10))
    first = cache.admit(tokens, 12)
    assert first is not None
    first.commit(10)
    second = cache.admit(tokens, 12)
    assert second is not None
    assert second.local_tokens == 8
    assert second.page_tables()[0][:2] == first.page_tables()[0][:2]
    assert second.page_tables()[0][2] != first.page_tables()[0][2]
    first.release()
    second.release()
    assert (cache.available_blocks, cache.cached_blocks) == (8, 2)
    assert cache.check() == []


@pytest.mark.parametrize(("length", "matched"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (40, 12)])
def test_L1_a_match_leaves_a_token_to_compute(length: int, matched: int) -> None:
    cache = cache_of(16)
    computed(cache, list(range(12)))
    assert cache.match(list(range(length))) == matched


def test_H1_a_match_that_ends_inside_a_block_is_rounded_down() -> None:
    cache = cache_of(16)
    computed(cache, list(range(12)))
    assert cache.match([0, 1, 2, 3, 4, 5, 6, 99, 8, 9]) == 4


def test_H1_scopes_share_nothing_and_K5_no_salt_is_the_empty_salt() -> None:
    cache = cache_of(16)
    computed(cache, list(range(9)), Scope(salt="one"))
    assert cache.match(list(range(9)), Scope(salt="one")) == 8
    assert cache.match(list(range(9)), Scope(salt="two")) == 0
    assert cache.match(list(range(9))) == 0
    computed(cache, list(range(9)), Scope(salt=""))
    assert cache.match(list(range(9)), Scope(salt=None)) == 8


def test_H1_uncommitted_pages_are_nobodys_prefix() -> None:
    cache = cache_of(8)
    sequence = cache.admit(list(range(9)), 9)
    assert sequence is not None
    assert cache.match(list(range(9))) == 0
    sequence.commit(7)  # the second block is not whole
    assert cache.match(list(range(9))) == 4
    sequence.release()
    assert (cache.free_pages, cache.cached_blocks) == ((7,), 1)


def test_H1_generated_tokens_become_reusable_block_by_block() -> None:
    cache = cache_of(8)
    sequence = cache.admit([0, 1, 2], 12)
    assert sequence is not None
    sequence.append([3, 4])
    sequence.commit(4)
    sequence.append([5, 6, 7, 8])
    sequence.commit(8)
    assert cache.match(list(range(9))) == 8


def test_H1_eviction_takes_the_least_recently_used_leaf_first() -> None:
    cache = cache_of(6)
    computed(cache, [0, 1, 2, 3, 10, 10, 10, 10])
    computed(cache, [0, 1, 2, 3, 20, 20, 20, 20])
    computed(cache, [0, 1, 2, 3, 10, 10, 10, 10, 11])  # the older branch is the more recently used now
    assert cache.free_pages == (3,)
    sequence = cache.admit([7] * 16, 16)
    assert sequence is not None
    assert cache.match([0, 1, 2, 3, 10, 10, 10, 10, 0]) == 8
    assert cache.match([0, 1, 2, 3, 20, 20, 20, 20, 0]) == 4
    assert cache.check() == []


def test_H1_a_shared_beginning_outlives_its_continuations() -> None:
    cache = cache_of(4)
    computed(cache, list(range(16)))
    sequence = cache.admit([50] * 12, 12)
    assert sequence is not None
    assert cache.match(list(range(17))) == 4


def test_H1_a_leaf_in_use_again_is_not_evicted_for_having_been_idle() -> None:
    cache = cache_of(6)
    computed(cache, [1] * 5)
    computed(cache, [2] * 5)
    again = cache.admit([1] * 5, 8)  # holds the older leaf
    assert again is not None
    assert cache.admit([3] * 12, 12) is not None
    assert cache.match([1] * 5) == 4
    assert cache.match([2] * 5) == 4
    assert cache.admit([4] * 4, 4) is not None
    assert cache.match([1] * 5) == 4
    assert cache.match([2] * 5) == 0
    assert cache.check() == []


def test_H1_scopes_that_lost_their_last_block_leave_nothing_behind() -> None:
    cache = cache_of(8)
    for tenant in range(50):
        computed(cache, list(range(9)), Scope(salt=f"tenant {tenant}"))
    present = sum(cache.match(list(range(9)), Scope(salt=f"tenant {tenant}")) > 0 for tenant in range(50))
    assert 0 < present < 50
    assert len(cache._holdings.tree._roots) == present


def test_M6_admission_takes_all_or_nothing_and_evicts_nothing_in_vain() -> None:
    cache = cache_of(4)
    running = cache.admit([9, 9], 8)
    assert running is not None
    computed(cache, [1, 2, 3, 4, 5])
    before = (cache.free_pages, cache.cached_blocks)
    assert cache.admit([8] * 12, 12) is None
    assert (cache.free_pages, cache.cached_blocks) == before
    assert not cache.fits(17)
    assert cache.fits(16)
    running.release()
    assert cache.admit([8] * 12, 12) is not None
    assert cache.check() == []


def test_H1_what_an_admission_shares_is_not_evicted_for_its_own_rest() -> None:
    cache = cache_of(3)
    computed(cache, list(range(12)))
    assert cache.admit([*range(8), 70, 71, 72, 73, 74], 13) is None  # two blocks are shared, two more cannot be had
    assert cache.match(list(range(13))) == 12
    sequence = cache.admit([*range(8), 70], 12)
    assert sequence is not None
    assert sequence.local_tokens == 8
    assert cache.check() == []


def test_S7_a_hold_outlives_the_sequence_and_keeps_its_pages() -> None:
    cache = cache_of(4)
    sequence = cache.admit(list(range(10)), 12)
    assert sequence is not None
    sequence.commit(10)
    hold = sequence.hold()
    sequence.release()
    assert cache.available_blocks == 1
    assert cache.admit([5] * 8, 8) is None
    assert cache.match(list(range(10))) == 8  # reading by others is no reuse of the page
    hold.release()
    hold.release()
    assert cache.available_blocks == 4
    assert cache.check() == []


def test_H1_two_that_compute_the_same_at_once_keep_their_own_pages() -> None:
    cache = cache_of(8)
    tokens = list(range(8))
    first, second = cache.admit(tokens, 8), cache.admit(tokens, 12)
    assert first is not None
    assert second is not None
    first.commit(8)
    second.commit(8)
    second.append([8, 9, 10, 11])
    second.commit(12)
    assert cache.cached_blocks == 3
    first.release()
    assert cache.check() == []
    # The first's blocks stand before the second's third one: they are not to be evicted under it.
    assert cache.available_blocks == 8 - 5
    assert cache.match(list(range(13))) == 12
    second.release()
    assert (cache.available_blocks, cache.free_pages) == (8, (5,))
    assert cache.check() == []


def test_S7_a_hold_from_before_a_commit_holds_what_the_commit_stands_behind() -> None:
    cache = cache_of(6)
    first, second = cache.admit(list(range(4)), 4), cache.admit(list(range(8)), 8)
    assert first is not None
    assert second is not None
    first.commit(4)
    earlier, hold = second.hold(), second.hold()
    earlier.release()
    second.commit(8)  # its second block stands behind the first one's block, not behind its own
    first.release()
    second.release()
    assert cache.check() == []
    assert cache.available_blocks == 3
    hold.release()
    assert cache.available_blocks == 6
    assert cache.admit([7] * 24, 24) is not None
    assert cache.check() == []


def test_H1_a_cold_run_neither_shares_nor_leaves_anything() -> None:
    cache = cache_of(8)
    computed(cache, list(range(9)))
    cold = cache.admit(list(range(9)), 9, reuse=False)
    assert cold is not None
    assert cold.local_tokens == 0
    cold.commit(9)
    cold.release()
    unseen = cache.admit([6] * 9, 9, reuse=False)
    assert unseen is not None
    unseen.commit(9)
    unseen.release()
    assert cache.cached_blocks == 2
    assert cache.evict_idle() == 2
    assert cache.free_pages == (8,)
    assert cache.match(list(range(9))) == 0


def test_H1_a_sequence_grows_or_stays_as_it_is() -> None:
    cache = cache_of(4)
    sequence = cache.admit([1, 2, 3], 4)
    assert sequence is not None
    assert sequence.grow(9)
    assert sequence.capacity_tokens == 12
    assert not sequence.grow(17)
    assert sequence.capacity_tokens == 12
    assert cache.free_pages == (1,)


def test_H1_misuse_is_refused_where_it_happens() -> None:
    cache = cache_of(4)
    with pytest.raises(EngineContractError, match="0 tokens"):
        cache.admit([], 4)
    with pytest.raises(EngineContractError, match="5 tokens cannot be admitted for 4"):
        cache.admit([1] * 5, 4)
    sequence = cache.admit([1, 2, 3], 4)
    assert sequence is not None
    with pytest.raises(EngineContractError, match="4 tokens cannot have been computed"):
        sequence.commit(4)
    sequence.release()
    for misuse in (lambda: sequence.commit(1), lambda: sequence.append([1]), lambda: sequence.grow(8), sequence.hold):
        with pytest.raises(EngineContractError, match="released"):
            misuse()
    assert sequence.page_tables() == ((),)
    with pytest.raises(SettingsError, match="page_counts"):
        cache_of(4, 0)
    with pytest.raises(SettingsError, match="tokens_per_block"):
        PagedCache(0, [4])


def test_K6_a_token_outside_int64_names_its_position() -> None:
    cache = cache_of(4)
    with pytest.raises(TokenError, match="position 1"):
        cache.admit([1, 1 << 63], 4)
    sequence = cache.admit([1, 2], 8)
    assert sequence is not None
    with pytest.raises(TokenError, match="position 3"):
        sequence.append([3, 1 << 63])
    assert sequence.tokens == 2


def test_H1_use_that_never_runs_short_of_pages_does_not_grow_without_bound() -> None:
    cache = cache_of(64)
    for _ in range(1000):
        computed(cache, list(range(9)))
    assert len(cache._holdings.tree._leaves) < 100


def test_K5_a_prompt_with_unknown_media_neither_shares_nor_leaves_pages() -> None:
    """Its placeholders look like any other picture's."""
    cache = cache_of(16)
    tokens, unknown = [0] * 13, Scope(media=None)
    for _ in range(2):
        assert cache.match(tokens, unknown) == 0
        sequence = cache.admit(tokens, 13, unknown)
        assert sequence is not None
        assert sequence.local_tokens == 0
        sequence.commit(13)
        sequence.release()
    assert cache.cached_blocks == 0
