"""The segments of this host behind `akv.ports.segments`: the register says which, and each file is checked again."""

import fcntl
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from akv.errors import SegmentNotReady, SegmentUnusable
from akv.pool.owners import OwnerWatch
from akv.pool.register import CheckedEntries, SegmentRefused, entry_path, lent_segments, open_segment, register_directory
from akv.settings import StoreSettings
from akv.values.segments import SegmentEntry


class OpenSegment:
    """Implements `akv.ports.segments.SegmentFile`. Closes when it is let go of."""

    def __init__(self, entry: SegmentEntry, descriptor: int, registered: Path) -> None:
        """Takes over a descriptor of the entry's file. `registered`: where the entry stands."""
        self._entry = entry
        self._registered = registered
        self._owner = OwnerWatch(entry)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        #: Nobody can shorten it, ever.
        self.sealed = _is_sealed(descriptor)
        self._links = os.fstat(descriptor).st_nlink

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        return self._entry.size

    def fileno(self) -> int:
        """Its descriptor, for reading."""
        return self._descriptor

    def owner_lives(self) -> bool:
        """Whether the process runs that lends it, and lends it still: the next segment may have its addresses."""
        return self._registered.exists() and self._owner.lives()

    def unchanged(self) -> bool:
        """Whether nobody shortened, linked or removed the file since it was opened. Writes do not count."""
        if self.sealed:
            return True
        status = os.fstat(self._descriptor)
        return (status.st_size, status.st_nlink) == (self._entry.size, self._links) and not _has_holes(status)


class RegisteredSegments:
    """Implements `akv.ports.segments.HostSegments`."""

    def __init__(self, store: StoreSettings) -> None:
        """`store`: says where the register is."""
        self._store = store
        self._checked = CheckedEntries()

    def entries(self) -> Sequence[SegmentEntry]:
        """The segments that this process may read, its own among them."""
        return lent_segments(self._store, self._checked)

    def open(self, entry: SegmentEntry) -> OpenSegment:
        """Open an entry's file. Raises SegmentUnusable if it is not what the entry says, SegmentNotReady if it is a file with
        holes, as one is that its owner is still allocating.
        """
        try:
            file = OpenSegment(entry, open_segment(entry), entry_path(register_directory(self._store), entry.segment_id))
        except SegmentRefused as refused:
            raise SegmentUnusable(
                f"segment {entry.segment_id} of process {entry.owner_pid}, {entry.path}, is not what the register says "
                f"({refused.fault.value}): its pages go through the store"
            ) from refused
        if not file.sealed and _has_holes(os.fstat(file.fileno())):
            raise SegmentNotReady(f"segment {entry.segment_id} of process {entry.owner_pid} is not allocated yet")
        return file


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file system that knows no seals
        return False


def _has_holes(status: os.stat_result) -> bool:
    # A file that was shortened and made longer again has its size, and reads as zeros. Its times tell nothing: they change
    # with the first write into each of its pages.
    return status.st_blocks * 512 < status.st_size
