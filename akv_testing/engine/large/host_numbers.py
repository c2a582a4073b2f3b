"""Numbers that host and device both see, without a copy between them."""

import torch
from torch import Tensor


class _Described:
    """What torch takes memory over from."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<i8",
            "shape": tuple(host.shape),
            "strides": None,
            "data": (host.data_ptr(), False),
        }


def shared_numbers(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 zeros, as the host sees them and as kernels do. The latter keeps the memory alive; so must whoever has the former.

    Kernels reach pinned memory over the bus, so it is for few numbers. On a CPU both are one tensor.
    """
    if device.type != "cuda":
        numbers = torch.zeros(count, dtype=torch.int64)
        return numbers, numbers
    host = torch.zeros(count, dtype=torch.int64, pin_memory=True)
    seen = torch.as_tensor(_Described(host), device=device)
    if seen.data_ptr() != host.data_ptr():
        raise RuntimeError(
            "torch copied pinned memory in place of taking it over: what is decoded would be what was decoded first"
        )
    return host, seen
