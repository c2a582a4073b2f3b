"""What of a hand-over fits into the backlog of saves: the beginnings of chains, and ends only behind whole ones (S6)."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.backlog import BacklogBounds, Fit, fit_backlog, order_bytes
from akv.values.messages import GroupPages, SaveOrder

#: Two groups of full attention and one of windows.
FULL, WINDOW = (0, 1), 2
PAGE_BYTES = (3, 7, 5)
BLOCK = 10
NOTHING = BacklogBounds(0, 0)


def order(
    save_id: int, request: int, blocks: Iterable[int], *, groups: Sequence[int] = FULL, again: bool = False
) -> SaveOrder:
    blocks = tuple(blocks)
    hashes = tuple(f"{request}/{block}".encode() for block in blocks)
    return SaveOrder(
        save_id=save_id,
        request_id=str(request),
        incarnation=request,
        groups=tuple(GroupPages(group, blocks, tuple(100 * request + block for block in blocks), hashes) for group in groups),
        window=WINDOW in groups,
        snapshot=WINDOW in groups,
        probe_first=again,
    )


def window(save_id: int, request: int, blocks: Iterable[int]) -> SaveOrder:
    return order(save_id, request, blocks, groups=(WINDOW,))


def blocks_of(some: Iterable[SaveOrder]) -> dict[int, tuple[int, ...]]:
    return {one.save_id: one.groups[0].blocks for one in some}


def fit(
    *orders: SaveOrder,
    room: int = 1000,
    passes: int = 64,
    used: BacklogBounds = NOTHING,
    shed: dict[int, list[int]] | None = None,
    is_pass: bool = True,
) -> Fit:
    return fit_backlog(orders, shed or {}, used, BacklogBounds(used.bytes + room, passes), PAGE_BYTES, is_pass=is_pass)


def test_S6_what_fits_is_handed_over_as_it_is() -> None:
    orders = (window(1, 7, [2, 3]), order(2, 7, range(4)), order(3, 8, range(2)))
    assert fit(*orders, room=70) == (orders, ())


@pytest.mark.parametrize(("room", "kept"), [(0, 0), (9, 0), (10, 1), (29, 2), (30, 3), (40, 4), (41, 4)])
def test_S6_with_a_block_go_the_later_blocks_of_its_request(room: int, kept: int) -> None:
    whole = order(1, 7, range(4))
    got = fit(whole, room=room)
    assert blocks_of(got.kept) == ({1: tuple(range(kept))} if kept else {})
    assert blocks_of(got.dropped) == ({1: tuple(range(kept, 4))} if kept < 4 else {})
    # The parts are the order, cut in two: the same pages and hashes in each group.
    for group in range(len(FULL)):
        parts = [part.groups[group] for part in (*got.kept, *got.dropped)]
        assert sum((part.pages for part in parts), ()) == whole.groups[group].pages
        assert sum((part.hashes for part in parts), ()) == whole.groups[group].hashes


def test_S6_what_is_under_way_takes_its_room() -> None:
    bounds = BacklogBounds(60, 64)
    for used, kept in ((0, 4), (29, 3), (51, 0), (70, 0)):
        got = fit_backlog([order(1, 7, range(4))], {}, BacklogBounds(used, 1), bounds, PAGE_BYTES, is_pass=True)
        assert len(blocks_of(got.kept).get(1, ())) == kept


@pytest.mark.parametrize(("passes", "kept"), [(62, True), (63, True), (64, False), (65, False)])
def test_S6_a_pass_too_many_is_dropped_whole_and_an_end_counts_in_bytes_only(passes: int, kept: bool) -> None:
    orders = (window(1, 7, [3]), order(2, 7, range(4)), order(3, 8, [0]))
    used = BacklogBounds(0, passes)
    assert fit(*orders, used=used) == ((orders, ()) if kept else ((), orders))
    assert fit(*orders, used=used, is_pass=False) == (orders, ())


def test_S6_the_windows_of_an_end_go_with_a_block_though_they_are_queued_first() -> None:
    windows, blocks, other = window(1, 7, [2, 3]), order(2, 7, range(4)), window(3, 8, [0, 1])
    got = fit(windows, blocks, other, room=39)
    assert blocks_of(got.kept) == {2: (0, 1, 2)}, "another request's windows find the room taken"
    assert blocks_of(got.dropped) == {1: (2, 3), 2: (3,), 3: (0, 1)}
    assert [one.save_id for one in got.dropped] == [1, 2, 3], "in the order of the hand-over"


def test_S6_blocks_come_before_the_windows_of_their_request_and_windows_fit_whole_or_not_at_all() -> None:
    windows, blocks = window(1, 7, [2, 3]), order(2, 7, range(4))
    assert blocks_of(fit(windows, blocks, room=50).kept) == {1: (2, 3), 2: (0, 1, 2, 3)}
    got = fit(windows, blocks, room=49)
    assert blocks_of(got.kept) == {2: (0, 1, 2, 3)}
    assert blocks_of(got.dropped) == {1: (2, 3)}


def test_S6_windows_of_an_end_whose_blocks_are_stored_already_need_none_of_them() -> None:
    assert blocks_of(fit(window(1, 7, [2, 3]), room=10).kept) == {1: (2, 3)}


def test_S6_behind_a_block_that_was_dropped_before_nothing_is_handed_over() -> None:
    got = fit(window(1, 7, [7]), order(2, 7, [3, 6, 7]), order(3, 8, [6]), shed={7: [5]})
    assert blocks_of(got.kept) == {2: (3,), 3: (6,)}
    assert blocks_of(got.dropped) == {1: (7,), 2: (6, 7)}
    # Its blocks are not even listed, since the pass is of a moment in the back-off.
    assert blocks_of(fit(window(1, 7, [7]), shed={7: [5]}).kept) == {}


def test_S6_a_block_that_is_offered_again_lets_the_later_ones_through() -> None:
    orders = (window(1, 7, [7]), order(2, 7, [5, 6, 7]))
    assert blocks_of(fit(*orders, shed={7: [5, 6]}).kept) == {1: (7,), 2: (5, 6, 7)}
    # One of several that were dropped has lost its page, say: it is a hole still.
    assert blocks_of(fit(window(1, 7, [8]), order(2, 7, [5, 7, 8]), shed={7: [5, 6]}).kept) == {2: (5,)}


def test_S6_S8_what_is_listed_again_comes_last_and_takes_nothing_with_it() -> None:
    again, windows, blocks = order(1, 7, range(4), again=True), window(2, 7, [5]), order(3, 7, [4, 5])
    got = fit(again, windows, blocks, room=45)
    assert blocks_of(got.kept) == {1: (0, 1), 2: (5,), 3: (4, 5)}
    assert blocks_of(got.dropped) == {1: (2, 3)}
    assert blocks_of(fit(again, windows, blocks, room=5).kept) == {}, "the windows are those of a chain that was cut"


def test_S6_window_pages_that_are_probed_first_are_windows_all_the_same() -> None:
    windows = order(1, 7, [3, 4], groups=(WINDOW,), again=True)
    assert blocks_of(fit(windows, room=9).kept) == {}
    assert blocks_of(fit(windows, room=10).kept) == {1: (3, 4)}


HAND_OVERS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sets(st.integers(0, 9), max_size=6),
        st.sets(st.integers(0, 9), max_size=3),
        st.sets(st.integers(0, 9), max_size=3),
    ),
    max_size=4,
    unique_by=lambda part: part[0],
)


@given(HAND_OVERS, st.booleans(), st.integers(0, 80), st.integers(0, 100), st.integers(0, 3), st.booleans(), st.booleans())
def test_S6_no_hand_over_passes_the_bound_or_leaves_a_hole(
    parts: list[tuple[int, set[int], set[int], set[int]]],
    window_first: bool,
    used_bytes: int,
    bound: int,
    used_passes: int,
    is_pass: bool,
    has_shed: bool,
) -> None:
    blocks = [order(request + 1, request, sorted(listed)) for request, listed, _, _ in parts if listed]
    windows = [window(request + 11, request, sorted(tail)) for request, _, tail, _ in parts if tail]
    orders = (*windows, *blocks) if window_first else (*blocks, *windows)
    shed = {request: sorted(gone) for request, _, _, gone in parts if gone} if has_shed else {}
    got = fit_backlog(
        orders, shed, BacklogBounds(used_bytes, used_passes), BacklogBounds(bound, 2), PAGE_BYTES, is_pass=is_pass
    )
    taken = sum(order_bytes(one, PAGE_BYTES) for one in got.kept)
    assert not taken or used_bytes + taken <= bound
    assert not (got.kept and is_pass and used_passes >= 2)
    kept, dropped = blocks_of(got.kept), blocks_of(got.dropped)
    for one in orders:
        parts_of_it = (*kept.get(one.save_id, ()), *dropped.get(one.save_id, ()))
        assert parts_of_it == one.groups[0].blocks, "a beginning and the rest of it"
    for request, listed, tail, _ in parts:
        holes = {*dropped.get(request + 1, ()), *(set(shed.get(request, ())) - listed)}
        assert not holes or max(kept.get(request + 1, (-1,))) < min(holes)
        if tail:
            assert not (holes and request + 11 in kept), "an end of a chain that is not whole"
