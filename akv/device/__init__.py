"""The engine's device behind `akv.ports.device`: torch tensors, on a CPU or on CUDA. torch is imported nowhere else in akv.

`caches.py` checks what the engine hands in, `host_pages.py` finds what of it the store can reach itself, `host_memory.py` and
`device_memory.py` own memory beside it, `streams.py` orders work, `moves.py` copies; on CUDA copy engines do so by `strips.py`
or one kernel by `spans.py`, and `scratch.py` lets both run at once; `torch_copier.py` puts them together;
`foreign.py` is for engines that tell addresses in place of tensors. Importing this package loads no torch; its functions do.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from akv.errors import DependencyError
from akv.values.layout import Layout

if TYPE_CHECKING:
    from akv.device.foreign import JoinedStream
    from akv.device.torch_copier import TorchCopier

__all__ = ["joined_stream", "open_torch_device", "rows_at"]


def open_torch_device(layout: Layout, caches: Sequence[Sequence[Any]], stream: Any = None) -> "TorchCopier":
    """Take an engine's caches at the door and return the copier that moves their pages. Changes none of them; on CUDA one or
    two are read, to see what its copy engines take.

    `caches[g][r]` is the tensor of region r of layer group g. Its first axis is the page; one page of it is contiguous and has
    exactly `region.bytes_per_page` bytes. The pages themselves may lie apart (a slice such as `kv[:, 0]`, a padded pitch).
    `stream` is the `torch.cuda.Stream` that the engine's kernels run on; the default is the current stream of the caches'
    device. On a CPU there is none.

    Raises SettingsError (fault of the embedding engine) naming the tensor that does not fit the layout, and DependencyError
    (fault of the installation) when torch cannot be imported.
    """
    try:
        from akv.device.torch_copier import TorchCopier  # noqa: PLC0415 - `import akv` must not load torch
    except (ImportError, OSError) as error:  # OSError: torch is there, a library that it loads is not
        raise _without_torch(error) from error
    return TorchCopier(layout, caches, stream)


def rows_at(base: int, size: int, stride: int, rows: int, *, cuda: bool) -> Any:
    """An engine's memory as a tensor of shape (rows, size), by address: see `akv.device.foreign`. Raises DependencyError."""
    try:
        from akv.device import foreign  # noqa: PLC0415 - as above
    except (ImportError, OSError) as error:
        raise _without_torch(error) from error
    return foreign.rows_at(base, size, stride, rows, cuda=cuda)


def joined_stream(*, cuda: bool) -> "JoinedStream":
    """A stream that stands for an engine's, whichever that is in a call: see `akv.device.foreign`. Raises DependencyError."""
    try:
        from akv.device.foreign import JoinedStream  # noqa: PLC0415 - as above
    except (ImportError, OSError) as error:
        raise _without_torch(error) from error
    return JoinedStream(cuda=cuda)


def _without_torch(error: Exception) -> DependencyError:
    return DependencyError(
        f"the engine's caches are torch tensors and torch cannot be imported ({error}). Run: pip install 'akv[torch]'"
    )
