"""Which requests are open, and whose pages a load holds until when (D2, D8, D9, L6, L7, S1, S13)."""

from typing import TYPE_CHECKING

import pytest

from akv.errors import EngineContractError
from akv.values.messages import LoadResult, LoadState
from akv.values.requests import LoadCompleted

if TYPE_CHECKING:
    from tests.ownership.conftest import Scene

# -- who is open


def test_D8_each_use_of_an_id_is_another_incarnation(scene: "Scene") -> None:
    first = scene.opened()
    assert scene.requests.finish(first, upto=0) == [scene.completed(first)]
    second = scene.opened()
    assert second.incarnation > first.incarnation
    assert scene.requests.records == [second]
    assert len(scene.requests) == 1


@pytest.mark.parametrize(("end", "phase"), [("none", "open"), ("finish", "finishing"), ("cancel", "cancelling")])
def test_L6_an_id_in_use_is_refused_and_the_message_says_how_it_stands(scene: "Scene", end: str, phase: str) -> None:
    record = scene.opened()
    scene.queued(record, 2)
    if end == "finish":
        scene.requests.finish(record, upto=0)
    if end == "cancel":
        scene.requests.cancel(record)
    with pytest.raises(EngineContractError, match=rf"'r' is open already \({phase}\)"):
        scene.opened()
    assert scene.requests.records == [record]


def test_L6_a_pass_may_only_name_open_requests(scene: "Scene") -> None:
    record = scene.opened()
    scene.queued(record, 1)
    assert scene.requests.scheduled("r", record.incarnation) is record
    for request_id, incarnation in (("r", record.incarnation + 1), ("other", record.incarnation)):
        with pytest.raises(EngineContractError, match=f"'{request_id}' is scheduled but not open .incarnation {incarnation}"):
            scene.requests.scheduled(request_id, incarnation)
    scene.requests.finish(record, upto=0)
    with pytest.raises(EngineContractError, match="cannot schedule request 'r': it is finishing"):
        scene.requests.scheduled("r", record.incarnation)


def test_L7_a_request_that_reads_nothing_is_remembered_as_such(scene: "Scene") -> None:
    record = scene.opened(reads_cache=False)
    assert (record.reads_cache, record.prompt_tokens) == (False, scene.BLOCKS * scene.T + 1)


# -- loads


def test_D2_a_reservation_lends_its_pages_until_the_terminal_state(scene: "Scene") -> None:
    record, other = scene.opened(), scene.opened("other", first_token=100)
    order, hold = scene.reserved(record, range(2, 4))
    assert (order.load_id, order.request_id, order.incarnation) == (hold.load_id, "r", record.incarnation)
    assert order.groups == scene.columns(record, range(2, 4))
    under_way = hold.completed
    assert under_way is None
    with pytest.raises(EngineContractError, match="'other', block 3, group 0: destination page 13 .*another load fills"):
        scene.reserved(other, range(3, 5))
    assert other.load is None, "all or nothing"
    assert scene.requests.load_ended(scene.load_end(order, LoadState.LOADED)) == [hold]
    assert hold.completed == LoadCompleted(
        request_id="r", incarnation=record.incarnation, state=LoadState.LOADED, tokens=2 * scene.T, reason=""
    )
    scene.reserved(other, range(3, 5))


def test_L6_one_load_at_a_time_and_none_for_a_request_that_ends(scene: "Scene") -> None:
    record = scene.opened()
    order, _ = scene.reserved(record, range(1))
    with pytest.raises(EngineContractError, match="'r' has a load under way"):
        scene.reserved(record, range(4, 5))
    scene.requests.cancel(record)
    with pytest.raises(EngineContractError, match="cannot reserve pages for request 'r': it is cancelling"):
        scene.reserved(record, range(4, 5))
    assert record.load is not None
    assert record.load.load_id == order.load_id


def test_L6_a_page_that_a_save_reads_cannot_be_a_destination(scene: "Scene") -> None:
    record, other = scene.opened(), scene.opened("other", first_token=100)
    save = scene.queued(record, 2)
    only_group_1 = (scene.TABLES[1], scene.TABLES[1])
    with pytest.raises(EngineContractError, match="'other', block 0, group 1: destination page 30 .*a save reads"):
        scene.reserved(other, range(1), only_group_1)
    scene.save_end(save, stored=(0, 1))
    scene.reserved(other, range(1))


def test_D9_a_load_of_nothing_is_a_load_like_any_other(scene: "Scene") -> None:
    record = scene.opened()
    order, hold = scene.reserved(record, range(0))
    assert order.groups == ()
    assert scene.requests.load_ended(scene.load_end(order, LoadState.LOADED)) == [hold]
    assert hold.completed is not None
    assert (hold.completed.state, hold.completed.tokens) == (LoadState.LOADED, 0)
    assert scene.listed(record, 2) == (0, 1)


def test_D9_loaded_blocks_are_not_listed_for_saving(scene: "Scene") -> None:
    record, later = scene.opened(), scene.opened("later")
    order, _ = scene.reserved(record, range(1, 3))
    scene.requests.load_ended(scene.load_end(order, LoadState.LOADED))
    assert scene.listed(record, 4) == (0, 3)
    assert [record.marks.is_open(block) for block in range(4)] == [True, False, False, True]
    assert scene.listed(later, 4) == (0, 3), "what was loaded is in the pool, whoever asks"
    assert later.marks.mark == 0


@pytest.mark.parametrize("state", [LoadState.FAILED, LoadState.CANCELLED])
def test_D2_a_load_that_did_not_deliver_leaves_only_the_local_match(scene: "Scene", state: LoadState) -> None:
    record = scene.opened()
    order, hold = scene.reserved(record, range(1, 3))
    assert scene.requests.load_ended(scene.load_end(order, state, failed_key="k", reason="missing")) == [hold]
    assert hold.completed == LoadCompleted(
        request_id="r", incarnation=record.incarnation, state=state, tokens=0, reason="missing"
    )
    assert hold.failed_key == "k"
    assert record.valid_to == 1 * scene.T
    assert scene.listed(record, 4) == (0, 1, 2, 3), "what landed is discarded, so it is computed and saved"


def test_D2_tokens_are_valid_again_once_matched_computed_or_loaded(scene: "Scene") -> None:
    record = scene.opened()
    scene.requests.matched_locally(record, 3 * scene.T)
    forbidden_beyond = record.valid_to
    assert forbidden_beyond is None, "nothing was lost yet"
    order, _ = scene.reserved(record, range(1, 3))
    scene.requests.load_ended(scene.load_end(order, LoadState.FAILED))
    scene.requests.matched_locally(record, 2 * scene.T)
    assert record.valid_to == 2 * scene.T
    scene.requests.matched_locally(record, scene.T)
    assert record.valid_to == 2 * scene.T
    scene.passed(record, 3)
    assert record.valid_to == 3 * scene.T
    scene.passed(record, 2)
    assert record.valid_to == record.computed == 3 * scene.T, "a pass takes nothing back"
    order, _ = scene.reserved(record, range(3, 5))
    scene.requests.load_ended(scene.load_end(order, LoadState.LOADED))
    assert record.valid_to == 5 * scene.T


def test_S1_finish_does_not_publish_computed_pages_that_a_lost_load_may_have_overwritten(scene: "Scene") -> None:
    record = scene.opened()
    scene.passed(record, 3)
    order, _ = scene.reserved(record, range(1, 3))
    scene.requests.load_ended(scene.load_end(order, LoadState.FAILED))
    assert record.computed == 1 * scene.T
    scene.passed(record, 2)
    assert record.computed == 2 * scene.T


def test_D3_failed_loads_of_a_life_are_counted_and_no_other_ends(scene: "Scene") -> None:
    record = scene.opened()
    for state in (LoadState.LOADED, LoadState.FAILED, LoadState.CANCELLED, LoadState.FAILED):
        order, _ = scene.reserved(record, range(1, 3))
        scene.requests.load_ended(scene.load_end(order, state))
    assert record.failed_loads == 2


def test_S13_blocks_that_the_pool_failed_to_deliver_are_saved_again(scene: "Scene") -> None:
    record, later = scene.opened(), scene.opened("later")
    scene.save_end(scene.queued(record, 3), stored=(0, 1, 2))
    assert scene.listed(later, 3) == ()
    tables = (tuple(range(50, 58)), tuple(range(50, 58)))
    order, _ = scene.reserved(later, range(1, 3), tables)
    scene.requests.load_ended(scene.load_end(order, LoadState.FAILED))
    assert scene.listed(later, 3) == (1, 2)


def test_S13_a_cancelled_load_says_nothing_of_the_pool(scene: "Scene") -> None:
    record, later = scene.opened(), scene.opened("later")
    scene.save_end(scene.queued(record, 3), stored=(0, 1, 2))
    order, _ = scene.reserved(later, range(1, 3))
    scene.requests.load_ended(scene.load_end(order, LoadState.CANCELLED))
    assert scene.listed(later, 3) == ()


def test_D8_results_of_other_loads_and_incarnations_change_nothing(scene: "Scene") -> None:
    old = scene.opened()
    old_order, _ = scene.reserved(old, range(1))
    scene.requests.cancel(old)
    scene.requests.pages_unread(scene.unread(old))
    scene.requests.load_ended(scene.load_end(old_order, LoadState.CANCELLED))
    record = scene.opened()
    assert scene.requests.load_ended(scene.load_end(old_order, LoadState.LOADED)) == [], "an earlier incarnation"
    order, _ = scene.reserved(record, range(2))
    strangers = [
        LoadResult(load_id=order.load_id + 1, request_id="r", incarnation=record.incarnation, state=LoadState.FAILED),
        LoadResult(load_id=order.load_id, request_id="other", incarnation=record.incarnation, state=LoadState.FAILED),
    ]
    assert [scene.requests.load_ended(stranger) for stranger in strangers] == [[], []]
    assert record.load is not None
    assert len(scene.requests.load_ended(scene.load_end(order, LoadState.LOADED))) == 1
    assert scene.requests.load_ended(scene.load_end(order, LoadState.LOADED)) == [], "a load ends once"
