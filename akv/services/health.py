"""The health latch: whether a connector may be used, and if not, why. Asked on every entry and after every wait.

It also knows whether a connector that may be used has lost its cache (O8).
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anyio import CancelScope

from akv.errors import AkvError, ConnectorBroken, NotOpenError


class HealthLatch:
    """Open, perhaps degraded, then closed or broken for good. The first reason stands."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._reason: Callable[[], AkvError] | None = None
        #: Why it goes on without a cache; empty while it has one.
        self.degraded = ""
        self._listeners: list[Callable[[], None]] = []
        self._waits: dict[CancelScope, None] = {}

    @property
    def tripped(self) -> bool:
        """Whether the connector can no longer be used."""
        return self._reason is not None

    @property
    def failure(self) -> AkvError | None:
        """What `check()` raises in every thread; None while it depends on the thread."""
        return None if self._reason is None else self._reason()

    def on_trip(self, listener: Callable[[], None]) -> None:
        """Call `listener` once when the latch trips, so that whoever waits wakes and asks `check()`."""
        self._listeners.append(listener)

    @contextmanager
    def ending_waits(self) -> Iterator[None]:
        """End the waits of the block when the latch trips, and raise what `check()` does, then or at the block's end."""
        with CancelScope() as scope:
            self._waits[scope] = None
            try:
                yield
            finally:
                del self._waits[scope]
        self.check()

    def break_(self, why: str) -> None:
        """The connector cannot go on."""
        self._trip(lambda: ConnectorBroken(f"the connector stopped: {why}. Leave its block; requests go on without a cache"))

    def degrade(self, why: str) -> bool:
        """The connector goes on without a cache, for good. Says whether this is news."""
        news = not self.degraded
        self.degraded = self.degraded or why
        return news

    def close(self) -> None:
        """The connector's block ended."""
        self._trip(
            lambda: NotOpenError(
                "this connector is closed: its `async with open_connector(...)` block has ended. Use it inside the block, "
                "or open another"
            )
        )

    def check(self) -> None:
        """Raise if the connector cannot be used: NotOpenError after close, in a forked child and in another thread,
        ConnectorBroken after a fault.
        """
        if self._reason is not None:
            raise self._reason()
        if os.getpid() != self._process:
            raise NotOpenError(
                f"this connector was opened in process {self._process} and is used in a forked child: the store's client does "
                "not survive a fork. Start worker processes with 'spawn' and open a connector in each"
            )
        if threading.get_ident() != self._thread:
            raise NotOpenError(
                "this connector belongs to the event loop that opened it and is used in another thread. Have that loop call "
                "it: anyio.from_thread.run_sync() from its workers, loop.call_soon_threadsafe() or trio.from_thread"
            )

    def _trip(self, reason: Callable[[], AkvError]) -> None:
        if self._reason is None:
            self._reason = reason
            for listener in self._listeners:
                listener()
            for scope in self._waits:
                scope.cancel()
