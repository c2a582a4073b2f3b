"""Window pages that the pool is known to hold are not listed again, and once they may be gone they are (S13, W3).

The second of the scene's two layer groups forgets.
"""

from typing import TYPE_CHECKING, Any

import pytest

from akv.ownership.request_record import RequestRecord
from akv.plan.ending import WindowPages
from akv.values.messages import LoadState, SaveOrder

if TYPE_CHECKING:
    from tests.ownership.conftest import Scene

#: What every closing pass here holds.
END = range(3, 6)


def closing(scene: "Scene", record: RequestRecord, *, again: bool = False) -> tuple[int, ...]:
    """The blocks that a closing pass lists of the window group."""
    order = scene.requests.listing.windows(record, [pages(scene, END)], snapshot=True, again=again)
    return () if order is None else order.groups[0].blocks


def pages(scene: "Scene", blocks: range, group: int = 1) -> WindowPages:
    return WindowPages(group, tuple(blocks), tuple(scene.TABLES[group][block] for block in blocks))


def saved(scene: "Scene", **lists: Any) -> RequestRecord:
    """A request whose closing pass saved its end, by default all of it."""
    record = scene.opened("first")
    order = scene.handed_over(scene.closing(record, END))
    assert order is not None
    scene.save_end(order, **(lists or {"stored": tuple(END)}))
    return record


def gone(record: RequestRecord, *blocks: int) -> tuple[int, list[bytes]]:
    """What a lookup says of pages of the window group that it asked for in vain."""
    hashes = record.chain.hashes(0, 8)
    return 1, [hashes[block] for block in blocks]


# -- learnt


def test_S13_W3_what_a_closing_pass_stored_no_other_copies_again(window_scene: "Scene") -> None:
    saved(window_scene)
    later = window_scene.opened("later")
    assert closing(window_scene, later) == ()
    order = window_scene.requests.listing.windows(later, [pages(window_scene, range(2, 7))], snapshot=True)
    assert order is not None
    assert (order.groups[0].blocks, order.groups[0].pages, order.probe_first) == ((2, 6), (32, 36), False)
    assert order.groups[0].hashes == tuple(later.chain.hashes(0, 8)[block] for block in (2, 6))


def test_S13_another_prompts_pages_are_its_own(window_scene: "Scene") -> None:
    saved(window_scene)
    assert closing(window_scene, window_scene.opened("other", first_token=100)) == tuple(END)


def test_S13_a_page_is_known_in_its_own_group_alone(window_scene: "Scene") -> None:
    scene = type(window_scene)(windows=(0, 1))
    record, later = scene.opened("first"), scene.opened("later")
    columns = [pages(scene, range(3, 5), 0), pages(scene, range(4, 6), 1)]
    order = scene.requests.listing.windows(record, columns, snapshot=True)
    assert order is not None
    assert scene.handed_over(order) is not None
    scene.save_end(order, stored=(3, 5), refused=(4,))
    assert [[record.windows.saved(group, block) for block in END] for group in (0, 1)] == [
        [True, False, False],
        [False, False, True],
    ]
    order = scene.requests.listing.windows(later, [pages(scene, END, 0), pages(scene, END, 1)], snapshot=True)
    assert order is not None
    assert [(group.group, group.blocks) for group in order.groups] == [(0, (4, 5)), (1, (3, 4))]


def test_S13_blocks_of_full_attention_and_window_pages_are_known_apart(window_scene: "Scene") -> None:
    scene = window_scene
    saved(scene)
    later = scene.opened("later")
    assert scene.listed(later, 6) == (0, 1, 2, 3, 4, 5)
    scene.save_end(scene.queued(later, 3), stored=(0, 1, 2))
    last = scene.opened("last")
    order = scene.requests.listing.windows(last, [pages(scene, range(6))], snapshot=True)
    assert order is not None
    assert order.groups[0].blocks == (0, 1, 2)


@pytest.mark.parametrize("lost", ["refused", "dropped"])
def test_S13_what_did_not_reach_the_pool_is_not_known(window_scene: "Scene", lost: str) -> None:
    saved(window_scene, **{"stored": (3, 5), lost: (4,)})
    assert closing(window_scene, window_scene.opened("later")) == (4,)


def test_S13_a_request_of_old_weights_teaches_nothing(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened("old")
    order = scene.handed_over(scene.closing(record, END))
    assert order is not None
    scene.requests.cancel(record)
    scene.requests.reset()
    scene.save_end(order, stored=tuple(END))
    assert closing(scene, scene.opened("new")) == tuple(END)


# -- forgotten


def test_S13_after_a_reset_nothing_is_known_under_the_new_names(window_scene: "Scene") -> None:
    saved(window_scene)
    window_scene.requests.reset()
    assert closing(window_scene, window_scene.opened("new")) == tuple(END)


def test_S13_a_lost_pool_gets_the_ends_again_of_requests_that_go_on_too(window_scene: "Scene") -> None:
    scene = window_scene
    first = saved(scene)
    second = scene.opened("second")
    second.windows.there(1, END)
    under_way = scene.opened("under way", first_token=100)
    assert scene.handed_over(scene.closing(under_way, END)) is not None
    scene.requests.new_generation()
    for record in (first, second):
        assert closing(scene, record) == tuple(END)
        assert not record.windows.saved(1, 3)
    assert closing(scene, under_way) == (), "its save will say whether the pool took it"


def test_S13_a_page_that_a_lookup_misses_is_listed_again_and_no_other(window_scene: "Scene") -> None:
    saved(window_scene)
    later = window_scene.opened("later")
    window_scene.requests.not_found(later, None, [gone(later, 1, 4)])
    assert closing(window_scene, later) == (4,)


def test_S13_behind_a_hole_in_the_prefix_no_window_page_is_known(window_scene: "Scene") -> None:
    saved(window_scene)
    later = window_scene.opened("later")
    later.chain.hash_up_to(8)
    window_scene.requests.not_found(later, 4)
    assert closing(window_scene, later) == (4, 5)


def test_L5_a_lookup_moves_no_mark_of_window_pages(window_scene: "Scene") -> None:
    record = saved(window_scene)
    window_scene.requests.not_found(record, None, [gone(record, *END)])
    assert all(record.windows.saved(1, block) for block in END)


@pytest.mark.parametrize("state", [LoadState.FAILED, LoadState.CANCELLED])
def test_S13_pages_of_a_load_that_failed_are_listed_again(window_scene: "Scene", state: LoadState) -> None:
    scene = window_scene
    saved(scene)
    later = scene.opened("later")
    load, _ = scene.reserved(later, range(4, 6))
    scene.requests.load_ended(scene.load_end(load, state))
    # A cancelled load says nothing about the pool.
    assert closing(scene, later) == ((4, 5) if state is LoadState.FAILED else ())


def test_S13_a_page_that_the_pool_refused_another_request_is_not_known_any_more(window_scene: "Scene") -> None:
    scene = window_scene
    at_once = scene.opened("at once")
    order = scene.handed_over(scene.closing(at_once, END))
    assert order is not None
    saved(scene)
    scene.save_end(order, stored=(3, 5), refused=(4,))
    assert closing(scene, scene.opened("later")) == (4,)


# -- the request that left out what is known


def left_out(scene: "Scene") -> RequestRecord:
    """A request whose closing pass ran and listed nothing, and which holds its end."""
    saved(scene)
    record = scene.opened("later")
    record.windows.there(1, scene.requests.listing.known(record, pages(scene, END)))
    scene.held(record, range(3, 7))
    return record


def test_S13_S12_finish_lists_what_lies_behind_and_not_what_the_closing_pass_left_out(window_scene: "Scene") -> None:
    record = left_out(window_scene)
    assert [record.windows.saved(1, block) for block in (2, 3, 5, 6)] == [False, True, True, False]
    # Aged out of what is known, say: the pool has it all the same, as far as this request was told.
    window_scene.requests.not_found(record, None, [gone(record, *END)])
    [order] = window_scene.requests.finish(record, upto=0)
    assert isinstance(order, SaveOrder)
    assert [group.blocks for group in order.groups] == [(6,)]


def test_S13_finish_of_an_end_that_is_known_hands_nothing_over(window_scene: "Scene") -> None:
    scene = window_scene
    saved(scene)
    later = scene.opened("later")
    scene.held(later, END)
    assert scene.requests.finish(later, upto=0) == [scene.completed(later)]


def test_S13_after_a_preemption_the_end_is_listed_again_once_it_is_not_known(window_scene: "Scene") -> None:
    scene = window_scene
    record = left_out(scene)
    scene.requests.preempt(record)
    scene.requests.pages_unread(scene.unread(record))
    assert closing(scene, record) == ()
    scene.requests.not_found(record, None, [gone(record, 5)])
    assert closing(scene, record) == (5,)


# -- asked for again


def test_S8_known_window_pages_are_listed_again_where_they_are_asked_for_first(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened("cold")
    order = scene.requests.listing.windows(record, [pages(scene, END)], snapshot=True, again=True)
    assert order is not None
    assert not order.probe_first, "nothing is known of them: they are put"
    saved(scene)
    later = scene.opened("later")
    order = scene.requests.listing.windows(later, [pages(scene, range(3, 7))], snapshot=True, again=True)
    assert order is not None
    assert (order.groups[0].blocks, order.probe_first) == ((3, 4, 5, 6), True)
    # The pass ran: what is known counts as there.
    later.windows.there(1, scene.requests.listing.known(later, pages(scene, END)))
    assert scene.handed_over(order) is order
    assert closing(scene, later, again=True) == (), "they are on their way"
    scene.save_end(order, stored=(3, 5, 6), refused=(4,))
    assert closing(scene, later) == (4,)
    assert closing(scene, scene.opened("last")) == (4,)
