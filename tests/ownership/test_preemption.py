"""A life that goes on with other pages (S2, S7, D6, D8, M7)."""

from typing import TYPE_CHECKING

import pytest

from akv.errors import EngineContractError
from akv.plan.lifecycle import Phase
from akv.values.messages import LoadState

if TYPE_CHECKING:
    from akv.ownership.request_record import RequestRecord
    from tests.ownership.conftest import Scene


def preempted(scene: "Scene", record: "RequestRecord") -> None:
    scene.requests.preempt(record)
    scene.requests.pages_unread(scene.unread(record))


def test_D8_the_life_goes_on_as_another_incarnation_without_pages(scene: "Scene") -> None:
    record = scene.opened()
    scene.passed(record, 3)
    was, withdrawal, completed = record.incarnation, scene.withdrawal(record, preempted=True), scene.completed(record)
    assert scene.requests.preempt(record) == [withdrawal]
    assert record.phase is Phase.PREEMPTING
    assert scene.requests.preempt(record) == [], "idempotent while under way"
    assert scene.requests.pages_unread(scene.unread(record)) == [completed]
    assert (record.phase, record.computed, record.tail) == (Phase.OPEN, 0, ())
    assert record.incarnation > was
    assert scene.requests.records == [record]


def test_D8_what_ends_late_belongs_to_the_pages_that_are_gone(scene: "Scene") -> None:
    record, other = scene.opened(), scene.opened("other", first_token=100)
    order = scene.queued(record, 2)
    late = scene.save_end
    unread = scene.unread(record)
    scene.requests.preempt(record)
    scene.requests.pages_unread(unread)
    assert late(order, stored=(0, 1)) == []
    assert record.stored_blocks == 0
    scene.reserved(other, range(2))
    assert scene.requests.pages_unread(unread) == [], "nor is anything withdrawn twice"
    assert record.is_open


def test_S2_withdrawn_saves_are_listed_again_and_stored_ones_are_not(scene: "Scene") -> None:
    record = scene.opened()
    scene.save_end(scene.queued(record, 2), stored=(0, 1))
    scene.queued(record, 4)
    assert scene.listed(record, 4) == ()
    preempted(scene, record)
    assert scene.listed(record, 4) == (2, 3)


def test_S2_lost_window_pages_are_listed_again_and_stored_ones_are_not(window_scene: "Scene") -> None:
    scene = window_scene
    record = scene.opened()
    ([stored], _) = scene.requests.queue_saves([scene.closing(record, range(2, 4))], 0.0)
    scene.save_end(stored, stored=(2, 3))
    scene.requests.queue_saves([scene.closing(record, range(2, 6))], 0.0)
    record.windows.ran(0, (), closes=True)
    preempted(scene, record)
    assert not record.windows.closed
    assert scene.closing(record, range(2, 6)).groups[0].blocks == (4, 5)


def test_S7_pages_of_queued_saves_are_free_when_nothing_reads_them(scene: "Scene") -> None:
    record, other = scene.opened(), scene.opened("other", first_token=100)
    scene.queued(record, 2)
    scene.requests.preempt(record)
    with pytest.raises(EngineContractError, match="a save reads"):
        scene.reserved(other, range(1))
    scene.requests.pages_unread(scene.unread(record))
    scene.reserved(other, range(1))


def test_D6_a_load_under_way_ends_first(scene: "Scene") -> None:
    record = scene.opened()
    order, hold = scene.reserved(record, range(1))
    assert record.phase is Phase.LOADING
    scene.requests.preempt(record)
    assert scene.requests.pages_unread(scene.unread(record)) == []
    completed = scene.completed(record)
    assert scene.requests.load_ended(scene.load_end(order, LoadState.CANCELLED)) == [hold, completed]
    assert (record.phase, record.load, record.valid_to) == (Phase.OPEN, None, None)
    scene.reserved(record, range(1))


@pytest.mark.parametrize("verb", ["look up", "schedule", "reserve pages for"])
def test_while_the_pages_are_taken_away_nothing_else_can_be_done(scene: "Scene", verb: str) -> None:
    record = scene.opened()
    scene.requests.preempt(record)
    with pytest.raises(EngineContractError, match=f"cannot {verb} request 'r': it is preempting; await preempted"):
        scene.requests.must_be_open(record, verb)
    order = scene.requests.listing.blocks(record, 2, scene.TABLES, 0, 0.0)
    assert order is not None
    assert scene.requests.queue_saves([order], 0.0) == ([], None)


@pytest.mark.parametrize("cancels", [False, True])
def test_D6_a_request_may_end_while_its_pages_are_taken_away(scene: "Scene", cancels: bool) -> None:
    record = scene.opened()
    scene.passed(record, 2)
    scene.requests.preempt(record)
    effects = scene.requests.cancel(record) if cancels else scene.requests.finish(record, upto=2)
    assert effects == [scene.withdrawal(record)], "and nothing is saved"
    completed = scene.completed(record)
    assert scene.requests.pages_unread(scene.unread(record)) == [completed]
    assert (record.phase, len(scene.requests)) == (Phase.CLOSED, 0)


@pytest.mark.parametrize("phase", [Phase.FINISHING, Phase.CANCELLING, Phase.CLOSED])
def test_a_request_that_ends_is_not_preempted(scene: "Scene", phase: Phase) -> None:
    record = scene.opened()
    scene.queued(record, 1)
    if phase is Phase.FINISHING:
        scene.requests.finish(record, upto=0)
    else:
        scene.requests.cancel(record)
    if phase is Phase.CLOSED:
        scene.requests.pages_unread(scene.unread(record))
    assert record.phase is phase
    assert scene.requests.preempt(record) == []
    assert record.phase is phase


def test_D3_failed_loads_are_counted_for_the_whole_life(scene: "Scene") -> None:
    record = scene.opened()
    order, _ = scene.reserved(record, range(1))
    scene.requests.load_ended(scene.load_end(order, LoadState.FAILED))
    preempted(scene, record)
    assert record.failed_loads == 1
