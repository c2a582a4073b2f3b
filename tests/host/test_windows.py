"""Window groups in the paged cache: when their pages come, when they go, and what is found again (H1, W1, W2, W4, W8)."""

import pytest

from akv.errors import EngineContractError
from akv.host import PagedCache, PagedSequence, Window
from akv.plan.window import kept_blocks

T = 4
FULL = Window()


def cache_of(*groups: Window, pages: tuple[int, ...] = (), retention: int = 0, chunk: int | None = 8) -> PagedCache:
    """Full attention, and these window groups."""
    counts = pages or (40,) * (len(groups) + 1)
    return PagedCache(T, counts, (FULL, *groups), retention_tokens=retention, chunk_tokens=chunk)


def admitted(cache: PagedCache, tokens: list[int], capacity: int = 0) -> PagedSequence:
    sequence = cache.admit(tokens, capacity or len(tokens))
    assert sequence is not None
    return sequence


def compute(cache: PagedCache, sequence: PagedSequence, upto: int, chunk: int = 8) -> None:
    """Pass after pass. No page has two owners meanwhile, and none is lost."""
    while sequence.computed_tokens < upto:
        end = min(upto, sequence.computed_tokens + chunk)
        sequence.prepare(end)
        assert cache.check() == []
        sequence.commit(end)
        assert cache.check() == []


def computed(cache: PagedCache, tokens: list[int], chunk: int = 8) -> None:
    """Have a request compute these tokens and leave."""
    sequence = admitted(cache, tokens)
    compute(cache, sequence, len(tokens), chunk)
    sequence.release()


def blocks_of(sequence: PagedSequence, group: int) -> list[int]:
    """The blocks that have a page."""
    return [block for block, page in enumerate(sequence.page_tables()[group]) if page != -1]


@pytest.mark.parametrize("retention", [0, T, 1024])
@pytest.mark.parametrize("window", [1, 4, 5, 10, 100])
@pytest.mark.parametrize("sinks", [0, 1, 9])
def test_W4_a_sequence_keeps_its_sinks_its_windows_and_what_is_retained(window: int, sinks: int, retention: int) -> None:
    cache = cache_of(Window(window, sinks), Window(7), retention=retention)
    sequence = admitted(cache, list(range(50)))
    for upto in (3, 8, 9, 16, 23, 24, 31, 32, 40, 41, 50):
        compute(cache, sequence, upto)
        for group, (w, s) in enumerate([(0, 0), (window, sinks), (7, 0)]):
            # At a history without the retained tokens, and whatever was begun since then.
            kept = [block for blocks in kept_blocks(max(0, upto - retention), w, s, T) for block in blocks]
            since = range(-(-max(0, upto - retention) // T), -(-upto // T))
            expected = list(range(13)) if group == 0 else [*kept, *since]
            assert blocks_of(sequence, group) == expected, (upto, group)
    sequence.release()
    assert cache.check() == []


def test_W1_pages_that_a_window_left_are_others_at_once() -> None:
    cache = cache_of(Window(4), pages=(40, 3), chunk=4)
    sequence = admitted(cache, list(range(40)))
    seen: set[int] = set()
    for upto in range(4, 41, 4):
        compute(cache, sequence, upto, chunk=4)
        seen.update(sequence.page_tables()[1])
        assert sum(page != -1 for page in sequence.page_tables()[1]) <= 2
    assert seen == {-1, 0, 1}  # two of the three that are booked, since its chunks are whole blocks
    assert cache.free_pages == (30, 2)


def test_H1_a_page_that_a_match_proved_of_use_rests_when_a_window_leaves_it() -> None:
    cache = cache_of(Window(4))
    system = list(range(16))
    computed(cache, system)
    first = admitted(cache, [*system, *range(50, 70)])
    assert first.local_tokens == 16
    compute(cache, first, 36)
    assert 3 not in blocks_of(first, 1)
    second = admitted(cache, [*system, *range(80, 90)])
    assert second.local_tokens == 16
    assert cache.check() == []


@pytest.mark.parametrize(
    ("shared", "retention", "matched"),
    [
        (49, 0, 0),  # the end at 44 reads block 8, which was let go of at 47
        (49, T, 44),
        (47, T, 44),
        (45, T, 44),
        (44, T, 0),
        (44, 2 * T, 40),
        (41, 2 * T, 40),
        (40, 2 * T, 0),
        (49, 2 * T, 44),
        (30, 1024, 28),
    ],
)
def test_W2_a_match_ends_where_every_window_is_there(shared: int, retention: int, matched: int) -> None:
    cache = cache_of(Window(10), Window(3, 5), retention=retention)
    computed(cache, list(range(47)))
    assert cache.match([*range(min(shared, 47)), *range(900, 900 + shared - 47)]) == matched


def test_W2_full_attention_stays_cached_when_window_pages_were_evicted() -> None:
    cache = cache_of(Window(10), pages=(40, 9), retention=T)
    computed(cache, list(range(30)))
    assert cache.match(list(range(30))) == 28
    other = admitted(cache, [7] * 30)
    compute(cache, other, 30)
    other.release()
    cached = cache.cached_blocks
    third = admitted(cache, [8] * 30)
    compute(cache, third, 30)
    assert cache.match(list(range(30))) == 0  # its window pages are gone, the least recently used first
    assert cache.match([7] * 30) == 28
    assert cache.cached_blocks > cached
    third.release()
    # Computed once more, the windows stand behind the full attention that was there.
    computed(cache, list(range(30)))
    assert cache.match(list(range(30))) == 28
    assert cache.check() == []


def test_W2_a_window_of_one_token_reads_no_page_behind_it() -> None:
    cache = cache_of(Window(1))
    computed(cache, list(range(30)))
    assert cache.free_pages[1] == 40
    assert cache.match(list(range(30))) == 28


def test_H1_sinks_are_evicted_last() -> None:
    cache = cache_of(Window(5, 4), retention=T)
    computed(cache, list(range(30)))
    order = [page.block.key[:8] for page in cache._holdings.pools[0].idle if page.block is not None]
    assert order == [token.to_bytes(8, "little") for token in (20, 24, 0)]


def test_H1_eviction_of_a_block_takes_its_window_page_along() -> None:
    cache = cache_of(Window(9), pages=(8, 20))
    computed(cache, list(range(30)))
    assert admitted(cache, [9] * 30) is not None
    assert cache.cached_blocks == 0
    assert cache.free_pages == (0, 20)
    assert cache.check() == []


def test_H1_admission_books_window_pages_by_their_number() -> None:
    # Chunks of 8 and windows of 9: positions H - 8 to H + 7 touch five blocks.
    cache = cache_of(Window(9), pages=(100, 11))
    first, second = admitted(cache, [1] * 80), admitted(cache, [2] * 80)
    assert cache.available_pages == (60, 1)
    assert cache.admit([3] * 80, 80) is None
    assert cache.admit([3] * 5, 8) is None  # two blocks
    third = cache.admit([3] * 3, 4)
    assert third is not None
    for upto in range(8, 81, 8):
        compute(cache, first, upto)
        compute(cache, second, upto)
    compute(cache, third, 3)
    first.release()
    assert cache.available_pages[1] == 5
    assert cache.fits(400)
    assert not cache.fits(401)
    assert not cache_of(Window(9), pages=(100, 4)).fits(80)
    assert cache_of(Window(9), pages=(100, 4)).fits(16)


def test_M6_an_admission_that_fails_takes_nothing() -> None:
    cache = cache_of(Window(9), pages=(8, 20))
    computed(cache, list(range(20)))
    before = (cache.free_pages, cache.available_pages, cache.cached_blocks)
    assert cache.admit([*range(20), *range(50, 70)], 40) is None
    assert (cache.free_pages, cache.available_pages, cache.cached_blocks) == before
    assert cache.check() == []


def test_W3_who_resumes_holds_nothing_that_is_stale_there() -> None:
    cache = cache_of(Window(6, 2), retention=1024)
    computed(cache, list(range(40)))
    again = admitted(cache, [*range(40), 99])
    assert again.local_tokens == 40
    assert blocks_of(again, 1) == [0, 8, 9]


def test_W8_a_load_is_given_its_pages_and_the_local_window_stays_until_it_ended() -> None:
    cache = cache_of(Window(6, 6), retention=1024)
    computed(cache, list(range(12)))
    for ends_well in (True, False):
        sequence = admitted(cache, [*range(12), *range(100, 140)])
        local = blocks_of(sequence, 1)
        assert (sequence.local_tokens, local) == (12, [0, 1, 2])
        assert sequence.prepare_load(40)
        tables = sequence.page_tables()
        assert sequence.prepare_load(40)
        assert sequence.page_tables() == tables
        assert blocks_of(sequence, 1) == [*local, 8, 9]
        if ends_well:
            sequence.commit(40)
            assert blocks_of(sequence, 1) == [0, 1, 8, 9]
            assert cache.match([*range(12), *range(100, 129)]) == 40
            cache.evict_idle()
        else:
            sequence.rewind(12)
            assert blocks_of(sequence, 1) == local
        compute(cache, sequence, 52)
        sequence.release()
        cache.evict_idle()
        computed(cache, list(range(12)))
        assert cache.check() == []


def test_W8_without_a_local_match_a_load_brings_the_sinks() -> None:
    cache = cache_of(Window(6, 6))
    sequence = admitted(cache, list(range(45)))
    assert sequence.prepare_load(24)
    assert blocks_of(sequence, 1) == [0, 1, 4, 5]
    assert sequence.prepare_load(40)  # an offer that was asked for anew
    assert blocks_of(sequence, 1) == [0, 1, 8, 9]
    sequence.commit(40)
    sequence.prepare(45)
    assert blocks_of(sequence, 1) == [0, 1, 8, 9, 10, 11]


def test_W8_a_group_too_small_for_two_windows_honours_nothing() -> None:
    cache = cache_of(Window(17), pages=(40, 6), chunk=1)
    computed(cache, list(range(24)), chunk=1)
    sequence = admitted(cache, [*range(24), *range(100, 140)])
    before = sequence.page_tables()
    assert sequence.local_tokens == 24
    assert not sequence.prepare_load(60)
    assert sequence.page_tables() == before
    compute(cache, sequence, 64, chunk=1)
    assert cache.check() == []


def test_S1_a_pass_that_never_ran_is_prepared_again() -> None:
    cache = cache_of(Window(6))
    sequence = admitted(cache, list(range(30)))
    sequence.prepare(8)
    tables = sequence.page_tables()
    sequence.prepare(8)
    assert sequence.page_tables() == tables
    sequence.commit(6)
    sequence.rewind(5)
    assert sequence.computed_tokens == 5
    assert sequence.page_tables() == tables  # block 1 holds a token that is still computed
    with pytest.raises(EngineContractError, match=r"prepare\(\) gave window pages for 5"):
        sequence.commit(8)
    sequence.prepare(13)
    sequence.commit(13)
    assert cache.check() == []


def test_S7_a_hold_keeps_window_pages_like_those_of_full_attention() -> None:
    cache = cache_of(Window(6), pages=(10, 6), retention=T)
    sequence = admitted(cache, list(range(18)), 20)
    compute(cache, sequence, 18)
    held = set(sequence.page_tables()[1]) - {-1}
    hold = sequence.hold()
    assert cache.check() == []
    sequence.release()
    assert cache.available_pages == (5, 6 - len(held))
    assert not held & set(cache.free_page_lists()[1])
    hold.release()
    assert cache.available_pages == (10, 6)
    assert cache.match(list(range(18))) == 16
    assert cache.check() == []


def test_H1_a_hold_of_a_live_sequence_takes_nothing_from_others() -> None:
    cache = cache_of(Window(3), pages=(40, 8), chunk=4)
    held, other = admitted(cache, [1] * 9, 30), admitted(cache, [2] * 9, 12)
    compute(cache, held, 9, chunk=4)
    hold = held.hold()
    held.commit(9)
    other.append([2] * 20)
    assert other.grow(30)
    compute(cache, other, 29, chunk=4)
    for misuse in (lambda: held.prepare(9), lambda: held.prepare_load(12), lambda: held.grow(60)):
        with pytest.raises(EngineContractError, match="a hold was taken"):
            misuse()
    held.release()
    hold.release()
    assert cache.check() == []


def test_H1_a_hold_that_books_what_its_sequence_has_hinders_nobody_who_needs_no_more() -> None:
    cache = cache_of(Window(100), pages=(40, 4), chunk=None)
    held, other = admitted(cache, [1] * 12), admitted(cache, [2] * 3)
    compute(cache, held, 12, chunk=12)
    hold = held.hold()
    assert cache.available_pages[1] == 0
    assert other.grow(4)
    assert not other.grow(5)
    held.release()
    assert cache.available_pages[1] == 0
    hold.release()
    assert other.grow(5)
    assert cache.check() == []


def test_H1_growth_books_window_pages_too_or_nothing() -> None:
    cache = cache_of(Window(9), pages=(40, 5))
    first, second = admitted(cache, [1] * 4), admitted(cache, [2] * 4)
    before = (cache.available_pages, first.page_tables())
    assert not first.grow(24)
    assert (cache.available_pages, first.page_tables()) == before
    second.release()
    assert first.grow(24)
    assert cache.available_pages == (34, 0)


def test_H1_windows_alone_leave_no_blocks_behind_that_have_no_page() -> None:
    cache = PagedCache(T, (8,), (Window(6),), retention_tokens=0, chunk_tokens=8)
    for start in range(0, 4000, 40):
        tokens = list(range(start, start + 40))
        computed(cache, tokens)
        assert cache.match([*tokens, 5]) == 40
    assert cache.cached_blocks < 200
    assert cache.check() == []
    assert cache.fits(10**6)


def test_H1_forgetting_forgets_windows_of_blocks_that_are_held_too() -> None:
    cache = cache_of(Window(4))
    computed(cache, list(range(16)))
    sequence = admitted(cache, [*range(16), *range(50, 70)])
    compute(cache, sequence, 36)
    assert cache.match(list(range(17))) == 16
    assert cache.evict_idle() == 0
    assert cache.match(list(range(17))) == 0
    sequence.release()
    assert cache.check() == []


def test_H1_forgetting_forgets_windows() -> None:
    cache = cache_of(Window(6))
    computed(cache, list(range(20)))
    assert cache.evict_idle() == 5
    assert cache.free_pages == (40, 40)


def test_H1_misuse_of_windows_is_refused_where_it_happens() -> None:
    cache = cache_of(Window(6))
    sequence = admitted(cache, list(range(30)))
    with pytest.raises(EngineContractError, match="chunk_tokens=8"):
        sequence.prepare(9)
    with pytest.raises(EngineContractError, match="up to 33 tokens"):
        sequence.prepare(33)
    with pytest.raises(EngineContractError, match=r"prepare\(\) gave window pages for 0"):
        sequence.commit(1)
    for place in (6, 32, -4):
        with pytest.raises(EngineContractError, match=f"cannot resume at {place} tokens"):
            sequence.prepare_load(place)
    assert sequence.prepare_load(20)
    with pytest.raises(EngineContractError, match=r"commit\(20\) when it is LOADED"):
        sequence.prepare(8)
    with pytest.raises(EngineContractError, match="a load to resume at 20 is prepared"):
        sequence.commit(16)
    sequence.commit(20)
    with pytest.raises(EngineContractError, match="others may share the first 20"):
        sequence.rewind(19)
    cold = cache.admit(list(range(40)), 40, reuse=False)
    assert cold is not None
    compute(cache, cold, 40)
    with pytest.raises(EngineContractError, match="layer group 1 has given back"):
        cold.rewind(24)
    cold.rewind(0)  # where nothing is read, anything can be computed
    assert cache.check() == []
