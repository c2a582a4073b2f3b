"""Waking whoever waits for one load or one request, and whoever waits for any."""

from collections.abc import Callable

from anyio import Event
from anyio.lowlevel import checkpoint

from akv.services.health import HealthLatch


class Notices:
    """Waits for conditions that `ownership/` decides. A notice is a hint to look again, and holds nothing to lose."""

    def __init__(self, latch: HealthLatch) -> None:
        self._latch = latch
        self._waiting: dict[int, Event] = {}
        latch.on_trip(self._wake_all)

    async def until(self, key: int, holds: Callable[[], bool]) -> None:
        """Return once `holds()`. Raises what the latch says if the connector ends first. Cancellation: nothing is held."""
        if holds():
            await checkpoint()
            return
        while not holds():
            self._latch.check()
            event = self._waiting.get(key)
            if event is None:
                event = self._waiting[key] = Event()
            await event.wait()
            # Even if it holds by now: the end of the connector withdrew it, which is not the end that was waited for (M8).
            self._latch.check()

    def wake(self, key: int) -> None:
        """What the waits for `key` look at has changed."""
        event = self._waiting.pop(key, None)
        if event is not None:
            event.set()

    def _wake_all(self) -> None:
        for key in list(self._waiting):
            self.wake(key)


class Changed:
    """Set while completions wait to be fetched with `Connector.completed()`. Level-triggered: waiting again after a fetch is
    safe.
    """

    def __init__(self, latch: HealthLatch) -> None:
        self._latch = latch
        self._event = Event()
        latch.on_trip(self.set)

    def is_set(self) -> bool:
        """Whether `completed()` would return something, or the connector ended."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when `completed()` has something to return. Raises ConnectorBroken or NotOpenError if the connector ended."""
        self._latch.check()
        await self._event.wait()
        self._latch.check()

    def set(self) -> None:
        """There is something to fetch."""
        self._event.set()

    def clear(self) -> None:
        """Everything was fetched."""
        if self._event.is_set() and not self._latch.tripped:
            self._event = Event()
