"""Regions of one size as rows of one tensor, so that one kernel on CUDA moves what lies in all of them.

Engines allocate layer by layer, and to queue a kernel for each of 48 takes longer than to copy a few pages. But addresses are
numbers: counted in the largest unit of which all distances between the caches and all pitches of their pages are multiples,
every region of every page is one row of one tensor, whose rows overlap and are hardly ever used.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from akv.device.foreign import rows_at
from akv.device.words import WIDEST, WORDS


class Placed(NamedTuple):
    """Where the pages of one region lie."""

    #: Address of page 0.
    begin: int
    #: Bytes from one page to the next.
    pitch: int
    #: How many there are.
    pages: int
    #: Bytes of a page, [start, stop) of a stored one.
    start: int
    stop: int
    #: Address of the allocation that it is a part of.
    memory: int = 0


class Span(NamedTuple):
    """Regions of one size that follow each other in a stored page."""

    #: Shape (rows, words per region): row i begins i units behind the first byte of these caches. It owns no memory.
    rows: torch.Tensor
    #: Columns of `row_numbers()` that are theirs.
    first: int
    last: int
    #: Bytes [start, stop) of a stored page.
    start: int
    stop: int
    #: Bytes per word, a key of `WORDS`.
    word: int
    #: For each region the row of page 0, and how many rows on the next page is.
    begins: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    pitches: "np.ndarray[tuple[int], np.dtype[np.int64]]"


def spans_of(regions: Sequence[Placed], page_bytes: int, device: torch.device) -> tuple[Span, ...]:
    """A group's regions, in order, in as few spans as their sizes allow. `page_bytes`: of a stored page."""
    return tuple(_span(first, some, page_bytes, device) for first, some in _runs(regions))


class RowNumbers:
    """Which rows hold some pages: int64 of shape (pages, regions), each counted in the span of its region."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host = host
        #: The same where a kernel can read it.
        self._device = device

    @classmethod
    def of(cls, spans: Sequence[Span], pages: torch.Tensor, device: torch.device) -> "RowNumbers":
        """`pages`: int64, on the host. What is on the device is there in the order of the current stream."""
        at = pages.numpy()[:, None]
        host = torch.from_numpy(np.concatenate([span.begins + at * span.pitches for span in spans], axis=1))
        if device.type == "cpu":
            return cls(host, host)
        # Pinned first: a copy from pageable memory would make the host wait for what is on the stream.
        return cls(host, host.pin_memory().to(device, non_blocking=True))

    def __getitem__(self, some: slice) -> "RowNumbers":
        """Of some of the pages."""
        return RowNumbers(self._host[some], self._device[some])

    def of_span(self, span: Span) -> torch.Tensor:
        """Of the regions of one span, on the device."""
        return self._device[:, span.first : span.last]

    def listed(self, span: Span) -> list[list[int]]:
        """The same, without waiting for the device."""
        return self._host[:, span.first : span.last].tolist()


def exchange(spans: Sequence[Span], numbers: RowNumbers, table: torch.Tensor, *, to_table: bool) -> None:
    """Copy between rows and a table of stored pages, one row each, all on one device."""
    fits = gcd(table.data_ptr(), table.stride(0), WIDEST)
    for span in spans:
        word = gcd(span.word, fits)
        rows = span.rows if word == span.word else span.rows.view(WORDS[word])
        part = table[:, span.start : span.stop].view(WORDS[word]).view(table.shape[0], span.last - span.first, -1)
        if to_table:
            torch.ops.aten.index.Tensor_out(rows, [numbers.of_span(span)], out=part)
        elif torch.are_deterministic_algorithms_enabled():
            _fill_one_by_one(rows, numbers.listed(span), part)
        else:
            rows.index_put_((numbers.of_span(span),), part)


def _fill_one_by_one(rows: torch.Tensor, numbers: list[list[int]], part: torch.Tensor) -> None:
    """For torch's deterministic algorithms: its own way to fill rows that lie apart copies the whole tensor to and fro, other
    pages included, and what a kernel writes into those meanwhile would be lost.
    """
    for page, numbered in enumerate(numbers):
        for region, number in enumerate(numbered):
            rows[number].copy_(part[page, region], non_blocking=True)


def _runs(regions: Sequence[Placed]) -> Iterator[tuple[int, list[Placed]]]:
    for _, numbered in groupby(enumerate(regions), lambda pair: pair[1].stop - pair[1].start):
        some = list(numbered)
        yield some[0][0], [region for _, region in some]


def _span(first: int, regions: list[Placed], page_bytes: int, device: torch.device) -> Span:
    base = min(region.begin for region in regions)
    size = regions[0].stop - regions[0].start
    start = regions[0].start
    # Of one page alone nothing says how far away a second one would be.
    pitches = [region.pitch if region.pages > 1 else 0 for region in regions]
    unit = gcd(*(region.begin - base for region in regions), *pitches) or size
    word = gcd(size, start, page_bytes, unit, base, WIDEST)
    last = max(region.begin + (region.pages - 1) * pitch for region, pitch in zip(regions, pitches, strict=True))
    with _current(device):
        rows = rows_at(base, size, unit, (last - base) // unit + 1, cuda=device.type == "cuda")
    return Span(
        rows=rows.view(WORDS[word]),
        first=first,
        last=first + len(regions),
        start=start,
        stop=regions[-1].stop,
        word=word,
        begins=np.array([(region.begin - base) // unit for region in regions], dtype=np.int64),
        pitches=np.array([pitch // unit for pitch in pitches], dtype=np.int64),
    )


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
