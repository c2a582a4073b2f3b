"""What ended on the loop and the engine's thread has not been told: asked for in each pass, so there is no hop in it."""

import threading
from collections.abc import Iterable

from akv.errors import LoadFailed


class Ends:
    """Filled on the loop, emptied by the engine's thread. Names an id only once the engine has announced it."""

    def __init__(self, *, restarts: bool) -> None:
        """`restarts`: the engine starts a request anew whose load failed. Without, a failed load ends the server."""
        self._restarts = restarts
        self._lock = threading.Lock()
        #: Loads that ended, by the id that the engine waits for, with why they failed; "" if they did not.
        self._loads: dict[int, str] = {}
        self._prefixes: dict[int, str] = {}
        self._saves: set[int] = set()
        self._announced_loads: set[int] = set()
        self._announced_saves: set[int] = set()
        self._failed: set[int] = set()

    def load_begins(self, engine_id: int) -> None:
        """A request loads again. The end of an earlier load that nobody asked for is not the end of this one."""
        with self._lock:
            self._loads.pop(engine_id, None)

    def load_ended(self, engine_id: int, reason: str = "") -> None:
        """A request's load has ended; `reason`: why it failed."""
        with self._lock:
            self._loads[engine_id] = reason

    def prefix_ended(self, reservation_id: int, reason: str = "") -> None:
        """A reservation's load has ended."""
        with self._lock:
            self._prefixes[reservation_id] = reason

    def saves_ended(self, engine_id: int) -> None:
        """Nothing reads a finished request's pages any more."""
        with self._lock:
            self._saves.add(engine_id)

    def take(self, finished: Iterable[int], started_loading: Iterable[int]) -> tuple[list[int], list[int]]:
        """The engine announces ids and asks which of all that it announced have ended: saves, and loads.

        Raises LoadFailed where a page was lost and the engine cannot start its request anew: it counts the tokens as there.
        """
        with self._lock:
            self._announced_saves.update(finished)
            self._announced_loads.update(started_loading)
            saved = sorted(self._announced_saves & self._saves)
            loaded = sorted(self._announced_loads & self._loads.keys())
            reasons = {engine_id: self._loads.pop(engine_id) for engine_id in loaded}
            self._announced_loads.difference_update(loaded)
            self._announced_saves.difference_update(saved)
            self._saves.difference_update(saved)
            failed = {engine_id for engine_id, reason in reasons.items() if reason}
            if self._restarts:
                self._failed |= failed
        for engine_id in failed:
            self._fatal(f"{engine_id}", reasons[engine_id])
        return saved, loaded

    def take_failed(self) -> set[int]:
        """Of the loads that `take()` named those that lost a page. Once each."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def take_prefixes(self) -> list[int]:
        """The reservations whose loads have ended, once each. Raises as `take()` does."""
        with self._lock:
            ended, self._prefixes = self._prefixes, {}
        for reservation_id, reason in ended.items():
            if reason:
                self._fatal(f"(reservation {reservation_id})", reason)
        return sorted(ended)

    def _fatal(self, name: str, reason: str) -> None:
        if not self._restarts:
            raise LoadFailed(name, "", reason) from None
