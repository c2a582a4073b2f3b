"""What the flows of one worker half work with, and the store call that loads and saves make alike."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from anyio import current_time
from anyio.lowlevel import checkpoint

from akv import observe
from akv.flow.answers import answer_each
from akv.flow.calls import CallDesk, EventWatch, always, nothing
from akv.flow.gate import OpenGate, PoolGate
from akv.ownership.reservations import Reservations
from akv.ownership.saves import Saves
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch
from akv.plan.keys import KeySpace
from akv.ports.calls import CallKind, CallSize
from akv.ports.device import DeviceCopier, HostBuffer, HostRegion
from akv.ports.pool import UNSETTLED, KeyAnswer, KeyState, PagePool
from akv.values.messages import GroupPages, PagesReleased, PassReport


class WorkerParts(msgspec.Struct, frozen=True, kw_only=True):
    """Ports, ownership and plumbing, handed to each flow."""

    pool: PagePool
    device: DeviceCopier
    desk: CallDesk
    events: EventWatch
    keys: KeySpace
    #: Bytes of one page in each layer group.
    page_bytes: Sequence[int]
    reservations: Reservations
    saves: Saves
    #: For each layer group, where the store can reach its pages itself; None where it cannot, or must not.
    regions: Sequence[HostRegion | None]
    #: Tells the scheduler half what ended.
    report: Callable[[PassReport], None]
    load_deadline_s: float
    #: The master's. What a get delivered after it may be another page's bytes (D4).
    lease_s: float
    #: Keys of one probe at most.
    probe_chunk: int
    #: Asked before each store call.
    gate: PoolGate = OpenGate()

    def direct(self, group: int) -> HostRegion | None:
        """Where the store may read and write the group's pages at this moment; None: through slots.

        While pages are in quarantine everything goes through slots. So no more than one batch of each loader and saver is ever
        in there, however long the store hangs (M3).
        """
        in_quarantine = self.reservations.quarantined_bytes or self.saves.quarantined_bytes
        return None if in_quarantine else self.regions[group]


def size_of(parts: WorkerParts, batch: Batch) -> CallSize:
    """What one call moves of a batch: its pages, all of them."""
    return CallSize(len(batch.pages), len(batch.pages) * parts.page_bytes[batch.group])


async def probe_call(parts: WorkerParts, batch: Batch) -> Sequence[KeyAnswer]:
    """Ask whether the pool has the pages of a batch, which renews their lease: an answer for each, in the batch's order.

    **Cancellation:** the call goes on and touches nothing.
    """
    if not parts.gate.lets_through():
        await checkpoint()
        return [KeyAnswer(KeyState.UNAVAILABLE)] * len(batch.hashes)
    keys = parts.keys.keys(batch.group, batch.hashes)
    answered = await parts.desk.run(CallKind.PROBE, partial(parts.pool.probe, keys), CallSize(len(keys)))
    return answer_each(answered, len(keys))


async def store_call(
    parts: WorkerParts,
    kind: CallKind,
    batch: Batch,
    buffer: HostBuffer,
    offsets: Sequence[int],
    slots: SlotTicket | None = None,
    *,
    pages: GroupPages | None = None,
    begin: Callable[[], bool] = always,
    end: Callable[[], None] = nothing,
) -> Sequence[KeyAnswer] | None:
    """Move a batch between the pool and host memory, and return the pool's answer for each page, in the batch's order.

    `kind`: GET or PUT. The memory is that of slots, or of pages themselves: then `begin` and `end` are those of
    `CallDesk.run`, and the answer is None if `begin` refused. What a get delivered after the lease is LEASE_EXPIRED (D4).
    While the gate is shut no call begins, and every page's answer is UNAVAILABLE. Slots that a peer may still touch when the
    call has returned are out of use from then on (M3).

    **Cancellation:** the wait ends; the call goes on, and keeps what it touches until it returned (M1).
    """
    unasked = [KeyAnswer(KeyState.UNAVAILABLE)] * len(batch.hashes)
    if not parts.gate.lets_through():
        await checkpoint()
        return unasked
    keys = parts.keys.keys(batch.group, batch.hashes)
    sizes = [parts.page_bytes[batch.group]] * len(keys)

    def move() -> Sequence[KeyAnswer]:
        call = parts.pool.get if kind is CallKind.GET else parts.pool.put
        return answer_each(call(keys, buffer, offsets, sizes), len(keys))

    times: list[float] = []

    def begun() -> bool:
        times.append(current_time())
        return begin()

    def ended() -> None:
        times.append(current_time())
        end()

    answers: Sequence[KeyAnswer] | None
    settle, waiting = partial(_settle, parts, slots, offsets), parts.gate.ending_waits
    answers = await parts.desk.run(
        kind, move, size_of(parts, batch), slots, pages=pages, begin=begun, end=ended, waiting=waiting, settle=settle
    )
    if not times:
        # The gate shut in the wait for a place, which calls that hang may hold for longer than anybody has.
        return unasked
    # Seen from the loop a call takes longer than in its thread, never less: the lease began behind the first of these times,
    # and the last byte came before the second. A slow loop may fail a get that was in time, but none that was late passes.
    if kind is CallKind.GET and answers is not None and times[1] - times[0] > parts.lease_s:
        return [KeyAnswer(KeyState.LEASE_EXPIRED, a.code) if a.state is KeyState.OK else a for a in answers]
    return answers


def _settle(parts: WorkerParts, slots: SlotTicket | None, offsets: Sequence[int], answers: Sequence[KeyAnswer]) -> None:
    """Keep the slots of those keys out of use behind whose answer a transfer may be under way."""
    if slots is None or parts.pool.lets_go_at_return:
        return
    unsettled = [(offset, answer) for offset, answer in zip(offsets, answers, strict=True) if answer.state in UNSETTLED]
    if slots.withhold(offset for offset, _ in unsettled):
        _, first = unsettled[0]
        observe.emit(observe.SLOTS_WITHHELD, slots=len(unsettled), state=first.state.value, code=first.code)


async def call_on_pages(
    parts: WorkerParts,
    kind: CallKind,
    batch: Batch,
    region: HostRegion,
    *,
    begin: Callable[[], bool],
    end: Callable[[], PagesReleased | None],
) -> Sequence[KeyAnswer] | None:
    """`store_call` on the pages themselves. `end` says which of them leave quarantine with it; that is reported.

    **Cancellation:** the wait ends; the pages stay the connector's until the call returned (D2, D6).
    """

    def ended() -> None:
        released = end()
        if released is not None:
            parts.report(PassReport(released=(released,)))

    return await store_call(
        parts, kind, batch, region.buffer, region.offsets(batch.pages), pages=batch, begin=begin, end=ended
    )
