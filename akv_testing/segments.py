"""A host's shared memory in memory: segments that fake processes lend, their register, and what may happen to either.

host = FakeHost()
segment = host.lend(1 << 20)
store.places.append(segment)              # values that are written from now on lie there, while there is room
ports = fake_ports(store=store, segments=host)
segment.owner_ends(); segment.truncate(100); host.lies(segment, base=0)
"""

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from akv.errors import SegmentUnusable
from akv.values.segments import SegmentEntry
from akv_testing.errors import MisuseError
from akv_testing.memory import HOST_POISON, FakeHostBuffer
from akv_testing.timeline import Work

#: Distance of the segments in their owners' address spaces.
_APART = 1 << 32


class FakeSegment:
    """Memory that a fake process lends. `place()` takes the lowest room, so what was given back is used again at once."""

    def __init__(self, entry: SegmentEntry) -> None:
        self.entry = entry
        self.array = np.full(entry.size, HOST_POISON, dtype=np.uint8)
        self.lives = True
        #: Bytes that the file has; less than the segment once somebody shortened it.
        self.length = entry.size
        self.changed = False
        #: Begin and length of what values take up, ascending.
        self._taken: dict[int, int] = {}

    @property
    def base(self) -> int:
        """Where its owner has it."""
        return self.entry.base

    def owner_ends(self) -> None:
        """The process that lends it ends, however: whoever has it mapped keeps the memory."""
        self.lives = False

    def truncate(self, nbytes: int) -> None:
        """Somebody shortens the file. Copies that read beyond fail."""
        self.length, self.changed = nbytes, True

    def place(self, data: bytes) -> int | None:
        """Store bytes; returns where, or None if there is no room."""
        begin = 0
        for taken, nbytes in sorted(self._taken.items()):
            if taken - begin >= len(data):
                break
            begin = taken + nbytes
        if begin + len(data) > self.array.nbytes:
            return None
        self._taken[begin] = len(data)
        self.array[begin : begin + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return begin

    def free(self, offset: int) -> None:
        """Give room back. The bytes stay until somebody uses it."""
        del self._taken[offset]


class FakeSegmentFile:
    """Implements `akv.ports.segments.SegmentFile`."""

    def __init__(self, segment: FakeSegment) -> None:
        self.segment = segment

    @property
    def nbytes(self) -> int:
        """As the port says."""
        return self.segment.entry.size

    @property
    def sealed(self) -> bool:
        """As the port says. `FakeSegment.truncate` is for those that are not."""
        return False

    def owner_lives(self) -> bool:
        """As the port says."""
        return self.segment.lives

    def unchanged(self) -> bool:
        """As the port says."""
        return not self.segment.changed


class FakeSegmentBuffer(FakeHostBuffer):
    """What `FakeDevice.map_segment()` gives: the segment's own memory. The pool's writes there are not watched: a lease is all
    that orders them.
    """

    def __init__(self, segment: FakeSegment, *, name: str) -> None:
        super().__init__(segment.entry.size, name=name)
        self.segment = segment
        self.array = segment.array

    def watched(self, apply: Callable[[Work], None], offsets: Sequence[int], nbytes: int) -> Callable[[Work], None]:
        """What is done to a copy of these pieces: it fails if the file has become too short for them by its end."""

        def watch(work: Work) -> None:
            apply(work)
            end = work.at_end

            def at_end() -> None:
                if max(offsets) + nbytes > self.segment.length:
                    work.error = OSError(f"{self!r} was shortened to {self.segment.length} bytes")
                end()

            work.at_end = at_end

        return watch


class FakeHost:
    """Implements `akv.ports.segments.HostSegments`: the register of one host, and who lends on it."""

    def __init__(self) -> None:
        self._segments: dict[str, FakeSegment] = {}
        #: What the register says, by segment.
        self._entries: dict[str, SegmentEntry] = {}
        self._numbers = itertools.count(1)
        #: Raised by `open()`, in turn, as long as there are any.
        self.open_errors: list[Exception] = []
        #: The same for `entries()`.
        self.register_errors: list[Exception] = []
        #: How often `entries()` was called.
        self.looks = 0

    def lend(self, nbytes: int, *, endpoint: str = "", base: int | None = None, registered: bool = True) -> FakeSegment:
        """A new process lends a segment. `endpoint`: of its own unless given; `registered`: it says so to its host."""
        number = next(self._numbers)
        entry = SegmentEntry(
            segment_id=f"segment-{number}",
            owner_pid=1000 + number,
            owner_started=number,
            pid_namespace=1,
            boot_id="boot",
            uid=1,
            endpoint=endpoint or f"10.0.0.1:{15000 + number}",
            base=number * _APART if base is None else base,
            size=nbytes,
            path=f"/shared/segment-{number}",
        )
        segment = self._segments[entry.segment_id] = FakeSegment(entry)
        if registered:
            self._entries[entry.segment_id] = entry
        return segment

    def lies(self, segment: FakeSegment, **fields: object) -> None:
        """The register says something else of this segment."""
        self._entries[segment.entry.segment_id] = msgspec.structs.replace(segment.entry, **fields)

    def entries(self) -> list[SegmentEntry]:
        """As the port says."""
        self.looks += 1
        if self.register_errors:
            raise self.register_errors.pop(0)
        return [entry for key, entry in self._entries.items() if self._segments[key].lives]

    def open(self, entry: SegmentEntry) -> FakeSegmentFile:
        """As the port says."""
        if self.open_errors:
            raise self.open_errors.pop(0)
        segment = self._segments.get(entry.segment_id)
        if segment is None:
            raise MisuseError(f"nobody lends {entry.segment_id}")
        if msgspec.structs.replace(entry, endpoint="") != msgspec.structs.replace(segment.entry, endpoint=""):
            raise SegmentUnusable(f"{entry.segment_id} is not what its register entry says (fake)")
        return FakeSegmentFile(segment)
