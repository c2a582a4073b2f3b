"""What an engine may answer to an offer, and which pages that fills (L6, D9)."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import EngineContractError
from akv.plan.reservation import check_honoured, destination_pages
from akv.values.offers import LookupOutcome, Offer

#: 3 blocks of 4 tokens offered behind a local match of 2 blocks.
OFFER = Offer(request_id="r1", incarnation=0, local_tokens=8, tokens=12, outcome=LookupOutcome.FULL, tokens_per_block=4)
#: Two layer groups: the tables of 6 blocks, and the sizes of the caches.
GOOD = ([10, 11, 12, 13, 14, 15], [5, 4, 3, 2, 1, 0])
COUNTS = (20, 6)


def settle(honoured: int, pages: Any = GOOD) -> list[tuple[int, range, tuple[int, ...]]]:
    return destination_pages(OFFER, honoured, pages, COUNTS, 4, "r1")


def with_entry(group: int, block: int, entry: Any) -> list[list[Any]]:
    tables: list[list[Any]] = [list(table) for table in GOOD]
    tables[group][block] = entry
    return tables


def test_L6_the_honoured_part_starts_at_the_local_match_in_every_group() -> None:
    assert settle(8) == [(0, range(2, 4), (12, 13)), (1, range(2, 4), (3, 2))]
    assert settle(12) == [(0, range(2, 5), (12, 13, 14)), (1, range(2, 5), (3, 2, 1))]


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
    assert settle(4, ([-1, -1, 12, -1, None], [-1, -1, 3])) == [(0, range(2, 3), (12,)), (1, range(2, 3), (3,))]
