"""A thread that touches what this process lends, so that the first save into a page does not wait for the kernel to make it.

Beside a pool that serves already: touching changes no byte. It runs at the lowest priority, and in small pieces, since the
kernel lets nobody map memory in this process meanwhile.
"""

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable

from akv.observe import SEGMENT_TOUCHED, emit

#: Bytes of one call. 1 ms on a busy machine.
CHUNK_BYTES = 2 << 20
#: Linux 5.14. Unlike a write it reports that there is no memory, and unlike a read it leaves nothing to do.
_MADV_POPULATE_WRITE = 23
_LOWEST_PRIORITY = 19

#: A mapped file: where it begins, its bytes, its descriptor.
Piece = tuple[int, int, int]


def populate(address: int, size: int, descriptor: int, offset: int) -> None:
    """Have the pages of a mapped file made, without changing them. Blocks, and lets other threads run. Raises OSError."""
    if _MADVISE(address, size, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    # An older kernel: the pages are made, and mapped by whoever writes first.
    os.posix_fallocate(descriptor, offset, size)


def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int
    return lambda address, size, advice: int(call(address, size, advice))


_MADVISE = _madvise()


class Touching:
    """Touches mapped files in order, on a thread of its own. `stop()` and `start()` as often as one likes."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._left = [
            (address + begin, min(CHUNK_BYTES, size - begin), descriptor, begin)
            for address, size, descriptor in pieces
            for begin in range(0, size, CHUNK_BYTES)
        ][::-1]
        self._total = sum(size for _, size, _, _ in self._left)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def left_bytes(self) -> int:
        """Bytes that were not touched yet."""
        return sum(size for _, size, _, _ in list(self._left))

    def start(self) -> None:
        """Go on, if something is left."""
        if self._left and self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._work, name="akv-touch", daemon=True)
            self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Stop and wait for the thread. False if it did not end in time: the memory must stay mapped."""
        if self._thread is None:
            return True
        self._stopping.set()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        began = time.monotonic()
        failed = ""
        while self._left and not self._stopping.is_set():
            try:
                populate(*self._left[-1])
            except OSError as error:
                failed = error.strerror or str(error)
                self._left.clear()
            else:
                self._left.pop()
        if not self._stopping.is_set():
            emit(SEGMENT_TOUCHED, bytes=self._total, reason=failed, duration_s=time.monotonic() - began)
