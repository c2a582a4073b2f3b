"""Which window pages an end lists, and what they are worth (W1, W3, W4, S12)."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.ending import Ending, WindowPages, held_pages
from akv.plan.window import closing_window, finishing_window, stale_blocks
from akv.plan.window_search import WindowGroup
from akv.units import NO_PAGE

T = 4
#: Of the layout's four groups the second and the last forget; the last has a sink of two blocks.
ENDING = Ending((WindowGroup(1, 9, 0), WindowGroup(3, 20, 5)), T, rewind_tokens=0, retention_tokens=0)


def table(group: int, blocks: int, *missing: int) -> list[int]:
    return [NO_PAGE if block in missing else 100 * group + block for block in range(blocks)]


def tables(blocks: int, *missing: int) -> list[list[int]]:
    """Nobody looks at those of full attention."""
    return [table(group, blocks, *missing) if group in (1, 3) else [] for group in range(4)]


def column(group: int, *blocks: int) -> WindowPages:
    return WindowPages(group, blocks, tuple(100 * group + block for block in blocks))


def finished(ending: Ending, kept: int, history: int, resumed_at: int | None = None) -> dict[int, list[int]]:
    """The blocks that a request lists at its end, of the pages that it held behind its last pass."""
    pages = [table(group, -(-history // T) + 1) for group in range(4)]
    columns = ending.finishing(kept, resumed_at, ending.held(history, history, pages))
    assert all(column.pages == tuple(100 * column.group + block for block in column.blocks) for column in columns)
    return {column.group: list(column.blocks) for column in columns}


# -- what the closing pass lists


def test_W3_each_window_group_lists_its_sinks_and_its_tail_by_its_own_table() -> None:
    # 41 tokens are 10 blocks; the windows at 40 read back to positions 32 and 21.
    assert ENDING.closing(41, 0, None, tables(11)) == (column(1, 8, 9), column(3, 0, 1, 5, 6, 7, 8, 9))


def test_W3_a_prompt_of_whole_blocks_lists_the_end_before_its_last_too() -> None:
    assert ENDING.closing(40, 0, None, tables(10))[0] == column(1, 7, 8, 9)
    assert ENDING._replace(rewind_tokens=2 * T).closing(41, 0, None, tables(11))[0] == column(1, 6, 7, 8, 9)


def test_W3_the_engines_table_decides_and_may_be_short() -> None:
    assert ENDING.closing(41, 0, None, tables(11, 1, 8)) == (column(1, 9), column(3, 0, 5, 6, 7, 9))
    assert ENDING.closing(41, 0, None, tables(6))[0] == column(1)
    assert ENDING.closing(41, 0, None, tables(0)) == (column(1), column(3))


def test_W3_what_the_engine_released_before_the_pass_or_never_had_is_not_listed() -> None:
    wide = ENDING._replace(rewind_tokens=100)
    assert wide.closing(41, 36, None, tables(11))[0] == column(1, 7, 8, 9)
    assert wide._replace(retention_tokens=2 * T).closing(41, 36, None, tables(11))[0] == column(1, 5, 6, 7, 8, 9)
    assert wide.closing(41, 16, 8, tables(11))[0] == column(1, 6, 7, 8, 9), "it resumed at 8 blocks"
    assert wide.closing(41, 16, 0, tables(11))[0] == column(1, *range(2, 10))


def test_W3_a_layout_without_windows_lists_nothing() -> None:
    ending = Ending((), T, rewind_tokens=T, retention_tokens=T)
    assert ending.closing(41, 0, None, []) == ()
    assert finished(ending, 41, 41) == {}
    assert not ending.lacks(10, lambda group, block: False)


# -- what finishing lists


def test_S12_finishing_lists_each_groups_blocks_that_are_held() -> None:
    assert finished(ENDING._replace(retention_tokens=T), 41, 41) == {1: [8, 9], 3: [0, 1, 5, 6, 7, 8, 9]}


def test_S12_pages_that_were_released_behind_tokens_not_confirmed_are_not_listed() -> None:
    """The engine ran ahead of what it told: by that it moved its window on."""
    ending = ENDING._replace(retention_tokens=T)
    # Behind 46 tokens, with a retention of 4, it holds [34, ...] and [23, ...]: one block less than the end at 41 reads.
    assert finished(ending, 41, 46)[1] == [8, 9]
    assert finished(ending, 41, 48)[1] == [9]
    assert finished(ending, 41, 200) == {1: [], 3: [0, 1]}, "sinks are never released"


def test_S12_tokens_that_were_confirmed_behind_the_plan_count_at_the_end() -> None:
    """What is held is noted with the plan; how much of it has a hash is known at the end."""
    ending = ENDING._replace(retention_tokens=T)
    held = ending.held(44, 44, tables(11))
    assert ending.finishing(43, None, held)[0] == column(1, 8, 9)
    assert ending.finishing(44, None, held)[0] == column(1, 8, 9, 10)


def test_S12_a_page_that_the_table_lacks_is_not_held() -> None:
    assert ENDING._replace(retention_tokens=T).held(41, 41, tables(11, 9))[0] == column(1, 7, 8, 10)


TOKENS = st.integers(0, 80)
SHAPES = st.tuples(st.integers(1, 30), st.integers(0, 9), st.integers(1, 6))


@given(SHAPES, TOKENS, TOKENS, TOKENS, TOKENS, st.none() | st.integers(0, 20))
def test_S12_nothing_is_listed_that_the_engine_may_have_released(
    shape: tuple[int, int, int], kept: int, ahead: int, rewind: int, retention: int, resumed_at: int | None
) -> None:
    window, sinks, size = shape
    ending = Ending((WindowGroup(0, window, sinks),), size, rewind, retention)
    [column] = ending.finishing(kept, resumed_at, ending.held(kept, kept + ahead, [table(0, 81)]))
    listed = list(column.blocks)
    read_on = [
        block
        for block in range(kept // size)
        # Some token of it is a sink, or in the window of the next token less what is retained.
        if block * size < sinks or (block + 1) * size - 1 > max(0, kept + ahead - retention) - window
    ]
    wanted = finishing_window(kept, *shape, rewind_tokens=rewind, retention_tokens=retention, resumed_at=resumed_at)
    assert listed == [block for some in wanted for block in some if block in read_on]


@given(SHAPES, TOKENS, TOKENS, st.sets(st.integers(0, 30)))
def test_W3_what_is_listed_is_what_has_a_page(shape: tuple[int, int, int], tokens: int, rewind: int, gone: set[int]) -> None:
    window, sinks, size = shape
    ending = Ending((WindowGroup(0, window, sinks),), size, rewind, 0)
    pages = table(7, tokens // size, *gone)
    [listed] = ending.closing(tokens, 0, None, [pages])
    wanted = closing_window(tokens, tokens // size, 0, *shape, rewind_tokens=rewind, retention_tokens=0, resumed_at=None)
    assert listed.group == 0
    assert listed.blocks == tuple(block for some in wanted for block in some if block not in gone)
    assert listed.pages == tuple(700 + block for block in listed.blocks)


# -- what an end is worth


def test_W4_ends_are_covered_as_far_back_as_the_pages_reach_in_every_group() -> None:
    ending = ENDING._replace(rewind_tokens=3 * T)
    # Tails of the first group: [8, 10) at 10, [7, 9) at 9, and so on; of the second [5, 10), [4, 9).
    both = [column(1, *range(5, 10)), column(3, *range(2, 10))]
    assert ending.covered_ends(10, both) == 4
    assert ending.covered_ends(10, [column(1, 7, 8, 9), both[1]]) == 2
    assert ending.covered_ends(10, [both[0], column(3, *range(5, 10))]) == 1
    assert ending.covered_ends(10, [column(1, 9), both[1]]) == 0
    assert ending.covered_ends(10, both[:1]) == 0, "a group without pages"
    assert ENDING.covered_ends(10, both) == 1, "without a rewind the end alone is wanted"


def test_W4_pages_behind_a_hole_cover_nothing() -> None:
    ending = ENDING._replace(rewind_tokens=3 * T)
    assert ending.covered_ends(10, [column(1, 5, 6, 8, 9), column(3, *range(2, 10))]) == 1
    assert ending.covered_ends(10, [column(1, 5, 6, 7, 8), column(3, *range(2, 10))]) == 0


def test_W4_no_end_is_wanted_before_the_first_block() -> None:
    ending = ENDING._replace(rewind_tokens=100)
    pages = [column(1, 0, 1), column(3, 0, 1)]
    assert ending.covered_ends(2, pages) == 2
    assert ending.covered_ends(1, [column(1, 0), column(3, 0)]) == 1


def test_W4_a_window_of_one_token_reads_nothing_at_an_end() -> None:
    ending = Ending((WindowGroup(0, 1, 0),), T, rewind_tokens=T, retention_tokens=0)
    assert ending.covered_ends(10, []) == 2
    assert not ending.lacks(10, lambda group, block: False)


@pytest.mark.parametrize(
    ("missing", "lacks"),
    [([], False), ([(1, 8)], True), ([(3, 5)], True), ([(1, 9)], True), ([(1, 7), (3, 4), (3, 0)], False)],
)
def test_S12_an_end_lacks_what_was_not_saved_of_some_groups_tail(missing: Sequence[tuple[int, int]], lacks: bool) -> None:
    assert ENDING.lacks(10, lambda group, block: (group, block) not in missing) is lacks


# -- blocks and tables


def test_W3_pages_are_plain_numbers_of_the_blocks_that_have_one() -> None:
    assert held_pages(2, [range(1, 3), range(4, 9)], [9, 8, NO_PAGE, 7, NO_PAGE, 5]) == WindowPages(2, (1, 5), (8, 5))
    assert held_pages(2, [], [1, 2]) == WindowPages(2, (), ())


def test_S12_sinks_beyond_the_window_are_listed_as_one_with_the_tail() -> None:
    assert stale_blocks(8, 9, 0, T) == range(0)
    assert finished(Ending((WindowGroup(0, 9, 40),), T, 0, 0), 33, 33) == {0: list(range(8))}
