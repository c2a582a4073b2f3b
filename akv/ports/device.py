"""The device: the engine's pages, staging memory on the host, and copies between them that events order."""

from collections.abc import Sequence
from typing import Protocol


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

    A page at an offset of a host buffer lies there as its regions' bytes, concatenated in the layout's order. `gather` and
    `scatter` may take host time (they issue one copy per region, not per page; on a CPU they do the copying), so they are
    called through a `CallRunner`; the other methods are quick and called on the loop. `akv_testing.conformance.device` holds
    what an implementation must pass.
    """

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages in each layer group's cache, in the order of the layout."""
        ...

    def host_buffer(self, nbytes: int) -> HostBuffer:
        """Allocate staging memory, uninitialised. Blocks: pinning gigabytes takes seconds, so through a `CallRunner` too."""
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

    def execution_waits_for(self, event: PassEvent) -> None:
        """Order the engine's next work behind `event`, on the execution stream and not on the host (D5, M4)."""
        ...

    def close(self) -> None:
        """Let go of streams and memory. Only when no copy is queued or running. Idempotent."""
        ...
