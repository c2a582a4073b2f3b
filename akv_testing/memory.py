"""Memory of the fakes: it knows who touched it last, and who may touch it already."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from akv_testing.errors import MisuseError
from akv_testing.races import AccessLedger, Actor, Actors, Stamp

#: What host memory holds before anybody wrote it, and where a get did not deliver.
HOST_POISON = 0xDD
#: What pages hold before anybody wrote them.
PAGE_POISON = 0xEE
#: Bytes before the first page of a group and behind each page, so that a page's place is never its index times its size.
PAGE_GAP = 8


def _nothing() -> None:
    """The settling of memory that no device writes."""


class Piece(NamedTuple):
    """A place that a copy reads or writes."""

    array: NDArray[np.uint8]
    #: Called with the access's stamp and whether it writes. Raises UnorderedAccess.
    note: Callable[[Stamp, bool], None]


class FakeDeviceBuffer:
    """Implements `akv.ports.device.DeviceBuffer`, filled with `HOST_POISON`: copies reach it, the host does not."""

    def __init__(self, nbytes: int, *, name: str) -> None:
        if nbytes < 1:
            raise MisuseError(f"{name} of {nbytes} bytes: a buffer holds at least one")
        self.name = name
        self.array = np.full(nbytes, HOST_POISON, dtype=np.uint8)
        self._ledger = AccessLedger(lambda begin, end: f"bytes [{begin}, {end}) of {name}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        return int(self.array.nbytes)

    def piece(self, offset: int, nbytes: int) -> Piece:
        """A piece of it, for a copy."""
        array = self.array[offset : offset + nbytes]
        return Piece(array, lambda stamp, writes: self.note(stamp, offset, nbytes, writes=writes))

    def check_piece(self, offset: int, nbytes: int) -> None:
        """Raise MisuseError unless the piece lies in the buffer."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MisuseError(f"bytes [{offset}, {offset + nbytes}) lie outside {self.name}, which has {self.nbytes}")

    def note(self, stamp: Stamp, offset: int, nbytes: int, *, writes: bool) -> None:
        """An access of a piece. Raises UnorderedAccess unless it is ordered behind the earlier ones that it depends on."""
        self._ledger.note(stamp, offset, offset + nbytes, writes=writes)


class FakeHostBuffer(FakeDeviceBuffer):
    """Implements `akv.ports.device.HostBuffer`: the host and the store reach it too.

    `FakePool` reads and writes it with `host_read` and `host_write`, which raise `UnorderedAccess` unless the host saw the
    event of everything complete that wrote the piece (or, for a write, that read it). `view()` is not watched.
    """

    def __init__(
        self, nbytes: int, *, name: str = "host buffer", host: Actor | None = None, settle: Callable[[], None] = _nothing
    ) -> None:
        super().__init__(nbytes, name=name)
        self._host = Actors().host if host is None else host
        self._settle = settle

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.array.ctypes.data)

    def view(self) -> memoryview:
        """Its bytes as they are now, writable, format "B"."""
        self._settle()
        return self.array.data

    def host_read(self, offset: int, nbytes: int) -> bytes:
        """The bytes of a piece at this moment, for the host or the store; what wrote them must have been seen complete."""
        self.check_piece(offset, nbytes)
        self._settle()
        self.note(self._host.step(), offset, nbytes, writes=False)
        return self.array[offset : offset + nbytes].tobytes()

    def host_write(self, offset: int, data: bytes) -> None:
        """Write a piece as the host or the store does; what wrote it or read it must have been seen complete."""
        self.check_piece(offset, len(data))
        self._settle()
        self.note(self._host.step(), offset, len(data), writes=True)
        self.array[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)


class FakePages(NamedTuple):
    """The pages of one layer group, somewhere in a `FakePageBuffer`."""

    #: Shape (pages, bytes per page); the rows lie `pitch` bytes apart.
    rows: NDArray[np.uint8]
    #: Counts in pages.
    ledger: AccessLedger
    #: Where page 0 begins in the buffer, and how far apart pages are, in bytes.
    offset: int
    pitch: int

    def piece(self, page: int) -> Piece:
        """A page, for a copy or a kernel."""
        return Piece(self.rows[page], lambda stamp, writes: self.ledger.note(stamp, page, page + 1, writes=writes))

    def page_at(self, offset: int, nbytes: int) -> int | None:
        """The page that holds these bytes of the buffer, if one holds all of them."""
        page, inside = divmod(offset - self.offset, self.pitch)
        return page if 0 <= page < len(self.rows) and inside + nbytes <= self.rows.shape[1] else None


class FakePageBuffer(FakeHostBuffer):
    """An engine's pages, of one layer group or several, as memory of the host: who touches it is noted page by page.

    So the host's accesses are ordered with those of kernels and copies: a put that reads a page before the host saw the kernel
    complete that wrote it raises UnorderedAccess, and so does a get that writes a page which a kernel is still using.
    """

    def __init__(self, groups: Sequence[tuple[int, int, int]], *, name: str, host: Actor, settle: Callable[[], None]) -> None:
        """`groups`: the index of each layer group, its pages, and bytes per page."""
        nbytes = sum(PAGE_GAP + count * (size + PAGE_GAP) for _, count, size in groups)
        super().__init__(nbytes, name=name, host=host, settle=settle)
        self.groups: dict[int, FakePages] = {}
        end = 0
        for group, count, size in groups:
            begin, pitch = end + PAGE_GAP, size + PAGE_GAP
            end = begin + count * pitch
            rows = self.array[begin:end].reshape(count, pitch)[:, :size]
            rows[:] = PAGE_POISON
            self.groups[group] = FakePages(rows, AccessLedger(_page_namer(group)), begin, pitch)

    def note(self, stamp: Stamp, offset: int, nbytes: int, *, writes: bool) -> None:
        """As the base says, by pages. Raises MisuseError for bytes that are not those of one page."""
        for pages in self.groups.values():
            page = pages.page_at(offset, nbytes)
            if page is not None:
                pages.ledger.note(stamp, page, page + 1, writes=writes)
                return
        raise MisuseError(f"bytes [{offset}, {offset + nbytes}) of {self.name} are not those of one page")


def _page_namer(group: int) -> Callable[[int, int], str]:
    return lambda begin, end: f"page {begin} of group {group}"
