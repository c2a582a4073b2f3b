"""What the flows of one worker half work with, and the store call that loads and saves make alike."""

from collections.abc import Callable, Sequence

import msgspec

from akv.flow.calls import CallDesk, EventWatch
from akv.flow.staging import Staging
from akv.ownership.reservations import Reservations
from akv.ownership.saves import Saves
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch
from akv.plan.keys import KeySpace
from akv.ports.calls import CallKind, CallSize
from akv.ports.device import DeviceCopier
from akv.ports.pool import KeyAnswer, PagePool
from akv.values.messages import PassReport


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
    #: Tells the scheduler half what ended.
    report: Callable[[PassReport], None]
    load_deadline_s: float


def size_of(parts: WorkerParts, batch: Batch) -> CallSize:
    """What one call moves of a batch: its pages, all of them."""
    return CallSize(len(batch.pages), len(batch.pages) * parts.page_bytes[batch.group])


async def store_call(
    parts: WorkerParts, kind: CallKind, staging: Staging, batch: Batch, slots: SlotTicket
) -> Sequence[KeyAnswer]:
    """Move a batch between the pool and its slots, and return the pool's answer for each page, in the batch's order.

    `kind`: GET or PUT.
    **Cancellation:** the wait ends; the call goes on, and keeps the slots until it returned (M1).
    """
    keys = parts.keys.keys(batch.group, batch.hashes)
    offsets = staging.offsets(slots)
    sizes = [parts.page_bytes[batch.group]] * len(keys)

    def move() -> Sequence[KeyAnswer]:
        call = parts.pool.get if kind is CallKind.GET else parts.pool.put
        return call(keys, staging.buffer, offsets, sizes)

    answers: Sequence[KeyAnswer] = await parts.desk.run(kind, move, size_of(parts, batch), slots)
    return answers
