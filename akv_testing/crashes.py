"""Crashes of services, planted in the service itself: what is under way belongs to somebody else, and must come to its end."""

from collections.abc import Callable
from typing import Any

import anyio

from akv.ports.calls import CallKind, CallSize
from akv.side import Side
from akv.worker import WorkerHalf
from akv_testing.calls import FakeRunner

#: The services of a side with a worker half on it.
SERVICES = ("deliverer", "poller", "breaker", "loader", "saver")


class Planted(Exception):
    """What the services crash with."""


class _Faulty:
    """An event that has not completed, and then raises what no device raises."""

    def __init__(self) -> None:
        self._asked = False

    def query(self) -> bool:
        if self._asked:
            raise Planted
        self._asked = True
        return False


def _raises(*_: object) -> Any:
    raise Planted


def crash(
    service: str, side: Side, worker: WorkerHalf, runner: FakeRunner, patch: Callable[[object, str, object], None]
) -> None:
    """Make one of `SERVICES` fail as soon as it gets its turn. `patch`: replaces an attribute until the test ends."""
    if service == "deliverer":
        runner.start(CallKind.COPY, lambda: None, CallSize(), _raises)
    elif service == "poller":
        side._poller.watch(_Faulty(), lambda _: None)
    elif service == "breaker":
        patch(side.breaker._breaker, "probe_begins", _raises)
        side.breaker._opened(side.breaker._breaker.unavailable(side.breaker.began(), anyio.current_time()))
    else:
        lanes: Any = worker._loads if service == "loader" else worker._saves
        take = lanes._take

        def once() -> Any:
            lanes._take = take
            raise Planted

        lanes._take = once
        lanes.wake()
