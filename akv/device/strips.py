"""Pages between a GPU and pinned host memory by copy engines alone, where the layers' caches lie evenly apart.

An engine that allocates its layers in one piece, `torch.zeros(layers, pages, ...)`, has a page's regions at equal distances.
In a slot they touch. So a page is a rectangle on both sides, its rows one region each, and one two-dimensional copy moves it:
no scratch, no kernel beside the engine's own, half the host time. Rows must be long: measured on an H200, 64 of them, copies
have 0.71 of a plain copy's speed with rows of 8 KiB, 0.88 with 16, 0.93 with 32 and 0.98 with 128; what goes through a scratch
has 0.93 to 0.96. Kernels that stream weights took 9 % longer beside the latter, and 6 % beside these, as beside plain copies.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from akv.device.spans import Placed

#: Bytes of a row at least, and of one copy: below, a kernel is faster, or the host's time per copy counts.
LEAST_ROW = 32 << 10
LEAST_COPY = 256 << 10
#: The longest way from one row to the next that CUDA takes, in bytes.
_LONGEST_PITCH = 2**31 - 1
_HOST, _DEVICE = 1, 2


#: Pages, or where they begin.
Numbers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


class Strip(NamedTuple):
    """Regions of one size that follow each other in a stored page and lie equally far apart."""

    #: Address of the first region's page 0, and bytes from one page to the next, of every region.
    begin: int
    page_pitch: int
    #: Where they begin in a stored page.
    start: int
    #: Bytes of a region's page; regions that touch on both sides are one.
    width: int
    #: How many regions, and bytes from one to the next.
    height: int
    apart: int
    #: Address of the allocation that all of them are parts of: CUDA refuses copies that reach from one into another.
    memory: int = 0


#: CUDA_MEMCPY2D of the driver's interface: source, target, width and height.
_SIDE = (("x", "u8"), ("y", "u8"), ("type", "i4"), ("host", "u8"), ("device", "u8"), ("array", "u8"), ("pitch", "u8"))
_COPY_2D = np.dtype(
    [(f"{side}_{name}", kind) for side in ("src", "dst") for name, kind in _SIDE] + [("width", "u8"), ("height", "u8")],
    align=True,
)


def strips_of(regions: Sequence[Placed]) -> tuple[Strip, ...]:
    """A group's regions in as few strips as they allow; none if copies of these would be too small to be worth it."""
    strips: list[Strip] = []
    for region in regions:
        piece = Strip(region.begin, region.pitch, region.start, region.stop - region.start, 1, 0, region.memory)
        if strips and (longer := _touching(strips[-1], piece)) is not None:
            strips[-1] = longer
        else:
            strips.append(piece)
    found = list(_stacked(strips))
    worth_it = all(strip.width >= LEAST_ROW and strip.width * strip.height >= LEAST_COPY for strip in found)
    return tuple(found) if worth_it else ()


def rectangles(strips: Sequence[Strip], pages: Numbers, hosts: Numbers, *, to_host: bool) -> npt.NDArray[np.void]:
    """The copies of some pages, as the driver takes their descriptions. `hosts`: the address of each page's slot.

    All at once: each in turn is 4 us of Python with the interpreter lock held, and a load has thousands.
    """
    work = np.zeros((len(pages), len(strips)), dtype=_COPY_2D)
    on_device, on_host = ("src", "dst") if to_host else ("dst", "src")
    begin, pitch, start, width, height, apart, _ = np.array(strips, dtype=np.int64).T
    work[f"{on_device}_type"], work[f"{on_host}_type"] = _DEVICE, _HOST
    work[f"{on_device}_device"] = begin + np.asarray(pages, dtype=np.int64)[:, None] * pitch
    work[f"{on_device}_pitch"] = np.where(apart, apart, width)
    work[f"{on_host}_host"] = np.asarray(hosts, dtype=np.int64)[:, None] + start
    work[f"{on_host}_pitch"] = work["width"] = width
    work["height"] = height
    return work.ravel()


def copy_strips(strips: Sequence[Strip], pages: Numbers, hosts: Numbers, *, to_host: bool) -> None:
    """Queue the copies between pages and slots of pinned host memory, at these addresses, on the current stream. Raises
    RuntimeError.
    """
    stream = torch.cuda.current_stream(torch.cuda.current_device())
    stream.query()  # makes the device's context this thread's, which the driver asks for
    copy_2d, handle = _driver().cuMemcpy2DAsync_v2, stream.cuda_stream
    work = rectangles(strips, pages, hosts, to_host=to_host)
    for number, description in enumerate(_addresses(work)):
        # The driver reads it before it returns. Another thread may run Python meanwhile.
        status = copy_2d(description, handle)
        if status != 0:
            width, height = work[["width", "height"]][number]
            raise RuntimeError(f"CUDA cannot queue a copy of {height} rows of {width} bytes (driver status {status})")


def usable(strips: tuple[Strip, ...], page_count: int, device: torch.device) -> tuple[Strip, ...]:
    """The strips, if CUDA copies the first and the last page by them, which is tried; none if it does not.

    Nobody can be asked beforehand: torch calls other vendors' devices by the same name, and whether memory that was mapped in
    pieces counts as one allocation is the driver's own affair.
    """
    if not strips:
        return ()
    try:
        copy_2d = _driver().cuMemcpy2D_v2
    except (OSError, AttributeError):
        return ()
    room = np.empty(sum(strip.width * strip.height for strip in strips), dtype=np.uint8)
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # as above
        tried = rectangles(strips, [0, page_count - 1], [room.ctypes.data] * 2, to_host=True)
        return strips if all(copy_2d(description) == 0 for description in _addresses(tried)) else ()


def _addresses(work: npt.NDArray[np.void]) -> range:
    """Where each description lies, as long as `work` lives."""
    begin = work.ctypes.data
    return range(begin, begin + work.nbytes, work.itemsize)


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    # Plain numbers: objects around them take longer to make than the driver takes for a copy.
    driver.cuMemcpy2D_v2.argtypes = (ctypes.c_void_p,)
    driver.cuMemcpy2DAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return driver


def _touching(strip: Strip, piece: Strip) -> Strip | None:
    """Both as one region, if they touch in the cache as they do in a slot."""
    alike = strip.page_pitch == piece.page_pitch and strip.memory == piece.memory
    if alike and strip.begin + strip.width == piece.begin:
        return strip._replace(width=strip.width + piece.width)
    return None


def _stacked(pieces: Sequence[Strip]) -> Iterator[Strip]:
    strip: Strip | None = None
    for piece in pieces:
        if strip is None:
            strip = piece
            continue
        apart = piece.begin - strip.begin - (strip.height - 1) * strip.apart
        alike = (piece.width, piece.page_pitch, piece.memory) == (strip.width, strip.page_pitch, strip.memory)
        if alike and strip.width <= apart <= _LONGEST_PITCH and apart == (strip.apart or apart):
            strip = strip._replace(height=strip.height + 1, apart=apart)
        else:
            yield strip
            strip = piece
    if strip is not None:
        yield strip
