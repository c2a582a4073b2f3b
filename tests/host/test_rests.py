"""The rest of a prompt is booked, a count and not pages, and nobody else gets it: parked loads never deadlock (D7)."""

import pytest

from akv.errors import EngineContractError
from akv.host import PagedCache, PagedSequence, Window, youngest_behind

T = 4


def prompt(first: int, blocks: int) -> list[int]:
    """Tokens of whole blocks that no other prompt here begins with."""
    return [first] * (blocks * T)


def admitted(cache: PagedCache, tokens: list[int], *, load: int) -> PagedSequence:
    """Pages for so many blocks that a load brings, and the rest of the prompt booked."""
    sequence = cache.admit(tokens, load * T, booked_tokens=len(tokens))
    assert sequence is not None
    return sequence


def test_D7_two_parked_loads_that_booked_nothing_wait_for_each_other() -> None:
    # What the rule is for: four pages and three of seven are loaded, and neither gets the one that it needs besides.
    cache = PagedCache(T, [7])
    both = [cache.admit(prompt(1, 4), 4 * T), cache.admit(prompt(2, 3), 3 * T)]
    assert [sequence is not None and sequence.grow(sequence.tokens + T) for sequence in both] == [False, False]


@pytest.mark.parametrize(("pages", "first", "second"), [(7, (4, 1), (3, 1)), (8, (4, 2), (3, 1))])
def test_D7_two_parked_loads_both_finish(pages: int, first: tuple[int, int], second: tuple[int, int]) -> None:
    cache = PagedCache(T, [pages])
    a = admitted(cache, prompt(1, sum(first)), load=first[0])
    assert cache.free_pages == (pages - first[0],)  # a count is booked, and no page
    assert cache.available_blocks == pages - sum(first)
    b_prompt = prompt(2, sum(second))
    # Its load has room beside the first one's. But then neither of the two could ever be computed to its end.
    assert second[0] <= cache.free_pages[0]
    assert cache.admit(b_prompt, second[0] * T, booked_tokens=len(b_prompt)) is None
    a.commit(first[0] * T)
    assert a.grow(sum(first) * T)
    a.commit(sum(first) * T)
    a.release()
    b = admitted(cache, b_prompt, load=second[0])
    b.commit(second[0] * T)
    assert b.grow(sum(second) * T)
    b.release()
    assert cache.check() == []
    assert cache.available_blocks == pages


def test_D7_both_are_parked_where_there_is_room_for_both() -> None:
    cache = PagedCache(T, [9])
    a, b = admitted(cache, prompt(1, 5), load=4), admitted(cache, prompt(2, 4), load=3)
    assert (cache.free_pages, cache.available_blocks) == ((2,), 0)
    assert cache.admit([3], T) is None
    assert cache.admit([3], 0, booked_tokens=T) is None
    for sequence in (b, a):
        assert sequence.grow(sequence.tokens)
    assert cache.free_pages == (0,)
    assert cache.check() == []


def test_D7_a_decoding_request_does_not_get_what_is_booked() -> None:
    cache = PagedCache(T, [8])
    decoding = cache.admit(prompt(1, 2), 2 * T)
    assert decoding is not None
    parked = admitted(cache, prompt(2, 5), load=3)
    assert decoding.grow(3 * T)  # this one is nobody's
    assert cache.free_pages == (2,)
    assert not decoding.grow(4 * T)
    assert parked.grow(5 * T)
    parked.release()
    assert decoding.grow(4 * T)
    assert cache.check() == []


def test_D7_past_what_it_booked_a_sequence_is_one_of_many() -> None:
    cache = PagedCache(T, [8])
    first, second = admitted(cache, prompt(1, 3), load=1), admitted(cache, prompt(2, 4), load=0)
    assert (first.assured_tokens, first.capacity_tokens) == (3 * T, T)
    assert not first.grow(5 * T)  # its own two, and two of which one is booked
    assert first.grow(4 * T)
    assert (first.assured_tokens, first.capacity_tokens) == (4 * T, 4 * T)
    assert not first.grow(5 * T)
    assert second.grow(4 * T)
    assert cache.check() == []


def test_D7_a_growth_takes_its_own_rest_first_and_keeps_what_is_left_of_it() -> None:
    cache = PagedCache(T, [6])
    sequence = admitted(cache, prompt(1, 5), load=1)
    assert sequence.grow(3 * T)
    assert (cache.available_blocks, cache.free_pages) == (1, (3,))
    other = cache.admit([9], T)
    assert other is not None
    assert cache.admit([9], T) is None
    assert sequence.grow(5 * T)


@pytest.mark.parametrize("how", ["released", "failed"])
def test_D7_a_rest_ends_with_its_sequence(how: str) -> None:
    cache = PagedCache(T, [8])
    sequence = admitted(cache, prompt(1, 8), load=3)
    if how == "failed":
        # Where a load failed the rest stays booked: the prompt is as long as before.
        sequence.rewind(0)
        assert sequence.assured_tokens == 8 * T
        assert cache.available_blocks == 0
    sequence.release()
    assert cache.available_blocks == 8
    sequence.release()
    assert cache.available_blocks == 8
    assert cache.check() == []


def test_D7_evictable_blocks_count_and_a_match_that_holds_them_does_not_undercut_a_rest() -> None:
    cache = PagedCache(T, [6])
    cached = cache.admit(prompt(1, 4), 4 * T)
    assert cached is not None
    cached.commit(4 * T)
    cached.release()
    assert (cache.free_pages, cache.available_blocks) == ((2,), 6)
    sequence = admitted(cache, prompt(2, 6), load=1)  # 1 page, and 5 blocks: one is free, the others rest in the tree
    assert cache.available_blocks == 0
    # It takes no new page at all, but blocks that it holds cannot be evicted any more.
    assert cache.match([*prompt(1, 4), 0]) == 4 * T
    assert cache.admit([*prompt(1, 4), 0], 4 * T, booked_tokens=4 * T + 1) is None
    assert cache.admit(prompt(1, 4), 0, booked_tokens=4 * T) is None
    assert cache.check() == []
    assert sequence.grow(6 * T)
    assert cache.cached_blocks == 0


def test_D7_equal_tokens_computed_twice_take_no_block_that_is_booked() -> None:
    cache = PagedCache(T, [6])
    first, second = cache.admit(prompt(1, 2), 2 * T), cache.admit(prompt(1, 2), 2 * T)
    assert first is not None
    assert second is not None
    first.commit(2 * T)
    first.release()  # its blocks rest in the tree: two that can be evicted, and two are free
    parked = admitted(cache, prompt(2, 4), load=1)
    second.commit(2 * T)  # in the tree there are these blocks already: to hold them too would keep them from being evicted
    assert cache.check() == []
    assert parked.grow(4 * T)
    second.commit(2 * T)  # they were evicted: now its own go there
    assert cache.match([*prompt(1, 2), 0]) == 2 * T
    assert cache.check() == []


def test_D7_a_sequence_does_not_wait_for_a_page_that_it_holds_itself() -> None:
    cache = PagedCache(T, [3])
    first, second = cache.admit(prompt(1, 1), T), cache.admit(prompt(1, 1), T)
    assert first is not None
    assert second is not None
    first.commit(T)
    second.commit(T)  # the first one's block stands in the tree, and the second one holds it beside its own
    assert second.grow(2 * T)
    table = second.page_tables()
    first.release()
    assert cache.free_pages == (0,)
    assert second.grow(3 * T)
    assert second.page_tables()[0][:2] == table[0]  # what may be read, or stands in a table, stays where it is
    assert cache.check() == []
    assert cache.match([*prompt(1, 1), 0]) == T
    second.append([1] * T)
    second.commit(2 * T)
    second.release()
    assert cache.available_blocks == 3
    assert cache.match([*prompt(1, 2), 0]) == 2 * T
    assert cache.check() == []


@pytest.mark.parametrize("other", ["a sequence", "a hold"])
def test_D7_a_block_that_somebody_else_reads_is_not_given_back(other: str) -> None:
    cache = PagedCache(T, [3])
    first, second = cache.admit(prompt(1, 1), T), cache.admit(prompt(1, 1), T)
    assert first is not None
    assert second is not None
    first.commit(T)
    second.commit(T)
    assert second.grow(2 * T)
    hold = second.hold() if other == "a hold" else None
    if hold is not None:
        first.release()
    tables = first.page_tables(), second.page_tables()
    assert not second.grow(3 * T)
    assert (first.page_tables(), second.page_tables()) == tables
    assert cache.check() == []
    if hold is not None:
        hold.release()
    first.release()
    assert second.grow(3 * T)
    assert cache.check() == []


def test_D7_windows_are_booked_for_the_whole_prompt() -> None:
    cache = PagedCache(T, [20, 6], [Window(), Window(8)], retention_tokens=0, chunk_tokens=T)
    parked = cache.admit(prompt(1, 10), 0, booked_tokens=10 * T)  # of windows it has at most 4 at a time
    assert parked is not None
    assert cache.available_pages == (10, 2)
    other = cache.admit([9], 1)
    assert other is not None
    assert not other.grow(3 * T)  # two are left, of which one is its own
    assert other.grow(2 * T)
    for upto in range(T, 10 * T + 1, T):
        assert parked.grow(upto)
        parked.prepare(upto)
        parked.commit(upto)
        assert cache.check() == []


def test_D7_a_load_that_fits_is_not_admitted_where_its_rest_does_not() -> None:
    cache = PagedCache(T, [6])
    first = admitted(cache, prompt(1, 3), load=1)
    for load in range(4):
        assert cache.admit(prompt(2, 4), load * T, booked_tokens=4 * T) is None
    assert (cache.free_pages, cache.available_blocks) == ((5,), 3)
    first.release()
    assert cache.admit(prompt(2, 4), T, booked_tokens=4 * T) is not None


def test_D7_what_is_admitted_covers_what_is_known() -> None:
    cache = PagedCache(T, [8])
    with pytest.raises(EngineContractError, match="8 tokens cannot be admitted for 7"):
        cache.admit(prompt(1, 2), 3, booked_tokens=7)


@pytest.mark.parametrize(
    ("number", "running", "victim"),
    [(1, [], None), (3, [1, 2, 3], None), (2, [1, 2, 3], 3), (1, [5, 9, 7, 1], 9), (4, [9], 9)],
)
def test_D7_the_youngest_gives_way_and_never_to_a_younger_one(number: int, running: list[int], victim: int | None) -> None:
    assert youngest_behind(number, running) == victim
