"""Pages that lie in segments of this host, read straight from there: no store call, no slot, one copy (R1, R2).

A query names the place of each page and leases it. What translates to a mapped segment is copied from the mapping, as from a
slot; then a second query says whether the pages lay there all the while, since whoever removes by force waits for no lease.
Only when the copy and the second answer were in order and in time does a page count as read.
"""

from collections.abc import Sequence

import msgspec
from anyio import current_time

from akv.flow.calls import CopyFailed
from akv.flow.copying import copy_into_pages
from akv.flow.parts import WorkerParts
from akv.flow.reads import DirectReads
from akv.ownership.reservations import LoadRecord
from akv.ownership.segments import Mapped
from akv.plan.batching import Batch
from akv.plan.direct import Pieces, Staged, in_time, moved, translate, worth_starting
from akv.ports.calls import CallKind, CallSize
from akv.ports.device import CopyStream
from akv.values.messages import GroupPages
from akv.values.segments import Replica


class Found(msgspec.Struct, frozen=True):
    """What of a batch is read directly, and what is left."""

    batch: Batch
    copies: tuple[tuple[Mapped, Pieces], ...] = ()
    rest: Batch | None = None
    #: What the pool said of each page, and when it was asked.
    replicas: Sequence[Replica | None] = ()
    sent: float = 0.0

    @property
    def indices(self) -> list[int]:
        """The places in the batch of the pages that are read directly."""
        return [index for _, pieces in self.copies for index in pieces.indices]


class Trouble(msgspec.Struct, frozen=True):
    """Why pages that were copied cannot be used."""

    reason: str
    #: The first page's place in the batch.
    index: int = 0


class _Answer(msgspec.Struct, frozen=True):
    """What a query came to: the pool's answer, and which of the segments cannot be relied on."""

    replicas: Sequence[Replica | None]
    bad: dict[str, Staged]


async def find(parts: WorkerParts, reads: DirectReads, record: LoadRecord, batch: Batch) -> Found:
    """Ask where the pages of a batch lie. Asks nobody where no segment is known.

    **Cancellation:** the query goes on and touches nothing.
    """
    count, page_bytes = len(batch.pages), parts.page_bytes[batch.group]
    off = reads.off
    if off is None:
        reads.look()
        off = reads.segments.why_none
    if off is not None:
        record.paths.are_staged({off: count}, page_bytes)
        return Found(batch, rest=batch)
    record.asking = True
    sent, answer = await _ask(parts, parts.keys.keys(batch.group, batch.hashes), reads.segments.all_mapped)
    record.asking = False
    for segment_id, reason in answer.bad.items():
        mapped = reads.segments.mapped(segment_id)
        if mapped is not None:
            reads.drop(mapped, reason)
    translation = translate(answer.replicas, reads.segments.by_endpoint, page_bytes)
    staged = dict(translation.staged)
    if translation.wanted:
        reads.segments.want(translation.wanted)
        reads.look()
    if translation.pieces and not worth_starting(sent, current_time(), parts.lease_s):
        staged[Staged.LATE] = sum(len(pieces.indices) for pieces in translation.pieces)
        translation = msgspec.structs.replace(translation, pieces=())
    record.paths.are_staged(staged, page_bytes)
    copies = tuple(
        (mapped, pieces) for pieces in translation.pieces if (mapped := reads.segments.mapped(pieces.segment_id)) is not None
    )
    found = Found(batch, copies, None, answer.replicas, sent)
    direct = set(found.indices)
    if len(direct) == count:
        return found
    return msgspec.structs.replace(found, rest=_selected(batch, [index for index in range(count) if index not in direct]))


async def copy_found(parts: WorkerParts, stream: CopyStream, record: LoadRecord, found: Found) -> Trouble | None:
    """Copy what was found into its pages. Says what is wrong with it; nothing, if the load has a verdict already.

    **Cancellation:** the wait ends; the copy goes on, and keeps pages and memory until its end.
    """
    for mapped, pieces in found.copies:
        part = _selected(found.batch, pieces.indices)
        try:
            await copy_into_pages(parts, stream, record, part, mapped.memory, pieces.offsets)
        except CopyFailed:
            return Trouble("copy_failed", pieces.indices[0])
        # Seen from the loop a copy ends later than on the device, never earlier.
        if not in_time(found.sent, current_time(), parts.lease_s):
            return Trouble("lease_expired", pieces.indices[0])
    return None


async def confirm(parts: WorkerParts, reads: DirectReads, record: LoadRecord, found: Found) -> Trouble | None:
    """Ask again, after the copy, where the pages lie. Says what is wrong with them; else they count as read.

    **Cancellation:** the query goes on and touches nothing.
    """
    indices = found.indices
    names = parts.keys.keys(found.batch.group, [found.batch.hashes[index] for index in indices])
    _, answer = await _ask(parts, names, [mapped for mapped, _ in found.copies])
    for mapped, pieces in found.copies:
        # Its owner may have ended since: what it held stays as it was while it is mapped here.
        if answer.bad.get(mapped.entry.segment_id) is Staged.REFUSED:
            reads.drop(mapped, Staged.REFUSED)
            return Trouble("segment_changed", pieces.indices[0])
    at = moved([found.replicas[index] for index in indices], answer.replicas)
    if at is not None:
        return Trouble("moved", indices[at])
    record.paths.read_directly(len(indices), parts.page_bytes[found.batch.group])
    return None


async def _ask(parts: WorkerParts, keys: Sequence[str], segments: Sequence[Mapped]) -> tuple[float, _Answer]:
    """When the pool was asked, and what it and the owners of these segments said; the owners behind the pool, because while
    one lives nobody else has its endpoint and its addresses.
    """
    times: list[float] = []

    def begun() -> bool:
        times.append(current_time())
        return True

    def ask() -> _Answer:
        replicas = parts.pool.describe(keys)
        return _Answer(replicas, {mapped.entry.segment_id: bad for mapped in segments if (bad := _fault(mapped)) is not None})

    answer: _Answer = await parts.desk.run(CallKind.DESCRIBE, ask, CallSize(len(keys)), begin=begun)
    if len(answer.replicas) != len(keys):
        # Nobody knows which page an answer is about.
        answer = _Answer([None] * len(keys), answer.bad)
    return times[0], answer


def _fault(mapped: Mapped) -> Staged | None:
    if not mapped.file.unchanged():
        return Staged.REFUSED
    return None if mapped.file.owner_lives() else Staged.OWNER_GONE


def _selected(batch: Batch, indices: Sequence[int]) -> Batch:
    return GroupPages(
        batch.group,
        tuple(batch.blocks[index] for index in indices),
        tuple(batch.pages[index] for index in indices),
        tuple(batch.hashes[index] for index in indices),
    )
