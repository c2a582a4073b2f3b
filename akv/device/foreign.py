"""An engine's memory by address, and its stream where each call may name another: for engines without tensors to hand out."""

from typing import Any

import torch


class _Rows:
    """What torch takes memory over from, without owning it."""

    def __init__(self, interface: str, base: int, size: int, stride: int, rows: int) -> None:
        described = {"version": 3, "typestr": "|u1", "shape": (rows, size), "strides": (stride, 1), "data": (base, False)}
        setattr(self, interface, described)


def rows_at(base: int, size: int, stride: int, rows: int, *, cuda: bool) -> torch.Tensor:
    """Memory as a tensor of shape (rows, size): rows of `size` bytes, `stride` bytes apart, the first at address `base`.

    `cuda`: the memory is the current device's, else the host's. Whoever gives the address keeps the memory for as long as the
    tensor is used; nothing here can check that, nor that the address is right.
    """
    if cuda:
        return torch.as_tensor(_Rows("__cuda_array_interface__", base, size, stride, rows), device="cuda")
    import numpy as np  # noqa: PLC0415 - on a CPU alone

    return torch.from_numpy(np.asarray(_Rows("__array_interface__", base, size, stride, rows)))


class JoinedStream:
    """A stream that stands for the engine's execution stream, whichever that is in a call.

    What akv records on it, and queues there, is ordered with the engine's kernels by `behind()` and `before()`. On a CPU there
    is nothing to order.
    """

    def __init__(self, *, cuda: bool) -> None:
        #: For `open_connector(stream=)`.
        self.stream: Any = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def behind(self, engine: Any = None) -> None:
        """What akv records from here on counts the engine's work so far. `engine`: its stream; the thread's current one."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device) if engine is None else engine)

    def before(self, engine: Any = None) -> None:
        """The engine's next kernels wait for what akv has queued: the copies of window pages that they may overwrite."""
        if self.stream is not None:
            (torch.cuda.current_stream(self.stream.device) if engine is None else engine).wait_stream(self.stream)
