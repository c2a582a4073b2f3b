"""How long a finished request's pages are held (S7)."""

from typing import TYPE_CHECKING

from akv.ownership.holds import Holds
from akv.plan.lifecycle import Phase

if TYPE_CHECKING:
    from tests.ownership.conftest import Scene


def test_S7_holds_expire_in_the_order_in_which_they_began(scene: "Scene") -> None:
    holds = Holds(60.0)
    assert holds.next_at == float("inf")
    first, second, third = (scene.opened(name, first_token=100 * n) for n, name in enumerate("abc"))
    assert holds.begin(first, 1.0)
    assert not holds.begin(second, 2.0), "the first comes first"
    holds.begin(third, 3.0)
    assert holds.next_at == 61.0
    holds.end(second.key)
    holds.end(second.key)
    assert holds.expired(60.5) == []
    assert holds.expired(61.0) == [first]
    assert (holds.expired(61.0), holds.next_at) == ([], 63.0)
    assert holds.expired(100.0) == [third]


def test_S7_a_hold_that_lasted_too_long_gives_the_saves_up(scene: "Scene") -> None:
    record = scene.opened()
    scene.queued(record, 2)
    assert scene.requests.hold_expired(record) == [], "an open request holds its pages itself"
    scene.requests.finish(record, upto=0)
    assert scene.requests.hold_expired(record) == [scene.withdrawal(record)]
    assert record.phase is Phase.CANCELLING
    assert scene.requests.pages_unread(scene.unread(record)) == [scene.completed(record)]
