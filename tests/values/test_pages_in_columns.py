"""Columns of pages: picked from, and sorted into the layout's groups (D2)."""

import pytest

from akv.values.messages import GroupPages, pages_per_group, select_pages

COLUMNS = GroupPages(1, (3, 4, 6), (7, 9, 8), (b"a" * 16, b"b" * 16, b"c" * 16))


def test_S2_what_is_picked_stays_in_its_column() -> None:
    assert select_pages(COLUMNS, [True, False, True]) == GroupPages(1, (3, 6), (7, 8), (b"a" * 16, b"c" * 16))
    assert select_pages(COLUMNS, [False] * 3) == GroupPages(1, (), (), ())


@pytest.mark.parametrize(
    ("columns", "pages"),
    [
        ([], ()),
        ([GroupPages(0, (), (), ())], ()),
        ([COLUMNS], ((), (7, 9, 8), ())),
        ([COLUMNS, GroupPages(0, (3,), (1,), (b"a" * 16,)), COLUMNS], ((1,), (7, 9, 8, 7, 9, 8), ())),
    ],
)
def test_D2_pages_are_named_for_every_group_of_the_layout_or_not_at_all(
    columns: list[GroupPages], pages: tuple[tuple[int, ...], ...]
) -> None:
    assert pages_per_group(columns, 3) == pages
