"""Pages of a CPU cache as memory that the store reaches: where they lie, and where they do not lie in one piece."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from akv.device import open_torch_device
from akv.errors import NotOpenError
from akv.ports.device import HostRegion
from akv.values.layout import Layout

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.int64).to(torch.uint8).view(shape)


def regions_of(layout_for: LayoutFor, sizes: list[list[int]], caches: list[list[torch.Tensor]]) -> list[HostRegion | None]:
    copier = open_torch_device(layout_for(sizes), caches)
    return [copier.host_region(group) for group in range(len(sizes))]


def page_in(region: HostRegion, page: int, nbytes: int) -> bytes:
    (offset,) = region.offsets([page])
    assert ctypes.string_at(region.buffer.address + offset, nbytes) == region.buffer.view()[offset : offset + nbytes]
    return region.buffer.view()[offset : offset + nbytes].tobytes()


def pages_of(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [b"".join(tensor[page].numpy().tobytes() for tensor in tensors) for page in range(len(tensors[0]))]


whole = numbered(6, 3, 8)
wide = numbered(6, 40)
flat = numbered(3 + 6 * 24)

IN_ONE_PIECE = {
    "one region": ([[24]], [[numbered(6, 24)]], 24),
    "one region from an odd byte on": ([[24]], [[flat[3:].view(6, 24)]], 24),
    "one region with a padded pitch": ([[24]], [[wide[:, 3:27]]], 40),
    "slices of one tensor": ([[8, 8, 8]], [[whole[:, 0], whole[:, 1], whole[:, 2]]], 24),
    "the first slices of one tensor": ([[8, 8]], [[whole[:, 0], whole[:, 1]]], 24),
    "unequal slices with a padded pitch": ([[8, 16]], [[wide[:, 4:12], wide[:, 12:28]]], 40),
    "a single page": ([[8, 8]], [[whole[:1, 0], whole[:1, 1]]], 16),
}


@pytest.mark.parametrize("case", IN_ONE_PIECE)
def test_a_page_in_one_piece_is_found_where_it_lies(case: str, layout_for: LayoutFor) -> None:
    sizes, caches, pitch = IN_ONE_PIECE[case]
    (region,) = regions_of(layout_for, sizes, caches)
    assert region is not None
    assert region.pitch == pitch
    assert region.buffer.address + region.offset == caches[0][0].data_ptr()
    expected = pages_of(caches[0])
    assert [page_in(region, page, sum(sizes[0])) for page in range(len(expected))] == expected
    assert region.offsets([len(expected) - 1])[0] + sum(sizes[0]) == region.buffer.nbytes, "nothing behind the last page"


IN_SEVERAL = {
    "separate tensors": ([[24, 24]], [[numbered(6, 24), numbered(6, 24)]]),
    "halves of one tensor": ([[24, 24]], [[numbered(12, 24)[:6], numbered(12, 24)[6:]]]),
    "slices in another order": ([[8, 8]], [[whole[:, 1], whole[:, 0]]]),
    "slices with a gap": ([[8, 8]], [[whole[:, 0], whole[:, 2]]]),
    "unequal pitches": ([[8, 8]], [[wide.flatten()[:48].view(6, 8), wide.flatten()[8:].as_strided((6, 8), (16, 1))]]),
    "pages that overlap": ([[8, 8]], [[wide.flatten()[:48].view(6, 8), wide.flatten()[8:56].view(6, 8)]]),
}


@pytest.mark.parametrize("case", IN_SEVERAL)
def test_pages_in_several_pieces_are_not_given(case: str, layout_for: LayoutFor) -> None:
    assert regions_of(layout_for, *IN_SEVERAL[case]) == [None]


def test_what_is_written_there_is_in_the_cache(layout_for: LayoutFor) -> None:
    cache = torch.zeros(6, 2, 12, dtype=torch.uint8)
    (region,) = regions_of(layout_for, [[12, 12]], [[cache[:, 0], cache[:, 1]]])
    assert region is not None
    for page, offset in zip((4, 1), region.offsets([4, 1]), strict=True):
        region.buffer.view()[offset : offset + 24] = bytes(range(page, page + 24))
    assert [cache[page].flatten().tolist() for page in (4, 1)] == [list(range(4, 28)), list(range(1, 25))]
    assert not cache[[0, 2, 3, 5]].any()


def test_M3_groups_that_share_memory_share_one_buffer(layout_for: LayoutFor) -> None:
    pool, other = numbered(6, 4, 8), numbered(6, 16)
    caches = [[pool[:, 1], pool[:, 2]], [other], [pool[:4, 0]], [pool[:, 0], pool[:, 1]]]
    shared, alone, part, same = regions_of(layout_for, [[8, 8], [16], [8], [8, 8]], caches)
    assert shared is not None
    assert alone is not None
    assert part is not None
    assert same is not None
    assert shared.buffer is part.buffer is same.buffer is not alone.buffer
    assert (shared.offset, part.offset, same.offset, alone.offset) == (8, 0, 0, 0)
    assert shared.buffer.nbytes == 5 * 32 + 24
    for region, tensors in zip((shared, alone, part, same), caches, strict=True):
        expected = pages_of(tensors)
        assert [page_in(region, page, len(expected[0])) for page in range(len(expected))] == expected


def test_memory_is_shared_whoever_says_so(layout_for: LayoutFor) -> None:
    memory = np.arange(96, dtype=np.uint8)
    one, other = regions_of(
        layout_for, [[8], [8]], [[torch.from_numpy(memory[:64]).view(8, 8)], [torch.from_numpy(memory[32:]).view(8, 8)]]
    )
    assert one is not None
    assert other is not None
    assert one.buffer is other.buffer
    assert (one.offset, other.offset, one.buffer.nbytes) == (0, 32, 96)


def test_groups_that_touch_have_buffers_of_their_own(layout_for: LayoutFor) -> None:
    pool = numbered(12, 8)
    one, other = regions_of(layout_for, [[8], [8]], [[pool[:6]], [pool[6:]]])
    assert one is not None
    assert other is not None
    assert one.buffer is not other.buffer
    assert one.buffer.address + one.buffer.nbytes == other.buffer.address


def test_M1_the_buffer_and_its_view_keep_the_cache_alive(layout_for: LayoutFor) -> None:
    cache = numbered(6, 1000)
    gone = weakref.ref(cache.untyped_storage())
    copier = open_torch_device(layout_for([[1000]]), [[cache]])
    region = copier.host_region(0)
    assert region is not None
    view = region.buffer.view()
    copier.close()
    with pytest.raises(NotOpenError):
        copier.host_region(0)
    del cache, copier, region
    gc.collect()
    assert gone() is not None, "the view's memory is the cache's"
    assert view[5999] == 5999 % 256
    view.release()
    gc.collect()
    assert gone() is None


def test_only_a_cpu_has_host_pages(layout_for: LayoutFor, device: torch.device) -> None:
    region = open_torch_device(layout_for([[24]]), [[torch.zeros(6, 24, dtype=torch.uint8, device=device)]]).host_region(0)
    assert (region is None) == (device.type == "cuda")
