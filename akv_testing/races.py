"""Who may touch what when: vector clocks over the host and the streams, and a ledger of accesses that finds races.

An access is ordered behind another if its actor had, before it, waited for an event that was recorded behind the other (or
seen it complete), directly or through others. Two accesses of the same memory, one of them a write, must be ordered.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from akv_testing.errors import UnorderedAccess


@dataclass(frozen=True)
class Stamp:
    """A point in one actor's order, and what is known to lie before it."""

    actor: str
    index: int
    #: The actor's own count of steps at this point.
    step: int
    #: For each actor, by index, the last step that lies before this point. Its own included.
    clock: Mapping[int, int]

    def is_behind(self, other: "Stamp") -> bool:
        """Whether this point is ordered behind `other`."""
        return self.clock.get(other.index, 0) >= other.step


@dataclass
class Actor:
    """The host or a stream: does one thing after another."""

    name: str
    index: int
    clock: dict[int, int] = field(default_factory=dict)

    def join(self, clock: Mapping[int, int]) -> None:
        """Whatever this actor does from now on is ordered behind everything in `clock`."""
        for index, step in clock.items():
            self.clock[index] = max(step, self.clock.get(index, 0))

    def step(self) -> Stamp:
        """One step on."""
        self.clock[self.index] = self.clock.get(self.index, 0) + 1
        return self.here()

    def here(self) -> Stamp:
        """The present end of this actor's order."""
        return Stamp(self.name, self.index, self.clock.get(self.index, 0), dict(self.clock))


class Actors:
    """The host, which is one actor however many threads it has, and the streams of one device."""

    def __init__(self) -> None:
        self._count = 0
        self.host = self.add("host")

    def add(self, name: str) -> Actor:
        """A new actor, ordered behind nothing."""
        self._count += 1
        return Actor(name, self._count)


@dataclass(frozen=True)
class _Access:
    begin: int
    end: int
    writes: bool
    stamp: Stamp


class AccessLedger:
    """The accesses of one memory that a later one must be ordered behind. Positions are pages or bytes, ends excluded."""

    def __init__(self, describe: Callable[[int, int], str]) -> None:
        self._describe = describe
        self._accesses: list[_Access] = []

    def check(self, stamp: Stamp, begin: int, end: int, *, writes: bool) -> None:
        """Raise UnorderedAccess if an access by `stamp` would race with an earlier one."""
        for earlier in self._accesses:
            overlaps = earlier.begin < end and begin < earlier.end
            if overlaps and (writes or earlier.writes) and not stamp.is_behind(earlier.stamp):
                raise UnorderedAccess(
                    stamp.actor,
                    "writes" if writes else "reads",
                    self._describe(begin, end),
                    earlier.stamp.actor,
                    "wrote" if earlier.writes else "read",
                )

    def note(self, stamp: Stamp, begin: int, end: int, *, writes: bool) -> None:
        """Check an access and remember it. What it covers and is ordered before it need not be remembered any longer."""
        self.check(stamp, begin, end, writes=writes)
        self._accesses = [
            earlier
            for earlier in self._accesses
            if not (begin <= earlier.begin and earlier.end <= end and (writes or self._repeats(stamp, earlier)))
        ]
        self._accesses.append(_Access(begin, end, writes, stamp))

    @staticmethod
    def _repeats(stamp: Stamp, earlier: _Access) -> bool:
        return not earlier.writes and stamp.index == earlier.stamp.index
