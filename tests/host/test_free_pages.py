"""The free pages of a cache: taken and given back by whole blocks, in an order that can be read (M6)."""

import pytest

from akv.host.pages import FreePages


def test_M6_blocks_are_taken_from_the_first_page_on_and_more_than_there_are_not_at_all() -> None:
    free = FreePages([5, 4], windows=0)
    taken = free.take(3)
    assert [block.pages for block in taken] == [(0, 0), (1, 1), (2, 2)]
    before = free.pages()
    with pytest.raises(IndexError, match="2 blocks are to be taken of 1"):
        free.take(2)
    assert free.pages() == before
    assert free.take(0) == []
    # What was given back last is handed out first.
    free.give(taken[:2])
    assert [block.pages for block in free.take(3)] == [(1, 1), (0, 0), (3, 3)]
