"""What an engine may answer to an offer, and which pages that fills (L6, W8, D9)."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import EngineContractError
from akv.plan.reservation import check_honoured, destination_pages
from akv.plan.window_search import WindowGroup
from akv.units import NO_PAGE
from akv.values.offers import LookupOutcome, Offer

#: 3 blocks of 4 tokens offered behind a local match of 2 blocks.
OFFER = Offer(request_id="r1", incarnation=0, local_tokens=8, tokens=12, outcome=LookupOutcome.FULL, tokens_per_block=4)
#: Two layer groups: the tables of 6 blocks, and the sizes of the caches.
GOOD = ([10, 11, 12, 13, 14, 15], [5, 4, 3, 2, 1, 0])
COUNTS = (20, 6)


def settle(honoured: int, pages: Any = GOOD) -> list[Any]:
    return destination_pages(OFFER, honoured, pages, COUNTS, 4, "r1")


def with_entry(group: int, block: int, entry: Any) -> list[list[Any]]:
    tables: list[list[Any]] = [list(table) for table in GOOD]
    tables[group][block] = entry
    return tables


def test_L6_the_honoured_part_starts_at_the_local_match_in_every_group() -> None:
    assert settle(8) == [(0, (2, 3), (12, 13)), (1, (2, 3), (3, 2))]
    assert settle(12) == [(0, (2, 3, 4), (12, 13, 14)), (1, (2, 3, 4), (3, 2, 1))]


def test_D9_with_nothing_honoured_no_page_is_asked_for() -> None:
    assert settle(0) == settle(0, ()) == []


@pytest.mark.parametrize(
    ("honoured", "why"),
    [
        (-4, "negative"),
        (16, "more than was offered"),
        (13, "more than was offered"),
        (6, "ends inside block 3"),
        (1, "ends inside block 2"),
    ],
)
def test_L6_an_honoured_count_that_is_no_whole_block_part_is_refused(honoured: int, why: str) -> None:
    for check in (lambda: check_honoured(OFFER, honoured, 4), lambda: settle(honoured)):
        with pytest.raises(EngineContractError, match=f"'r1': honoured {honoured} tokens .*{why}"):
            check()


@given(st.integers(-5, 20))
def test_L6_every_whole_block_part_of_an_offer_may_be_honoured_and_nothing_else(honoured: int) -> None:
    if honoured in {0, 4, 8, 12}:
        check_honoured(OFFER, honoured, 4)
    else:
        with pytest.raises(EngineContractError):
            check_honoured(OFFER, honoured, 4)


@pytest.mark.parametrize("pages", [(), GOOD[:1], (*GOOD, GOOD[0])], ids=len)
def test_L6_another_number_of_page_tables_is_refused(pages: Any) -> None:
    with pytest.raises(EngineContractError, match=f"'r1': {len(pages)} page tables for a layout of 2"):
        settle(4, pages)


@pytest.mark.parametrize(("length", "block"), [(4, 4), (3, 3), (2, 2), (0, 2)])
def test_L6_a_page_table_that_ends_too_early_is_refused_at_the_first_block_without_entry(length: int, block: int) -> None:
    with pytest.raises(EngineContractError, match=f"'r1', layer group 1, block {block}: .*ends at {length} blocks of 5"):
        settle(12, (GOOD[0], GOOD[1][:length]))


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("block", [2, 3, 4])
@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (-1, "no page"),
        (-2, "not in the cache"),
        (20, "not in the cache"),
        (10**12, "not in the cache"),
        (None, "not a NoneType"),
        (2.0, "not a float"),
    ],
)
def test_L6_a_missing_or_invalid_page_is_refused_by_request_block_and_group(
    group: int, block: int, entry: Any, why: str
) -> None:
    with pytest.raises(EngineContractError, match=f"'r1', layer group {group}, block {block}: .*{why}"):
        settle(12, with_entry(group, block, entry))


@pytest.mark.parametrize(("group", "last"), [(0, 19), (1, 5)])
def test_L6_the_bound_is_the_groups_own_cache(group: int, last: int) -> None:
    tables = with_entry(group, 0, -1)
    tables[group][2] = last
    assert settle(4, tables)[group][2] == (last,)
    tables[group][2] = last + 1
    with pytest.raises(EngineContractError, match=f"page {last + 1} is not in the cache, which has {last + 1}"):
        settle(4, tables)


@pytest.mark.parametrize("earlier", [0, 1, 2, 3])
def test_L6_a_page_of_an_earlier_block_is_refused_the_local_match_included(earlier: int) -> None:
    with pytest.raises(EngineContractError, match=f"group 0, block 4: page {GOOD[0][earlier]} belongs to an earlier block"):
        settle(12, with_entry(0, 4, GOOD[0][earlier]))


def test_L6_one_page_index_in_two_groups_is_two_pages() -> None:
    assert [pages for _, _, pages in settle(4, ([0, 1, 2], [0, 1, 2]))] == [(2,), (2,)]


def test_L6_a_page_table_may_be_numpy_and_its_pages_become_plain_integers() -> None:
    [(_, _, pages), _] = settle(8, tuple(np.array(table, dtype=np.int32) for table in GOOD))
    assert pages == (12, 13)
    assert {type(page) for page in pages} == {int}


def test_L6_entries_outside_the_honoured_blocks_are_not_looked_at() -> None:
    assert settle(4, ([-1, -1, 12, -1, None], [-1, -1, 3])) == [(0, (2,), (12,)), (1, (2,), (3,))]


# -- window groups (W8)

#: 10 blocks of 4 tokens behind a local match of 2.
LONG = msgspec.structs.replace(OFFER, tokens=40, ends=(24, 40))


def windowed(
    window_tokens: int, sink_tokens: int, table: list[Any], honoured: int = 40, offer: Offer = LONG, count: int = 99
) -> list[Any]:
    """The destination of the second of two groups, the one with the window."""
    tables = (list(range(20, 32)), table)
    full, *windows = destination_pages(
        offer, honoured, tables, (40, count), 4, "r1", (WindowGroup(1, window_tokens, sink_tokens),)
    )
    end = 2 + honoured // 4
    assert full == (0, tuple(range(2, end)), tuple(range(22, 20 + end)))
    return windows


@pytest.mark.parametrize(
    ("window_tokens", "sink_tokens", "blocks"),
    [
        (9, 0, (10, 11)),
        (10, 0, (9, 10, 11)),
        (2, 0, (11,)),
        (1, 0, ()),
        (1, 16, (2, 3)),
        # Sinks that the engine has, sinks from the local match on, sinks that meet the tail, and sinks beyond the end.
        (9, 8, (10, 11)),
        (9, 17, (2, 3, 4, 10, 11)),
        (9, 40, tuple(range(2, 12))),
        (9, 400, tuple(range(2, 12))),
        # A window that reaches to the local match and behind it.
        (41, 0, tuple(range(2, 12))),
        (400, 0, tuple(range(2, 12))),
    ],
)
def test_W8_of_a_window_group_only_what_is_read_after_resuming_is_loaded(
    window_tokens: int, sink_tokens: int, blocks: tuple[int, ...]
) -> None:
    table = [block if block in blocks else NO_PAGE for block in range(12)]
    loaded = windowed(window_tokens, sink_tokens, table)
    assert loaded == ([(1, blocks, blocks)] if blocks else [])
    for missing in blocks:
        holed = [NO_PAGE if block == missing else page for block, page in enumerate(table)]
        with pytest.raises(EngineContractError, match=f"group 1, block {missing}: the block has no page"):
            windowed(window_tokens, sink_tokens, holed)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 10))
def test_W8_blocks_are_those_that_a_naive_reader_reads_and_does_not_have(window: int, sinks: int, blocks: int) -> None:
    end = 2 + blocks
    # The next token sits at position 4 * end, and reads the sinks and a window that ends with itself.
    read = {token // 4 for token in range(4 * end) if token < sinks or token > 4 * end - window}
    offer = msgspec.structs.replace(LONG, tokens=4 * blocks)
    loaded = [block for group in windowed(window, sinks, list(range(12)), 4 * blocks, offer) for block in group.blocks]
    assert loaded == sorted(block for block in read if block >= 2)


def test_W8_pages_of_blocks_that_are_not_read_any_more_may_be_anybodys() -> None:
    # Blocks 1 to 9 are stale: block 10's page was block 4's, and block 11's was block 1's.
    assert windowed(9, 4, [7, 5, 3, 3, 4, None, "", 0, -7, 400, 4, 5]) == [(1, (10, 11), (4, 5))]
    with pytest.raises(EngineContractError, match="group 1, block 11: page 7 belongs to an earlier block"):
        windowed(9, 4, [7, 5, 3, 3, 4, 0, 0, 0, 0, 0, 4, 7])
    with pytest.raises(EngineContractError, match="group 1, block 11: page 3 belongs to an earlier block"):
        windowed(9, 12, [7, 5, 3, -1, -1, -1, -1, -1, -1, -1, 4, 3])
    with pytest.raises(EngineContractError, match="group 1, block 10: page 5 belongs to an earlier block"):
        windowed(45, 0, [7, 5, 3, 2, 1, 0, 11, 12, 13, 14, 5, 15])


@pytest.mark.parametrize(("length", "block"), [(11, 11), (5, 10), (2, 2), (0, 2)])
def test_W8_a_table_that_ends_before_the_last_block_to_load_is_refused_at_the_first_without_entry(
    length: int, block: int
) -> None:
    with pytest.raises(EngineContractError, match=f"group 1, block {block}: the page table ends at {length} blocks of 12"):
        windowed(9, 9, list(range(length)))


@pytest.mark.parametrize("entry", [50, -2])
def test_W8_a_page_of_a_window_group_is_one_of_its_cache(entry: int) -> None:
    with pytest.raises(EngineContractError, match=f"group 1, block 11: page {entry} is not in the cache, which has 50"):
        windowed(9, 0, [*range(11), entry], count=50)


@pytest.mark.parametrize("honoured", range(-4, 48, 2))
def test_W8_with_windows_an_offer_is_honoured_whole_or_not_at_all(honoured: int) -> None:
    for offer in (LONG, LONG.at_most(39)):
        if honoured in {0, offer.tokens}:
            check_honoured(offer, honoured, 4, windows=True)
        else:
            with pytest.raises(EngineContractError, match=f"'r1': honoured {honoured} tokens of an offer of {offer.tokens}"):
                check_honoured(offer, honoured, 4, windows=True)


def test_W8_who_honours_a_part_is_told_what_to_ask_for() -> None:
    with pytest.raises(EngineContractError, match=r"'r1'.*all or nothing.*offer\.at_most\(tokens\)"):
        windowed(9, 0, list(range(12)), 24)
    assert windowed(9, 0, list(range(12)), 24, LONG.at_most(39)) == [(1, (6, 7), (6, 7))]
    assert destination_pages(LONG, 0, (), (40, 99), 4, "r1", (WindowGroup(1, 9, 0),)) == []
