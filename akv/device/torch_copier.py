"""Pages between torch caches and host buffers: one code path for CPU and CUDA tensors.

On CUDA one indexed copy per region moves all pages of a call between the cache and a scratch on the device, never one copy per
page (130 pages of 48 regions, measured on an H200: 0.5 ms of host time against 48 ms), and each run of adjacent slots is one
bulk copy between scratch and host. On a CPU the host buffer is its own scratch, and the indexed copies are cut small.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from math import gcd
from typing import Any

import numpy as np
import torch

from akv.device.caches import WORDS, GroupCache, take_caches
from akv.device.host_memory import TorchBuffer
from akv.device.host_pages import host_regions
from akv.errors import DeviceError, EngineContractError, NotOpenError, SettingsError
from akv.ports.device import CopyStream, HostBuffer, HostRegion, PassEvent
from akv.values.layout import Layout

#: Bytes of device memory per stream, taken when the stream opens: later the engine may have taken all there is. One page at
#: least. Measured on an H200, pages of 48 regions of 128 KiB: 8 MiB move 10 GB/s, 64 MiB 38 to 44, 256 MiB 48, a bulk copy 55.
SCRATCH_BYTES = 64 << 20

#: The most elements of one indexed copy on a CPU. From 32,768 on (its grain size) torch splits an operation among its OpenMP
#: threads, which wait for each other: beside other work on the same cores, such as a forward pass, that was measured 10 to 40
#: times slower than this thread alone, and never much faster.
CPU_PIECE = 32_767


class TorchEvent:
    """A point in a CUDA stream's work; on a CPU a point that has passed, because copies there end before they return."""

    def __init__(self, event: torch.cuda.Event | None = None, holds: object = None) -> None:
        """`holds`: what must stay alive until the work has completed."""
        self.event = event
        self._holds = holds

    def query(self) -> bool:
        """Whether everything before this point has completed. Raises DeviceError if the device failed."""
        event = self.event  # read once: a loader's thread and the poller may ask at the same time
        if event is not None:
            try:
                done = event.query()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            except RuntimeError as error:
                raise DeviceError(f"the device failed before this point of its work: {error}") from error
            if not done:
                return False
            self.event = None
            self._holds = None
        return True


class TorchStream:
    """A stream for copies, with its scratch on the device. On a CPU only a name and a lock."""

    def __init__(self, name: str, device: torch.device, scratch_bytes: int) -> None:
        self._name = name
        #: Held while a call issues its copies: two threads on one stream would overwrite each other's scratch.
        self.lock = threading.Lock()
        self.cuda: torch.cuda.Stream | None = None
        self.scratch: torch.Tensor | None = None
        if device.type == "cuda":
            self.cuda = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            # Allocated on this very stream: memory that another stream freed may still be read or written by its kernels.
            with torch.cuda.stream(self.cuda):
                self.scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)

    @property
    def name(self) -> str:
        """For logs."""
        return self._name

    def close(self) -> None:
        """Give the scratch back. Only when no copy is queued or running."""
        self.cuda = self.scratch = None

    def entered(self) -> AbstractContextManager[object]:
        """Make it the current stream of this thread, and its device the current device."""
        return nullcontext() if self.cuda is None else torch.cuda.stream(self.cuda)


class TorchCopier:
    """The `DeviceCopier` of torch tensors. Open it with `akv.device.open_torch_device`.

    `gather` and `scatter` may run in several threads at a time. They leave the modes, default device and default dtype of the
    application alone and do not depend on them. If one raises, nothing of it is queued or running any more: what refuses its
    arguments copied nothing, DeviceError says that torch or the device failed on the way. After `close()` every method raises
    NotOpenError.
    """

    def __init__(self, layout: Layout, caches: Sequence[Sequence[Any]], stream: Any = None) -> None:
        self._groups, self._device = take_caches(layout, caches)
        self._page_counts = tuple(group.page_count for group in self._groups)
        self._scratch_bytes = max(
            layout.largest_page_bytes,
            min(SCRATCH_BYTES, max(group.page_count * group.bytes_per_page for group in self._groups)),
        )
        self._execution = _execution_stream(stream, self._device)
        self._host_regions: tuple[HostRegion | None, ...] = (
            host_regions(self._groups) if self._device.type == "cpu" else (None,) * len(self._groups)
        )
        self._streams: list[TorchStream] = []
        self._open = True

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages in each layer group's cache, in the order of the layout."""
        return self._page_counts

    def host_buffer(self, nbytes: int) -> TorchBuffer:
        """Allocate staging memory, page-aligned, uninitialised, pinned for CUDA. Blocks. Raises MemoryError."""
        self._check_open()
        return TorchBuffer(nbytes, pinned=self._device.type == "cuda")

    def open_stream(self, name: str) -> TorchStream:
        """A new stream for copies, with its scratch. Raises torch's OutOfMemoryError if the device has no room for that."""
        self._check_open()
        stream = TorchStream(name, self._device, self._scratch_bytes)
        self._streams.append(stream)
        return stream

    def record(self) -> TorchEvent:
        """Mark the present end of the engine's execution stream."""
        self._check_open()
        if self._execution is None:
            return TorchEvent()
        try:
            return TorchEvent(self._execution.record_event())
        except RuntimeError as error:  # what torch raises for all that a device reports, faults of earlier kernels included
            raise DeviceError(f"the device failed before an event could be recorded on it: {error}") from error

    def gather(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
    ) -> TorchEvent:
        """Copy pages of a layer group into `buffer`, each to its offset, on `stream`, after `after`. Returns its end.

        Raises EngineContractError for a page that the cache does not have, ValueError for slots that do not fit.
        """
        return self._move(stream, group, pages, buffer, offsets, after, to_host=True)

    def scatter(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
    ) -> TorchEvent:
        """Copy from `buffer`, each page from its offset, into pages of a layer group, on `stream`, after `after`.

        Raises EngineContractError for a page that the cache does not have or that is named twice, ValueError for slots that do
        not fit.
        """
        return self._move(stream, group, pages, buffer, offsets, after, to_host=False)

    def host_region(self, group: int) -> HostRegion | None:
        """The group's pages in the cache's own memory: on a CPU, if every page is one piece. On CUDA None.

        That is so for a group of one region, and for regions that are slices of one tensor, `big[:, 0]`, `big[:, 1]` and so on
        in the layout's order. The buffer keeps the cache alive, also after `close()`.
        """
        self._check_open()
        return self._host_regions[group]

    def execution_waits_for(self, event: PassEvent) -> None:
        """Order the engine's next work behind `event`, on the execution stream and not on the host."""
        self._check_open()
        _wait(self._execution, event)

    def close(self) -> None:
        """Let go of the caches and of the streams with their scratch. Only when no copy is queued or running. Idempotent."""
        self._open = False
        self._groups = ()
        self._host_regions = ()
        while self._streams:
            self._streams.pop().close()
        self._execution = None

    def _check_open(self) -> None:
        if not self._open:
            raise NotOpenError("the device is closed: its connector has ended")

    def _move(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
        *,
        to_host: bool,
    ) -> TorchEvent:
        self._check_open()
        if not isinstance(stream, TorchStream) or not isinstance(buffer, TorchBuffer):
            raise TypeError("streams and host buffers of another device cannot be used here")
        cache = self._groups[group]
        index, slots = _in_slot_order(group, cache, pages, buffer, offsets, to_host=to_host)
        with stream.lock, torch.inference_mode(), stream.entered():
            _wait(stream.cuda, after)
            with _leaving_nothing_behind(stream):
                if stream.scratch is None:
                    _move_directly(cache, index, slots, buffer.tensor, to_host=to_host)
                else:
                    _move_through(stream.scratch, cache, index, slots, buffer.tensor, to_host=to_host)
            return TorchEvent() if stream.cuda is None else TorchEvent(stream.cuda.record_event(), holds=buffer)


def _execution_stream(stream: Any, device: torch.device) -> torch.cuda.Stream | None:
    if device.type == "cpu":
        if stream is not None:
            raise SettingsError("stream", stream, "the caches are on a CPU, which has no streams", "Leave it out.")
        return None
    if stream is None:
        return torch.cuda.current_stream(device)
    if not isinstance(stream, torch.cuda.Stream) or stream.device != device:
        raise SettingsError("stream", stream, f"it is no stream of {device}", "Pass the torch.cuda.Stream of the forwards.")
    return stream


@contextmanager
def _leaving_nothing_behind(stream: TorchStream) -> Iterator[None]:
    """If queueing fails half-way, end what was queued: there will be no event that could tell when it ends by itself."""
    try:
        yield
    except BaseException as error:
        if stream.cuda is not None:
            with suppress(RuntimeError):  # a device that failed for good runs nothing any more
                stream.cuda.synchronize()
        if isinstance(error, RuntimeError):  # what torch raises for all that a device reports, out of memory included
            raise DeviceError(f"copies could not be queued on stream {stream.name!r}: {error}") from error  # noqa: ASYNC104 - no cancellation
        raise


def _wait(stream: torch.cuda.Stream | None, event: PassEvent) -> None:
    if not isinstance(event, TorchEvent):
        raise TypeError("an event of another device orders nothing here")
    pending = event.event  # read once: the poller may clear it at any moment, when there is nothing to wait for any more
    if stream is not None and pending is not None:
        stream.wait_event(pending)


def _in_slot_order(
    group: int, cache: GroupCache, pages: Sequence[int], buffer: TorchBuffer, offsets: Sequence[int], *, to_host: bool
) -> tuple[torch.Tensor, list[int]]:
    """Check a call's arguments, and sort its pages by their slots, so that adjacent slots can be moved as one."""
    index = np.asarray(pages, dtype=np.int64)
    slots = np.asarray(offsets, dtype=np.int64)
    if index.shape != slots.shape:
        raise ValueError(f"{index.size} pages and {slots.size} offsets: there is one slot per page")
    strangers = index[(index < 0) | (index >= cache.page_count)]
    if strangers.size:
        raise EngineContractError(f"layer group {group} has no page {strangers[0]}: its cache has {cache.page_count} pages")
    if not to_host and np.unique(index).size != index.size:
        raise EngineContractError(f"layer group {group}: two loads into one page, of which only one could survive")
    outside = slots[(slots < 0) | (slots > buffer.nbytes - cache.bytes_per_page)]
    if outside.size:
        raise ValueError(f"a page of {cache.bytes_per_page} bytes does not fit at {outside[0]} of {buffer.nbytes} bytes")
    order = np.argsort(slots, kind="stable")
    index, slots = index[order], slots[order]
    if to_host and (np.diff(slots) < cache.bytes_per_page).any():
        raise ValueError("slots overlap: one page would overwrite another")
    return torch.from_numpy(index), slots.tolist()


def _runs(slots: list[int], page_bytes: int, *, gaps: bool) -> Iterator[tuple[int, int, int]]:
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


def _move_directly(cache: GroupCache, index: torch.Tensor, slots: list[int], host: torch.Tensor, *, to_host: bool) -> None:
    for first, last, step in _runs(slots, cache.bytes_per_page, gaps=True):
        table = host.as_strided((last - first, cache.bytes_per_page), (step, 1), slots[first])
        _exchange(cache, index[first:last], table, to_host=to_host)


def _move_through(
    scratch: torch.Tensor, cache: GroupCache, index: torch.Tensor, slots: list[int], host: torch.Tensor, *, to_host: bool
) -> None:
    page_bytes = cache.bytes_per_page
    at_once = scratch.numel() // page_bytes
    # Pinned first: a copy from pageable memory would make the host wait for what is on the stream, `after` included.
    index = index.pin_memory().to(scratch.device, non_blocking=True)
    for begin in range(0, len(slots), at_once):
        part = slots[begin : begin + at_once]
        pages = index[begin : begin + len(part)]
        block = scratch[: len(part) * page_bytes]
        table = block.view(len(part), page_bytes)
        if to_host:
            _exchange(cache, pages, table, to_host=True)
        for first, last, _ in _runs(part, page_bytes, gaps=False):
            on_device = block[first * page_bytes : last * page_bytes]
            on_host = host[part[first] : part[first] + on_device.numel()]
            if to_host:
                on_host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(on_host, non_blocking=True)
        if not to_host:
            _exchange(cache, pages, table, to_host=False)


def _exchange(cache: GroupCache, index: torch.Tensor, table: torch.Tensor, *, to_host: bool) -> None:
    """Move between the caches' pages and a table of stored pages, one row each, on the caches' device."""
    fits = gcd(table.data_ptr(), table.stride(0), max(WORDS))
    tables = {word: table.view(WORDS[word]) for word in {gcd(region.word, fits) for region in cache.regions}}
    for region in cache.regions:
        word = gcd(region.word, fits)
        rows = region.rows if word == region.word else region.rows.view(WORDS[word])
        part = tables[word][:, region.start // word : region.stop // word]
        if not part.is_cpu or part.numel() <= CPU_PIECE:
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
