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
from typing import NamedTuple

import numpy as np
import torch

from akv.device.spans import Placed

#: Bytes of a row at least, and of one copy: below, a kernel is faster, or the host's time per copy counts.
LEAST_ROW = 32 << 10
LEAST_COPY = 256 << 10
#: The longest way from one row to the next that CUDA takes, in bytes.
_LONGEST_PITCH = 2**31 - 1
_HOST, _DEVICE = 1, 2


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


class Rectangle(NamedTuple):
    """One copy: `height` rows of `width` bytes."""

    device: int
    device_pitch: int
    host: int
    width: int
    height: int


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


def rectangles(strips: Sequence[Strip], pages: Sequence[int], hosts: Sequence[int]) -> Iterator[Rectangle]:
    """The copies of some pages. `hosts`: the address of each page's slot."""
    for page, host in zip(pages, hosts, strict=True):
        for strip in strips:
            pitch = strip.apart or strip.width
            yield Rectangle(strip.begin + page * strip.page_pitch, pitch, host + strip.start, strip.width, strip.height)


def copy_strips(
    strips: Sequence[Strip], pages: Sequence[int], host: torch.Tensor, slots: Sequence[int], *, to_host: bool
) -> None:
    """Queue the copies between pages and slots of pinned host memory on the current stream. Raises RuntimeError."""
    stream = torch.cuda.current_stream(torch.cuda.current_device())
    stream.query()  # makes the device's context this thread's, which the driver asks for
    copy_2d, handle, begin = _driver().cuMemcpy2DAsync_v2, ctypes.c_void_p(stream.cuda_stream), host.data_ptr()
    for piece in rectangles(strips, pages, [begin + slot for slot in slots]):
        # The driver reads the description before it returns. Another thread may run Python meanwhile.
        status = copy_2d(ctypes.byref(_description(piece, to_host=to_host)), handle)
        if status != 0:
            raise RuntimeError(
                f"CUDA cannot queue a copy of {piece.height} rows of {piece.width} bytes (driver status {status})"
            )


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
        tried = rectangles(strips, [0, page_count - 1], [room.ctypes.data] * 2)
        return strips if all(copy_2d(ctypes.byref(_description(piece, to_host=True))) == 0 for piece in tried) else ()


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface: source, target, width and height."""

    _fields_ = (
        *(("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_int), ("src_host", ctypes.c_void_p)),
        *(("src_device", ctypes.c_uint64), ("src_array", ctypes.c_void_p), ("src_pitch", ctypes.c_size_t)),
        *(("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_int), ("dst_host", ctypes.c_void_p)),
        *(("dst_device", ctypes.c_uint64), ("dst_array", ctypes.c_void_p), ("dst_pitch", ctypes.c_size_t)),
        *(("width", ctypes.c_size_t), ("height", ctypes.c_size_t)),
    )


def _description(piece: Rectangle, *, to_host: bool) -> _Copy2D:
    on_host = (0, 0, _HOST, piece.host, 0, None, piece.width)
    on_device = (0, 0, _DEVICE, None, piece.device, None, piece.device_pitch)
    source, target = (on_device, on_host) if to_host else (on_host, on_device)
    return _Copy2D(*source, *target, piece.width, piece.height)


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
