"""Pages between torch caches and host buffers: one code path for CPU and CUDA tensors.

On CUDA a page moves to and from the host by one copy of `strips.py` where the layers' caches lie evenly apart. Elsewhere, and
in snapshots, one indexed copy moves pages between all regions of one size and memory on the device, never a copy per region
and page (130 pages of 48 regions, measured on an H200: 1 ms of host time against 62), and each run of adjacent slots is one
bulk copy between that and the host. On a CPU the host buffer is its own scratch, and the indexed copies are cut small.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from akv.device.caches import GroupCache, take_caches
from akv.device.device_memory import TorchDeviceBuffer
from akv.device.host_memory import TorchBuffer
from akv.device.host_pages import host_regions
from akv.device.moves import in_order_of_each, in_slot_order, indices, move_directly, move_on, places_of
from akv.device.scratch import Scratch
from akv.device.segment_memory import TorchSegment, fill_pages, map_segment
from akv.device.streams import TorchEvent, TorchStream, execution_stream, leaving_nothing_behind, wait
from akv.device.strips import copy_strips
from akv.errors import DeviceError, NotOpenError
from akv.ports.device import CopyStream, DeviceSlots, HostBuffer, HostRegion, PassEvent, Source
from akv.ports.segments import SegmentFile
from akv.values.layout import Layout

#: Bytes of device memory per stream, taken when the stream opens: later the engine may have taken all there is. One page at
#: least, and two for its halves. Measured on an H200, 780 MiB in pages of 48 regions of 128 KiB, in parts of the speed of one
#: bulk copy: 16 MiB 0.92 and 15 ms of host time, 32 MiB 0.95 and 8, 64 MiB 0.96 and 3, 128 MiB 0.95 and 2.
SCRATCH_BYTES = 64 << 20


class TorchCopier:
    """The `DeviceCopier` of torch tensors. Open it with `akv.device.open_torch_device`.

    `gather`, `scatter` and `snapshot` may run in several threads at a time. They leave the modes, default device and default
    dtype of the application alone and do not depend on them. If one raises, nothing of it is queued or running any more: what
    refuses its arguments copied nothing, DeviceError says that torch or the device failed on the way. After `close()` every
    method raises NotOpenError.
    """

    def __init__(self, layout: Layout, caches: Sequence[Sequence[Any]], stream: Any = None) -> None:
        self._groups, self._device = take_caches(layout, caches)
        self._page_counts = tuple(group.page_count for group in self._groups)
        self._scratch_bytes = max(
            layout.largest_page_bytes,
            min(SCRATCH_BYTES, max(group.page_count * group.bytes_per_page for group in self._groups)),
        )
        self._execution = execution_stream(stream, self._device)
        self._host_regions: tuple[HostRegion | None, ...] = (
            host_regions(self._groups) if self._device.type == "cpu" else (None,) * len(self._groups)
        )
        #: For snapshots that go to the host at once. Held as in `TorchStream`.
        self._snapshot_lock = threading.Lock()
        self._snapshot_scratch: Scratch | None = None
        if self._execution is not None and any(group.is_window for group in layout.groups):
            # Now, like that of streams: later the engine may have taken all there is. Other layouts are not snapshotted.
            self._snapshot_scratch = Scratch(self._scratch_bytes, self._execution)
        self._streams: list[TorchStream] = []
        self._open = True

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages in each layer group's cache, in the order of the layout."""
        return self._page_counts

    @property
    def copies_behind_calls(self) -> bool:
        """On CUDA."""
        return self._device.type != "cpu"

    def host_buffer(self, nbytes: int) -> TorchBuffer:
        """Allocate staging memory, page-aligned, uninitialised, pinned for CUDA. Blocks. Raises MemoryError."""
        self._check_open()
        return TorchBuffer(nbytes, pinned=self._device.type == "cuda")

    def map_segment(self, file: SegmentFile) -> TorchSegment:
        """A segment's memory, mapped read-only, pinned for CUDA. One for all connectors of the process. Blocks."""
        self._check_open()
        return map_segment(file, pinned=self._device.type == "cuda")

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
        return self._move(stream, group, [Source(pages, buffer, offsets)], after, to_host=True)

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
        return self._move(stream, group, [Source(pages, buffer, offsets)], after, to_host=False)

    def scatter_from(self, stream: CopyStream, group: int, sources: Sequence[Source], after: PassEvent) -> TorchEvent:
        """As `scatter`, from several buffers, on which the same conditions are."""
        return self._move(stream, group, sources, after, to_host=False)

    def host_region(self, group: int) -> HostRegion | None:
        """The group's pages in the cache's own memory: on a CPU, if every page is one piece. On CUDA None.

        That is so for a group of one region, and for regions that are slices of one tensor, `big[:, 0]`, `big[:, 1]` and so on
        in the layout's order. The buffer keeps the cache alive, also after `close()`.
        """
        self._check_open()
        return self._host_regions[group]

    def device_buffer(self, nbytes: int) -> TorchDeviceBuffer | None:
        """Allocate memory for device slots, uninitialised; None on a CPU. Raises MemoryError if the device is full."""
        self._check_open()
        return None if self._execution is None else TorchDeviceBuffer(nbytes, self._execution)

    def snapshot(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        via: DeviceSlots | None,
    ) -> TorchEvent:
        """Copy pages into `buffer`, each to its offset, at the present end of the execution stream. Returns their arrival.

        On CUDA the engine's next kernels wait for one indexed copy per region within the device if there are device slots, one
        per page in any order, `via` which `stream` carries them on; without, they wait for the way to the host as well.

        On a CPU it copies at once, so before whatever the engine does next.

        Raises EngineContractError for a page that the cache does not have, ValueError for slots that do not fit.
        """
        self._check_open()
        torch_stream, (memory,) = _own(stream, [buffer])
        cache, execution = self._groups[group], self._execution
        index, slots = in_slot_order(group, cache, pages, memory.nbytes, offsets, to_host=True)
        if execution is None:
            if via is not None:
                raise TypeError("a CPU has no device slots: its copies have ended when they return")
            with torch.inference_mode(), leaving_nothing_behind(stream.name):
                move_directly(cache, index, slots, memory.tensor, to_host=True)
            return TorchEvent()
        if via is None:
            with self._snapshot_lock, torch.inference_mode(), leaving_nothing_behind(stream.name, execution):
                scratch = self._snapshot_scratch = self._snapshot_scratch or Scratch(self._scratch_bytes, execution)
                with torch.cuda.stream(execution):
                    _move_pinned(scratch, cache, index, slots, memory.tensor, to_host=True)
                return TorchEvent(execution.record_event(), holds=memory)
        if not isinstance(via.buffer, TorchDeviceBuffer):
            raise TypeError("device slots of another device cannot be used here")
        # Which page goes through which device slot is nobody's business: in the order of the slots, most of them move as one.
        _, places = in_slot_order(group, cache, pages, via.buffer.nbytes, via.offsets, to_host=True)
        with torch_stream.lock, torch.inference_mode(), leaving_nothing_behind(stream.name, execution, torch_stream.cuda):
            with torch.cuda.stream(execution):
                move_directly(cache, indices(cache, index), places, via.buffer.tensor, to_host=True)
            with torch_stream.entered():
                wait(torch_stream.cuda, TorchEvent(execution.record_event()))
                move_on(via.buffer.tensor, places, memory.tensor, slots, cache.bytes_per_page)
            return torch_stream.record(holds=(memory, via.buffer))

    def execution_waits_for(self, event: PassEvent) -> None:
        """Order the engine's next work behind `event`, on the execution stream and not on the host."""
        self._check_open()
        wait(self._execution, event)

    def close(self) -> None:
        """Let go of the caches and of the streams with their scratch. Only when no copy is queued or running. Idempotent."""
        self._open = False
        self._groups = ()
        self._host_regions = ()
        while self._streams:
            self._streams.pop().close()
        self._snapshot_scratch = None
        self._execution = None

    def _check_open(self) -> None:
        if not self._open:
            raise NotOpenError("the device is closed: its connector has ended")

    def _move(
        self, stream: CopyStream, group: int, sources: Sequence[Source], after: PassEvent, *, to_host: bool
    ) -> TorchEvent:
        """Between pages and buffers: `sources` says of a gather where its pages go."""
        self._check_open()
        torch_stream, memories = _own(stream, [source.buffer for source in sources], read_only=not to_host)
        cache = self._groups[group]
        strips = cache.strips if torch_stream.scratch is not None else ()
        # Rectangles need no order, and so all of them at once.
        rectangles = [places_of(group, cache, sources, to_host=to_host)] if strips else []
        ordered = [] if strips else in_order_of_each(group, cache, sources, to_host=to_host)
        with torch_stream.lock, torch.inference_mode(), torch_stream.entered():
            wait(torch_stream.cuda, after)
            with leaving_nothing_behind(stream.name, torch_stream.cuda):
                for pages, addresses in rectangles:
                    copy_strips(strips, pages, addresses, to_host=to_host)
                for memory, (index, slots) in zip(memories if ordered else (), ordered, strict=True):
                    if isinstance(memory, TorchSegment) and torch_stream.cuda is None:
                        fill_pages(memory, cache, index.tolist(), slots)
                    elif torch_stream.scratch is None:
                        move_directly(cache, index, slots, memory.tensor, to_host=to_host)
                    else:
                        torch_stream.scratch.move(cache, index, slots, memory.tensor, to_host=to_host)
                return torch_stream.record(holds=memories)


def _move_pinned(
    scratch: Scratch, cache: GroupCache, pages: torch.Tensor, slots: list[int], host: torch.Tensor, *, to_host: bool
) -> None:
    """Between pages on CUDA and pinned host memory, in the order of the current stream."""
    if cache.strips:
        addresses = np.asarray(slots, dtype=np.int64) + host.data_ptr()
        copy_strips(cache.strips, pages.numpy(), addresses, to_host=to_host)
    else:
        scratch.move(cache, pages, slots, host, to_host=to_host)


def _own(
    stream: CopyStream, buffers: Sequence[HostBuffer], *, read_only: bool = False
) -> tuple[TorchStream, list[TorchBuffer | TorchSegment]]:
    """`read_only`: the buffers are not written, so that they may be segments."""
    kinds = (TorchBuffer, TorchSegment) if read_only else (TorchBuffer,)
    own = [buffer for buffer in buffers if isinstance(buffer, kinds)]
    if not isinstance(stream, TorchStream) or len(own) < len(buffers):
        raise TypeError("streams and host buffers of another device cannot be used here")
    return stream, own
