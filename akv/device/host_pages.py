"""Caches on a CPU as the store sees them: where every page is one piece of memory, the store can read and write it itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from akv.device.caches import GroupCache
from akv.ports.device import HostRegion


class CacheMemory:
    """A stretch of the engine's own memory, as a `HostBuffer`. It keeps the caches alive, and so does a view of it.

    Gaps between pages and pages of groups that are not stored in one piece may lie in it: an offset of a page is what counts.
    """

    def __init__(self, begin: int, end: int, caches: tuple[Any, ...]) -> None:
        """`begin`, `end`: addresses. `caches`: the tensors whose memory it is, together all of it."""
        self._array = np.asarray(_Stretch(begin, end, caches))

    @property
    def address(self) -> int:
        """Where it begins. On no particular boundary: the engine chose it."""
        return int(self._array.ctypes.data)

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        return int(self._array.nbytes)

    def view(self) -> memoryview:
        """Its bytes, writable, format "B"."""
        return self._array.data


class _Stretch:
    """What numpy keeps as the owner of the memory, for as long as an array or a view of it lives."""

    def __init__(self, begin: int, end: int, caches: tuple[Any, ...]) -> None:
        self._caches = caches
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (end - begin,), "data": (begin, False)}


class _Pages(NamedTuple):
    """The pages of one group, each in one piece: addresses of the first page's begin and the last one's end, and the pitch."""

    begin: int
    end: int
    pitch: int
    group: int


def host_regions(groups: Sequence[GroupCache]) -> tuple[HostRegion | None, ...]:
    """For each group of caches on a CPU where its pages lie, or None if a page of it lies in several places.

    Groups whose memory overlaps, which includes pages that alternate, get one buffer over all of it: the store refuses to
    register memory twice.
    """
    regions: list[HostRegion | None] = [None] * len(groups)
    laid = sorted(pages for index, group in enumerate(groups) if (pages := _in_one_piece(index, group)) is not None)
    while laid:
        together = [laid.pop(0)]
        begin, end = together[0].begin, together[0].end
        while laid and laid[0].begin < end:
            end = max(end, laid[0].end)
            together.append(laid.pop(0))
        caches = tuple(region.rows for pages in together for region in groups[pages.group].regions)
        memory = CacheMemory(begin, end, caches)
        for pages in together:
            regions[pages.group] = HostRegion(memory, pages.begin - begin, pages.pitch)
    return tuple(regions)


def _in_one_piece(index: int, group: GroupCache) -> _Pages | None:
    begin = group.regions[0].rows.data_ptr()
    pitch = group.regions[0].rows.stride(0) * group.regions[0].word
    if group.page_count == 1:
        pitch = group.bytes_per_page  # nothing says how far away a second page would be
    elif pitch < group.bytes_per_page or any(region.rows.stride(0) * region.word != pitch for region in group.regions):
        return None
    if any(region.rows.data_ptr() != begin + region.start for region in group.regions):
        return None
    return _Pages(begin, begin + (group.page_count - 1) * pitch + group.bytes_per_page, pitch, index)
