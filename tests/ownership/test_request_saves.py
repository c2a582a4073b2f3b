"""What a pass lists for saving, and what becomes of it (S1, S2, S12, S13, D8, L2, M7)."""

import math
from typing import TYPE_CHECKING

import pytest

from akv.errors import EngineContractError
from akv.units import NO_PAGE
from akv.values.messages import GroupPages, SaveResult

if TYPE_CHECKING:
    from tests.ownership.conftest import Scene


def test_S1_only_blocks_below_the_bound_are_listed_with_pages_and_hashes_of_every_group(scene: "Scene") -> None:
    record = scene.opened()
    order = scene.requests.listing.blocks(record, 3, scene.TABLES, 0, 0.0)
    assert order is not None
    assert order.groups == scene.columns(record, range(3))
    assert (order.request_id, order.incarnation) == record.key


def test_L2_a_block_without_a_page_in_some_group_is_not_listed(scene: "Scene") -> None:
    record = scene.opened()
    holed = (scene.TABLES[0], (30, NO_PAGE, 32, NO_PAGE))
    order = scene.requests.listing.blocks(record, 6, holed, 0, 0.0)
    assert order is not None
    assert order.groups == tuple(
        GroupPages(group, (0, 2), pages, (record.chain.hashes(0, 1)[0], record.chain.hashes(2, 3)[0]))
        for group, pages in enumerate([(10, 12), (30, 32)])
    )
    assert scene.requests.listing.blocks(record, 6, (scene.TABLES[0], ()), 0, 0.0) is None


def test_S12_tables_may_begin_at_a_later_block(scene: "Scene") -> None:
    record = scene.opened()
    order = scene.requests.listing.blocks(record, 5, tuple(table[3:] for table in scene.TABLES), 3, 0.0)
    assert order is not None
    assert order.groups == scene.columns(record, range(3, 5))


def test_S2_listing_changes_no_mark_and_queueing_does(scene: "Scene") -> None:
    record = scene.opened()
    assert scene.listed(record, 3) == scene.listed(record, 3) == (0, 1, 2)
    assert record.marks.mark == 0
    scene.queued(record, 3)
    assert record.marks.mark == 3
    assert scene.listed(record, 3) == ()


def test_S2_a_block_that_two_plans_listed_is_handed_over_once(scene: "Scene") -> None:
    record = scene.opened()
    first, second, third = (scene.requests.listing.blocks(record, end, scene.TABLES, 0, 0.0) for end in (2, 4, 4))
    assert first is not None
    assert second is not None
    assert third is not None
    assert scene.handed_over(first) is first
    rest = scene.handed_over(second)
    assert rest is not None
    assert (rest.save_id, rest.groups) == (second.save_id, scene.columns(record, range(2, 4)))
    assert scene.handed_over(third) is None
    assert record.saves.keys() == {first.save_id, second.save_id}


@pytest.mark.parametrize("group", [0, 1])
def test_S1_a_page_that_a_load_fills_is_not_read_for_a_save(scene: "Scene", group: int) -> None:
    record, loading = scene.opened(), scene.opened("loading", first_token=100)
    order = scene.requests.listing.blocks(record, 3, scene.TABLES, 0, 0.0)
    assert order is not None
    other = tuple(range(50, 58))
    scene.reserved(loading, range(1, 2), (scene.TABLES[0], other) if group == 0 else (other, scene.TABLES[1]))
    rest = scene.handed_over(order)
    assert rest is not None
    assert rest.groups[group].blocks == rest.groups[1 - group].blocks == (0, 2)
    assert scene.listed(record, 3) == (1,), "it is unsaved, not lost"


@pytest.mark.parametrize("end", ["finish", "cancel", "close", "reopen"])
def test_M7_a_listed_save_of_a_request_that_began_to_end_is_not_queued(scene: "Scene", end: str) -> None:
    record = scene.opened()
    scene.queued(record, 1)
    order = scene.requests.listing.blocks(record, 3, scene.TABLES, 0, 0.0)
    assert order is not None
    if end == "finish":
        scene.requests.finish(record, upto=0)
    else:
        scene.requests.cancel(record)
        if end != "cancel":
            scene.requests.pages_unread(scene.unread(record))
        if end == "reopen":
            scene.opened()
    assert scene.handed_over(order) is None


def test_S2_what_another_request_saved_is_not_listed_and_marked_by_the_next_pass(scene: "Scene") -> None:
    record, later = scene.opened(), scene.opened("later")
    scene.save_end(scene.queued(record, 3), stored=(0, 1), dropped=(2,))
    assert scene.listed(later, 4) == (2, 3)
    assert scene.listed(later, 2) == ()
    assert later.marks.mark == 0
    scene.requests.ran(later, 4 * scene.T, 4, 0, ())
    assert later.marks.mark == 2
    assert later.stored_blocks == 0, "only own saves count"
    scene.requests.ran(later, 4 * scene.T, 0, 0, ())


def test_S13_what_a_lookup_no_longer_finds_is_saved_again_from_the_hole_on(scene: "Scene") -> None:
    record, later = scene.opened(), scene.opened("later")
    scene.save_end(scene.queued(record, 4), stored=(0, 1, 2, 3))
    later.chain.hash_up_to(3)
    scene.requests.not_found(later, 1)
    assert scene.listed(later, 4) == (1, 2), "the lookup did not get as far as block 3"
    scene.requests.not_found(later, 6)
    assert scene.listed(later, 4) == (1, 2)


def test_S2_a_refused_block_is_listed_again_after_its_back_off(scene: "Scene") -> None:
    record = scene.opened()
    scene.save_end(scene.queued(record, 3), 10.0, stored=(0,), refused=(1, 2))
    assert record.marks.mark == 1
    assert scene.listed(record, 4, now=10.0) == (3,)
    assert scene.listed(record, 4, now=10.0 + scene.BACKOFF_S) == (1, 2, 3)


def test_S2_a_pass_between_two_refusals_does_not_shorten_the_back_off(scene: "Scene") -> None:
    record = scene.opened()
    for wait in (1.0, 2.0, 4.0):
        scene.save_end(scene.queued(record, 1, math.inf), 10.0, refused=(0,))
        scene.requests.ran(record, scene.T, 1, 0, ())
        assert scene.listed(record, 1, now=10.0 + wait - 0.1) == ()
        assert scene.listed(record, 1, now=10.0 + wait) == (0,)


def test_S2_a_save_that_stored_a_block_ends_the_row_of_refusals(scene: "Scene") -> None:
    record = scene.opened()
    for _ in range(3):
        scene.save_end(scene.queued(record, 1, math.inf), 10.0, refused=(0,))
    assert scene.listed(record, 1, now=10.0 + scene.BACKOFF_S) == ()
    scene.save_end(scene.queued(record, 3, math.inf), 10.0, stored=(1,), refused=(0, 2))
    assert scene.listed(record, 1, now=10.0 + scene.BACKOFF_S) == (0,)


def test_D8_results_of_other_saves_and_incarnations_change_nothing(scene: "Scene") -> None:
    record = scene.opened()
    order = scene.queued(record, 2)
    for save_id, request_id, incarnation in (
        (order.save_id + 1, "r", record.incarnation),
        (order.save_id, "other", record.incarnation),
        (order.save_id, "r", record.incarnation + 1),
    ):
        late = SaveResult(save_id=save_id, request_id=request_id, incarnation=incarnation, refused=(0, 1))
        assert scene.requests.save_ended(late, 0.0) == []
    assert record.marks.mark == 2
    scene.save_end(order, stored=(0, 1))
    assert scene.save_end(order, refused=(0, 1)) == []
    assert record.marks.mark == 2


def test_S7_a_page_that_two_requests_share_is_held_until_both_saves_ended(scene: "Scene") -> None:
    first, second, other = scene.opened(), scene.opened("second"), scene.opened("other", first_token=100)
    orders = scene.queued(first, 2), scene.queued(second, 2)
    for order in orders:
        with pytest.raises(EngineContractError, match="a save reads"):
            scene.reserved(other, range(1))
        scene.save_end(order, stored=(0, 1))
    scene.reserved(other, range(1))
