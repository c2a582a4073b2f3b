"""The segments that this process lends: made, mounted, registered, touched, and removed with it, however it ends (R3, O3).

A store that lends so is set up with a segment of 0 bytes, and files are mounted as its segments. The store's client alone maps
them here; where, is read from /proc/self/maps. What a process leaves that is killed, the next one that starts removes.
"""

import atexit
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from akv.errors import PoolError
from akv.observe import SEGMENT_STALE, emit
from akv.plan.segments import split, too_small
from akv.pool.client import StoreClient
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.owners import mapped_at, this_process
from akv.pool.register import (
    open_register,
    publish,
    read_register,
    register_directory,
    remove_stale,
    unallocated_bytes,
    withdraw,
)
from akv.pool.shared_memory import SegmentFile, allocate, check_in_memory, make_file, rooms
from akv.pool.touching import Touching
from akv.settings import StoreSettings
from akv.values.segments import SegmentEntry

#: Seconds that the end of the client, or of the process, waits for the thread that touches. Its calls take milliseconds.
STOP_DEADLINE_S = 2.0


class NotMounted(PoolError):
    """The store's client did not take a file as a segment."""


class LentSegments:
    """Files that this process lends, from `claim()` to `remove()`. In between: `mount()`, `publish()`, `touch()`.

    Belongs to one client of the store. `claim()` and `publish()` read and write files and are for a worker thread.
    """

    def __init__(self, store: StoreSettings) -> None:
        self._store = store
        self._directory = register_directory(store)
        #: What the files are.
        self.kind: SegmentFile = "file" if store.segment_memory == "file" else "memfd"
        self._pid = os.getpid()
        #: Claims, then what is mounted, and for each the descriptor of its file: a memfd lives as long as it is open.
        self._lent: list[tuple[SegmentEntry, int]] = []
        self._touching: Touching | None = None
        self._removed = False
        self._changing = threading.Lock()

    @property
    def entries(self) -> list[SegmentEntry]:
        """What is lent, as the register has it."""
        return [entry for entry, _ in self._lent]

    @property
    def untouched_bytes(self) -> int:
        """What is left to touch."""
        return sum(entry.size for entry in self.entries) if self._touching is None else self._touching.left_bytes

    def claim(self) -> None:
        """Clear away what dead processes left, and make the files, if there is room.

        Raises PoolError (fault of the deployment), and leaves nothing, where shared memory is too small or cannot be used.
        """
        open_register(self._directory)
        _clear(self._directory)
        with self._changing:
            _OPEN.add(self)
            try:
                if self.kind == "file":
                    check_in_memory(self._directory)
                self._make_files()
                self._check_room()
                if self.kind == "file":
                    for entry, descriptor in self._lent:
                        allocate(descriptor, entry.size)
            except OSError as error:
                self._remove()
                raise PoolError(
                    f"no segment of {self._store.segment_bytes} bytes could be made in shared memory ({error.strerror}; "
                    f"store.segment_memory is {self._store.segment_memory!r}, store.shared_memory_dir "
                    f"{self._store.shared_memory_dir!r}). Lend less, or use store.segment_memory = 'private'."
                ) from error
            except BaseException:
                self._remove()
                raise
            if self._removed:
                # Whoever waited for this has gone.
                self._remove()

    def mount(self, client: StoreClient) -> None:
        """Mount the files, in milliseconds. Raises NotMounted; closing the client unmounts what was mounted."""
        for index, (entry, descriptor) in enumerate(self._lent):
            answer = client.mount_segment(entry.path, entry.size, 0, self._store.protocol, "")
            code = answer.get("ret") if isinstance(answer, dict) else answer
            if code != 0:
                raise NotMounted(
                    f"the store did not mount a segment of {entry.size} bytes in shared memory (code {code}). Set "
                    "store.segment_memory to 'private' to lend what the store allocates itself. The client told stderr why."
                )
            bases = mapped_at(self._pid, os.fstat(descriptor))
            # A kernel that does not show it well is no reason not to lend. Without its base nobody reads it in place.
            base = bases[0] if len(bases) == 1 else 0
            self._lent[index] = (msgspec.structs.replace(entry, base=base, name=client.get_hostname()), descriptor)

    def publish(self, endpoint: str) -> None:
        """Tell other processes where the segments are. `endpoint`: how the pool's descriptors name this process."""
        with self._changing:
            if not self._removed:
                self._lent = [(msgspec.structs.replace(entry, endpoint=endpoint), fd) for entry, fd in self._lent]
                for entry in self.entries:
                    publish(self._directory, entry)

    def holds(self, address: int, size: int) -> bool:
        """Whether these bytes of this process lie in a mounted segment."""
        return any(0 < entry.base <= address and address + size <= entry.base + entry.size for entry in self.entries)

    def touch(self) -> None:
        """Begin to touch the segments, or go on with it. Returns at once."""
        if self._touching is None:
            self._touching = Touching((entry.base, entry.size, descriptor) for entry, descriptor in self._lent if entry.base)
        self._touching.start()

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> bool:
        """Touch no more. False if the thread did not end in time: then nothing may be unmounted."""
        return self._touching is None or self._touching.stop(deadline_s)

    def remove(self) -> None:
        """Withdraw entries and remove files; who has one mapped keeps its memory. Idempotent; nothing in a forked child."""
        if os.getpid() == self._pid:
            self._removed = True
            with self._changing:
                self._remove()

    def _make_files(self) -> None:
        owner = this_process()
        for size in split(self._store.segment_bytes, self._store.segment_file_bytes):
            segment_id = secrets.token_hex(16)
            entry = SegmentEntry(
                segment_id=segment_id,
                owner_pid=owner.pid,
                owner_started=owner.started,
                pid_namespace=owner.pid_namespace,
                boot_id=owner.boot_id,
                uid=os.geteuid(),
                endpoint="",
                base=0,
                size=size,
                path="",
            )
            # Before its file: one without an entry is nobody's.
            publish(self._directory, entry)
            descriptor = -1
            try:
                descriptor, path = make_file(self.kind, self._directory, segment_id, size)
            finally:
                self._lent.append((entry, descriptor))
            entry = msgspec.structs.replace(entry, path=path)
            self._lent[-1] = (entry, descriptor)
            publish(self._directory, entry)

    def _check_room(self) -> None:
        """Refuse what does not fit, before the kernel kills somebody for it.

        All claims are on record, this one too: of two that come at once, none may be taken for the only one.
        """
        register = read_register(self._directory)
        claimed = sum(unallocated_bytes(entry) for entry in (*register.usable, *register.claims))
        room = too_small(rooms(self.kind, self._directory), claimed)
        if room is None:
            return
        wanted = self._store.segment_bytes
        raise PoolError(
            f"{wanted} bytes of segments do not fit in {room.what}: {room.free_bytes} of {room.total_bytes} bytes are free, "
            f"and other processes have claimed {claimed - wanted} of them. {_remedy(room.what, wanted)} Or lend less "
            "(store.segment_bytes), or use store.segment_memory = 'private', which other processes read more slowly."
        )

    def _remove(self) -> None:
        for entry, descriptor in self._lent:
            with suppress(OSError):
                withdraw(self._directory, entry.segment_id)
            if descriptor >= 0:
                os.close(descriptor)
        self._lent.clear()
        _OPEN.discard(self)


def _remedy(what: str, wanted: int) -> str:
    if not what.startswith("shared memory"):
        return "Give the container or the machine more memory."
    return (
        f"Give the container more of it (docker run --shm-size={-(-wanted // 2**30) + 1}g; in Kubernetes an emptyDir of "
        "medium Memory at that directory), or use store.segment_memory = 'memfd', which needs none there."
    )


def _clear(directory: Path) -> None:
    register = read_register(directory)
    if register.stale or register.orphans:
        freed = remove_stale(directory, register)
        emit(SEGMENT_STALE, segments=len(register.stale), orphans=len(register.orphans), bytes=freed)


#: What this process lends.
_OPEN: set[LentSegments] = set()
_watching = False


def remove_at_exit() -> None:
    """See to it that the end of the process removes what it lends.

    Called before the exit guard is armed: hooks run in reverse, and nothing is removed beside a call that it waits for (O6).
    """
    global _watching  # noqa: PLW0603 - a process ends once, whatever it opened
    if not _watching:
        _watching = True
        atexit.register(_at_exit)
        PROCESS_GUARD.before_leaving(_at_exit)


def _at_exit() -> None:
    for lent in list(_OPEN):
        # A daemon thread that comes back from the kernel when the interpreter is gone would end the process by a signal.
        lent.stop()
        lent.remove()
