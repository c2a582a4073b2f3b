"""Fourth step: publish the pages that a pass computed (S1, S2). A failure here is an outcome and an event, never an exception.

`plan/save_bounds.py` decided what may be published, `ownership/saves.py` keeps what became of it. A batch is one gather into
slots, behind the pass's event, and one store call from them; the store call of one batch and the gather of the next overlap.
Where the store can reach the pages itself a batch is one store call from them. What the pool does not take at once is tried
again from where it lies, as `plan/put_attempts.py` decides (S5).
"""

from collections.abc import Sequence
from functools import partial
from itertools import compress

from akv import observe
from akv.flow.calls import CopyFailed, NoSlots, event_reached
from akv.flow.overlap import overlapping
from akv.flow.parts import WorkerParts, call_on_pages, probe_call, size_of, store_call
from akv.flow.snapshot import Snapshot
from akv.flow.staging import Staging
from akv.flow.transfer import PutSome, attempt_puts
from akv.ownership.saves import SaveTicket
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch, split_batches
from akv.plan.put_attempts import MOST_ATTEMPTS, PutAttempts
from akv.ports.calls import CallKind
from akv.ports.device import CopyStream, HostBuffer, HostRegion, PassEvent
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
        await _prove(parts, ticket)
    parts.report(PassReport(saves=(parts.saves.end(ticket),)))


async def _missing(parts: WorkerParts, ticket: SaveTicket) -> tuple[GroupPages, ...]:
    """Of pages that the pool may hold those that it does not (D9, S8). Asking renews the others' lease."""
    missing: list[GroupPages] = []
    for batch in split_batches(ticket.order.groups, parts.probe_chunk):
        if ticket.stopped:
            break
        there = [state is KeyState.OK for state in await _probe(parts, batch)]
        ticket.pages_stored(list(compress(batch.blocks, there)), 0)
        missing.append(select_pages(batch, [not is_there for is_there in there]))
    return tuple(batch for batch in missing if batch.blocks)


async def _probe(parts: WorkerParts, batch: Batch) -> list[KeyState]:
    """What the pool says of each page now."""
    states: list[KeyState] = []
    for chunk in split_batches([batch], parts.probe_chunk):
        states += [answer.state for answer in await probe_call(parts, chunk)]
    return states


async def _prove(parts: WorkerParts, ticket: SaveTicket) -> None:
    """Ask once which window pages are there: a put is accepted too while another writer of its key has not finished (S5).

    An end is offered in its own pass alone, so one that is not whole must be known. Nobody waits for that once the ticket is
    withdrawn; its pages count as dropped then.
    """
    for batch in ticket.accepted:
        if ticket.stopped:
            return
        for block, state in zip(batch.blocks, await _probe(parts, batch), strict=True):
            if state is KeyState.OK:
                ticket.pages_stored((block,), parts.page_bytes[batch.group])
            else:
                ticket.pages_refused((block,), state.value)


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
        if ticket.stopped:
            return
        slots = [offsets[batch.group, block] for block in batch.blocks]
        await _put(parts, ticket, batch, partial(_put_from, parts, batch, snapshot.buffer, slots, snapshot.claim.host))


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
            try:
                slots = await transfer.take(len(batch.blocks))
            except NoSlots:
                ticket.pages_refused(batch.blocks, "no_slots")
                continue
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
    await _put(parts, ticket, batch, partial(_put_from, parts, batch, staging.buffer, staging.offsets(slots), slots))


async def _put_from(
    parts: WorkerParts,
    batch: Batch,
    buffer: HostBuffer,
    offsets: Sequence[int],
    slots: SlotTicket | None,
    some: Sequence[bool],
) -> Sequence[KeyAnswer] | None:
    chosen = list(compress(offsets, some))
    return await store_call(parts, CallKind.PUT, select_pages(batch, some), buffer, chosen, slots)


async def _put_pages(parts: WorkerParts, ticket: SaveTicket, batch: Batch, region: HostRegion) -> bool:
    """The store calls from the pages themselves. False if the ticket is withdrawn: then no further one begins.

    **Cancellation:** as for every ticket; the pages stay the connector's until the call returned (D6).
    """

    async def put(some: Sequence[bool]) -> Sequence[KeyAnswer] | None:
        chosen = select_pages(batch, some)
        return await call_on_pages(
            parts,
            CallKind.PUT,
            chosen,
            region,
            begin=lambda: parts.saves.begin_call(ticket, chosen),
            end=lambda: parts.saves.end_call(ticket, chosen),
        )

    await _put(parts, ticket, batch, put)
    return not ticket.stopped


async def _put(parts: WorkerParts, ticket: SaveTicket, batch: Batch, put: PutSome) -> None:
    """Store a batch in as many attempts as it is worth, and write down what became of each page.

    A withdrawn ticket tries nothing again. What the batch lies in is held until the last attempt.

    **Cancellation:** nothing is written down; what is under way keeps its slots or pages until it returned.
    """
    attempts = PutAttempts(parts.keys.keys(batch.group, batch.hashes), MOST_ATTEMPTS if ticket.retries else 1)
    await attempt_puts(
        attempts,
        len(batch.blocks),
        put,
        lambda some: _probe(parts, select_pages(batch, some)),
        stopped=lambda: ticket.stopped,
    )
    _note(parts, ticket, batch, attempts)


def _note(parts: WorkerParts, ticket: SaveTicket, batch: Batch, attempts: PutAttempts) -> None:
    """Write down what became of each page."""
    stored, found, refused = attempts.stored, attempts.found, attempts.refused
    ticket.pages_stored(list(compress(batch.blocks, found)), 0)
    if ticket.order.window:
        ticket.accepted.append(select_pages(batch, stored))
    else:
        ticket.pages_stored(list(compress(batch.blocks, stored)), parts.page_bytes[batch.group])
    for block, reason in zip(batch.blocks, refused, strict=True):
        if reason:
            ticket.pages_refused((block,), reason)
    ticket.retries = ticket.retries and not attempts.in_vain
    if attempts.attempts > 1:
        observe.emit(
            observe.SAVE_RETRIED,
            request_id=ticket.order.request_id,
            incarnation=ticket.order.incarnation,
            save_id=ticket.order.save_id,
            group=batch.group,
            pages=len(attempts.retried),
            attempts=attempts.attempts,
            stored=sum(stored[page] for page in attempts.retried),
            found=sum(found[page] for page in attempts.retried),
            reason=attempts.first_trouble,
        )
