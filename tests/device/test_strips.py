"""Pages as rectangles: which copies they make, and that these move every byte. What CUDA does is in test_cuda_strips."""

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akv.device import strips as module
from akv.device.spans import Placed
from akv.device.strips import Strip, rectangles, strips_of


def placed(regions: list[tuple[int, int, int]], memories: Sequence[int] = ()) -> list[Placed]:
    """From (begin, pitch, size) of each region, in the order of a stored page; `memories`: of each, one of them all."""
    found, start = [], 0
    for index, (begin, pitch, size) in enumerate(regions):
        found.append(Placed(begin, pitch, 8, start, start + size, memories[index] if memories else 0))
        start += size
    return found


KIB = 1 << 10
ROW = 32 * KIB


@pytest.mark.parametrize(
    ("regions", "strips"),
    [
        ([(1000 + 9 * ROW * index, ROW, ROW) for index in range(8)], [Strip(1000, ROW, 0, ROW, 8, 9 * ROW)]),
        # Keys and values in turn in one tensor per layer: they touch, and are one row.
        (
            [(20 * ROW * layer + kind * ROW, 2 * ROW, ROW) for layer in range(4) for kind in (0, 1)],
            [Strip(0, 2 * ROW, 0, 2 * ROW, 4, 20 * ROW)],
        ),
        ([(0, 8 * ROW, 8 * ROW)], [Strip(0, 8 * ROW, 0, 8 * ROW, 1, 0)]),
        # Two allocations, each of layers evenly apart.
        (
            [(base + 9 * ROW * index, ROW, ROW) for base in (0, 10**9) for index in range(8)],
            [Strip(0, ROW, 0, ROW, 8, 9 * ROW), Strip(10**9, ROW, 8 * ROW, ROW, 8, 9 * ROW)],
        ),
        # Downwards, as separate allocations often lie; rows that are short; copies that are small; farther than CUDA reaches.
        ([(10**9 - 9 * ROW * index, ROW, ROW) for index in range(8)], []),
        ([(9 * ROW * index, ROW, ROW // 2) for index in range(64)], []),
        ([(9 * ROW * index, ROW, ROW) for index in range(7)], []),
        ([(2**31 * index, ROW, ROW) for index in range(8)], []),
    ],
    ids=["evenly", "keys and values", "one region", "two stacks", "downwards", "short rows", "small", "too far"],
)
def test_regions_that_lie_evenly_apart_are_one_strip(regions: list[tuple[int, int, int]], strips: list[Strip]) -> None:
    assert list(strips_of(placed(regions))) == strips


@pytest.mark.parametrize("apart", [9 * ROW, ROW], ids=["evenly apart", "touching"])
def test_no_copy_reaches_from_one_allocation_into_another(apart: int) -> None:
    regions = [(apart * index, 16 * ROW, ROW) for index in range(16)]
    memories = [index // 8 for index in range(16)]
    height, width = (8, ROW) if apart > ROW else (1, 8 * ROW)
    strips = strips_of(placed(regions, memories))
    assert [(strip.memory, strip.width, strip.height) for strip in strips] == [(0, width, height), (1, width, height)]
    assert strips_of(placed(regions, list(range(16)))) == ()


@st.composite
def caches(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Regions in one memory of 64 KiB: eight pages each, in stacks, alternating or anyhow."""
    regions, begin = [], 0
    for _ in range(draw(st.integers(1, 3))):
        size, count = draw(st.sampled_from([1, 16, 48])), draw(st.integers(1, 5))
        gap, alternating = draw(st.sampled_from([0, 0, 7])), draw(st.booleans())
        pitch = size * count + gap if alternating else size + gap
        apart = size if alternating else 8 * pitch + draw(st.sampled_from([0, 13]))
        regions += [(begin + index * apart, pitch, size) for index in range(count)]
        begin += count * 8 * (size + gap) + count * 13 + 8 * size
    return regions


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D, as the driver's header has it."""

    _fields_ = (
        *(("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_int), ("src_host", ctypes.c_void_p)),
        *(("src_device", ctypes.c_uint64), ("src_array", ctypes.c_void_p), ("src_pitch", ctypes.c_size_t)),
        *(("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_int), ("dst_host", ctypes.c_void_p)),
        *(("dst_device", ctypes.c_uint64), ("dst_array", ctypes.c_void_p), ("dst_pitch", ctypes.c_size_t)),
        *(("width", ctypes.c_size_t), ("height", ctypes.c_size_t)),
    )


HOST, DEVICE = 1, 2


def carry_out(description: np.void) -> None:
    """What the driver does with a description, where all memory is the host's."""
    piece = Copy2D.from_buffer_copy(description.tobytes())
    at = {HOST: (piece.src_host, piece.dst_host), DEVICE: (piece.src_device, piece.dst_device)}
    source, target = at[piece.src_type][0], at[piece.dst_type][1]
    assert piece.src_type != piece.dst_type
    for row in range(piece.height):
        ctypes.memmove(target + row * piece.dst_pitch, source + row * piece.src_pitch, piece.width)


@settings(deadline=None, max_examples=150)
@given(caches(), st.permutations(range(8)), st.integers(1, 8))
def test_the_copies_of_a_page_are_the_copies_of_its_regions(
    regions: list[tuple[int, int, int]], order: list[int], some: int
) -> None:
    memory = np.random.default_rng(3).integers(0, 256, 1 << 16, dtype=np.uint8)
    begin, page_bytes = memory.ctypes.data, sum(size for _, _, size in regions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_ROW", 1)
        patch.setattr(module, "LEAST_COPY", 1)
        strips = strips_of(placed([(begin + at, pitch, size) for at, pitch, size in regions]))
    slots = np.full((some, page_bytes + 3), 9, dtype=np.uint8)
    pages = order[:some]
    hosts = [slots[index].ctypes.data for index in range(some)]
    for piece in rectangles(strips, pages, hosts, to_host=True):
        carry_out(piece)
    for page, slot in zip(pages, slots, strict=True):
        expected = np.concatenate([memory[at + page * pitch :][:size] for at, pitch, size in regions])
        assert (slot[:page_bytes] == expected).all()
        assert (slot[page_bytes:] == 9).all()
    before = memory.copy()
    for page in pages:
        for at, pitch, size in regions:
            memory[at + page * pitch :][:size] = 0
    for piece in rectangles(strips, pages, hosts, to_host=False):
        carry_out(piece)
    assert (memory == before).all()
