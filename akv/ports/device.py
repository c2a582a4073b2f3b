"""The device: the engine's pages, staging memory on the host, and copies between them that events order."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from akv.ports.segments import SegmentFile


class HostBuffer(Protocol):
    """Contiguous host memory that both the store and the device can reach (pinned where the device needs it)."""

    @property
    def address(self) -> int:
        """Where it begins."""
        ...

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        ...

    def view(self) -> memoryview:
        """Its bytes, writable, format "B". The memory lives at least as long as the view."""
        ...


class HostRegion(NamedTuple):
    """Where the pages of a layer group lie in host memory, each in one piece, so that the store can reach them itself."""

    #: The cache's own memory. Layer groups that share memory have the same buffer here.
    buffer: HostBuffer
    #: Where page 0 begins in it, in bytes.
    offset: int
    #: Bytes from the beginning of one page to the next one's; at least a page.
    pitch: int

    def offsets(self, pages: Sequence[int]) -> list[int]:
        """Where these pages begin in the buffer, in bytes."""
        return [self.offset + page * self.pitch for page in pages]


class DeviceBuffer(Protocol):
    """Contiguous memory on the device, apart from the engine's cache: the device slots of the snapshot ring (S3)."""

    @property
    def nbytes(self) -> int:
        """How long it is, in bytes."""
        ...


class DeviceSlots(NamedTuple):
    """Pieces of a device buffer, one per page."""

    buffer: DeviceBuffer
    #: Where each piece begins, in bytes.
    offsets: Sequence[int]


class Source(NamedTuple):
    """Where pages of a layer group come from: one buffer, and a place in it for each."""

    pages: Sequence[int]
    buffer: HostBuffer
    #: Where each begins in the buffer, in bytes.
    offsets: Sequence[int]


class PassEvent(Protocol):
    """A point in a stream's work. Polled by the one stream poller; nothing else asks it."""

    def query(self) -> bool:
        """Whether everything before this point has completed. Never blocks. Once True, always True.

        Raises DeviceError, caused by what the work raised, if it failed: then nothing of it is running any more either.
        """
        ...


class CopyStream(Protocol):
    """An ordered queue of copies, apart from the engine's own work."""

    @property
    def name(self) -> str:
        """For logs and for errors of the fake device."""
        ...


class DeviceCopier(Protocol):
    """Copies pages between an engine's cache and host buffers, in order, without the host waiting.

    A page at an offset of a host buffer lies there as its regions' bytes, concatenated in the layout's order. `gather`,
    `scatter` and `snapshot` may take host time (they issue one copy per region, not per page; on a CPU they do the copying),
    so they are called through a `CallRunner`; the other methods are quick and called on the loop.
    `akv_testing.conformance.device` holds what an implementation must pass.
    """

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages in each layer group's cache, in the order of the layout."""
        ...

    @property
    def copies_behind_calls(self) -> bool:
        """Whether a copy runs on behind the call that queued it. False where the call itself copies, as on a CPU."""
        ...

    def host_buffer(self, nbytes: int) -> HostBuffer:
        """Allocate staging memory, uninitialised. Blocks: pinning gigabytes takes seconds, so through a `CallRunner` too."""
        ...

    def map_segment(self, file: SegmentFile) -> HostBuffer:
        """The memory of a segment's file, read-only: `scatter` takes it, nothing else does. Blocks as `host_buffer` does.

        If the file is shortened meanwhile or later, copies from it fail; nothing else does. Raises DeviceError or OSError if
        it cannot be mapped, MemoryError if it cannot be pinned.
        """
        ...

    def open_stream(self, name: str) -> CopyStream:
        """A new stream for copies. Lives until `close()`."""
        ...

    def record(self) -> PassEvent:
        """Mark the present end of the engine's execution stream: the end of a pass, or an allocation fence (D5)."""
        ...

    def gather(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
    ) -> PassEvent:
        """Copy pages of a layer group into `buffer`, each to its offset, on `stream`, after `after`. Returns its end."""
        ...

    def scatter(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
    ) -> PassEvent:
        """Copy from `buffer`, each page from its offset, into pages of a layer group, on `stream`, after `after`."""
        ...

    def scatter_from(self, stream: CopyStream, group: int, sources: Sequence[Source], after: PassEvent) -> PassEvent:
        """As `scatter`, from several buffers, each page from one of them. Returns the end of all of it.

        One call, because what a call costs the host is as much as tens of pages cost, however few it copies. If it raises,
        nothing of any of them is queued or running.
        """
        ...

    def host_region(self, group: int) -> HostRegion | None:
        """The group's pages as host memory, if the cache lies there and every page of it is one piece; else None."""
        ...

    def device_buffer(self, nbytes: int) -> DeviceBuffer | None:
        """Allocate memory for device slots; None where the device is the host, which needs none. Raises MemoryError."""
        ...

    def snapshot(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        via: DeviceSlots | None,
    ) -> PassEvent:
        """Copy pages into `buffer` at this point of the **execution stream**: what is queued there later may overwrite them.

        With `via` the execution stream only copies into device slots, and `stream` carries these on to the host; without, it
        copies to the host itself. Returns the event of the arrival in `buffer`; by then the device slots are free, too. One
        gather per region, not a copy per page (S3, M5). If it raises, nothing of it is queued or running.
        """
        ...

    def execution_waits_for(self, event: PassEvent) -> None:
        """Order the engine's next work behind `event`, on the execution stream and not on the host (D5, M4)."""
        ...

    def close(self) -> None:
        """Let go of streams and memory. Only when no copy is queued or running. Idempotent."""
        ...
