"""Third step: fill reserved pages from the pool, or say which page could not be had (D2, D3, D5).

`plan/batching.py` cuts the order into batches; `ownership/reservations.py` decides when the pages are the engine's again. A
batch is one store call into slots and one scatter from them, behind the fence that `reserve()` recorded; the scatter of one
batch and the store call of the next overlap. Where the store can reach the pages itself a batch is one store call into them.
What lies in a segment of this host is read from there, and the rest of its batch in one of these ways (R1).
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from anyio import current_time, move_on_after

from akv.flow.ahead import ReadAhead
from akv.flow.calls import CopyFailed, NoSlots, event_reached
from akv.flow.copying import copy_into_pages, report_load
from akv.flow.direct import DirectRead
from akv.flow.overlap import Overlap, overlapping
from akv.flow.parts import WorkerParts, call_on_pages, probe_call, store_call
from akv.flow.reads import DirectReads
from akv.flow.staging import Staging
from akv.ownership.reservations import LoadRecord
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch, blocks_at_a_time, split_batches, split_stretches
from akv.plan.breaker import NOT_ASKED, Waited
from akv.ports.calls import CallKind
from akv.ports.device import CopyStream, HostRegion
from akv.ports.pool import KeyAnswer, KeyState
from akv.values.messages import BadPage

#: Pages and bytes of a stretch that is read in place beside decoding, while a device copies the one before it: these bytes
#: take 10 ms on a bus of 55 GB/s, and to ask for 64 pages takes 2. Seen beside steps of 7.8 ms on an H200: with stretches of
#: 512 pages, 4 GiB, their 99th percentile was 48 % above that of steps alone.
MOST_PAGES_AT_A_TIME = 128
MOST_BYTES_AT_A_TIME = 512 << 20
#: Stretches from which on a load waits for lulls: its calls would meet many steps, and a wait is little beside all of it.
PATIENT_FROM = 4
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
    if parts.reads is not None:
        parts.reads.load_ended()


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
    """Move stretch after stretch, the second step of each while the next one takes its first. Ends early once the load has a
    verdict.
    """
    stretches = split_stretches(record.order.groups, _stretch(parts, staging, record))
    async with overlapping(staging) as transfer:
        ahead = None
        if parts.reads is not None:
            patient = len(stretches) >= PATIENT_FROM
            read = partial(_read_directly, parts, parts.reads, stream, record, transfer, patient)
            ahead = ReadAhead(read, stretches, transfer)
        for number, stretch in enumerate(stretches):
            rest = stretch if ahead is None else await ahead.rest(number)
            for batch in () if not rest else split_batches(rest, staging.batch):
                if not await _stage(parts, staging, stream, record, batch, transfer):
                    return
            if rest is None:
                return


def _stretch(parts: WorkerParts, staging: Staging, record: LoadRecord) -> int:
    """Blocks that are moved together at most. Pages that no slot is needed for come in more: each query costs the time that
    tens of megabytes take to copy. But beside decoding in fewer: what calls do for each page takes the interpreter lock, which
    the engine's next step needs.
    """
    reads, groups = parts.reads, record.order.groups
    if reads is None or not reads.segments.all_mapped:
        return staging.batch
    if not reads.lulls.matter:
        return max(staging.batch, parts.probe_chunk // len(groups))
    pages = min(parts.probe_chunk, MOST_PAGES_AT_A_TIME)
    return max(staging.batch, blocks_at_a_time(groups, parts.page_bytes, pages, MOST_BYTES_AT_A_TIME))


async def _read_directly(
    parts: WorkerParts,
    reads: DirectReads,
    stream: CopyStream,
    record: LoadRecord,
    transfer: Overlap,
    patient: bool,
    stretch: Sequence[Batch],
    turn: Callable[[], Awaitable[None]],
) -> Sequence[Batch] | None:
    """Have those pages of a stretch copied that lie in segments of this host. Returns the others; None, with a verdict passed,
    if the load gets no further. `turn` returns when the copies of the stretches before it are on their way.
    """
    off = reads.why_none()
    if off is not None:
        for batch in stretch:
            record.paths.are_staged({off: len(batch.pages)}, parts.page_bytes[batch.group])
        return stretch
    if record.verdict is not None or not _may_ask(parts, record):
        return None
    reading = DirectRead(parts, reads, stream, record, stretch, patient=patient)
    rest = await reading.begin()
    if rest is None or not reading.copies:
        return rest
    if reading.over:
        # As on a CPU: neither waits for anything, and a task of their own would cost more turns of the loop than they do.
        await reading.copied()
        await reading.confirmed()
    else:
        await turn()
        await transfer.then(None, reading.copied, reading.confirmed)
    return rest


async def _stage(
    parts: WorkerParts, staging: Staging, stream: CopyStream, record: LoadRecord, batch: Batch, transfer: Overlap
) -> bool:
    """Have the store's client fetch a batch: into the pages where it can reach them, else into slots, and scatter these while
    the next batch is on its way. False once the load has a verdict.
    """
    region = parts.direct(batch.group)
    if region is not None:
        return await _get_into_pages(parts, record, batch, region)
    try:
        slots = await transfer.take(len(batch.blocks))
    except NoSlots:
        _fail(parts, record, batch, "no_slots")
        return False
    # A scatter that failed while this waited has passed a verdict.
    if record.verdict is not None or not await _get_into_slots(parts, staging, record, batch, slots):
        return False
    await transfer.then(slots, partial(_scatter, parts, staging, stream, record, batch, slots))
    return True


async def _get_into_slots(parts: WorkerParts, staging: Staging, record: LoadRecord, batch: Batch, ticket: SlotTicket) -> bool:
    """The store call into slots. False, with a verdict passed, if a page did not arrive whole."""
    if not _asks(parts, record):
        return False
    answers = await store_call(parts, CallKind.GET, batch, staging.buffer, staging.offsets(ticket), ticket)
    record.asking -= 1
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
    record.asking -= 1
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


def _may_ask(parts: WorkerParts, record: LoadRecord) -> bool:
    """Whether a store call may begin. False, with a verdict passed, if the pool is not asked."""
    if not parts.gate.lets_through():
        # No page was asked for, so none is said to be missing.
        report_load(parts, parts.reservations.fail(record, "", NOT_ASKED))
        return False
    return True


def _asks(parts: WorkerParts, record: LoadRecord) -> bool:
    """Whether a store call may begin; it does, with the next await. False, with a verdict passed, if the pool is not asked."""
    may_ask = _may_ask(parts, record)
    record.asking += may_ask
    return may_ask


def _fail(parts: WorkerParts, record: LoadRecord, batch: Batch, reason: str) -> None:
    key = parts.keys.keys(batch.group, batch.hashes[:1])[0]
    report_load(parts, parts.reservations.fail(record, key, reason))


async def _scatter(
    parts: WorkerParts, staging: Staging, stream: CopyStream, record: LoadRecord, batch: Batch, ticket: SlotTicket
) -> None:
    """The copy from slots into pages; nothing if the load has a verdict already. One that fails passes a verdict."""
    try:
        await copy_into_pages(parts, stream, record, batch, staging.buffer, staging.offsets(ticket), ticket)
    except CopyFailed:
        _fail(parts, record, batch, "copy_failed")


def _first_key(parts: WorkerParts, record: LoadRecord) -> str:
    group = record.order.groups[0]
    return parts.keys.keys(group.group, group.hashes[:1])[0]
