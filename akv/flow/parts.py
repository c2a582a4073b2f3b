"""What the flows of one worker half work with, and the store call that loads and saves make alike."""

from collections.abc import Callable, Sequence

import msgspec

from akv.flow.calls import CallDesk, EventWatch, always, nothing
from akv.flow.gate import OpenGate, PoolGate
from akv.flow.reads import DirectReads
from akv.flow.transfer import probe_keys, transfer
from akv.ownership.reservations import Reservations
from akv.ownership.saves import Saves
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch
from akv.plan.keys import KeySpace
from akv.ports.calls import CallKind, CallSize
from akv.ports.device import DeviceCopier, HostBuffer, HostRegion
from akv.ports.pool import KeyAnswer, PagePool
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
    #: How pages are read from segments of this host; None: not at all.
    reads: DirectReads | None = None

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
    return await probe_keys(parts, parts.keys.keys(batch.group, batch.hashes))


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
    `CallDesk.run`, and the answer is None if `begin` refused. The rest is as for `transfer`.

    **Cancellation:** the wait ends; the call goes on, and keeps what it touches until it returned (M1).
    """
    keys = parts.keys.keys(batch.group, batch.hashes)
    sizes = [parts.page_bytes[batch.group]] * len(keys)
    return await transfer(parts, kind, keys, sizes, buffer, offsets, slots, pages=pages, begin=begin, end=end)


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
