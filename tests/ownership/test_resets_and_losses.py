"""New weights, a lost pool, pages whose end nobody sees: what the scheduler half forgets and what it keeps (K8, S13, M8)."""

from typing import TYPE_CHECKING

import pytest

from akv.errors import EngineContractError
from akv.plan.lifecycle import Phase
from akv.values.messages import LoadState, SaveResult

if TYPE_CHECKING:
    from tests.ownership.conftest import Scene


def test_S13_a_lost_pool_has_everything_listed_again(scene: "Scene") -> None:
    record = scene.opened()
    scene.save_end(scene.queued(record, 3), stored=(0, 1, 2))
    other = scene.opened("other")
    assert scene.listed(other, 3) == (), "known to be there"
    scene.requests.new_generation()
    assert scene.listed(other, 3) == (0, 1, 2)
    assert scene.listed(record, 3) == (0, 1, 2)


@pytest.mark.parametrize("brought_by", ["save", "load"])
def test_K8_what_was_begun_with_the_old_weights_says_nothing_of_the_new_ones(scene: "Scene", brought_by: str) -> None:
    record = scene.opened()
    if brought_by == "save":
        order = scene.queued(record, 2)
    else:
        load, _ = scene.reserved(record, range(2))
    scene.requests.cancel(record)
    scene.requests.reset()
    if brought_by == "save":
        scene.save_end(order, stored=(0, 1))
    else:
        scene.requests.load_ended(scene.load_end(load, LoadState.LOADED))
    assert scene.listed(scene.opened("new"), 2) == (0, 1)


def test_K8_what_was_known_before_is_forgotten(scene: "Scene") -> None:
    scene.save_end(scene.queued(scene.opened(), 2), stored=(0, 1))
    scene.requests.reset()
    new = scene.opened("new")
    assert scene.listed(new, 2) == (0, 1)
    scene.save_end(scene.queued(new, 2), stored=(0, 1))
    assert scene.listed(scene.opened("newer"), 2) == (), "and learnt again"


def test_M8_a_request_whose_end_nobody_sees_is_over_and_its_pages_stay_out_of_use(scene: "Scene") -> None:
    record, other = scene.opened(), scene.opened("other", first_token=100)
    scene.queued(record, 1)
    load, _ = scene.reserved(record, range(1, 2))
    scene.requests.cancel(record)
    lost = scene.requests.lose(record)
    assert record.phase is Phase.LOST
    assert {(group.group, page) for group in lost for page in group.pages} == {
        (group, table[block]) for group, table in enumerate(scene.TABLES) for block in (0, 1)
    }
    for blocks in (range(1), range(1, 2)):
        with pytest.raises(EngineContractError):
            scene.reserved(other, blocks)
    # Whatever is told of it later meets nobody.
    assert scene.requests.load_ended(scene.load_end(load, LoadState.CANCELLED)) == []
    assert scene.requests.pages_unread(scene.unread(record)) == []
    scene.opened(record.request_id, first_token=200)


def test_M8_pages_of_a_snapshot_are_not_lost_with_their_request(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    scene.requests.queue_saves([scene.closing(record, range(2, 4))], 0.0)
    scene.requests.cancel(record)
    assert scene.requests.lose(record) == []


def test_L8_the_pages_that_a_save_brought_are_told_before_it_ends(scene: "Scene") -> None:
    record = scene.opened()
    order = scene.queued(record, 3)
    result = SaveResult(save_id=order.save_id, request_id="r", incarnation=record.incarnation, stored=(0, 2))
    assert [group.blocks for group in scene.requests.stored_pages(result)] == [(0, 2), (0, 2)]
    scene.requests.save_ended(result, 0.0)
    assert scene.requests.stored_pages(result) == []
    scene.requests.cancel(record)
    scene.requests.pages_unread(scene.unread(record))
    assert scene.requests.stored_pages(result) == []


def test_what_goes_on_may_be_added_to_while_pages_are_taken_away_and_not_after_the_end(scene: "Scene") -> None:
    record = scene.opened()
    scene.requests.must_go_on(record, "append tokens to")
    scene.requests.preempt(record)
    scene.requests.must_go_on(record, "append tokens to")
    scene.requests.cancel(record)
    with pytest.raises(EngineContractError, match="cannot append tokens to request 'r': it is cancelling"):
        scene.requests.must_go_on(record, "append tokens to")
