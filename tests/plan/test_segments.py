"""How a process divides what it lends, and when it does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.segments import PAGE_BYTES, Room, split, too_small
from akv.values.settings import SMALLEST_SEGMENT_BYTES

MIB = 1 << 20


@pytest.mark.parametrize(
    ("total", "limit", "sizes"),
    [
        (0, 32 * MIB, []),
        (16 * MIB, 32 * MIB, [16 * MIB]),
        (64 * MIB, 64 * MIB, [64 * MIB]),
        (65 * MIB, 64 * MIB, [32 * MIB + MIB // 2, 32 * MIB + MIB // 2]),
        (300 * MIB, 64 * MIB, [60 * MIB] * 5),
        (17 * MIB + 5, 32 * MIB, [17 * MIB + 5]),
    ],
)
def test_R3_a_segment_is_divided_evenly(total: int, limit: int, sizes: list[int]) -> None:
    assert split(total, limit) == sizes


@given(total=st.integers(SMALLEST_SEGMENT_BYTES, 1 << 40), limit=st.integers(2 * SMALLEST_SEGMENT_BYTES, 1 << 38))
def test_R3_no_piece_is_too_large_or_too_small_and_none_is_lost(total: int, limit: int) -> None:
    sizes = split(total, limit)
    assert sum(sizes) == total
    assert max(sizes) < limit + PAGE_BYTES
    # What rounding to whole pages takes from the last one.
    assert min(sizes) > SMALLEST_SEGMENT_BYTES - PAGE_BYTES * len(sizes) or min(sizes) >= SMALLEST_SEGMENT_BYTES
    assert all(size % PAGE_BYTES == 0 for size in sizes[:-1])


def test_O4_the_tightest_room_is_named_and_one_that_is_just_large_enough_passes() -> None:
    wide, tight = Room("the machine's memory", 100, 200), Room("shared memory", 64, 64)
    assert too_small([wide, tight], 64) is None
    assert too_small([wide, tight], 65) is tight
    assert too_small([tight, wide], 101) is tight
    assert too_small([], 1 << 50) is None
