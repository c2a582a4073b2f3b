"""Pages that a store call still touches when their sequence is released: neither free nor matched until it returned (D2)."""

import pytest

from akv.errors import EngineContractError
from akv.host import PagedCache, PagedSequence, Window

T = 4
TOKENS = list(range(18))


def admitted(cache: PagedCache, tokens: list[int], capacity: int = 0) -> PagedSequence:
    sequence = cache.admit(tokens, capacity or len(tokens))
    assert sequence is not None
    return sequence


def with_window() -> PagedCache:
    return PagedCache(T, (12, 12), (Window(), Window(6)), retention_tokens=T)


def computed(cache: PagedCache, tokens: list[int]) -> PagedSequence:
    sequence = admitted(cache, tokens)
    sequence.prepare(len(tokens))
    sequence.commit(len(tokens))
    return sequence


def test_D2_pages_that_nobody_found_are_kept_one_by_one_and_the_rest_is_free() -> None:
    cache = PagedCache(T, (8, 8, 8), (Window(), Window(), Window(6)), retention_tokens=0)
    sequence = admitted(cache, TOKENS)
    sequence.prepare(18)
    tables = sequence.page_tables()
    sequence.release(quarantined=(tables[0][:2], (), tables[2][4:5]))
    assert cache.free_pages == (6, 8, 7)
    assert cache.available_pages == (6, 8, 7)
    assert not set(tables[0][:2]) & set(cache.free_page_lists()[0])
    assert cache.check() == []
    cache.pages_released((tables[0][:1], (), tables[2][4:5]))
    assert cache.free_pages == (7, 8, 8)
    cache.pages_released((tables[0][:2], (), ()))
    assert cache.free_pages == (8, 8, 8)
    assert cache.check() == []


def test_D2_a_block_in_the_tree_is_not_matched_and_those_before_it_are() -> None:
    cache = PagedCache(T, (8,))
    sequence = computed(cache, TOKENS)
    pages = sequence.page_tables()[0]
    sequence.release(quarantined=((pages[2],),))
    assert cache.match(TOKENS) == 8
    assert cache.available_blocks == 8 - 3
    # Whoever computes it anew does so elsewhere, and what it computes behind is found once the call returned.
    other = computed(cache, [*TOKENS, 50, 51, 52])
    assert pages[2] not in other.page_tables()[0]
    other.release()
    assert cache.match([*TOKENS, 50, 51, 52]) == 8
    assert cache.check() == []
    cache.pages_released(((pages[2],),))
    assert cache.match([*TOKENS, 50, 51, 52]) == 20
    assert cache.available_blocks == 8
    assert cache.check() == []


def test_D2_a_window_page_in_the_tree_is_not_matched_and_free_afterwards() -> None:
    cache = with_window()
    sequence = computed(cache, TOKENS)
    assert cache.match(TOKENS) == 16
    page = sequence.page_tables()[1][3]
    sequence.release(quarantined=((), (page,)))
    assert cache.match(TOKENS) == 0
    assert cache.available_pages[1] == 11
    assert cache.check() == []
    computed(cache, TOKENS).release()
    assert cache.match(TOKENS) == 16
    cache.pages_released(((), (page,)))
    assert cache.available_pages == (12, 12)
    assert page in cache.free_page_lists()[1]
    assert cache.check() == []


def test_D2_a_page_that_two_named_is_kept_until_both_calls_returned() -> None:
    cache = with_window()
    first = computed(cache, TOKENS)
    second = admitted(cache, TOKENS)
    assert second.local_tokens == 16
    shared = (first.page_tables()[0][:1], first.page_tables()[1][3:4])
    for sequence in (first, second):
        sequence.release(quarantined=shared)
        assert cache.match(TOKENS) == 0
        assert cache.check() == []
    cache.pages_released(shared)
    assert cache.match([*TOKENS]) == 0
    assert shared[1][0] not in cache.free_page_lists()[1]
    assert cache.check() == []
    cache.pages_released(shared)
    assert shared[1][0] in cache.free_page_lists()[1]
    assert cache.available_pages == (12, 12)
    assert cache.check() == []


def test_D2_a_page_of_a_hold_stays_out_of_use_while_its_sequence_goes_on() -> None:
    cache = PagedCache(T, (8,))
    sequence = admitted(cache, TOKENS)
    page = sequence.page_tables()[0][1]
    sequence.hold().release(quarantined=((page,),))
    sequence.commit(18)
    assert cache.match(TOKENS) == 4  # not behind it either
    assert cache.check() == []
    cache.pages_released(((page,),))
    assert cache.match(TOKENS) == 4
    sequence.commit(18)
    assert cache.match(TOKENS) == 16
    sequence.release()
    assert cache.check() == []


def test_D2_a_window_page_of_a_hold_is_not_put_into_the_tree_meanwhile() -> None:
    cache = with_window()
    sequence = admitted(cache, TOKENS)
    sequence.prepare(18)
    page = sequence.page_tables()[1][3]
    sequence.hold().release(quarantined=((), (page,)))
    sequence.commit(18)
    assert cache.match(TOKENS) == 0
    sequence.release()
    assert page not in cache.free_page_lists()[1]
    cache.pages_released(((), (page,)))
    assert page in cache.free_page_lists()[1]
    assert cache.check() == []


def test_D2_pages_are_named_while_they_are_held_or_refused_before_anything_happens() -> None:
    cache = with_window()
    sequence = computed(cache, TOKENS)
    tables = sequence.page_tables()
    for wrong in (((11,), ()), ((), (tables[1][0],)), (tables[0][:1],)):
        with pytest.raises(EngineContractError):
            sequence.release(quarantined=wrong)
        assert sequence.page_tables() == tables
    sequence.release()
    sequence.release(quarantined=((), ()))
    with pytest.raises(EngineContractError, match="too late"):
        sequence.release(quarantined=(tables[0][:1], ()))
    cache.pages_released((tables[0], ()))  # unknown, as when akv was faster
    assert cache.check() == []
