"""The engine's caches as akv sees them: per region a two-dimensional view, one row of bytes per page, of the same memory."""

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple, NoReturn

import torch

from akv.device.spans import Placed, Span, spans_of
from akv.device.strips import Strip, strips_of, usable
from akv.device.words import WIDEST, WORDS
from akv.errors import SettingsError
from akv.values.layout import LayerGroup, Layout, Region


class RegionCache(NamedTuple):
    """One region of a group: every page's bytes in it, and where they lie inside a stored page."""

    #: Shape (pages, words per page), a view of the engine's tensor whose rows may lie apart.
    rows: torch.Tensor
    #: Bytes [start, stop) of a stored page.
    start: int
    stop: int
    #: Bytes per word of `rows`, a key of `WORDS`: the widest that this tensor and its part of a stored page can be cut into.
    word: int


class GroupCache(NamedTuple):
    """The caches of one layer group."""

    regions: tuple[RegionCache, ...]
    page_count: int
    bytes_per_page: int
    #: On CUDA the regions as kernels go over them; none on a CPU.
    spans: tuple[Span, ...] = ()
    #: On CUDA the regions as copy engines go over them; none where kernels are better.
    strips: tuple[Strip, ...] = ()


def take_caches(layout: Layout, caches: Sequence[Sequence[Any]]) -> tuple[tuple[GroupCache, ...], torch.device]:
    """Check every tensor against the layout and return the views, with the one device that they are on.

    Raises SettingsError: the first tensor that does not fit, with its shape, dtype and strides.
    """
    if len(caches) != len(layout.groups):
        raise SettingsError(
            "caches",
            f"{len(caches)} groups",
            f"the layout has {len(layout.groups)} layer groups",
            "Give one sequence of tensors per layer group, in the layout's order.",
        )
    for index, (group, tensors) in enumerate(zip(layout.groups, caches, strict=True)):
        if len(tensors) != len(group.regions):
            raise SettingsError(
                f"caches[{index}]",
                f"{len(tensors)} tensors",
                f"layer group {index} has {len(group.regions)} regions",
                "Give one tensor per region, in the order of the group's regions: it is the order of the stored bytes.",
            )
    first = caches[0][0]
    groups = tuple(
        _take_group(f"caches[{index}]", group, tensors, first)
        for index, (group, tensors) in enumerate(zip(layout.groups, caches, strict=True))
    )
    return groups, first.device


def _take_group(field: str, group: LayerGroup, tensors: Sequence[Any], first: torch.Tensor) -> GroupCache:
    regions: list[RegionCache] = []
    begins: dict[int, int] = {}
    start = 0
    for index, (region, tensor) in enumerate(zip(group.regions, tensors, strict=True)):
        name = f"{field}[{index}]"
        _check_tensor(name, region, tensor, first)
        if regions and tensor.shape[0] != regions[0].rows.shape[0]:
            _refuse(
                name,
                tensor,
                f"{field}[0] has {regions[0].rows.shape[0]} pages and this tensor has {tensor.shape[0]}",
                "A page index means the same page in every region of a group: give all of them equally many pages.",
            )
        # Groups may share memory (an engine may lend one pool of pages to several groups); regions of one group may not.
        earlier = begins.setdefault(tensor.data_ptr(), index)
        if earlier != index:
            _refuse(name, tensor, f"it begins at the same byte as {field}[{earlier}]", "Give each region its own memory.")
        regions.append(_rows(tensor, region.bytes_per_page, start, group.bytes_per_page))
        start += region.bytes_per_page
    taken = GroupCache(tuple(regions), tensors[0].shape[0], group.bytes_per_page)
    if first.device.type == "cpu":
        return taken
    return taken._replace(
        spans=spans_of(placed_regions(taken), taken.bytes_per_page, first.device),
        strips=usable(strips_of(placed_regions(taken)), taken.page_count, first.device),
    )


def placed_regions(group: GroupCache) -> list[Placed]:
    """Where the regions of a group lie, by address."""
    return [
        Placed(
            begin=region.rows.data_ptr(),
            pitch=region.rows.stride(0) * region.word,
            pages=group.page_count,
            start=region.start,
            stop=region.stop,
            memory=region.rows.untyped_storage().data_ptr(),
        )
        for region in group.regions
    ]


def _check_tensor(name: str, region: Region, tensor: Any, first: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise SettingsError(name, type(tensor).__name__, "a cache is a torch tensor", "Pass the tensor that holds the pages.")
    if tensor.device != first.device:
        _refuse(name, tensor, f"caches[0][0] is on {first.device}", "Open one connector per device.")
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
        _refuse(name, tensor, "akv copies dense tensors on a CPU or on CUDA", "Keep the cache there.")
    if tensor.dim() < 1 or tensor.shape[0] < 1:
        _refuse(name, tensor, "its first axis is the page and it has no page", "Allocate the cache before opening akv.")
    page = tensor.select(0, 0)
    if not page.is_contiguous():
        _refuse(
            name,
            tensor,
            "one page of it is not contiguous",
            "Move the page to the first axis; give interleaved parts as regions of their own (kv[:, 0] and kv[:, 1], say).",
        )
    nbytes = page.numel() * page.element_size()
    if nbytes != region.bytes_per_page:
        _refuse(
            name,
            tensor,
            f"one page of it has {nbytes} bytes and region {region.name!r} of the layout has {region.bytes_per_page}",
            "Describe the region with the bytes of one page in this tensor.",
        )
    if tensor.shape[0] > 1 and tensor.stride(0) * tensor.element_size() < nbytes:
        _refuse(name, tensor, "its pages overlap in memory", "Pass the allocated tensor, not an expanded or unfolded view.")


def _refuse(name: str, tensor: torch.Tensor, why: str, fix: str) -> NoReturn:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    raise SettingsError(name, f"shape {tuple(tensor.shape)}, {tensor.dtype}, strides {strides}, {tensor.device}", why, fix)


def _rows(tensor: torch.Tensor, nbytes: int, start: int, page_bytes: int) -> RegionCache:
    elements = nbytes // tensor.element_size()
    count = tensor.shape[0]
    pitch = tensor.stride(0) if count > 1 else elements  # torch lets the stride of an axis of one element be anything
    rows = tensor.detach().as_strided((count, elements), (pitch, 1)).view(torch.uint8)
    # The address and the offset in the storage both count: torch checks the one, the hardware needs the other.
    word = gcd(nbytes, start, page_bytes, rows.stride(0), rows.storage_offset(), rows.data_ptr(), WIDEST)
    return RegionCache(rows.view(WORDS[word]), start, start + nbytes, word)
