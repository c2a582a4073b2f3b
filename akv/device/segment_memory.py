"""Segments of other processes as memory of this one: mapped read-only, and pinned where CUDA reads them (R3).

Whoever may write the file may shorten it, and a CPU that reads a mapping beyond its file's end ends the process (SIGBUS). So a
CPU reads through the mapping only where the kernel refuses to shorten the file (`F_SEAL_SHRINK`, which anonymous memory files
have), and through the file otherwise: a read beyond the end comes back short, at two thirds of the speed. CUDA reads pinned
pages, which the kernel keeps whatever becomes of the file.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from akv.device.caches import GroupCache
from akv.device.host_memory import pin
from akv.device.sharing import cores, shared
from akv.errors import DeviceError

#: Linux's own number, which Python does not name.
_MADV_POPULATE_READ = 22
#: Bytes whose pages are mapped in one call.
_STRIDE = 256 << 20
#: Pieces of one read; the kernel takes 1,024.
_MOST_PIECES = 1024
#: Bytes of a copy from which on the interpreter lock is let go of meanwhile. To get it back costs more than copying less, and
#: with a busy engine beside it up to a switch interval: 480 pieces of 8 KiB took 0.95 ms so, and 0.4 with the lock held.
_LONG_COPY = 64 << 10
#: Bytes of pages from which on a second thread copies, too, and of what each of the two takes at a time. To start it takes a
#: tenth of a millisecond, as long as a megabyte.
_SHARED_COPY = 8 << 20
_SHARED_PIECE = 2 << 20

#: `memmove` with the interpreter lock held.
_SHORT_MOVE = ctypes.PyDLL(None).memmove
_SHORT_MOVE.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SHORT_MOVE.restype = ctypes.c_void_p

#: By device, inode and whether pinned: connectors of one process have one mapping between them.
_MAPPED: "weakref.WeakValueDictionary[tuple[int, int, bool], TorchSegment]" = weakref.WeakValueDictionary()
_MAPPING = threading.Lock()


class TorchSegment:
    """A segment's memory, as a `HostBuffer` that `scatter` reads. It lives as long as this object or a copy that names it."""

    def __init__(self, file: Any, *, pinned: bool) -> None:
        """Map, and for CUDA pin. Blocks. Raises OSError, and MemoryError if it cannot be pinned."""
        #: Keeps the file open.
        self._file = file
        self.descriptor: int = file.fileno()
        nbytes: int = file.nbytes
        self._mapping = mmap.mmap(self.descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        #: Whether a CPU may read the mapping: nobody can shorten the file.
        self.sealed: bool = file.sealed
        address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data
        self._array = np.asarray(_Mapped(address, nbytes, self._mapping))
        #: uint8, one axis. Not to be written: the memory is mapped for reading only.
        self.tensor = torch.from_numpy(self._array)
        if pinned:
            pin(self._array, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, read_only=True)
        elif self.sealed:
            _populate(address, nbytes)

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        return self._array.nbytes

    def view(self) -> memoryview:
        """Its bytes, format "B", read-only."""
        return self._array.data.toreadonly()

    def read(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """Read adjacent bytes from the file into pieces of memory. Raises DeviceError if the file ends before."""
        for begin in range(0, len(pieces), _MOST_PIECES):
            some = pieces[begin : begin + _MOST_PIECES]
            wanted = sum(piece.nbytes for piece in some)
            got = os.preadv(self.descriptor, some, offset)
            if got != wanted:
                raise DeviceError(
                    f"a segment's file gave {got} of {wanted} bytes at {offset}: somebody shortened it. It had {self.nbytes}"
                )
            offset += wanted


def map_segment(file: Any, *, pinned: bool) -> TorchSegment:
    """The memory of an open segment file; the same as long as somebody of this process has it. Blocks."""
    if not hasattr(file, "fileno"):
        raise TypeError("a segment of another device cannot be used here")
    status = os.fstat(file.fileno())
    key = (status.st_dev, status.st_ino, pinned)
    with _MAPPING:
        segment = _MAPPED.get(key)
        if segment is None or segment.nbytes != file.nbytes:
            segment = _MAPPED[key] = TorchSegment(file, pinned=pinned)
        return segment


def fill_pages(segment: TorchSegment, cache: GroupCache, pages: Sequence[int], offsets: Sequence[int]) -> None:
    """Fill pages of a cache on a CPU from a segment, each from its offset; offsets ascend. Raises DeviceError.

    One plain copy per region of a page, or, where pages follow each other in both memories, of all of them: an indexed copy
    takes 1.2 to 2 times as long where the pages lie apart, as values in a segment do. Two threads share many pages. Short
    copies keep the interpreter lock, so these read the file then, which lets go of it and takes a third longer.
    """
    copies = _copies(cache, pages, offsets) if segment.sealed else []
    nbytes = len(pages) * cache.bytes_per_page
    alone = nbytes < _SHARED_COPY or cores() == 1
    fill: Callable[[Any], None] = partial(_copy, segment)
    work: Sequence[Any] = copies
    if not segment.sealed or (not alone and any(length < _LONG_COPY for _, _, length in copies)):
        rows = [region.rows.view(torch.uint8).numpy() for region in cache.regions]
        fill, work = partial(_read, segment, rows, cache.bytes_per_page), list(zip(pages, offsets, strict=True))
    if alone:
        fill(work)
    else:
        some = -(-len(work) * _SHARED_PIECE // nbytes)
        shared(fill, [work[at : at + some] for at in range(0, len(work), some)])


def _copy(segment: TorchSegment, copies: Sequence[tuple[int, int, int]]) -> None:
    begin = segment.address
    for to, at, nbytes in copies:
        move = ctypes.memmove if nbytes >= _LONG_COPY else _SHORT_MOVE
        move(to, begin + at, nbytes)


def _read(segment: TorchSegment, rows: Sequence[Any], page_bytes: int, places: Sequence[tuple[int, int]]) -> None:
    """Pages and their offsets. What is adjacent in the segment is read at once."""
    begin = end = places[0][1]
    pieces: list[memoryview] = []
    for page, offset in places:
        if offset != end:
            segment.read(begin, pieces)
            begin, pieces = offset, []
        pieces += [region[page].data for region in rows]
        end = offset + page_bytes
    segment.read(begin, pieces)


def _copies(cache: GroupCache, pages: Sequence[int], offsets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Address, place in the segment and length of each region of each page; what is adjacent in both memories is one copy."""
    regions = cache.regions
    begins = np.array([region.rows.data_ptr() for region in regions])
    pitches = np.array([region.rows.stride(0) * region.word for region in regions])
    starts = np.array([region.start for region in regions])
    lengths = np.tile(np.array([region.stop - region.start for region in regions]), len(pages))
    to = (begins + np.asarray(pages)[:, None] * pitches).ravel()
    at = (np.asarray(offsets)[:, None] + starts).ravel()
    # Each is the first of a run but one that begins where the one before it ends, here and there.
    first = np.ones(len(to), dtype=bool)
    first[1:] = (to[1:] != to[:-1] + lengths[:-1]) | (at[1:] != at[:-1] + lengths[:-1])
    (runs,) = np.nonzero(first)
    return list(zip(to[runs].tolist(), at[runs].tolist(), np.add.reduceat(lengths, runs).tolist(), strict=True))


class _Mapped:
    """What numpy keeps as the owner of the memory, for as long as an array or a view of it lives."""

    def __init__(self, address: int, nbytes: int, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        # Said to be writable, because torch takes no other; the pages are not.
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def _populate(address: int, nbytes: int) -> None:
    """Enter the pages into this process's tables, so that no load waits for it. A kernel that cannot do it does it later."""
    libc = ctypes.CDLL(None)
    for begin in range(0, nbytes, _STRIDE):
        length = min(_STRIDE, nbytes - begin)
        libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(length), _MADV_POPULATE_READ)
