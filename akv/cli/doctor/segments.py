"""The segments of this user on this machine: who lends, what is left behind, whether there is room. Needs no `cli` extra."""

from pathlib import Path

import msgspec

from akv.plan.segments import Room
from akv.pool.register import (
    RefusedEntry,
    read_register,
    register_directory,
    remove_stale,
    unallocated_bytes,
)
from akv.pool.shared_memory import rooms, shared_memory
from akv.settings import StoreSettings
from akv.values.segments import SegmentEntry


class Finding(msgspec.Struct, frozen=True):
    """What the doctor found. `healthy` is what the exit status says."""

    register: str
    #: The file system of the register; None if it has no limit, or is not there.
    shared_memory: Room | None
    #: The least of what a segment of `segment_memory` would be made from.
    room: Room | None
    segment_bytes: int
    segment_memory: str
    #: Bytes that living processes promised to the pool and have not taken yet.
    claimed_bytes: int
    lent: tuple[SegmentEntry, ...]
    #: Of owners that are not ready.
    starting: tuple[SegmentEntry, ...]
    stale: tuple[SegmentEntry, ...]
    orphans: tuple[str, ...]
    refused: tuple[RefusedEntry, ...]
    #: Whether what is stale was removed, and the bytes that this gave back.
    removed: bool
    freed_bytes: int

    @property
    def fits(self) -> bool:
        """Whether a process with these settings finds room; where some run already, another one need not."""
        return self.room is None or bool(self.lent) or self.room.free_bytes - self.claimed_bytes >= self.segment_bytes

    @property
    def troubles(self) -> list[str]:
        """What is left to do, one sentence each."""
        found = [f"{entry.path} is not used ({entry.fault}): {_REMEDIES[entry.fault.value]}" for entry in self.refused]
        if (self.stale or self.orphans) and not self.removed:
            found.append("segments of dead processes hold memory: run akv doctor without --keep")
        if not self.fits and self.room is not None:
            found.append(
                f"a segment of {self.segment_bytes} bytes (store.segment_bytes) does not fit: {self.room.free_bytes} of "
                f"{self.room.total_bytes} bytes of {self.room.what} are free, {self.claimed_bytes} of them promised"
            )
        return found


#: What to do about each word of `akv.pool.register.EntryFault`.
_REMEDIES = {
    "link": "it is a link, or has a second name; nothing of akv makes such, so remove it",
    "no_file": "it has gone",
    "foreign": "it belongs to another user; that one must remove it",
    "writable_by_others": "others may write it, so it says nothing; remove it, or take their rights",
    "malformed": "it is no entry; remove it",
    "version": "another version of akv wrote it; run that one's akv doctor",
    "owner_unknown": "its owner belongs to another container; look there",
    "path": "it names a file that is not its owner's; remove it",
    "segment_missing": "its file is gone or cannot be opened; restart its owner",
    "segment_readable_by_others": "others may open its file; restart its owner",
    "size": "its file has another size; restart its owner",
    "base": "its owner does not have the file there; restart its owner",
    "hidden": "we may not look into its owner: run both as one user and group, in one user namespace, with the same "
    "capabilities",
}


def examine(store: StoreSettings, *, keep: bool) -> Finding:
    """Look at what is lent and left; with `keep` False remove what dead processes left."""
    directory = register_directory(store)
    register = read_register(directory)
    freed = 0 if keep else remove_stale(directory, register)
    available = (
        [] if store.segment_memory == "private" else rooms("file" if store.segment_memory == "file" else "memfd", directory)
    )
    return Finding(
        register=str(directory),
        shared_memory=shared_memory(Path(store.shared_memory_dir)),
        room=min(available, key=lambda room: room.free_bytes, default=None),
        segment_bytes=store.segment_bytes,
        segment_memory=store.segment_memory,
        claimed_bytes=sum(unallocated_bytes(entry) for entry in (*register.usable, *register.claims)),
        lent=register.usable,
        starting=register.claims,
        stale=register.stale,
        orphans=register.orphans,
        refused=register.refused,
        removed=not keep,
        freed_bytes=freed,
    )
