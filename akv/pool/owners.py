"""Whether the process that a file names as its owner still lives, and what it has mapped where: facts from /proc.

A process id alone says little: ids are used again, they begin anew with each boot, and in another container they mean another
process. So an owner is an id with the moment of its start, the boot, and the namespace that its id belongs to.
"""

import os
import select
import weakref
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import msgspec

from akv.values.segments import SegmentEntry
from akv.values.stats import PostedStats

_PROC = Path("/proc")
#: Fields of /proc/PID/stat behind the command's name, from 0: the state, the start in clock ticks since boot, and where the
#: stack begins.
_STATE, _STARTED, _STACK = 0, 19, 25
#: A process that ended, memory and all, and was not waited for yet.
_GONE = frozenset("ZXx")


class Liveness(StrEnum):
    """What can be known of an owner."""

    ALIVE = "alive"
    DEAD = "dead"
    #: It lives, or lived, in another namespace of process ids.
    UNKNOWN = "unknown"


class Owner(msgspec.Struct, frozen=True):
    """A process, for good: no other one is ever equal."""

    pid: int
    started: int
    pid_namespace: int
    boot_id: str


def this_process() -> Owner:
    """The one that asks."""
    pid = os.getpid()
    return Owner(pid, int(_stat_of(pid)[_STARTED]), *_here(pid))


def liveness(entry: SegmentEntry | PostedStats) -> Liveness:
    """Whether the owner of an entry lives."""
    namespace, boot_id = _here(os.getpid())
    if entry.boot_id != boot_id:
        return Liveness.DEAD
    if entry.pid_namespace != namespace:
        return Liveness.UNKNOWN
    try:
        fields = _stat_of(entry.owner_pid)
    except (FileNotFoundError, ProcessLookupError):
        return Liveness.DEAD
    except PermissionError:
        return Liveness.UNKNOWN
    gone = fields[_STATE] in _GONE or int(fields[_STARTED]) != entry.owner_started
    return Liveness.DEAD if gone else Liveness.ALIVE


def image_of(pid: int) -> int:
    """Tells the memory of a process from what it had before it executed another program, which leaves its id and its start
    as they were. 0 where that cannot be seen.
    """
    try:
        # Each program's stack is put elsewhere.
        return int(_stat_of(pid)[_STACK])
    except OSError:
        return 0


class OwnerWatch:
    """Asks again and again whether an owner lives, by its process's own descriptor: one system call. Closes when it is let go
    of.
    """

    def __init__(self, entry: SegmentEntry) -> None:
        self._entry = entry
        self._process: int | None = None
        try:
            self._process = os.pidfd_open(entry.owner_pid)
        except OSError:
            # An old kernel, another namespace, or it has ended: then the files in /proc say so, each time.
            return
        weakref.finalize(self, os.close, self._process)
        # Behind the opening: from here on the descriptor is this owner's, or nobody's.
        self._was_alive = liveness(entry) is Liveness.ALIVE

    def lives(self) -> bool:
        """Whether it runs."""
        if self._process is None:
            return liveness(self._entry) is Liveness.ALIVE
        # A new one each time: threads must not share one.
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return self._was_alive and not poll.poll(0)


def mapped_at(pid: int, file: os.stat_result) -> list[int]:
    """Where a process has a file mapped from its beginning. Raises OSError where that cannot be seen."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    found = []
    for line in (_PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, offset, at, inode = line.split(maxsplit=5)[:5]
        if (at, int(inode), int(offset, 16)) == (device, file.st_ino, 0):
            found.append(int(addresses.partition("-")[0], 16))
    return found


def _stat_of(pid: int) -> list[str]:
    # The command's name stands in parentheses and may hold any character, those two included.
    return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


@lru_cache(maxsize=1)
def _here(_pid: int) -> tuple[int, str]:
    """The namespace of this process's id, which it never leaves (a child may be born into another), and the boot."""
    # By this name: /proc may be that of another namespace, where the id is somebody else's.
    namespace = (_PROC / "self/ns/pid").stat().st_ino
    return namespace, (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
