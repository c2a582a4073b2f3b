"""Fourth step: publish the pages that a pass computed (S1, S2). A failure here is an outcome and an event, never an exception.

`plan/save_bounds.py` decided what may be published, `ownership/saves.py` keeps what became of it. A batch is one gather into
slots, behind the pass's event, and one store call from them; the store call of one batch and the gather of the next overlap.
"""

from functools import partial

from akv.flow.calls import CopyFailed, event_reached
from akv.flow.overlap import overlapping
from akv.flow.parts import WorkerParts, size_of, store_call
from akv.flow.staging import Staging
from akv.ownership.saves import SaveTicket
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch, split_batches
from akv.ports.calls import CallKind
from akv.ports.device import CopyStream, PassEvent
from akv.ports.pool import KeyState
from akv.values.messages import PassReport


async def save(parts: WorkerParts, staging: Staging, stream: CopyStream, ticket: SaveTicket) -> None:
    """Work on one ticket until every page of it is stored, refused, or withdrawn; then report it.

    **Cancellation:** the ticket is not reported, since it only comes with the end of the connector; reads and puts that are
    under way keep pages and slots until they ended.
    """
    try:
        await event_reached(parts.events, ticket.after)
    except CopyFailed:
        # The pass itself failed on the device: what it computed is not KV.
        ticket.pages_refused({block for group in ticket.order.groups for block in group.blocks}, "pass_failed")
    else:
        await _move(parts, staging, stream, ticket)
    parts.report(PassReport(saves=(parts.saves.end(ticket),)))


async def _move(parts: WorkerParts, staging: Staging, stream: CopyStream, ticket: SaveTicket) -> None:
    """Gather batch after batch, and put each while the next one is gathered. Ends early once the ticket is withdrawn."""
    async with overlapping(staging) as transfer:
        for batch in split_batches(ticket.order.groups, staging.batch):
            slots = await transfer.take(len(batch.blocks))
            try:
                if not await _gather(parts, staging, stream, ticket, batch, slots):
                    return
            except CopyFailed:
                ticket.pages_refused(batch.blocks, "copy_failed")
                slots.leave()
            else:
                await transfer.then(slots, partial(_put, parts, staging, ticket, batch, slots))


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


async def _put(parts: WorkerParts, staging: Staging, ticket: SaveTicket, batch: Batch, slots: SlotTicket) -> None:
    answers = await store_call(parts, CallKind.PUT, staging, batch, slots)
    ticket.pages_stored(
        [b for b, answer in zip(batch.blocks, answers, strict=True) if answer.state is KeyState.OK],
        parts.page_bytes[batch.group],
    )
    for block, answer in zip(batch.blocks, answers, strict=True):
        if answer.state is not KeyState.OK:
            ticket.pages_refused((block,), answer.state)
