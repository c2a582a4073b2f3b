"""Memory on the device apart from the engine's cache: scratch of copies, and the device slots of the snapshot ring."""

import torch


class TorchDeviceBuffer:
    """Contiguous CUDA memory, uninitialised. It lives as long as this object or a copy that names it."""

    def __init__(self, nbytes: int, stream: torch.cuda.Stream) -> None:
        """Allocate, for copies that begin on `stream`. Raises MemoryError (fault of the deployment: the device is full)."""
        if nbytes < 1:
            raise ValueError(f"a device buffer has at least one byte, not {nbytes}")
        try:
            #: uint8, one axis.
            self.tensor = device_bytes(nbytes, stream)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"the device has no room for {nbytes} bytes of device slots: {error}") from error

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        return self.tensor.numel()


def device_bytes(nbytes: int, stream: torch.cuda.Stream) -> torch.Tensor:
    """Allocate bytes that are used on `stream` first. Raises torch's OutOfMemoryError."""
    # On this very stream: memory that another stream freed may still be read or written by its kernels.
    with torch.cuda.stream(stream):
        return torch.empty(nbytes, dtype=torch.uint8, device=stream.device)
