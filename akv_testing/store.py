"""The shared store behind `FakePool`s: keys, room, leases and eviction under a clock, as Mooncake's master keeps them.

One `FakeStore` with several `FakePool`s stands for several processes on one pool.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from akv.values.segments import Replica
from akv_testing.segments import FakeSegment

#: How long after a refused put the room is there: eviction runs in the background, and a retry after this mostly works.
EVICTION_DELAY_S = 0.02


@dataclass
class _Value:
    #: None while its writer has not finished: such a key cannot be read, and no put can take it.
    data: bytes | None
    #: Before this moment nothing evicts it.
    leased_until: float = float("-inf")
    #: The segment that it lies in, and where; None for memory that no host shares.
    place: tuple[FakeSegment, int] | None = None


class FakeStore:
    """A key-value store whose first values stay.

    `now`: the clock, `anyio.current_time` or a `ManualClock`. `capacity_bytes`: room for values, unlimited when None.
    `lease_s`: what a probe or a get of a key protects it for. `high_watermark`, `eviction_ratio`: above this share of the
    capacity the least recently used values that no lease protects are evicted, until this share more is free.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        capacity_bytes: int | None = None,
        lease_s: float = 10.0,
        high_watermark: float = 1.0,
        eviction_ratio: float = 0.05,
    ) -> None:
        self.now = now
        self.lease_s = lease_s
        #: Set to True and nobody is served: every answer is UNAVAILABLE, as with a dead master.
        self.down = False
        #: How long a get is deemed to take, in seconds. Longer than `lease_s`, and it answers LEASE_EXPIRED.
        self.get_takes_s = 0.0
        #: Guards the store: pools are called from several threads.
        self.lock = threading.RLock()
        #: Where values are put, the first of these with room; else into memory that no host shares.
        self.places: list[FakeSegment] = []
        self._capacity = capacity_bytes
        self._mark = None if capacity_bytes is None else int(capacity_bytes * high_watermark)
        self._ratio = eviction_ratio
        self._used = 0
        #: In the order of last use, the least recent first.
        self._values: dict[str, _Value] = {}
        self._evicts_at: float | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of all finished values."""
        return self._used

    def keys(self) -> list[str]:
        """The keys that can be read, the least recently used first."""
        return [key for key, value in self._values.items() if value.data is not None]

    def value(self, key: str) -> bytes | None:
        """The bytes of a key, or None. Grants no lease and counts as no use: this is the test's own look."""
        stored = self._values.get(key)
        return None if stored is None else stored.data

    def write(self, key: str, data: bytes) -> None:
        """Store a value whatever is there, as a test's set-up or its damage."""
        self.remove(key)
        self._values[key] = _Value(data, place=self._place(data))
        self._used += len(data)

    def move(self, key: str) -> None:
        """The store moves a value to another place and uses the old one for something else, lease or not."""
        value = self._values[key]
        if value.data is None or value.place is None:
            raise KeyError(key)
        segment, offset = value.place
        nbytes = len(value.data)
        value.place = self._place(value.data)
        segment.array[offset : offset + nbytes] = 0xA5
        segment.free(offset)

    def replica(self, key: str) -> Replica | None:
        """Where a key that can be read lies, for a client that asks: grants a lease and counts as a use."""
        if self.touch(key) is None:
            # One that is being written has a place already, which nobody may read yet.
            return None
        value = self._values[key]
        if value.place is None or value.data is None:
            return None
        segment, offset = value.place
        return Replica(segment.entry.endpoint, segment.base + offset, len(value.data))

    def swap(self, one: str, other: str) -> None:
        """Exchange two values: the damage that a planted fault makes. Raises KeyError if one is missing."""
        self._values[one], self._values[other] = self._values[other], self._values[one]

    def begin_write(self, key: str) -> None:
        """Another client began to write a key and has not finished: puts of it answer OK, nobody can read it."""
        self._values.setdefault(key, _Value(None))

    def finish_write(self, key: str, data: bytes) -> None:
        """That client finished."""
        if self.is_unfinished(key):
            self.write(key, data)

    def abandon_write(self, key: str) -> None:
        """That client died, and the store discarded its half-written key."""
        if self.is_unfinished(key):
            self.remove(key)

    def remove(self, key: str) -> bool:
        """Take a key away whatever its lease; False if it was not there."""
        stored = self._values.pop(key, None)
        if stored is not None and stored.data is not None:
            self._used -= len(stored.data)
            if stored.place is not None:
                segment, offset = stored.place
                segment.free(offset)
        return stored is not None

    def _place(self, data: bytes) -> tuple[FakeSegment, int] | None:
        for segment in self.places:
            offset = segment.place(data)
            if offset is not None:
                return segment, offset
        return None

    def evict(self, key: str) -> bool:
        """Evict one key, unless a lease protects it or nobody has it; says whether it did."""
        stored = self._values.get(key)
        if stored is None or stored.data is None or stored.leased_until > self.now():
            return False
        return self.remove(key)

    def clear(self) -> None:
        """A restarted master: every key is gone."""
        for key in list(self._values):
            self.remove(key)

    def is_unfinished(self, key: str) -> bool:
        """Whether another client is writing the key."""
        stored = self._values.get(key)
        return stored is not None and stored.data is None

    def touch(self, key: str) -> bytes | None:
        """Read a key as a client does: grants a lease and counts as a use. None if it cannot be read."""
        self.run_eviction()
        stored = self._values.get(key)
        if stored is None or stored.data is None:
            return None
        stored.leased_until = max(stored.leased_until, self.now() + self.lease_s)
        self._values[key] = self._values.pop(key)
        return stored.data

    def add(self, key: str, data: bytes) -> bool:
        """Store a new value as a client does; False if there is no room now. An existing or unfinished key stays as it is."""
        self.run_eviction()
        if key in self._values:
            return True
        if self._capacity is not None and self._used + len(data) > self._capacity:
            self._plan_eviction()
            return False
        self.write(key, data)
        if self._mark is not None and self._used > self._mark:
            self._plan_eviction()
        return True

    def run_eviction(self) -> None:
        """Do what the background has had the time to do by now."""
        if self._capacity is None or self._mark is None or self._evicts_at is None or self._evicts_at > self.now():
            return
        self._evicts_at = None
        target = self._mark - int(self._capacity * self._ratio)
        for key in self.keys():
            if self._used <= target:
                break
            self.evict(key)

    def _plan_eviction(self) -> None:
        if self._evicts_at is None:
            self._evicts_at = self.now() + EVICTION_DELAY_S
