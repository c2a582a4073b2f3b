"""Window pages of a request: what its passes and its end list of them, and what becomes of these saves (W3, S2, S8, S12, W6).

The second of the scene's two layer groups forgets.
"""

from typing import TYPE_CHECKING, Any

import pytest

from akv.errors import EngineContractError
from akv.plan.ending import WindowPages
from akv.plan.lifecycle import Phase
from akv.units import NO_PAGE
from akv.values.messages import LoadState, PagesReleased, SaveOrder

if TYPE_CHECKING:
    from tests.ownership.conftest import Scene


def blocks_of(order: SaveOrder) -> list[tuple[int, tuple[int, ...]]]:
    return [(columns.group, columns.blocks) for columns in order.groups]


# -- what passes list


def test_W3_passes_list_blocks_of_full_attention_alone_and_look_at_no_other_table(window_scene: "Scene") -> None:
    record = window_scene.opened()
    order = window_scene.requests.listing.blocks(record, 3, (window_scene.TABLES[0], ()), 0, 0.0)
    assert order is not None
    assert order.groups == window_scene.columns(record, range(3))[:1]
    assert (order.window, order.snapshot, order.probe_first) == (False, False, False)


def test_W3_a_layout_of_windows_alone_lists_no_blocks_and_still_its_ends(window_scene: "Scene") -> None:
    scene = type(window_scene)(windows=(0, 1))
    record = scene.opened()
    assert scene.requests.listing.some_blocks(record, 8, scene.TABLES, 0, 0.0, 100) == (0, None)
    assert scene.requests.listing.again(record, 8, scene.TABLES) is None
    scene.requests.ran(record, 8 * scene.T, 8, 0, ((), ()))
    scene.held(record, range(6, 8), groups=(0, 1))
    [order] = scene.requests.finish(record, upto=8)
    assert isinstance(order, SaveOrder)
    assert order.groups == scene.columns(record, range(6, 8))
    assert scene.save_end(order, stored=(6, 7)) == [scene.completed(record)], "marks count blocks of full attention"


def test_W3_window_pages_are_listed_with_their_hashes_for_each_group(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    columns = [WindowPages(1, (1, 5), (31, 35)), WindowPages(0, (), ())]
    order = scene.requests.listing.windows(record, columns, snapshot=True)
    assert order is not None
    hashes = record.chain.hashes(0, 6)
    assert [(c.group, c.blocks, c.pages, c.hashes) for c in order.groups] == [(1, (1, 5), (31, 35), (hashes[1], hashes[5]))]
    assert (order.window, order.snapshot, order.probe_first) == (True, True, False)
    assert scene.requests.listing.windows(record, columns[1:], snapshot=True) is None


def test_S2_what_was_handed_over_of_a_window_is_not_listed_again(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    assert blocks_of(scene.closing(record, range(3, 6))) == [(1, (3, 4, 5))]
    assert scene.handed_over(scene.closing(record, range(3, 6))) is not None
    assert blocks_of(scene.closing(record, range(4, 8))) == [(1, (6, 7))]
    assert [record.windows.saved(1, block) for block in (2, 3, 5, 6)] == [False, True, True, False]
    assert not record.windows.saved(0, 3)


@pytest.mark.parametrize("tokens", [0, 4])
def test_D9_window_pages_are_asked_for_first_once_a_load_brought_some(window_scene: "Scene", tokens: int) -> None:
    scene = window_scene
    record = scene.opened()
    order, _ = scene.reserved(record, range(2, 2 + tokens // scene.T))
    scene.requests.load_ended(scene.load_end(order, LoadState.LOADED))
    assert scene.closing(record, range(2, 4)).probe_first is (tokens > 0)


def test_D9_a_load_marks_blocks_of_full_attention_alone(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    full, window = scene.columns(record, range(2)), scene.columns(record, range(5, 6))
    order, _ = scene.requests.reserve(record, (full[0], window[1]), 0, 2 * scene.T)
    scene.requests.load_ended(scene.load_end(order, LoadState.LOADED))
    assert scene.listed(record, 8) == (2, 3, 4, 5, 6, 7)


# -- what becomes of them


def test_S2_marks_follow_no_window_order(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    order = scene.handed_over(scene.closing(record, range(3)))
    assert order is not None
    assert record.marks.mark == 0
    scene.save_end(order, stored=(0,), refused=(1,), dropped=(2,))
    assert (record.marks.mark, record.stored_blocks) == (0, 0)
    assert scene.listed(record, 3) == (0, 1, 2), "no back-off, and nothing is known of them"


def test_S3_a_snapshot_pins_nothing_and_is_handed_over_whatever_happens_to_its_pages(window_scene: "Scene") -> None:
    scene = window_scene
    record, other = scene.opened(), scene.opened("other", first_token=100)
    order = scene.closing(record, range(3))
    scene.reserved(other, range(3))
    assert scene.handed_over(order) is order, "the pages were copied at the pass"
    assert scene.requests.pages.saving == {}
    scene.save_end(order, stored=(0, 1, 2))
    assert scene.requests.pages.saving == {}


def test_S12_finish_lists_what_it_holds_window_first_and_pins_it(window_scene: "Scene") -> None:
    scene = window_scene
    record, other = scene.opened(), scene.opened("other", first_token=100)
    scene.passed(record, 4)
    scene.held(record, range(2, 4))
    window, full = scene.requests.finish(record, upto=4)
    assert isinstance(window, SaveOrder)
    assert isinstance(full, SaveOrder)
    assert (blocks_of(window), blocks_of(full)) == ([(1, (2, 3))], [(0, (0, 1, 2, 3))])
    assert (window.window, window.snapshot) == (True, False)
    assert scene.requests.pages.saving == {(1, 32): 1, (1, 33): 1, **{(0, page): 1 for page in range(10, 14)}}
    with pytest.raises(EngineContractError, match="page 32 is in use, a save reads"):
        scene.requests.reserve(other, scene.columns(other, range(2, 3))[1:], 4, 2)
    assert scene.save_end(window, stored=(2, 3)) == []
    assert scene.save_end(full, stored=(0, 1, 2, 3)) == [scene.completed(record, stored=4)]
    assert scene.requests.pages.saving == {}


@pytest.mark.parametrize("lost", ["refused", "dropped"])
def test_S12_window_pages_that_did_not_reach_the_pool_are_listed_again_by_finish(window_scene: "Scene", lost: str) -> None:
    scene = window_scene
    record = scene.opened()
    order = scene.handed_over(scene.closing(record, range(2, 5)))
    assert order is not None
    lists: dict[str, Any] = {"stored": (2, 4), lost: (3,)}
    scene.save_end(order, **lists)
    scene.held(record, range(3, 6))
    [last] = scene.requests.finish(record, upto=0)
    assert isinstance(last, SaveOrder)
    assert blocks_of(last) == [(1, (3, 5))]


def test_S12_finish_leaves_out_window_pages_that_a_load_fills(window_scene: "Scene") -> None:
    scene = window_scene
    record, loading = scene.opened(), scene.opened("loading", first_token=100)
    scene.held(record, range(2, 5))
    scene.reserved(loading, range(3, 4))
    [last] = scene.requests.finish(record, upto=0)
    assert isinstance(last, SaveOrder)
    assert blocks_of(last) == [(1, (2, 4))]
    assert not record.windows.saved(1, 3)


def test_S12_finish_of_window_pages_that_loads_fill_hands_nothing_over(window_scene: "Scene") -> None:
    scene = window_scene
    record, loading = scene.opened(), scene.opened("loading", first_token=100)
    scene.held(record, range(3, 4))
    scene.reserved(loading, range(3, 4))
    assert scene.requests.finish(record, upto=0) == [scene.completed(record)]


@pytest.mark.parametrize("state", [LoadState.FAILED, LoadState.LOADED])
def test_S1_what_a_pass_left_behind_a_later_load_is_not_published_at_finish(window_scene: "Scene", state: LoadState) -> None:
    """The engine began again from its local match: pages behind it may have been written over since."""
    scene = window_scene
    record = scene.opened()
    scene.passed(record, 6)
    scene.held(record, range(4, 6))
    order, _ = scene.reserved(record, range(1, 3))
    scene.requests.load_ended(scene.load_end(order, state))
    valid = 3 if state is LoadState.LOADED else 1
    assert record.computed == valid * scene.T
    effects = scene.requests.finish(record, upto=record.computed // scene.T)
    listed = [blocks_of(effect) for effect in effects if isinstance(effect, SaveOrder)]
    assert listed == [[(0, (0,))]]


def test_S1_a_load_of_nothing_says_nothing_about_pages(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    scene.passed(record, 6)
    scene.held(record, range(4, 6))
    order, _ = scene.reserved(record, range(1, 1))
    scene.requests.load_ended(scene.load_end(order, LoadState.LOADED))
    assert record.computed == 6 * scene.T
    window, _ = scene.requests.finish(record, upto=6)
    assert isinstance(window, SaveOrder)
    assert blocks_of(window) == [(1, (4, 5))]


# -- asked for again


def test_S8_what_is_stored_is_listed_again_where_it_has_its_page(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    assert scene.requests.listing.again(record, 4, scene.TABLES) is None
    scene.save_end(scene.queued(record, 4), stored=(0, 1, 3), dropped=(2,))
    order = scene.requests.listing.again(record, 4, ((10, NO_PAGE, 12, 13), ()))
    assert order is not None
    hashes = record.chain.hashes(0, 4)
    assert [(c.group, c.blocks, c.pages, c.hashes) for c in order.groups] == [(0, (0, 3), (10, 13), (hashes[0], hashes[3]))]
    assert (order.window, order.snapshot, order.probe_first) == (False, False, True)


def test_S8_asking_again_moves_no_mark_and_counts_no_block_twice(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    scene.save_end(scene.queued(record, 4), stored=(0, 1, 2, 3))
    order = scene.requests.listing.again(record, 4, scene.TABLES)
    assert order is not None
    assert scene.handed_over(order) is order
    assert record.marks.mark == 4
    assert record.marks.is_stored(0), "it is asked for, not on its way"
    scene.save_end(order, stored=(0, 1), dropped=(2, 3))
    assert (record.marks.mark, record.stored_blocks) == (4, 4)
    assert scene.requests.pages.saving == {}
    assert scene.requests.finish(record, upto=4) == [scene.completed(record, stored=4)]


def test_S8_a_block_that_was_gone_and_is_refused_is_known_no_more_and_saved_again(window_scene: "Scene") -> None:
    scene = window_scene
    record, later = scene.opened(), scene.opened("later")
    scene.save_end(scene.queued(record, 3), stored=(0, 1, 2))
    assert scene.listed(later, 3) == ()
    order = scene.requests.listing.again(record, 3, scene.TABLES)
    assert order is not None
    assert scene.handed_over(order) is not None
    scene.save_end(order, 10.0, stored=(0, 2), refused=(1,))
    assert scene.listed(later, 3) == (1,)
    assert scene.listed(record, 3, now=10.0) == ()
    assert scene.listed(record, 3, now=10.0 + scene.BACKOFF_S) == (1,)


def test_S8_a_page_that_a_load_fills_is_not_read_again(window_scene: "Scene") -> None:
    scene = window_scene
    record, loading = scene.opened(), scene.opened("loading", first_token=100)
    scene.save_end(scene.queued(record, 3), stored=(0, 1, 2))
    order = scene.requests.listing.again(record, 3, scene.TABLES)
    assert order is not None
    scene.reserved(loading, range(1, 2))
    rest = scene.handed_over(order)
    assert rest is not None
    assert blocks_of(rest) == [(0, (0, 2))]


# -- ends


def test_D6_a_cancel_with_everything_under_way_waits_for_reads_and_names_what_calls_touch(window_scene: "Scene") -> None:
    scene = window_scene
    requests = scene.requests
    record, other = scene.opened(), scene.opened("other", first_token=100)
    snapshot = scene.handed_over(scene.closing(record, range(1)))
    full = scene.queued(record, 2)
    load, hold = scene.reserved(record, range(4, 6))
    assert snapshot is not None
    assert requests.cancel(record) == [scene.withdrawal(record)]
    assert requests.cancel(record) == []
    ended = scene.load_end(load, LoadState.CANCELLED, quarantined=((14,), ()))
    assert requests.load_ended(ended) == [hold]
    assert requests.pages.loading == set()
    unread = scene.unread(record, quarantined=((10,), ()))
    assert requests.pages_unread(unread) == [scene.completed(record)]
    assert (record.phase, requests.pages.saving) == (Phase.CLOSED, {})
    assert requests.pages.tell(record.key) == ((10, 14), ())
    for block in (0, 4):
        with pytest.raises(EngineContractError, match="a store call that was given up still touches"):
            scene.reserved(other, range(block, block + 1))
    for page in (10, 14):
        message = PagesReleased(request_id=record.request_id, incarnation=record.incarnation, pages=((page,), ()))
        assert requests.pages_released(message) == [message]
    scene.reserved(other, range(6))
    for order in (snapshot, full):
        assert scene.save_end(order, dropped=order.groups[0].blocks) == []


def test_D2_pages_that_leave_quarantine_before_anybody_heard_of_them_are_no_news(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    load, _ = scene.reserved(record, range(2))
    scene.requests.load_ended(scene.load_end(load, LoadState.FAILED, quarantined=((10, 11), (30,))))
    message = PagesReleased(request_id=record.request_id, incarnation=record.incarnation, pages=((10, 11), ()))
    assert scene.requests.pages_released(message) == []
    assert scene.requests.pages.tell(record.key) == ((), (30,))


def test_S1_a_page_in_quarantine_is_not_read_for_a_save(window_scene: "Scene") -> None:
    scene = window_scene
    record, other = scene.opened(), scene.opened("other", first_token=100)
    load, _ = scene.reserved(other, range(1, 2))
    scene.requests.load_ended(scene.load_end(load, LoadState.FAILED, quarantined=((11,), (31,))))
    scene.passed(record, 3)
    scene.held(record, range(3))
    window, full = scene.requests.finish(record, upto=3)
    assert isinstance(window, SaveOrder)
    assert isinstance(full, SaveOrder)
    assert (blocks_of(window), blocks_of(full)) == ([(1, (0, 2))], [(0, (0, 2))])


def test_S2_window_state_follows_the_passes(window_scene: "Scene") -> None:
    windows = window_scene.opened().windows
    windows.ran(6, (), closes=False)
    assert (windows.began_at, windows.closed) == (6, False)
    windows.ran(9, (), closes=True)
    windows.ran(12, (), closes=False)
    assert (windows.began_at, windows.closed) == (6, True)
