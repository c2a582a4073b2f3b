"""The pool: a key-value store of immutable pages. Every method blocks, so it is called through a `CallRunner`."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from akv.ports.device import HostBuffer
from akv.values.segments import Replica


class KeyState(StrEnum):
    """What a call says of one key, in akv's words. The value is the word that events and results carry."""

    #: Probe: the key is there. Get: exactly the asked number of bytes arrived. Put: accepted (which proves no presence, S5).
    OK = "ok"
    #: There is no such key, or its writer has not finished.
    MISSING = "missing"
    #: The stored value is shorter or longer than a page of this layout: another layout's, or damage.
    WRONG_SIZE = "wrong_size"
    #: What lies behind the page is not its trailer: it was damaged, or another client wrote it (S11).
    DAMAGED = "damaged"
    #: The bytes were written after the store's lease on them had passed: they may be another key's.
    LEASE_EXPIRED = "lease_expired"
    #: The pool has no room for the value.
    NO_SPACE = "no_space"
    #: The pool could not be asked: its master did not answer.
    UNAVAILABLE = "unavailable"
    #: The pool answered, but the process that holds the value, or was to hold it, is gone. Says nothing about other keys.
    HOLDER_LOST = "holder_lost"
    #: The store refused the call's form, answered with a list of the wrong length, or with a code that akv does not know.
    REFUSED = "refused"


#: Answers behind which a transfer may still be under way, where the pool does not let go at the return (M3): the transfer
#: failed, or was waited for no longer; or the answer is one that nobody understands. Every other answer was given before a
#: transfer began, as where the key is missing, the master does not answer, or there is no space; or behind its end, as where a
#: lease had passed or a value was too short.
UNSETTLED = frozenset({KeyState.HOLDER_LOST, KeyState.REFUSED})


class KeyAnswer(msgspec.Struct, frozen=True):
    """The answer for one key."""

    state: KeyState
    #: The store's own code, for logs: a negative number, or the size that a get reported.
    code: int = 0


class PagePool(Protocol):
    """A shared store of pages. First value stays: a put of an existing key changes nothing and answers OK.

    Blocking and thread safe; each call may take as long as the store takes, so nobody on an event loop calls them directly.
    None of these raises for what the store answers: trouble is an answer per key. They raise `NotOpenError` after
    `close()` and in a forked child. `akv_testing.conformance.pool` holds what an implementation must pass.
    """

    @property
    def lets_go_at_return(self) -> bool:
        """Whether a call that returned, with whatever answer, touches the memory that it was given no more.

        False where a peer may touch it after a transfer error (RDMA): then nothing but akv's own slots is handed to it, and
        the slots of keys whose answer is in `UNSETTLED` are out of use until their buffer was unregistered (M3).
        """
        ...

    def probe(self, keys: Sequence[str]) -> list[KeyAnswer]:
        """Say for each key whether it can be read now: one answer per key, in order. OK only if the store said so (L2)."""
        ...

    def get(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """Read each key's value into `buffer` at its offset: one answer per key, in order.

        `sizes` are the exact sizes in bytes that the values must have; another size is WRONG_SIZE. When the answer is not OK
        the bytes at the offset are undefined. The buffer must be registered and the pieces disjoint.
        """
        ...

    def put(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """Store the bytes at each offset under its key: one answer per key, in order. The bytes are read until it returns."""
        ...

    def describe(self, keys: Sequence[str]) -> Sequence[Replica | None]:
        """Say where each key's value lies in memory: one answer per key, in order; None where the pool names no place.

        Grants a lease on each value that it names, counted from some moment within the call (R2).
        """
        ...

    def remove(self, keys: Sequence[str]) -> list[KeyAnswer]:
        """Take values out of the pool, leased or not, whoever put them: one answer per key, in order."""
        ...

    def remove_all(self, prefix: str) -> KeyAnswer:
        """Take every value out of the pool whose key begins with `prefix`, leased or not. OK with their number as its code."""
        ...

    def register(self, buffer: HostBuffer) -> None:
        """Make a buffer known to the store's transport, before the first call that names it. Raises PoolError if refused."""
        ...

    def unregister(self, buffer: HostBuffer) -> None:
        """Take a registration back. Only when no call that names the buffer is outstanding. Idempotent.

        Once it returned no peer touches the buffer any more. Raises PoolError if the store refused: then the pool keeps the
        buffer alive to the end of the process, since a peer may still write there (M3).
        """
        ...

    def close(self) -> None:
        """Leave the pool. Only when no call is outstanding. Idempotent. May hold the interpreter lock for seconds (O7)."""
        ...
