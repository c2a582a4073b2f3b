"""Third step: fill reserved pages from the pool, or say which page could not be had (D2, D3, D5).

`plan/batching.py` cuts the order into batches; `ownership/reservations.py` decides when the pages are the engine's again. A
batch is one store call into slots and one scatter from them, behind the fence that `reserve()` recorded; the scatter of one
batch and the store call of the next overlap. Where the store can reach the pages itself a batch is one store call into them.
"""

from collections.abc import Sequence
from functools import partial

from anyio import current_time, move_on_after

from akv.flow.calls import CopyFailed, NoSlots, event_reached
from akv.flow.overlap import overlapping
from akv.flow.parts import WorkerParts, call_on_pages, probe_call, size_of, store_call
from akv.flow.staging import Staging
from akv.ownership.reservations import LoadRecord
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch, split_batches
from akv.plan.breaker import NOT_ASKED, Waited
from akv.ports.calls import CallKind
from akv.ports.device import CopyStream, HostRegion, PassEvent
from akv.ports.pool import KeyAnswer, KeyState
from akv.values.messages import BadPage, LoadResult, PassReport

#: The pool has no such value, or not any more: what is damaged has been removed. So a put can bring it back.
_GONE = frozenset({KeyState.MISSING, KeyState.DAMAGED})


async def load(parts: WorkerParts, staging: Staging, stream: CopyStream, record: LoadRecord) -> None:
    """Work on one load until it has a verdict. Its terminal state is reported when no copy can write any more, here or later.

    **Cancellation:** whoever cancels has passed the verdict first (`Reservations.withdraw`). The wait ends; a store call that
    is under way keeps its slots, a copy that is under way keeps the pages, until each has ended.
    """
    # A deadline that passes while a copy runs fails the load at once; the terminal state still waits for the copy's event.
    with move_on_after(parts.load_deadline_s) as timer:
        if await _still_there(parts, record):
            await _move(parts, staging, stream, record)
    if timer.cancelled_caught:
        if record.asking:
            parts.gate.timed_out(Waited.LOAD)
        report_load(parts, parts.reservations.fail(record, _first_key(parts, record), "deadline"))
    elif record.verdict is None:
        report_load(parts, parts.reservations.landed(record))


def report_load(parts: WorkerParts, result: LoadResult | None) -> None:
    """Tell the scheduler half of a terminal state, if this was one."""
    if result is not None:
        parts.report(PassReport(loads=(result,)))


async def _still_there(parts: WorkerParts, record: LoadRecord) -> bool:
    """Ask again for the pages of a load that waited for longer than the lease which its lookup was granted (D4).

    False, with a verdict passed, if one has gone: the request learns it for the price of a probe, and nothing was moved.
    """
    if current_time() - record.queued_at <= parts.lease_s:
        return True
    for batch in split_batches(record.order.groups, parts.probe_chunk):
        if not _all_good(parts, record, batch, await probe_call(parts, batch), CallKind.PROBE):
            return False
    return True


async def _move(parts: WorkerParts, staging: Staging, stream: CopyStream, record: LoadRecord) -> None:
    """Get batch after batch, and scatter each while the next one is on its way. Ends early once the load has a verdict."""
    async with overlapping(staging) as transfer:
        for batch in split_batches(record.order.groups, staging.batch):
            region = parts.direct(batch.group)
            if region is not None:
                arrived = await _get_into_pages(parts, record, batch, region)
            else:
                try:
                    slots = await transfer.take(len(batch.blocks))
                except NoSlots:
                    _fail(parts, record, batch, "no_slots")
                    return
                # A scatter that failed while this waited has passed a verdict.
                arrived = record.verdict is None and await _get_into_slots(parts, staging, record, batch, slots)
            if not arrived:
                return
            if region is None:
                await transfer.then(slots, partial(_scatter, parts, staging, stream, record, batch, slots))


async def _get_into_slots(parts: WorkerParts, staging: Staging, record: LoadRecord, batch: Batch, ticket: SlotTicket) -> bool:
    """The store call into slots. False, with a verdict passed, if a page did not arrive whole."""
    if not _asks(parts, record):
        return False
    answers = await store_call(parts, CallKind.GET, batch, staging.buffer, staging.offsets(ticket), ticket)
    record.asking = False
    # Nothing of a batch with a hole reaches a page: its other slots are discarded with the ticket (X4).
    return _all_good(parts, record, batch, answers, CallKind.GET)


async def _get_into_pages(parts: WorkerParts, record: LoadRecord, batch: Batch, region: HostRegion) -> bool:
    """The store call into the pages, behind the fence (D5). False, with a verdict passed, if a page did not arrive whole.

    **Cancellation:** the pages stay the connector's until the call returned, in quarantine from the terminal state on (D2).
    """
    try:
        await event_reached(parts.events, record.fence)
    except CopyFailed:
        _fail(parts, record, batch, "copy_failed")
        return False

    if not _asks(parts, record):
        return False
    answers = await call_on_pages(
        parts,
        CallKind.GET,
        batch,
        region,
        begin=lambda: parts.reservations.begin_call(record, batch),
        end=lambda: parts.reservations.end_call(record, batch),
    )
    record.asking = False
    return _all_good(parts, record, batch, answers, CallKind.GET)


def _all_good(
    parts: WorkerParts, record: LoadRecord, batch: Batch, answers: Sequence[KeyAnswer] | None, asked: CallKind
) -> bool:
    """Whether the load may go on: no answer is bad, and nothing else has passed a verdict meanwhile."""
    failed = [
        (block_hash, answer.state)
        for block_hash, answer in zip(batch.hashes, answers or (), strict=answers is not None)
        if answer.state is not KeyState.OK
    ]
    if failed:
        first, state = failed[0]
        # A lease that passed, or a master that did not answer, says nothing of the page; a probe is asked again by the next
        # lookup.
        bad = tuple(
            BadPage(batch.group, block_hash, named=state not in _GONE)
            for block_hash, state in failed
            if asked is CallKind.GET and state not in (KeyState.LEASE_EXPIRED, KeyState.UNAVAILABLE)
        )
        report_load(parts, parts.reservations.fail(record, parts.keys.keys(batch.group, [first])[0], state.value, bad))
    return record.verdict is None


def _asks(parts: WorkerParts, record: LoadRecord) -> bool:
    """Whether a store call may begin; it does, with the next await. False, with a verdict passed, if the pool is not asked."""
    record.asking = parts.gate.lets_through()
    if not record.asking:
        # No page was asked for, so none is said to be missing.
        report_load(parts, parts.reservations.fail(record, "", NOT_ASKED))
    return record.asking


def _fail(parts: WorkerParts, record: LoadRecord, batch: Batch, reason: str) -> None:
    report_load(parts, parts.reservations.fail(record, parts.keys.keys(batch.group, batch.hashes[:1])[0], reason))


async def _scatter(
    parts: WorkerParts, staging: Staging, stream: CopyStream, record: LoadRecord, batch: Batch, ticket: SlotTicket
) -> None:
    """The copy from slots into pages; nothing if the load has a verdict already. One that fails passes a verdict."""
    offsets = staging.offsets(ticket)

    def scatter() -> PassEvent:
        return parts.device.scatter(stream, batch.group, batch.pages, staging.buffer, offsets, record.fence)

    def end(event: PassEvent | None) -> None:
        if event is not None:
            # The host has seen the copy's end, so this costs nothing; it tells the stream that reads the pages next (M4).
            parts.device.execution_waits_for(event)
        report_load(parts, parts.reservations.end_copy(record))

    try:
        await parts.desk.copy(
            scatter,
            size_of(parts, batch),
            ticket,
            begin=lambda: parts.reservations.begin_copy(record),
            end=end,
        )
    except CopyFailed:
        _fail(parts, record, batch, "copy_failed")


def _first_key(parts: WorkerParts, record: LoadRecord) -> str:
    group = record.order.groups[0]
    return parts.keys.keys(group.group, group.hashes[:1])[0]
