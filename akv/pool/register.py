"""The segment register: one small file for each segment that a process of this user lends on this machine (O3, X5).

It lies in a directory that only this user may enter, within shared memory, and does not outlive the machine. An entry is
published before its segment exists and withdrawn after it is gone, so a segment's file without an entry is nobody's.

An entry is used only if nobody else can have written it and its owner lives. What it says is checked as far as it can be seen:
a wrong base address would have another page's bytes loaded under a key.
"""

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import msgspec

from akv.errors import PoolError
from akv.pool.owners import Liveness, image_of, liveness, mapped_at
from akv.settings import StoreSettings
from akv.values.segments import ENTRY_VERSION, SegmentEntry

ENTRY_SUFFIX = ".json"
SEGMENT_SUFFIX = ".segment"
_PARTIAL_SUFFIX = ".partial"
#: Seconds after which a file that was never finished is nobody's. Writing one takes less than a millisecond.
_PARTIAL_AGE_S = 60.0
#: Bytes. An entry has a few hundred.
_LARGEST_ENTRY = 1 << 16


class EntryFault(StrEnum):
    """Why an entry is not used. The value is the word that is counted and shown."""

    LINK = "link"
    NO_FILE = "no_file"
    FOREIGN = "foreign"
    WRITABLE_BY_OTHERS = "writable_by_others"
    MALFORMED = "malformed"
    VERSION = "version"
    #: Its owner lives in another container, say, where its process id means something else.
    OWNER_UNKNOWN = "owner_unknown"
    #: The file is not where files of this owner are.
    PATH = "path"
    SEGMENT_MISSING = "segment_missing"
    SEGMENT_READABLE_BY_OTHERS = "segment_readable_by_others"
    SIZE = "size"
    #: The owner does not have this file where the entry says.
    BASE = "base"
    #: The kernel does not let us look into its owner: another user, group or user namespace, or more capabilities than ours.
    HIDDEN = "hidden"


class SegmentRefused(Exception):
    """An entry, or the file that it names, is not to be used."""

    def __init__(self, fault: EntryFault) -> None:
        self.fault = fault
        super().__init__(fault.value)


class RefusedEntry(msgspec.Struct, frozen=True):
    """A file of the register that is left alone."""

    path: str
    fault: EntryFault


class Register(msgspec.Struct, frozen=True):
    """What a register holds, sorted by what may be done with it."""

    #: Passed every check.
    usable: tuple[SegmentEntry, ...] = ()
    #: Their owners are gone.
    stale: tuple[SegmentEntry, ...] = ()
    refused: tuple[RefusedEntry, ...] = ()
    #: Claims of living owners that are not mounted yet.
    claims: tuple[SegmentEntry, ...] = ()
    #: Files that belong to no entry.
    orphans: tuple[str, ...] = ()


def register_directory(store: StoreSettings) -> Path:
    """Where processes of this user register what they lend."""
    return Path(store.shared_memory_dir) / f"akv-{os.geteuid()}"


def entry_path(directory: Path, segment_id: str) -> Path:
    """Where a segment's entry stands as long as the segment is lent."""
    return directory / f"{segment_id}{ENTRY_SUFFIX}"


def open_register(directory: Path) -> None:
    """Make the directory if it is not there. Raises PoolError if it cannot be made or trusted (X5)."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise PoolError(
            f"segments are registered in {directory}, which cannot be made ({error.strerror}). Set store.shared_memory_dir to "
            "a directory in shared memory that this user may write to, or store.segment_memory to 'private'."
        ) from error
    try:
        check_directory(directory)
    except SegmentRefused as refused:
        raise PoolError(
            f"segments are registered in {directory}, which is not to be trusted ({refused}): it must be a directory of this "
            "user's own (no link), that nobody else may enter (mode 0700). Look who made it, and remove it; or set "
            "store.shared_memory_dir."
        ) from refused


def publish(directory: Path, entry: SegmentEntry) -> None:
    """Write an entry, or write it anew."""
    write_whole(entry_path(directory, entry.segment_id), msgspec.json.encode(entry))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that only this user may read, or write it anew: whole, or not at all. Raises OSError."""
    partial = path.parent / f".{path.stem}.{secrets.token_hex(8)}{_PARTIAL_SUFFIX}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def withdraw(directory: Path, segment_id: str) -> None:
    """Remove a segment's file, if it has a name, and then its entry. Who has the file mapped keeps the memory. Idempotent."""
    for suffix in (SEGMENT_SUFFIX, ENTRY_SUFFIX):
        (directory / f"{segment_id}{suffix}").unlink(missing_ok=True)


class CheckedEntries:
    """What one reader of a register found usable, by the file that said so.

    Whether an owner has mapped what its entry says takes milliseconds of Python to see, for which a load in the same process
    waits: it is looked at again only where the entry's file is another, or the owner executed another program since. Whether
    the owner lives is looked at each time.
    """

    def __init__(self) -> None:
        self._entries: dict[Path, _Checked] = {}

    def get(self, path: Path, stamp: tuple[int, ...]) -> SegmentEntry | None:
        """The entry that this file held, and holds still; None if it must be read."""
        known = self._entries.get(path)
        return known.entry if known is not None and known.stamp == stamp else None

    def is_good(self, path: Path, checked: "_Checked") -> bool:
        """Whether all that is known of this file's entry is as it was when it was found usable."""
        return checked.image != 0 and self._entries.get(path) == checked

    def replace(self, entries: dict[Path, "_Checked"]) -> None:
        """The register was read: these are usable, and none else."""
        self._entries = entries


class _Checked(msgspec.Struct, frozen=True):
    """An entry, the file that it stood in, and its owner's memory, both as they were before anything was looked at."""

    entry: SegmentEntry
    stamp: tuple[int, ...]
    image: int


def lent_segments(store: StoreSettings, checked: CheckedEntries | None = None) -> list[SegmentEntry]:
    """The segments that living processes of this user lend on this machine, those of this process included (X5).

    None where there is no register, or one that is not to be trusted. `checked`: of a reader that asks again and again.
    """
    return list(read_register(register_directory(store), checked).usable)


def read_register(directory: Path, checked: CheckedEntries | None = None) -> Register:
    """Read and check every entry. Changes nothing."""
    try:
        check_directory(directory)
    except SegmentRefused as refused:
        return Register(refused=() if refused.fault is EntryFault.NO_FILE else (RefusedEntry(str(directory), refused.fault),))
    # Segments before entries: one that is made meanwhile has an entry by then.
    files = {path.stem: path for path in directory.glob(f"*{SEGMENT_SUFFIX}")}
    stale, claims, refused_entries = [], [], []
    known, usable = checked or CheckedEntries(), dict[Path, _Checked]()
    for path in sorted(directory.glob(f"*{ENTRY_SUFFIX}")):
        files.pop(path.stem, None)
        try:
            # Before it is read: what is written meanwhile has another.
            stamp = _stamp(path)
            entry = known.get(path, stamp) or _read_entry(path)
            now = _Checked(entry, stamp, image_of(entry.owner_pid))
            alive = liveness(entry)
            if alive is Liveness.DEAD:
                stale.append(entry)
            elif (alive is Liveness.ALIVE and known.is_good(path, now)) or _is_mounted(entry, directory):
                usable[path] = now
            else:
                claims.append(entry)
        except SegmentRefused as refused:
            # One that was withdrawn meanwhile is no fault.
            if os.path.lexists(path):
                refused_entries.append(RefusedEntry(str(path), refused.fault))
    known.replace(usable)
    orphans = [str(path) for path in (*files.values(), *_old_partials(directory))]
    entries = tuple(one.entry for one in usable.values())
    return Register(entries, tuple(stale), tuple(refused_entries), tuple(claims), tuple(orphans))


def remove_stale(directory: Path, register: Register) -> int:
    """Remove what `read_register` found to be nobody's. Returns the bytes of segments that were given back. Idempotent."""
    freed = 0
    for entry in register.stale:
        freed += _allocated(directory / f"{entry.segment_id}{SEGMENT_SUFFIX}")
        withdraw(directory, entry.segment_id)
    for orphan in map(Path, register.orphans):
        freed += _allocated(orphan)
        orphan.unlink(missing_ok=True)
    return freed


def open_segment(entry: SegmentEntry) -> int:
    """A descriptor of the file that an entry names, read-only, after every check; whoever maps it maps what was checked.

    The caller closes it. Raises SegmentRefused.
    """
    is_memfd = entry.path.startswith("/proc/")
    try:
        # The last part of a path in /proc is a link of the kernel's own.
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if is_memfd else os.O_NOFOLLOW))
    except OSError as error:
        fault = _fault_of(error, EntryFault.SEGMENT_MISSING)
        raise SegmentRefused(EntryFault.HIDDEN if is_memfd and fault is EntryFault.FOREIGN else fault) from error
    try:
        _check_segment(entry, os.fstat(descriptor), links=0 if is_memfd else 1)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unallocated_bytes(entry: SegmentEntry) -> int:
    """What an entry promises and its file does not hold yet. 0 where that cannot be seen."""
    if not entry.path:
        return entry.size
    try:
        return max(0, entry.size - Path(entry.path).stat().st_blocks * 512)
    except OSError:
        return 0


def _check_segment(entry: SegmentEntry, found: os.stat_result, links: int) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != links:
        raise SegmentRefused(EntryFault.LINK)
    if found.st_uid != os.geteuid():
        raise SegmentRefused(EntryFault.FOREIGN)
    if found.st_mode & 0o077:
        raise SegmentRefused(EntryFault.SEGMENT_READABLE_BY_OTHERS)
    if found.st_size != entry.size:
        raise SegmentRefused(EntryFault.SIZE)
    try:
        bases = mapped_at(entry.owner_pid, found)
    except OSError as error:
        raise SegmentRefused(EntryFault.HIDDEN) from error
    if entry.base not in bases:
        raise SegmentRefused(EntryFault.BASE)


def _is_mounted(entry: SegmentEntry, directory: Path) -> bool:
    """Whether an entry, of an owner that is not dead, can be used: False for a claim. Raises SegmentRefused."""
    if liveness(entry) is not Liveness.ALIVE:
        raise SegmentRefused(EntryFault.OWNER_UNKNOWN)
    if not (entry.base and entry.endpoint):
        return False
    _check_place(entry, directory)
    os.close(open_segment(entry))
    return True


def _check_place(entry: SegmentEntry, directory: Path) -> None:
    """A segment is a file of the register's directory, or a descriptor of its owner's."""
    number = entry.path.removeprefix(f"/proc/{entry.owner_pid}/fd/")
    is_descriptor = number != entry.path and number.isascii() and number.isdigit()
    if not is_descriptor and entry.path != str(directory / f"{entry.segment_id}{SEGMENT_SUFFIX}"):
        raise SegmentRefused(EntryFault.PATH)


def check_directory(directory: Path) -> None:
    """Raises SegmentRefused unless it is this user's own and nobody else may enter it (X5)."""
    try:
        found = directory.lstat()
    except OSError as error:
        raise SegmentRefused(_fault_of(error, EntryFault.NO_FILE)) from error
    if not stat.S_ISDIR(found.st_mode):
        raise SegmentRefused(EntryFault.LINK)
    if found.st_uid != os.geteuid():
        raise SegmentRefused(EntryFault.FOREIGN)
    if found.st_mode & 0o077:
        raise SegmentRefused(EntryFault.WRITABLE_BY_OTHERS)


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def read_trusted(path: Path) -> bytes:
    """The content of a file that nobody but this user can have written. Raises SegmentRefused (X5)."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SegmentRefused(_fault_of(error, EntryFault.NO_FILE)) from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise SegmentRefused(EntryFault.LINK)
        if found.st_uid != os.geteuid():
            raise SegmentRefused(EntryFault.FOREIGN)
        if found.st_mode & 0o022:
            raise SegmentRefused(EntryFault.WRITABLE_BY_OTHERS)
        return file.read(_LARGEST_ENTRY)


def _read_entry(path: Path) -> SegmentEntry:
    raw = read_trusted(path)
    try:
        if msgspec.json.decode(raw, type=_Versioned).version != ENTRY_VERSION:
            raise SegmentRefused(EntryFault.VERSION)
        entry = msgspec.json.decode(raw, type=SegmentEntry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SegmentRefused(EntryFault.MALFORMED) from error
    if entry.segment_id != path.stem or entry.size < 1 or entry.base < 0 or entry.owner_pid < 1:
        raise SegmentRefused(EntryFault.MALFORMED)
    if entry.uid != os.geteuid():
        raise SegmentRefused(EntryFault.FOREIGN)
    return entry


def _stamp(path: Path) -> tuple[int, ...]:
    """What no other content of an entry's file has: it is replaced, never written again."""
    try:
        found = path.lstat()
    except OSError as error:
        raise SegmentRefused(_fault_of(error, EntryFault.NO_FILE)) from error
    # Its rights and its names change the time, too, but some kernels' clocks of files stand still for milliseconds.
    return (found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size, found.st_mode, found.st_nlink)


def _fault_of(error: OSError, missing: EntryFault) -> EntryFault:
    return {errno.ELOOP: EntryFault.LINK, errno.EACCES: EntryFault.FOREIGN, errno.EPERM: EntryFault.FOREIGN}.get(
        error.errno or 0, missing
    )


def _old_partials(directory: Path) -> Iterator[Path]:
    """What a process left that ended while it wrote an entry."""
    for path in directory.glob(f".*{_PARTIAL_SUFFIX}"):
        with suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > _PARTIAL_AGE_S:
                yield path


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
