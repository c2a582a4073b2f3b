"""`akv.pool.call_failed`: the first failure of a kind at once, the others in one event per interval."""

from collections.abc import Callable
from typing import Any

import pytest

from akv.pool.mooncake import MooncakePool
from akv.pool.trouble import INTERVAL_S, TroubleLog
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState

Events = Callable[..., list[dict[str, Any]]]

FAILED = "akv.pool.call_failed"
DOWN = KeyAnswer(KeyState.UNAVAILABLE, -900)
FULL = KeyAnswer(KeyState.NO_SPACE, -200)
OK = KeyAnswer(KeyState.OK)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_first_failure_is_told_at_once_with_what_it_was(clock: Clock, events: Events) -> None:
    TroubleLog(clock).look_at("get", 98.5, [OK, DOWN, FULL])
    told = {"call": "get", "state": "unavailable", "code": -900, "calls": 1, "keys": 3, "failed": 2, "duration_s": 1.5}
    assert events(FAILED) == [told]


def test_what_is_no_trouble_is_not_told(clock: Clock, events: Events) -> None:
    log = TroubleLog(clock)
    log.look_at("get", 100.0, [OK, KeyAnswer(KeyState.MISSING, -704)])
    log.look_at("get", 100.0, [])
    log.flush()
    assert events(FAILED) == []


def test_later_ones_of_a_kind_are_counted_and_told_once_per_interval(clock: Clock, events: Events) -> None:
    log = TroubleLog(clock)
    for late_s in (0.0, 1.0, 3.0, 2.0):
        clock.now = 100.0 + late_s
        log.look_at("put", clock.now - late_s, [FULL, OK])
    assert len(events(FAILED)) == 1
    clock.now = 100.0 + INTERVAL_S
    log.look_at("put", clock.now, [FULL])
    assert events(FAILED)[1] == events(FAILED)[0] | {"calls": 4, "keys": 7, "failed": 4, "duration_s": 3.0}
    clock.now += INTERVAL_S / 2
    log.look_at("put", clock.now, [FULL])
    assert len(events(FAILED)) == 2


@pytest.mark.parametrize(
    ("call", "answer"),
    [("get", FULL), ("put", DOWN), ("put", KeyAnswer(KeyState.NO_SPACE, -201))],
    ids=["another call", "another state", "another code"],
)
def test_another_kind_is_told_at_once(call: str, answer: KeyAnswer, clock: Clock, events: Events) -> None:
    log = TroubleLog(clock)
    log.look_at("put", 100.0, [FULL])
    log.look_at(call, 100.0, [answer])
    assert len(events(FAILED)) == 2


def test_what_was_counted_is_told_at_the_end_once(clock: Clock, events: Events) -> None:
    log = TroubleLog(clock)
    for _ in range(3):
        log.look_at("put", 100.0, [FULL])
    for _ in range(2):
        log.flush()
    assert [event["calls"] for event in events(FAILED)] == [1, 2]


def test_the_adapter_tells_of_each_of_its_calls_and_at_its_close(
    memory_client: Any, memory: Callable[[int], HostBuffer], events: Events
) -> None:
    buffer, after = memory(8), []
    pool = MooncakePool(memory_client, "127.0.0.1:1", after_call=lambda: after.append(1))
    pool.register(buffer)
    memory_client.codes = {"probe": [-900, -900], "get": [-707], "put": [-200], "remove": [-703]}
    pool.probe(["a", "b"])
    pool.get(["a"], buffer, [0], [8])
    pool.put(["a"], buffer, [0], [8])
    pool.remove(["a"])
    assert [(event["call"], event["code"]) for event in events(FAILED)] == [
        ("probe", -900),
        ("get", -707),
        ("put", -200),
        ("remove", -703),
    ]
    assert len(after) == 4
    memory_client.codes = {"put": [-200]}
    pool.put(["a"], buffer, [0], [8])
    pool.close()
    assert [event["calls"] for event in events(FAILED, call="put")] == [1, 1]
