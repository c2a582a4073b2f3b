"""Fourth step: publish the pages that a pass computed (S1, S2). A failure here is an outcome and an event, never an exception.

`plan/save_bounds.py` decided what may be published, `ownership/saves.py` keeps what became of it. A batch is one gather into
slots, behind the pass's event, and one store call from them; the store call of one batch and the gather of the next overlap.
Where the store can reach the pages itself a batch is one store call from them.
"""

from collections.abc import Sequence
from functools import partial

from akv.flow.calls import CopyFailed, event_reached
from akv.flow.overlap import overlapping
from akv.flow.parts import WorkerParts, call_on_pages, probe_call, size_of, store_call
from akv.flow.snapshot import Snapshot
from akv.flow.staging import Staging
from akv.ownership.saves import SaveTicket
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch, split_batches
from akv.ports.calls import CallKind
from akv.ports.device import CopyStream, HostRegion, PassEvent
from akv.ports.pool import KeyAnswer, KeyState
from akv.values.messages import GroupPages, PassReport, select_pages


async def save(parts: WorkerParts, staging: Staging, stream: CopyStream, ticket: SaveTicket) -> None:
    """Work on one ticket until every page of it is stored, refused, or withdrawn; then report it.

    **Cancellation:** the ticket is not reported, since it only comes with the end of the connector; reads and puts that are
    under way keep pages and slots until they ended.
    """
    snapshot: Snapshot | None = ticket.snapshot
    try:
        await event_reached(parts.events, ticket.after if snapshot is None else snapshot.arrived)
    except CopyFailed:
        # The pass itself failed on the device: what it computed is not KV. Or its copy failed, and there is nothing to store.
        reason = "pass_failed" if snapshot is None else "copy_failed"
        ticket.pages_refused({block for group in ticket.order.groups for block in group.blocks}, reason)
    else:
        missing = await _missing(parts, ticket) if ticket.order.probe_first else ticket.order.groups
        if snapshot is None:
            await _move(parts, staging, stream, ticket, missing)
        else:
            await _put_snapshot(parts, staging.batch, ticket, snapshot, missing)
    parts.report(PassReport(saves=(parts.saves.end(ticket),)))


async def _missing(parts: WorkerParts, ticket: SaveTicket) -> tuple[GroupPages, ...]:
    """Of pages that the pool may hold those that it does not (D9, S8). Asking renews the others' lease."""
    missing: list[GroupPages] = []
    for batch in split_batches(ticket.order.groups, parts.probe_chunk):
        if ticket.withdrawn:
            break
        there = [answer.state is KeyState.OK for answer in await probe_call(parts, batch)]
        ticket.pages_stored([block for block, is_there in zip(batch.blocks, there, strict=True) if is_there], 0)
        missing.append(select_pages(batch, [not is_there for is_there in there]))
    return tuple(batch for batch in missing if batch.blocks)


async def _put_snapshot(
    parts: WorkerParts, most: int, ticket: SaveTicket, snapshot: Snapshot, missing: Sequence[GroupPages]
) -> None:
    """The store calls from the slots of a snapshot, which concern nobody's pages. Ends early once the ticket is withdrawn."""
    offsets = {
        (group.group, block): offset
        for group, column in zip(ticket.order.groups, snapshot.offsets, strict=True)
        for block, offset in zip(group.blocks, column, strict=True)
    }
    for batch in split_batches(missing, most):
        if ticket.withdrawn:
            return
        slots = [offsets[batch.group, block] for block in batch.blocks]
        answers = await store_call(parts, CallKind.PUT, batch, snapshot.buffer, slots, snapshot.claim.host)
        _note(parts, ticket, batch, answers or ())


async def _move(
    parts: WorkerParts, staging: Staging, stream: CopyStream, ticket: SaveTicket, groups: Sequence[GroupPages]
) -> None:
    """Gather batch after batch, and put each while the next one is gathered. Ends early once the ticket is withdrawn."""
    async with overlapping(staging) as transfer:
        for batch in split_batches(groups, staging.batch):
            region = parts.direct(batch.group)
            if region is not None:
                if not await _put_pages(parts, ticket, batch, region):
                    return
                continue
            slots = await transfer.take(len(batch.blocks))
            try:
                if not await _gather(parts, staging, stream, ticket, batch, slots):
                    return
            except CopyFailed:
                ticket.pages_refused(batch.blocks, "copy_failed")
                slots.leave()
            else:
                await transfer.then(slots, partial(_put_slots, parts, staging, ticket, batch, slots))


async def _gather(
    parts: WorkerParts, staging: Staging, stream: CopyStream, ticket: SaveTicket, batch: Batch, slots: SlotTicket
) -> bool:
    offsets = staging.offsets(slots)

    def gather() -> PassEvent:
        return parts.device.gather(stream, batch.group, batch.pages, staging.buffer, offsets, ticket.after)

    def end(_: PassEvent | None) -> None:
        unread = parts.saves.end_read(ticket)
        if unread:
            parts.report(PassReport(unread=tuple(unread)))

    return await parts.desk.copy(
        gather,
        size_of(parts, batch),
        slots,
        begin=lambda: parts.saves.begin_read(ticket),
        end=end,
    )


async def _put_slots(parts: WorkerParts, staging: Staging, ticket: SaveTicket, batch: Batch, slots: SlotTicket) -> None:
    answers = await store_call(parts, CallKind.PUT, batch, staging.buffer, staging.offsets(slots), slots)
    _note(parts, ticket, batch, answers or ())


async def _put_pages(parts: WorkerParts, ticket: SaveTicket, batch: Batch, region: HostRegion) -> bool:
    """The store call from the pages themselves. False if the ticket was withdrawn: then it did not begin.

    **Cancellation:** as for every ticket; the pages stay the connector's until the call returned (D6).
    """
    answers = await call_on_pages(
        parts,
        CallKind.PUT,
        batch,
        region,
        begin=lambda: parts.saves.begin_call(ticket, batch),
        end=lambda: parts.saves.end_call(ticket, batch),
    )
    if answers is not None:
        _note(parts, ticket, batch, answers)
    return answers is not None


def _note(parts: WorkerParts, ticket: SaveTicket, batch: Batch, answers: Sequence[KeyAnswer]) -> None:
    """Write the pool's answers down."""
    ticket.pages_stored(
        [b for b, answer in zip(batch.blocks, answers, strict=True) if answer.state is KeyState.OK],
        parts.page_bytes[batch.group],
    )
    for block, answer in zip(batch.blocks, answers, strict=True):
        if answer.state is not KeyState.OK:
            ticket.pages_refused((block,), answer.state)
