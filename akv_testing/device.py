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
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from akv.errors import NotOpenError
from akv.ports.device import CopyStream, HostBuffer, HostRegion, PassEvent
from akv.values.layout import Layout
from akv_testing.copy_script import CopyKind, CopyScript
from akv_testing.errors import MisuseError
from akv_testing.memory import FakeHostBuffer, FakePageBuffer
from akv_testing.races import Actor, Actors
from akv_testing.timeline import FakeEvent, Timeline, Work, WorkKind

#: What the destination of a copy or kernel holds while it runs, and keeps if it fails.
TORN = 0xDB
#: How long a copy or gather takes unless a test says otherwise, in seconds. Not 0: code must wait for its event.
COPY_S = 0.0005


@dataclass(frozen=True)
class CopyRecord:
    """One gather or scatter, for assertions."""

    kind: CopyKind
    stream: str
    group: int
    pages: tuple[int, ...]
    offsets: tuple[int, ...]
    #: When it was queued, in seconds.
    at: float


class FakeStream:
    """Implements `akv.ports.device.CopyStream`."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        #: The work that was queued last.
        self.last: Work | None = None

    @property
    def name(self) -> str:
        """For errors and records."""
        return self.actor.name


class FakeDevice:
    """Implements `akv.ports.device.DeviceCopier` for pages kept in numpy arrays.

    `layout`: its page geometry. `page_counts`: pages per group. `now`: the clock. `copy_s`: the duration of a copy in seconds
    given its bytes; a constant by default. `host_pages`: it is a CPU, and `host_region()` gives its pages to the store, whose
    calls on them are then checked like kernels. `one_memory`: all layer groups lie in one piece of memory.
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
        groups = [pages for memory in self._memories for pages in memory.groups.values()]
        self._pages = [pages.rows for pages in groups]
        self._ledgers = [pages.ledger for pages in groups]
        self._buffers = 0
        self._open = True

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages in each layer group's cache, in the order of the layout."""
        return tuple(len(pages) for pages in self._pages)

    @property
    def busy(self) -> int:
        """Copies that are queued or running at this moment."""
        return len(self._timeline.pending("gather", "scatter"))

    def host_buffer(self, nbytes: int) -> FakeHostBuffer:
        """As the port says; filled with poison."""
        self._check_open()
        self._buffers += 1
        name = f"host buffer {self._buffers}"
        return FakeHostBuffer(nbytes, name=name, host=self._actors.host, settle=self._timeline.settle)

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
        return self._copy("gather", stream, group, pages, buffer, offsets, after)

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
        return self._copy("scatter", stream, group, pages, buffer, offsets, after)

    def host_region(self, group: int) -> HostRegion | None:
        """As the port says: None unless made with `host_pages`. Page 0 is not at 0, and pages do not touch."""
        self._check_open()
        if not self._host_pages:
            return None
        memory = next(memory for memory in self._memories if group in memory.groups)
        pages = memory.groups[group]
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
            self._ledgers[group].note(stamp, page, page + 1, writes=False)
        contents = [(self._pages[group][page], self._content(group, content)) for group, page, content in writes]
        for group, page, _ in writes:
            self._ledgers[group].note(stamp, page, page + 1, writes=True)
        seen: dict[tuple[int, int], bytes] = {}

        def at_start() -> None:
            seen.update({(group, page): self._pages[group][page].tobytes() for group, page in reads})
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
        return bytes(self._pages[group][page])

    def pattern(self, group: int, seed: int) -> bytes:
        """Bytes for one page of a group, different for each seed, and nowhere periodic."""
        return np.random.default_rng(seed).integers(0, 256, self._pages[group].shape[1], dtype=np.uint8).tobytes()

    def _copy(
        self,
        kind: CopyKind,
        stream: CopyStream,
        group: int,
        pages: Sequence[int],
        buffer: HostBuffer,
        offsets: Sequence[int],
        after: PassEvent,
    ) -> FakeEvent:
        self._check_open()
        if not isinstance(stream, FakeStream) or not isinstance(buffer, FakeHostBuffer):
            raise MisuseError(f"{kind} on {stream!r} with {buffer!r}: both must come from this device")
        fence = self._own(after)
        self._check_copy(kind, group, pages, buffer, offsets)
        scripted = self.script.next_copy(kind)
        self.copies.append(CopyRecord(kind, stream.name, group, tuple(pages), tuple(offsets), self._now()))
        nbytes = self.layout.groups[group].bytes_per_page
        self._note_copy(kind, stream, fence, group, pages, buffer, offsets)
        in_pages = [self._pages[group][page] for page in pages]
        in_buffer = [buffer.array[offset : offset + nbytes] for offset in offsets]
        sources, targets = (in_pages, in_buffer) if kind == "gather" else (in_buffer, in_pages)

        def at_start() -> None:
            for target in targets:
                target[:] = TORN

        def at_end() -> None:
            if work.error is None:
                for source, target in zip(sources, targets, strict=True):
                    target[:] = source

        work = self._work(kind, stream, self.copy_s(len(pages) * nbytes), at_start, at_end, fence)
        scripted(work)
        self._queue(work, stream)
        return self._event(stream)

    def _check_copy(
        self, kind: CopyKind, group: int, pages: Sequence[int], buffer: FakeHostBuffer, offsets: Sequence[int]
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
            any(behind - offset < nbytes for offset, behind in pairwise(sorted(offsets)))
            if kind == "gather"
            else len(set(pages)) < len(pages)
        )
        if targets_overlap:
            raise MisuseError(f"{kind}: two of its copies write the same place")

    def _note_copy(
        self,
        kind: CopyKind,
        stream: FakeStream,
        fence: FakeEvent,
        group: int,
        pages: Sequence[int],
        buffer: FakeHostBuffer,
        offsets: Sequence[int],
    ) -> None:
        stream.actor.join(fence.stamp.clock)
        stream.actor.join(self._actors.host.clock)
        stamp = stream.actor.step()
        nbytes = self.layout.groups[group].bytes_per_page
        for page, offset in zip(pages, offsets, strict=True):
            self._ledgers[group].note(stamp, page, page + 1, writes=kind == "scatter")
            buffer.note(stamp, offset, nbytes, writes=kind == "gather")

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
