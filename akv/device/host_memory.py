"""Staging memory on the host: page-aligned, and pinned where CUDA reads and writes it."""

import mmap
import weakref
from contextlib import suppress

import numpy as np
import torch

#: cudaHostRegisterReadOnly
_READ_ONLY = 0x08


class TorchBuffer:
    """Contiguous host memory, uninitialised. It lives as long as this object, a view of it, or a copy that names it.

    Pinned memory is plain memory that is registered with CUDA, not memory of torch's pinning allocator: that one rounds every
    size up to a power of two and keeps what was freed, so staging could take twice its budget and outlive the connector.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        """Allocate, and for CUDA pin. Blocks. Raises MemoryError (fault of the deployment: memory is short)."""
        if nbytes < 1:
            raise ValueError(f"a host buffer has at least one byte, not {nbytes}")
        # Whole pages, from a page on: registering memory takes the pages that it touches, and they must be nobody else's.
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        room = np.empty(whole + mmap.PAGESIZE, dtype=np.uint8)
        begin = -room.ctypes.data % mmap.PAGESIZE
        self._array = room[begin : begin + nbytes]
        #: uint8, one axis. Shares the array's memory and keeps it alive, like `view()`.
        self.tensor = torch.from_numpy(self._array)
        if pinned:
            pin(self._array, whole)

    @property
    def address(self) -> int:
        """Where it begins; a multiple of the system's page size."""
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        return self._array.nbytes

    def view(self) -> memoryview:
        """Its bytes, writable, format "B"."""
        return self._array.data


def pin(array: "np.ndarray[tuple[int], np.dtype[np.uint8]]", nbytes: int, *, read_only: bool = False) -> None:
    """Register memory with CUDA for as long as the array or a view of it lives. Blocks. Raises MemoryError.

    `read_only`: the process may not write it, and CUDA will not.
    """
    address = array.ctypes.data
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    status = int(runtime.cudaHostRegister(address, nbytes, _READ_ONLY if read_only else 0))
    if status != 0:
        with suppress(RuntimeError):  # CUDA keeps the error and reports it at this thread's next kernel: let it be this one
            torch.zeros(1, device="cuda")
        raise MemoryError(
            f"CUDA cannot pin {nbytes} bytes of host memory (status {status}): memory is short, or the limit on locked memory "
            "is too low"
        )
    # Runs when the last view has gone and before the memory goes. Not at exit: CUDA is going away itself then.
    weakref.finalize(array, runtime.cudaHostUnregister, address).atexit = False
