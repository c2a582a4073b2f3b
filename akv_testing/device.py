"""A device in virtual time whose copies take their time, and that refuses every access which no event orders.

    device = FakeDevice(tiny_layout(), (64,), anyio.current_time)
    device.fill_page(0, 5, b"...")                       # or kernel(reads=..., writes=...): what an engine's forward does
    device.script.hold("scatter")                               # the next scatter does not begin until the gate opens

Bytes move when a copy ends, and while it runs its destination holds garbage (`TORN`), so code that reads too early reads
wrong bytes. And it never comes to that: reads and writes are checked when they are queued, by vector clocks, and one that is
not ordered behind what it depends on raises `UnorderedAccess`, naming both sides. That the copy would mostly have been in time
does not count.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from akv.errors import NotOpenError
from akv.ports.device import CopyStream, DeviceSlots, HostBuffer, HostRegion, PassEvent, Source
from akv.ports.segments import SegmentFile
from akv.values.layout import Layout
from akv_testing.copy_script import CopyKind, CopyRecord, CopyScript, failing_with
from akv_testing.errors import MisuseError
from akv_testing.memory import FakeDeviceBuffer, FakeHostBuffer, FakePageBuffer, Piece
from akv_testing.races import Actors
from akv_testing.segments import FakeSegmentBuffer, FakeSegmentFile
from akv_testing.timeline import FakeEvent, FakeStream, Timeline, Work, WorkKind

#: What the destination of a copy or kernel holds while it runs, and keeps if it fails.
TORN = 0xDB
#: How long a copy or gather takes unless a test says otherwise, in seconds. Not 0: code must wait for its event.
COPY_S = 0.0005
#: Room for device slots unless a test says otherwise.
DEVICE_BYTES = 1 << 30


class FakeDevice:
    """Implements `akv.ports.device.DeviceCopier` for pages kept in numpy arrays.

    `layout`: its page geometry. `page_counts`: pages per group. `now`: the clock. `copy_s`: the duration of a copy in seconds
    given its bytes; a constant by default. `host_pages`: it is a CPU, and `host_region()` gives its pages to the store, whose
    calls on them are then checked like kernels. `one_memory`: all layer groups lie in one piece of memory. `device_bytes`: the
    room for device slots, None for a device that has none; a CPU has none either.
    """

    def __init__(
        self,
        layout: Layout,
        page_counts: Sequence[int],
        now: Callable[[], float],
        *,
        copy_s: Callable[[int], float] = lambda nbytes: COPY_S,
        host_pages: bool = False,
        one_memory: bool = False,
        device_bytes: int | None = DEVICE_BYTES,
    ) -> None:
        if len(page_counts) != len(layout.groups):
            raise MisuseError(f"{len(page_counts)} page counts for {len(layout.groups)} layer groups")
        self.layout = layout
        self.copy_s = copy_s
        #: What happens to the copies to come: faults, delays, gates, hooks.
        self.script = CopyScript(now)
        #: Every copy so far, in order.
        self.copies: list[CopyRecord] = []
        self._now = now
        self._actors = Actors()
        self._execution = FakeStream(self._actors.add("execution stream"))
        self._timeline = Timeline(now)
        self._host_pages = host_pages
        sizes = [(index, page_counts[index], int(group.bytes_per_page)) for index, group in enumerate(layout.groups)]
        self._memories = [
            FakePageBuffer(some, name=f"cache {number}", host=self._actors.host, settle=self._timeline.settle)
            for number, some in enumerate([sizes] if one_memory else [[one] for one in sizes])
        ]
        self._pages = [pages for memory in self._memories for pages in memory.groups.values()]
        self._device_bytes = None if host_pages else device_bytes
        self._buffers = 0
        self._open = True

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages in each layer group's cache, in the order of the layout."""
        return tuple(len(pages.rows) for pages in self._pages)

    @property
    def copies_behind_calls(self) -> bool:
        """As the port says: a copy's bytes move when it ends."""
        return True

    @property
    def busy(self) -> int:
        """Copies that are queued or running at this moment."""
        return len(self._timeline.pending("gather", "scatter", "snapshot", "carry"))

    def host_buffer(self, nbytes: int) -> FakeHostBuffer:
        """As the port says; filled with poison."""
        self._check_open()
        self._buffers += 1
        name = f"host buffer {self._buffers}"
        return FakeHostBuffer(nbytes, name=name, host=self._actors.host, settle=self._timeline.settle)

    def map_segment(self, file: SegmentFile) -> FakeSegmentBuffer:
        """As the port says."""
        self._check_open()
        if not isinstance(file, FakeSegmentFile):
            raise MisuseError(f"{file!r} is no file of a fake host")
        self._buffers += 1
        return FakeSegmentBuffer(file.segment, name=f"segment {self._buffers}")

    def open_stream(self, name: str) -> FakeStream:
        """As the port says. Streams of one name are different streams."""
        self._check_open()
        return FakeStream(self._actors.add(name))

    def record(self) -> FakeEvent:
        """As the port says."""
        self._check_open()
        return self._event(self._execution)

    def gather(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
    ) -> FakeEvent:
        """As the port says. Raises UnorderedAccess unless it is ordered behind the last write of each page and piece."""
        return self._copy("gather", stream, group, [Source(pages, buffer, offsets)], after)

    def scatter(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
    ) -> FakeEvent:
        """As the port says. Raises UnorderedAccess unless it is ordered behind every access of each page."""
        return self._copy("scatter", stream, group, [Source(pages, buffer, offsets)], after)

    def scatter_from(self, stream: CopyStream, group: int, sources: Sequence[Source], after: PassEvent) -> FakeEvent:
        """As the port says, and as `scatter`. To the script, and on record, each source is a copy of its own."""
        return self._copy("scatter", stream, group, sources, after)

    def device_buffer(self, nbytes: int) -> FakeDeviceBuffer | None:
        """As the port says. What was taken stays taken: `device_bytes` is for all buffers that there ever were."""
        self._check_open()
        if self._device_bytes is None:
            return None
        if nbytes > self._device_bytes:
            raise MemoryError(f"the fake device has {self._device_bytes} bytes left for device slots, not {nbytes}")
        self._device_bytes -= nbytes
        self._buffers += 1
        return FakeDeviceBuffer(nbytes, name=f"device buffer {self._buffers}")

    def snapshot(
        self,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        via: DeviceSlots | None,
    ) -> FakeEvent:
        """As the port says: pages are read at this point of the execution stream, which goes on when they have been.

        Raises UnorderedAccess unless it is ordered behind every access of the pieces of `buffer` and of the device slots, and
        behind what others than the execution stream wrote into the pages.
        """
        self._check_open()
        carrier, memory = self._own_memory("snapshot", stream, buffer)
        self._check_copy("snapshot", group, pages, memory, offsets)
        through: FakeDeviceBuffer | None = None
        slots: tuple[int, ...] = ()
        if via is not None:
            if not isinstance(via.buffer, FakeDeviceBuffer) or isinstance(via.buffer, FakeHostBuffer):
                raise MisuseError(f"snapshot through {via.buffer!r}: it must come from device_buffer()")
            through, slots = via.buffer, tuple(via.offsets)
            self._check_copy("snapshot", group, pages, through, slots)
        scripted = self.script.next_copy("snapshot")
        self.copies.append(CopyRecord("snapshot", stream.name, group, tuple(pages), tuple(offsets), self._now(), slots))
        sources, targets = self._page_pieces(group, pages), self._memory_pieces(group, memory, offsets)
        if through is None:
            self._move("snapshot", self._execution, sources, targets, scripted)
            return self._event(self._execution)
        carried, between = self.script.next_copy("carry"), self._memory_pieces(group, through, slots)
        copied = self._move("snapshot", self._execution, sources, between, scripted)

        def apply(work: Work) -> None:
            carried(work)
            work.error = work.error or copied.error

        self._move("carry", carrier, between, targets, apply, self._event(self._execution))
        return self._event(carrier)

    def host_region(self, group: int) -> HostRegion | None:
        """As the port says: None unless made with `host_pages`. Page 0 is not at 0, and pages do not touch."""
        self._check_open()
        if not self._host_pages:
            return None
        memory = next(memory for memory in self._memories if group in memory.groups)
        pages = self._pages[group]
        return HostRegion(memory, pages.offset, pages.pitch)

    def execution_waits_for(self, event: PassEvent) -> None:
        """As the port says."""
        waited = self._own(event)
        self._execution.actor.join(waited.stamp.clock)
        self._queue(self._work("wait", self._execution, 0, _nothing, _nothing, waited), self._execution)

    def close(self) -> None:
        """As the port says. Raises MisuseError if a copy is queued or running."""
        if self._open and self.busy:
            raise MisuseError(f"close() while {self.busy} copies are queued or running: they would write freed memory")
        self._open = False

    def kernel(
        self,
        *,
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int, int | bytes]] = (),
        duration_s: float = 0.0,
    ) -> FakeEvent:
        """A kernel of the engine on its execution stream: reads pages (group, page), then writes (group, page, content).

        Content is a whole page, or one byte that fills it. Raises UnorderedAccess as a copy does: a page that a load wrote may
        be read once `execution_waits_for()` or the host ordered it. The event's `seen` holds what was read.
        """
        self._check_open()
        self._execution.actor.join(self._actors.host.clock)
        stamp = self._execution.actor.step()
        for group, page in reads:
            self._pages[group].piece(page).note(stamp, False)
        contents = [(self._pages[group].rows[page], self._content(group, content)) for group, page, content in writes]
        for group, page, _ in writes:
            self._pages[group].piece(page).note(stamp, True)
        seen: dict[tuple[int, int], bytes] = {}

        def at_start() -> None:
            seen.update({(group, page): self._pages[group].rows[page].tobytes() for group, page in reads})
            for target, _ in contents:
                target[:] = TORN

        def at_end() -> None:
            for target, content in contents:
                target[:] = content

        self._queue(self._work("kernel", self._execution, duration_s, at_start, at_end), self._execution)
        event = self._event(self._execution)
        event.seen = seen
        return event

    def fill_page(self, group: int, page: int, content: int | bytes) -> None:
        """Write a page as a kernel of no duration does."""
        self.kernel(writes=[(group, page, content)])

    def read_page(self, group: int, page: int) -> bytes:
        """What a page holds at this moment: the test's own look, not checked and not recorded."""
        self._timeline.settle()
        return bytes(self._pages[group].rows[page])

    def pattern(self, group: int, seed: int) -> bytes:
        """Bytes for one page of a group, different for each seed, and nowhere periodic."""
        return np.random.default_rng(seed).integers(0, 256, self._pages[group].rows.shape[1], dtype=np.uint8).tobytes()

    def _copy(self, kind: CopyKind, stream: CopyStream, group: int, sources: Sequence[Source], after: PassEvent) -> FakeEvent:
        self._check_open()
        fence, all_pages = self._own(after), [page for source in sources for page in source.pages]
        if kind == "scatter" and len(set(all_pages)) < len(all_pages):
            raise MisuseError(f"{kind}: two of its copies write the same place")
        # All that may be refused before anything is queued.
        copies = [(source, *self._checked_copy(kind, stream, group, source)) for source in sources]
        previous: Work | None = None
        for (pages, _, offsets), copier, memory, scripted in copies:
            self.copies.append(CopyRecord(kind, stream.name, group, tuple(pages), tuple(offsets), self._now()))
            in_cache, in_memory = self._page_pieces(group, pages), self._memory_pieces(group, memory, offsets)
            origins, targets = (in_memory, in_cache) if kind == "scatter" else (in_cache, in_memory)
            # The event is the last one's, and tells of all.
            previous = self._move(kind, copier, origins, targets, failing_with(previous, scripted), fence)
        return self._event(copies[-1][1])

    def _checked_copy(
        self, kind: CopyKind, stream: CopyStream, group: int, source: Source
    ) -> tuple[FakeStream, FakeHostBuffer, Callable[[Work], None]]:
        copier, memory = self._own_memory(kind, stream, source.buffer)
        self._check_copy(kind, group, source.pages, memory, source.offsets)
        scripted = self.script.next_copy(kind)
        if isinstance(memory, FakeSegmentBuffer):
            scripted = memory.watched(scripted, source.offsets, self.layout.groups[group].bytes_per_page)
        return copier, memory, scripted

    def _move(
        self,
        kind: CopyKind,
        stream: FakeStream,
        sources: Sequence[Piece],
        targets: Sequence[Piece],
        scripted: Callable[[Work], None],
        after: FakeEvent | None = None,
    ) -> Work:
        """Queue a copy, after its accesses were found to be in order."""
        if after is not None:
            stream.actor.join(after.stamp.clock)
        stream.actor.join(self._actors.host.clock)
        stamp = stream.actor.step()
        for source, target in zip(sources, targets, strict=True):
            source.note(stamp, False)
            target.note(stamp, True)

        def at_start() -> None:
            for target in targets:
                target.array[:] = TORN

        def at_end() -> None:
            if work.error is None:
                for source, target in zip(sources, targets, strict=True):
                    target.array[:] = source.array

        nbytes = sum(source.array.nbytes for source in sources)
        work = self._work(kind, stream, self.copy_s(nbytes), at_start, at_end, after)
        scripted(work)
        self._queue(work, stream)
        return work

    def _page_pieces(self, group: int, pages: Sequence[int]) -> list[Piece]:
        return [self._pages[group].piece(page) for page in pages]

    def _memory_pieces(self, group: int, memory: FakeDeviceBuffer, offsets: Sequence[int]) -> list[Piece]:
        nbytes = self.layout.groups[group].bytes_per_page
        return [memory.piece(offset, nbytes) for offset in offsets]

    @staticmethod
    def _own_memory(kind: CopyKind, stream: CopyStream, buffer: HostBuffer) -> tuple[FakeStream, FakeHostBuffer]:
        if not isinstance(stream, FakeStream) or not isinstance(buffer, FakeHostBuffer):
            raise MisuseError(f"{kind} on {stream!r} with {buffer!r}: both must come from this device")
        if isinstance(buffer, FakeSegmentBuffer) and kind != "scatter":
            raise MisuseError(f"{kind} into {buffer!r}, which is mapped for reading only: on a CPU it would crash the process")
        return stream, buffer

    def _check_copy(
        self, kind: CopyKind, group: int, pages: Sequence[int], buffer: FakeDeviceBuffer, offsets: Sequence[int]
    ) -> None:
        if len(pages) != len(offsets):
            raise MisuseError(f"{kind} of {len(pages)} pages with {len(offsets)} offsets")
        for page in pages:
            if not 0 <= page < self.page_counts[group]:
                raise MisuseError(f"{kind}: group {group} has pages 0 to {self.page_counts[group] - 1}, not {page}")
        nbytes = self.layout.groups[group].bytes_per_page
        for offset in offsets:
            buffer.check_piece(offset, nbytes)
        targets_overlap = (
            len(set(pages)) < len(pages)
            if kind == "scatter"
            else any(behind - offset < nbytes for offset, behind in pairwise(sorted(offsets)))
        )
        if targets_overlap:
            raise MisuseError(f"{kind}: two of its copies write the same place")

    def _work(
        self,
        kind: WorkKind,
        stream: FakeStream,
        duration_s: float,
        at_start: Callable[[], None],
        at_end: Callable[[], None],
        after: FakeEvent | None = None,
    ) -> Work:
        behind = [work for work in (stream.last, None if after is None else after.work) if work is not None]
        return Work(kind, stream.name, self._now(), duration_s, behind, at_start, at_end)

    def _queue(self, work: Work, stream: FakeStream) -> None:
        stream.last = work
        self._timeline.add(work)

    def _event(self, stream: FakeStream) -> FakeEvent:
        return FakeEvent(stream.last, stream.actor.here(), self._actors.host, self._timeline)

    def _own(self, event: PassEvent) -> FakeEvent:
        if not isinstance(event, FakeEvent) or event.timeline is not self._timeline:
            raise MisuseError(f"{event!r} is no event of this device, so it orders nothing here")
        return event

    def _content(self, group: int, content: int | bytes) -> NDArray[np.uint8]:
        nbytes = self.layout.groups[group].bytes_per_page
        whole = bytes([content]) * nbytes if isinstance(content, int) else content
        if len(whole) != nbytes:
            raise MisuseError(f"a page of group {group} has {nbytes} bytes, not {len(whole)}")
        return np.frombuffer(whole, dtype=np.uint8)

    def _check_open(self) -> None:
        if not self._open:
            raise NotOpenError("the device was closed")


def _nothing() -> None:
    """The effect of a wait."""
