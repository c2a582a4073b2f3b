"""Pages that lie in segments of this host, read straight from there: no store call, no slot, one copy (R1, R2).

A query names the place of each page and leases it. What translates to a mapped segment is copied from the mapping, as from a
slot; then a second query says whether the pages lay there all the while, since whoever removes by force waits for no lease.
Only when the copy and the second answer were in order and in time does a page count as read.

Query, copy and, where the copy has ended by then, second query are one call: each way between the loop and a thread costs as
much as a megabyte takes to copy.
"""

from collections.abc import Sequence

import msgspec
from anyio import current_time

from akv.errors import DeviceError
from akv.flow.calls import CopyFailed, QueuedCopy
from akv.flow.copying import report_load
from akv.flow.parts import WorkerParts
from akv.flow.permits import WritePermit
from akv.flow.reads import DirectReads
from akv.ownership.reservations import LoadRecord
from akv.ownership.segments import Mapped
from akv.plan.batching import Batch, selected
from akv.plan.direct import Staged, Translation, in_time, moved, translate
from akv.ports.calls import CallKind, CallSize
from akv.ports.device import CopyStream, PassEvent, Source
from akv.values.segments import Replica


class _Answer(msgspec.Struct, frozen=True):
    """What a query came to: the pool's answer for each batch, and which of the segments cannot be relied on."""

    replicas: Sequence[Sequence[Replica | None]]
    bad: dict[str, Staged]


class _Together:
    """The events of several copies as one, which has completed, or failed, when nothing of any of them runs."""

    def __init__(self, events: Sequence[PassEvent]) -> None:
        self._running = list(events)
        self._failure: DeviceError | None = None

    def query(self) -> bool:
        running, self._running = self._running, []
        for event in running:
            try:
                completed = event.query()
            except DeviceError as failure:
                self._failure = failure
            else:
                if not completed:
                    self._running.append(event)
        if not self._running and self._failure is not None:
            raise self._failure
        return not self._running


class DirectRead:
    """The pages of one stretch of a load, on their way. Used by the load's task; `_call` runs on a thread.

    `begin()`; where that says that something is copied, `copied()` and then `confirmed()`.
    """

    def __init__(
        self,
        parts: WorkerParts,
        reads: DirectReads,
        stream: CopyStream,
        record: LoadRecord,
        batches: Sequence[Batch],
        *,
        patient: bool,
    ) -> None:
        """`patient`: its calls wait for lulls between the engine's steps: it is one stretch of many."""
        self._parts = parts
        self._reads = reads
        self._stream = stream
        self._record = record
        self._batches = batches
        self._patient = patient
        self._names = [parts.keys.keys(batch.group, batch.hashes) for batch in batches]
        # What the loop knows now: it may change there while the call runs.
        self._known = reads.segments.by_endpoint
        self._mapped = {mapped.entry.segment_id: mapped for mapped in reads.segments.all_mapped}
        self._permit = WritePermit()
        self._sent = 0.0
        self._queued: QueuedCopy | None = None
        #: What the call leaves behind.
        self._first: _Answer | None = None
        self._found: list[Translation] = []
        #: Batch and place in it of each page that is copied, in the order of the second query.
        self._places: list[tuple[int, int]] = []
        self._events: list[PassEvent] = []
        self._second: _Answer | None = None

    async def begin(self) -> Sequence[Batch] | None:
        """Ask where the pages lie, and have those copied that lie in segments. Returns the others; None, with a verdict
        passed, if the load gets no further.

        **Cancellation:** the query goes on and touches nothing; a copy that has begun keeps pages and memory until its end.
        """
        size = CallSize(sum(len(batch.pages) for batch in self._batches))
        if self._patient:
            await self._reads.lulls.wait()
        self._record.asking += 1
        queued = await self._parts.desk.queue(CallKind.READ, self._call, size, None, begin=self._begins, end=self._ends)
        self._record.asking -= 1
        if queued is None:
            return None
        if self._first is None:
            # Not a copy's failure: the query raised, which no pool does.
            await queued.ended()
            raise AssertionError("a call that returned has asked")
        self._queued = queued
        self._learn(self._first)
        if self._record.verdict is not None:
            return None
        return [
            selected(batch, left)
            for batch, found in zip(self._batches, self._found, strict=True)
            if (left := _others(len(batch.pages), found))
        ]

    @property
    def copies(self) -> bool:
        """Whether something is copied, which is to be waited for, and confirmed."""
        return bool(self._places)

    @property
    def over(self) -> bool:
        """Whether the call has seen the copy's end, and asked again."""
        return self._second is not None

    async def copied(self) -> None:
        """Wait until the pages are copied. Passes a verdict if they cannot be used.

        **Cancellation:** the wait ends; the copy goes on, and keeps pages and memory until its end.
        """
        if self._queued is None:
            return
        try:
            await self._queued.ended()
        except CopyFailed:
            self._fail("copy_failed")
        # Seen from the loop a copy ends later than on the device, never earlier.
        if not in_time(self._sent, current_time(), self._parts.lease_s):
            self._fail("lease_expired")

    async def confirmed(self) -> None:
        """Ask again, where the call has not, where the pages lie. They count as read if they lay there all the while; else it
        passes a verdict.

        **Cancellation:** the query goes on and touches nothing.
        """
        if self._patient and not self.over:
            await self._reads.lulls.wait()
        # A load that has failed, as it may have in that wait, asks nobody.
        if self._record.verdict is not None or self._first is None:
            return
        answer = self._second
        if answer is None:
            answer = await self._parts.desk.run(CallKind.DESCRIBE, self._ask_again, CallSize(len(self._places)))
        # An owner may have ended since: what it held stays as it was while it is mapped here.
        changed = [key for key, bad in answer.bad.items() if bad is Staged.REFUSED]
        for segment_id in changed:
            self._reads.drop(self._mapped[segment_id], Staged.REFUSED)
        if changed:
            self._fail("segment_changed", *self._places_in(changed[0])[0])
            return
        before = [self._first.replicas[batch][index] for batch, index in self._places]
        at = moved(before, [replica for replicas in answer.replicas for replica in replicas])
        if at is not None:
            self._fail("moved", *self._places[at])
            return
        for batch, found in zip(self._batches, self._found, strict=True):
            pages = sum(len(pieces.indices) for pieces in found.pieces)
            self._record.paths.read_directly(pages, self._parts.page_bytes[batch.group])

    def _begins(self) -> bool:
        self._sent = current_time()
        return self._parts.reservations.begin_read(self._record, self._permit)

    def _ends(self, event: PassEvent | None) -> None:
        if event is None and self._events:
            # One of several copies was refused, and those before it may run still.
            self._parts.events.watch(_Together(self._events), self._let_go)
        else:
            self._let_go(None)

    def _let_go(self, failure: BaseException | None) -> None:
        for event in self._events if failure is None else ():
            # The host has seen the copy's end, so this costs nothing; it tells the stream that reads the pages next (M4).
            self._parts.device.execution_waits_for(event)
        self._permit.end()
        report_load(self._parts, self._parts.reservations.end_read(self._record, self._permit))

    def _learn(self, first: _Answer) -> None:
        reads, wanted = self._reads, set[str]()
        for segment_id, reason in first.bad.items():
            reads.drop(self._mapped[segment_id], reason)
        for batch, found in zip(self._batches, self._found, strict=True):
            wanted |= found.wanted
            self._record.paths.are_staged(found.staged, self._parts.page_bytes[batch.group])
        if wanted:
            reads.segments.want(wanted)
            reads.look()

    # The following run on the call's thread.

    def _call(self) -> PassEvent:
        replicas = self._ask(self._names)
        found = self._translated(replicas, {})
        bad = self._faults(found)
        # The owners are asked behind the pool, because while one lives nobody else has its endpoint and its addresses.
        self._found = self._translated(replicas, bad) if bad else found
        self._first = _Answer(replicas, bad)
        self._places = [
            (number, index) for number, each in enumerate(self._found) for pieces in each.pieces for index in pieces.indices
        ]
        if self._places and self._permit.begin():
            self._copy()
        together = _Together(self._events)
        if self._events and together.query():
            self._permit.end()
            self._second = self._ask_again()
        return together

    def _copy(self) -> None:
        for batch, found in zip(self._batches, self._found, strict=True):
            sources = [
                Source(
                    [batch.pages[index] for index in pieces.indices],
                    self._mapped[pieces.segment_id].memory,
                    pieces.offsets,
                )
                for pieces in found.pieces
            ]
            if sources:
                self._events.append(self._parts.device.scatter_from(self._stream, batch.group, sources, self._record.fence))

    def _ask_again(self) -> _Answer:
        names: list[list[str]] = [[] for _ in self._names]
        for batch, index in self._places:
            names[batch].append(self._names[batch][index])
        return _Answer(self._ask(names), self._faults(self._found))

    def _ask(self, names: Sequence[Sequence[str]]) -> list[Sequence[Replica | None]]:
        answers = self._parts.pool.describe([name for some in names for name in some])
        if len(answers) != sum(map(len, names)):
            # Nobody knows which page an answer is about.
            return [[None] * len(some) for some in names]
        split, at = [], 0
        for some in names:
            split.append(answers[at : at + len(some)])
            at += len(some)
        return split

    def _translated(self, replicas: Sequence[Sequence[Replica | None]], bad: dict[str, Staged]) -> list[Translation]:
        return [
            translate(some, self._known, self._parts.page_bytes[batch.group], bad)
            for batch, some in zip(self._batches, replicas, strict=True)
        ]

    def _faults(self, found: Sequence[Translation]) -> dict[str, Staged]:
        used = {pieces.segment_id for each in found for pieces in each.pieces}
        return {segment_id: bad for segment_id in sorted(used) if (bad := _fault(self._mapped[segment_id])) is not None}

    # The following are the load's own arithmetic.

    def _places_in(self, segment_id: str) -> list[tuple[int, int]]:
        return [
            (number, index)
            for number, found in enumerate(self._found)
            for pieces in found.pieces
            if pieces.segment_id == segment_id
            for index in pieces.indices
        ]

    def _fail(self, reason: str, batch: int | None = None, index: int = 0) -> None:
        if batch is None:
            batch, index = self._places[0]
        report_load(self._parts, self._parts.reservations.fail(self._record, self._names[batch][index], reason))


def _fault(mapped: Mapped) -> Staged | None:
    if not mapped.file.unchanged():
        return Staged.REFUSED
    return None if mapped.file.owner_lives() else Staged.OWNER_GONE


def _others(count: int, found: Translation) -> list[int]:
    """The places in a batch of the pages that are not copied."""
    copied = {index for pieces in found.pieces for index in pieces.indices}
    return [index for index in range(count) if index not in copied]
