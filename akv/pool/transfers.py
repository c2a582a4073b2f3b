"""How many transfers this process has in flight, over all its threads and stores.

Over TCP the client takes about two thousand entries in flight for one peer: past that, calls fail or block for a minute, and
the peer stays wedged. An entry is one buffer: a page of ours, or each buffer of a scatter list. Which peer holds a key is not
known before the call, so the entries to all of them are counted together.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: The client's own variable for the entries that may wait for one peer.
QUEUE_VARIABLE = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"

#: Entries in flight at a time. Seven calls of 256, well below the 2,052 at which a peer with the client's own limit is wedged;
#: a client that knows no such variable has that limit whatever is set. Parts of 256 are served no faster beyond it.
MOST_ENTRIES = 1792

#: Seconds that a call waits for others to end, at most. The client itself gives a dead peer up in a few seconds, so after
#: this time nothing moves, and the caller is better told so.
WAIT_S = 30.0


class TransferBudget:
    """Entries that may be in flight. Whoever asks first is served first, so that a large call is not starved by small ones."""

    def __init__(self, entries: int = MOST_ENTRIES, wait_s: float = WAIT_S) -> None:
        self._limit = entries
        self._wait_s = wait_s
        self._in_flight = 0
        self._most_in_flight = 0
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()

    @property
    def limit(self) -> int:
        """Entries that may be in flight. A call is cut into parts no larger than this."""
        return self._limit

    @property
    def in_flight(self) -> int:
        """Entries in flight now."""
        return self._in_flight

    @property
    def most_in_flight(self) -> int:
        """The most entries that ever were in flight together."""
        return self._most_in_flight

    def lower_to(self, entries: int) -> None:
        """Let at most `entries` be in flight from now on. Raises nothing again: stores of one process share the client."""
        with self._changed:
            self._limit = max(1, min(self._limit, entries))

    @contextmanager
    def hold(self, entries: int) -> Iterator[bool]:
        """Wait until `entries` more may be in flight, and hold them for the block. Blocks the calling thread.

        Yields False, holding nothing, if their turn did not come in time. More entries than the limit wait until nothing else
        is in flight.
        """
        granted = self._take(entries)
        try:
            yield granted
        finally:
            if granted:
                with self._changed:
                    self._in_flight -= entries
                    self._changed.notify_all()

    def _take(self, entries: int) -> bool:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                granted = self._changed.wait_for(lambda: self._queue[0] is ticket and self._fits(entries), self._wait_s)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
            if granted:
                self._in_flight += entries
                self._most_in_flight = max(self._most_in_flight, self._in_flight)
            return granted

    def _fits(self, entries: int) -> bool:
        return not self._in_flight or self._in_flight + entries <= self._limit


def entries_allowed(in_force: Mapping[str, str]) -> int:
    """Entries that the client's variables, as they are in force, let be in flight; at most `MOST_ENTRIES`.

    A larger limit of the client's is not used up: it buys no speed, and other versions of the client do not know it.
    """
    limit = in_force.get(QUEUE_VARIABLE, "")
    return min(MOST_ENTRIES, int(limit)) if limit.isascii() and limit.isdigit() and int(limit) else MOST_ENTRIES


#: What all stores of this process share: a peer counts what comes from the process.
PROCESS_BUDGET = TransferBudget()
