"""Somebody who runs blocking calls and says when they returned."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from anyio.abc import TaskStatus


class CallKind(StrEnum):
    """Each kind has its own threads and its own limit of calls at a time, so that slow puts never hold up a lookup."""

    PROBE = "probe"
    GET = "get"
    PUT = "put"
    #: Device copies, and the allocation of staging memory.
    COPY = "copy"
    #: Copies of window pages that the next forward waits for: never behind another copy.
    SNAPSHOT = "snapshot"
    #: Asks where pages lie, copies those that lie in mapped segments, and asks again.
    READ = "read"
    #: Asks again where pages lie that a device has copied. As quick as a probe.
    DESCRIBE = "describe"
    #: Looks for segments of this host and maps them, which may take seconds for each.
    MAP = "map"


class CallSize(msgspec.Struct, frozen=True):
    """What a call moves, for latency models and logs."""

    keys: int = 0
    bytes: int = 0


class CallEnd(msgspec.Struct, frozen=True):
    """How a call ended: with a value, or with what it raised."""

    value: Any = None
    error: BaseException | None = None


class CallRunner(Protocol):
    """Runs blocking calls off the loop. A call that began always ends with exactly one `done`, on the loop, or never returns.

    There is no way to stop a call: that is the point (M1). Whoever gives up waiting leaves the record of what the call
    touches in `ownership/`, and `done` finds it there.
    """

    def start(self, kind: CallKind, call: Callable[[], Any], size: CallSize, done: Callable[[CallEnd], None]) -> None:
        """Run `call` elsewhere; then run `done` on the loop, from within `serve()`. Called on the loop, returns at once.

        The caller keeps at most `limits[kind]` calls of a kind running; one more may wait for a thread.
        """
        ...

    @property
    def limits(self) -> dict[CallKind, int]:
        """How many calls of each kind run at a time."""
        ...

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Deliver ends until cancelled. A `done` that raises is a crash of akv and leaves through here."""
        ...

    async def close(self, deadline_s: float) -> int:
        """End the threads that are idle, within the deadline; return how many calls are still outstanding.

        Cancellation: the threads end by themselves once idle; what is outstanding stays on record with the exit guard (O6).
        """
        ...
