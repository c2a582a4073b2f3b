"""Segments that processes of this host lend to the pool, as files that others of the same user may read (R3)."""

from collections.abc import Sequence
from typing import Protocol

from akv.values.segments import SegmentEntry


class SegmentFile(Protocol):
    """A segment's file, open for reading, after it was found to be what its entry says. Closes when it is let go of."""

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        ...

    @property
    def sealed(self) -> bool:
        """Whether the kernel lets nobody shorten it: only then may a CPU read it through a mapping."""
        ...

    def owner_lives(self) -> bool:
        """Whether the process runs that lends it, and lends it still. Only then do the pool's addresses mean what the entry
        says. Quick.
        """
        ...

    def unchanged(self) -> bool:
        """Whether it is as it was when it was opened: not shortened since, however briefly, nor removed. Quick."""
        ...


class HostSegments(Protocol):
    """The segment register of this host. Both methods block, so they are called through a `CallRunner`."""

    def entries(self) -> Sequence[SegmentEntry]:
        """The segments that this process may read: its own user's, whose owners are alive (X5)."""
        ...

    def open(self, entry: SegmentEntry) -> SegmentFile:
        """Open an entry's file. Raises SegmentUnusable if it is not what the entry says, SegmentNotReady if it can be
        soon.
        """
        ...
