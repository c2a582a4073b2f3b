"""Host memory of the fakes: it knows who wrote it last, and whether the host may look at it yet."""

from collections.abc import Callable

import numpy as np

from akv_testing.errors import MisuseError
from akv_testing.races import AccessLedger, Actor, Actors

#: What host memory holds before anybody wrote it, and where a get did not deliver.
HOST_POISON = 0xDD


def _nothing() -> None:
    """The settling of memory that no device writes."""


class FakeHostBuffer:
    """Implements `akv.ports.device.HostBuffer`, filled with `HOST_POISON`.

    `FakePool` reads and writes it with `host_read` and `host_write`, which raise `UnorderedAccess` unless the host saw the
    event of every copy that wrote the piece (or, for a write, that read it) complete. `view()` is not watched.
    """

    def __init__(
        self, nbytes: int, *, name: str = "host buffer", host: Actor | None = None, settle: Callable[[], None] = _nothing
    ) -> None:
        if nbytes < 1:
            raise MisuseError(f"{name} of {nbytes} bytes: a buffer holds at least one")
        self.name = name
        self.array = np.full(nbytes, HOST_POISON, dtype=np.uint8)
        self.ledger = AccessLedger(lambda begin, end: f"bytes [{begin}, {end}) of {name}")
        self._host = Actors().host if host is None else host
        self._settle = settle

    def __repr__(self) -> str:
        return f"<FakeHostBuffer {self.name}, {self.nbytes} bytes>"

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.array.ctypes.data)

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        return int(self.array.nbytes)

    def view(self) -> memoryview:
        """Its bytes as they are now, writable, format "B"."""
        self._settle()
        return self.array.data

    def check_piece(self, offset: int, nbytes: int) -> None:
        """Raise MisuseError unless the piece lies in the buffer."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MisuseError(f"bytes [{offset}, {offset + nbytes}) lie outside {self.name}, which has {self.nbytes}")

    def host_read(self, offset: int, nbytes: int) -> bytes:
        """The bytes of a piece, for the host or the store; every copy into it must have been seen complete."""
        self.check_piece(offset, nbytes)
        self._settle()
        self.ledger.note(self._host.step(), offset, offset + nbytes, writes=False)
        return self.array[offset : offset + nbytes].tobytes()

    def host_write(self, offset: int, data: bytes) -> None:
        """Write a piece as the host or the store does; every copy into it and out of it must have been seen complete."""
        self.check_piece(offset, len(data))
        self._settle()
        self.ledger.note(self._host.step(), offset, offset + len(data), writes=True)
        self.array[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
