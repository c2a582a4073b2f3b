"""The copying itself: indexed copies between caches and tables of stored pages, and runs of slots that move as one."""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from akv.device.caches import GroupCache
from akv.device.spans import RowNumbers, exchange
from akv.device.words import WIDEST, WORDS
from akv.errors import EngineContractError
from akv.ports.device import Source

#: The most elements of one indexed copy on a CPU. From 32,768 on (its grain size) torch splits an operation among its OpenMP
#: threads, which wait for each other: beside other work on the same cores, such as a forward pass, that was measured 10 to 40
#: times slower than this thread alone, and never much faster.
CPU_PIECE = 32_767

#: What pages are looked up by: their own numbers on a CPU.
Indices: TypeAlias = torch.Tensor | RowNumbers


#: Pages, the bytes of the buffer that they lie in, and where each does.
_Places: TypeAlias = tuple[Sequence[int], int, Sequence[int]]


def in_slot_order(
    group: int, cache: GroupCache, pages: Sequence[int], nbytes: int, offsets: Sequence[int], *, to_host: bool
) -> tuple[torch.Tensor, list[int]]:
    """Check a call's arguments, and sort its pages by their slots, so that adjacent slots can be moved as one.

    `nbytes`: of the buffer that the slots are in. Raises EngineContractError for a page that the cache does not have or that
    would be written twice, ValueError for slots that do not fit.
    """
    index, slots = _checked(group, cache, [(pages, nbytes, offsets)], to_host=to_host)
    return _by_slot(cache, index, slots, to_host=to_host)


def in_order_of_each(
    group: int, cache: GroupCache, sources: Sequence[Source], *, to_host: bool
) -> list[tuple[torch.Tensor, list[int]]]:
    """As `in_slot_order`, of each of several buffers. No page may be written twice by all of them."""
    index, slots = _checked(group, cache, _places(sources), to_host=to_host)
    found, begin = [], 0
    for each in sources:
        end = begin + len(each.pages)
        found.append(_by_slot(cache, index[begin:end], slots[begin:end], to_host=to_host))
        begin = end
    return found


def places_of(
    group: int, cache: GroupCache, sources: Sequence[Source], *, to_host: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The pages of several buffers, and the address of each, in their order; after the checks of `in_slot_order`."""
    index, slots = _checked(group, cache, _places(sources), to_host=to_host)
    begins = [each.buffer.address for each in sources]
    addresses = slots + np.repeat(np.asarray(begins, dtype=np.int64), [len(each.pages) for each in sources])
    if to_host:
        _refuse_overlaps(cache, np.sort(addresses))
    return index, addresses


def _places(sources: Sequence[Source]) -> list[_Places]:
    return [(each.pages, each.buffer.nbytes, each.offsets) for each in sources]


def _checked(
    group: int, cache: GroupCache, sources: Sequence[_Places], *, to_host: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pages and offsets of all sources."""
    for pages, _, offsets in sources:
        if len(pages) != len(offsets):
            raise ValueError(f"{len(pages)} pages and {len(offsets)} offsets: there is one slot per page")
    index = np.concatenate([np.asarray(pages, dtype=np.int64) for pages, _, _ in sources])
    slots = np.concatenate([np.asarray(offsets, dtype=np.int64) for _, _, offsets in sources])
    strangers = index[(index < 0) | (index >= cache.page_count)]
    if strangers.size:
        raise EngineContractError(f"layer group {group} has no page {strangers[0]}: its cache has {cache.page_count} pages")
    if not to_host and np.unique(index).size != index.size:
        raise EngineContractError(f"layer group {group}: two loads into one page, of which only one could survive")
    room = np.repeat(np.array([nbytes for _, nbytes, _ in sources], dtype=np.int64), [len(pages) for pages, _, _ in sources])
    (outside,) = np.nonzero((slots < 0) | (slots > room - cache.bytes_per_page))
    if outside.size:
        at = outside[0]
        raise ValueError(f"a page of {cache.bytes_per_page} bytes does not fit at {slots[at]} of {room[at]} bytes")
    return index, slots


def _by_slot(
    cache: GroupCache, index: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], *, to_host: bool
) -> tuple[torch.Tensor, list[int]]:
    order = np.argsort(slots, kind="stable")
    index, slots = index[order], slots[order]
    if to_host:
        _refuse_overlaps(cache, slots)
    return torch.from_numpy(index), slots.tolist()


def _refuse_overlaps(cache: GroupCache, ascending: npt.NDArray[np.int64]) -> None:
    if (np.diff(ascending) < cache.bytes_per_page).any():
        raise ValueError("slots overlap: one page would overwrite another")


def _runs(slots: Sequence[int], page_bytes: int, *, gaps: bool) -> Iterator[tuple[int, int, int]]:
    """Cut the ascending slots into runs of one step: (first, last, step), slots[first:last] lying `step` bytes apart.

    Without `gaps` the slots of a run touch. With them they may lie further apart, as the slots of a group of small pages do in
    staging whose slots are as large as the largest page.
    """
    first = 0
    while first < len(slots):
        last, step = first + 1, page_bytes
        if gaps and last < len(slots):
            step = max(step, slots[last] - slots[first])
        while last < len(slots) and slots[last] - slots[last - 1] == step:
            last += 1
        yield first, last, step
        first = last


def indices(cache: GroupCache, pages: torch.Tensor) -> Indices:
    """What copies of these pages look them up by: on CUDA where kernels can read it, in the order of the current stream."""
    return RowNumbers.of(cache.spans, pages, cache.spans[0].rows.device) if cache.spans else pages


def move_directly(cache: GroupCache, index: Indices, slots: list[int], memory: torch.Tensor, *, to_host: bool) -> None:
    """Copy between pages and ascending slots of memory on the caches' own device."""
    for first, last, step in _runs(slots, cache.bytes_per_page, gaps=True):
        table = memory.as_strided((last - first, cache.bytes_per_page), (step, 1), slots[first])
        exchange_pages(cache, index[first:last], table, to_host=to_host)


def copy_runs(block: torch.Tensor, slots: Sequence[int], host: torch.Tensor, page_bytes: int, *, to_host: bool) -> None:
    """Copy between a table of stored pages on the device and ascending slots of pinned host memory, one copy for each run."""
    for first, last, _ in _runs(slots, page_bytes, gaps=False):
        on_device = block[first * page_bytes : last * page_bytes]
        on_host = host[slots[first] : slots[first] + on_device.numel()]
        if to_host:
            on_host.copy_(on_device, non_blocking=True)
        else:
            on_device.copy_(on_host, non_blocking=True)


def move_on(device_memory: torch.Tensor, places: list[int], host: torch.Tensor, slots: list[int], page_bytes: int) -> None:
    """Copy from ascending places on the device to as many ascending slots of pinned host memory, in their order."""
    for first, last, _ in _runs(slots, page_bytes, gaps=False):
        for begin, end, _ in _runs(places[first:last], page_bytes, gaps=False):
            place, slot, nbytes = places[first + begin], slots[first + begin], (end - begin) * page_bytes
            host[slot : slot + nbytes].copy_(device_memory[place : place + nbytes], non_blocking=True)


def exchange_pages(cache: GroupCache, index: Indices, table: torch.Tensor, *, to_host: bool) -> None:
    """Move between the caches' pages and a table of stored pages, one row each, on the caches' device."""
    if isinstance(index, RowNumbers):
        exchange(cache.spans, index, table, to_table=to_host)
        return
    fits = gcd(table.data_ptr(), table.stride(0), WIDEST)
    tables = {word: table.view(WORDS[word]) for word in {gcd(region.word, fits) for region in cache.regions}}
    for region in cache.regions:
        word = gcd(region.word, fits)
        rows = region.rows if word == region.word else region.rows.view(WORDS[word])
        part = tables[word][:, region.start // word : region.stop // word]
        if part.numel() <= CPU_PIECE:
            _exchange_words(rows, index, part, to_host=to_host)
            continue
        for some, columns in _pieces(*part.shape, most=CPU_PIECE):
            _exchange_words(rows[:, columns], index[some], part[some, columns], to_host=to_host)


def _exchange_words(rows: torch.Tensor, index: torch.Tensor, part: torch.Tensor, *, to_host: bool) -> None:
    if to_host:
        torch.index_select(rows, 0, index, out=part)
    else:
        rows.index_copy_(0, index, part)


def _pieces(count: int, width: int, *, most: int) -> Iterator[tuple[slice, slice]]:
    """Cut a table into pieces of whole rows, or of parts of rows that are too long, of at most `most` elements."""
    tall = max(1, most // width)
    for top in range(0, count, tall):
        for left in range(0, width, most):
            yield slice(top, top + tall), slice(left, left + most)
