"""Files in memory: made for one segment each, as large as it is, and how much room there is for them.

By default a file has no name ("memfd"). Nobody can shrink it, so neither its owner nor a reader dies of SIGBUS; it needs no
place in /dev/shm, which is 64 MiB in many containers; and it is gone with the last process that has it, however that ended.
Readers reach it as /proc/OWNER/fd/N. A named file ("file") has none of this, and is there for whoever needs a path.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from akv.errors import PoolError
from akv.plan.segments import Room
from akv.pool.register import SEGMENT_SUFFIX

SegmentFile = Literal["memfd", "file"]

#: Types of file system whose files are memory.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
#: Linux 6.3. Python does not name it. With the control `vm.memfd_noexec` at 2 no file is made without it.
_MFD_NOEXEC_SEAL = 0x8
#: Bytes that are allocated in one call, so that other calls come in between.
_CHUNK = 64 << 20
#: A limit beyond this is none: version 1 of control groups spells "no limit" as a number.
_NO_LIMIT = 1 << 60


def make_file(kind: SegmentFile, directory: Path, segment_id: str, size: int) -> tuple[int, str]:
    """A new file of `size` bytes that only this user can open: its descriptor, which the caller closes, and its path."""
    if kind == "memfd":
        descriptor = _file_without_a_name()
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        path = str(directory / f"{segment_id}{SEGMENT_SUFFIX}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
        if kind == "memfd":
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, path


def _file_without_a_name() -> int:
    """One that nobody can execute, ever, where the kernel knows of that: a server may be told to refuse all others."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("akv-segment", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("akv-segment", flags)


def allocate(descriptor: int, size: int) -> None:
    """Take the memory of a file, whose content this does not change. Raises OSError if there is none.

    Writing to a mapped page that a full file system cannot allocate would kill the process.
    """
    for begin in range(0, size, _CHUNK):
        os.posix_fallocate(descriptor, begin, min(_CHUNK, size - begin))


def rooms(kind: SegmentFile, directory: Path) -> list[Room]:
    """All memory that a segment needs its bytes of. What cannot be read is left out."""
    found = [_machine(), *_control_groups()]
    if kind == "file":
        found.append(shared_memory(directory))
    return [room for room in found if room is not None]


def shared_memory(directory: Path) -> Room | None:
    """The room of the directory's file system; None if it has no limit of its own, or is not there."""
    try:
        system = os.statvfs(directory)
    except OSError:
        return None
    total = system.f_blocks * system.f_frsize
    return Room(f"shared memory at {directory}", system.f_bavail * system.f_frsize, total) if total else None


def check_in_memory(directory: Path) -> None:
    """Raises PoolError for a directory whose files are on a disk: each page that is saved would be written there, too."""
    status = directory.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == device:
            if (kind := after.split()[0]) in _IN_MEMORY:
                return
            raise PoolError(
                f"store.shared_memory_dir lies on a file system of type {kind!r} ({directory}), which is no memory. Name a "
                "directory of a tmpfs, /dev/shm say, or use store.segment_memory = 'memfd', which needs none for its pages."
            )


def _machine() -> Room | None:
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return Room("the machine's memory", sizes["MemAvailable"], sizes["MemTotal"])
    return None


def _control_groups(root: Path = Path("/sys/fs/cgroup")) -> list[Room]:
    """What the memory limit of a container leaves, as seen inside, in both versions of the interface."""
    found = []
    for folder, limit, used in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        # "max" is no number, and stands for no limit.
        with suppress(OSError, ValueError):
            most = int((folder / limit).read_text(encoding="ascii"))
            taken = int((folder / used).read_text(encoding="ascii"))
            if most < _NO_LIMIT:
                free = most - taken + _reclaimable(folder)
                found.append(Room("the container's memory limit", max(0, free), most))
    return found


def _reclaimable(folder: Path) -> int:
    """Bytes of files that were read and can be dropped, which count as used."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name in {"inactive_file", "total_inactive_file"}:
                return int(value)
    return 0
