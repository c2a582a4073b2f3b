"""How a request ends, and when its pages are the engine's again (S7, S12, D6, M7)."""

from typing import TYPE_CHECKING

import pytest

from akv.errors import EngineContractError
from akv.plan.lifecycle import Phase
from akv.values.messages import LoadState, SaveOrder

if TYPE_CHECKING:
    from tests.ownership.conftest import Scene


def test_S12_finish_saves_what_no_pass_listed(scene: "Scene") -> None:
    record = scene.opened()
    order = scene.queued(record, 2)
    scene.requests.ran(record, 5 * scene.T, 2, 1, tuple(table[1:5] for table in scene.TABLES))
    [last] = scene.requests.finish(record, upto=4)
    assert isinstance(last, SaveOrder)
    assert last.groups == scene.columns(record, range(2, 4)), "blocks 0 and 1 are on their way, block 4 is beyond the bound"
    assert record.phase is Phase.FINISHING
    assert scene.requests.finish(record, upto=4) == [], "idempotent"
    assert scene.save_end(last, stored=(2,), refused=(3,)) == []
    assert scene.save_end(order, stored=(0, 1)) == [scene.completed(record, stored=3, refused=1)]
    assert (record.phase, len(scene.requests)) == (Phase.CLOSED, 0)


def test_S12_finish_waits_for_no_back_off(scene: "Scene") -> None:
    record = scene.opened()
    scene.passed(record, 2)
    scene.save_end(scene.queued(record, 2), 10.0, refused=(0, 1))
    [last] = scene.requests.finish(record, upto=2)
    assert isinstance(last, SaveOrder)
    assert last.groups[0].blocks == (0, 1)


def test_S12_finish_hands_over_nothing_while_a_load_of_another_fills_the_pages(scene: "Scene") -> None:
    record, loading = scene.opened(), scene.opened("loading", first_token=100)
    scene.passed(record, 1)
    scene.reserved(loading, range(1))
    assert scene.requests.finish(record, upto=1) == [scene.completed(record)]


@pytest.mark.parametrize("ran", [True, False])
def test_S7_a_request_without_saves_closes_at_once(scene: "Scene", ran: bool) -> None:
    record = scene.opened()
    if ran:
        scene.passed(record, 2)
    assert scene.requests.finish(record, upto=0 if ran else 2) == [scene.completed(record)]
    assert scene.requests.finish(record, upto=2) == []
    assert scene.requests.cancel(record) == []


def test_S7_pages_of_a_finished_request_are_held_until_its_saves_ended(scene: "Scene") -> None:
    record, other = scene.opened(), scene.opened("other", first_token=100)
    order = scene.queued(record, 1)
    scene.requests.finish(record, upto=0)
    with pytest.raises(EngineContractError, match="a save reads"):
        scene.reserved(other, range(1))
    scene.save_end(order, dropped=(0,))
    scene.reserved(other, range(1))


def test_D6_finishing_during_a_load_cancels_it_and_keeps_nothing(scene: "Scene") -> None:
    record = scene.opened()
    scene.passed(record, 1)
    order, hold = scene.reserved(record, range(2, 3))
    assert scene.requests.finish(record, upto=1) == [scene.withdrawal(record)]
    assert scene.requests.pages_unread(scene.unread(record)) == []
    assert scene.requests.load_ended(scene.load_end(order, LoadState.CANCELLED)) == [hold, scene.completed(record)]


def test_D6_a_cancelled_request_closes_when_its_load_ended_and_nothing_reads_its_pages(scene: "Scene") -> None:
    record = scene.opened()
    order, hold = scene.reserved(record, range(1))
    assert scene.requests.cancel(record) == [scene.withdrawal(record)]
    assert scene.requests.cancel(record) == [], "idempotent"
    assert scene.requests.load_ended(scene.load_end(order, LoadState.LOADED)) == [hold], (
        "the worker was faster than the withdrawal"
    )
    assert scene.requests.pages_unread(scene.unread(record)) == [scene.completed(record)]
    assert scene.requests.pages_unread(scene.unread(record)) == []


def test_D6_a_cancel_waits_for_reads_and_not_for_puts(scene: "Scene") -> None:
    record, other = scene.opened(), scene.opened("other", first_token=100)
    order = scene.queued(record, 2)
    assert scene.requests.cancel(record) == [scene.withdrawal(record)]
    with pytest.raises(EngineContractError, match="a save reads"):
        scene.reserved(other, range(1))
    assert scene.requests.pages_unread(scene.unread(record)) == [scene.completed(record)]
    scene.reserved(other, range(1))
    assert scene.save_end(order, stored=(0, 1)) == []
    assert record.stored_blocks == 0


def test_D6_a_finishing_request_may_still_be_cancelled(scene: "Scene") -> None:
    record = scene.opened()
    order = scene.queued(record, 2)
    assert scene.requests.finish(record, upto=0) == []
    assert scene.requests.cancel(record) == [scene.withdrawal(record)]
    assert scene.save_end(order, dropped=(0, 1)) == []
    assert scene.requests.pages_unread(scene.unread(record)) == [scene.completed(record)]


def test_D6_cancel_lists_nothing(scene: "Scene") -> None:
    record = scene.opened()
    scene.passed(record, 3)
    assert scene.requests.cancel(record) == [scene.withdrawal(record)]
    assert record.saves == {}


def test_M7_nothing_is_kept_of_a_request_that_closed(scene: "Scene") -> None:
    for index in range(3):
        record = scene.opened(f"r{index}", first_token=100 * index)
        order, _ = scene.reserved(record, range(1))
        scene.requests.load_ended(scene.load_end(order, LoadState.LOADED))
        scene.queued(record, 3)
        scene.requests.cancel(record)
        scene.requests.pages_unread(scene.unread(record))
    assert (len(scene.requests), scene.requests.pages.loading, scene.requests.pages.saving) == (0, set(), {})
