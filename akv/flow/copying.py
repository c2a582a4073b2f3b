"""A copy from host memory into pages of a load, whatever the memory is: slots, or a segment that is mapped."""

from collections.abc import Sequence

from akv.flow.parts import WorkerParts, size_of
from akv.ownership.reservations import LoadRecord
from akv.ownership.slots import SlotTicket
from akv.plan.batching import Batch
from akv.ports.device import CopyStream, HostBuffer, PassEvent
from akv.values.messages import LoadResult, PassReport


def report_load(parts: WorkerParts, result: LoadResult | None) -> None:
    """Tell the scheduler half of a terminal state, if this was one."""
    if result is not None:
        parts.report(PassReport(loads=(result,)))


async def copy_into_pages(
    parts: WorkerParts,
    stream: CopyStream,
    record: LoadRecord,
    batch: Batch,
    buffer: HostBuffer,
    offsets: Sequence[int],
    ticket: SlotTicket | None = None,
) -> None:
    """Copy a batch into its pages, behind the load's fence (D5); nothing if the load has a verdict already. Raises CopyFailed.

    **Cancellation:** the wait ends; the copy goes on, and keeps the pages and the ticket's slots until its end.
    """

    def scatter() -> PassEvent:
        return parts.device.scatter(stream, batch.group, batch.pages, buffer, offsets, record.fence)

    def end(event: PassEvent | None) -> None:
        if event is not None:
            # The host has seen the copy's end, so this costs nothing; it tells the stream that reads the pages next (M4).
            parts.device.execution_waits_for(event)
        report_load(parts, parts.reservations.end_copy(record))

    await parts.desk.copy(scatter, size_of(parts, batch), ticket, begin=lambda: parts.reservations.begin_copy(record), end=end)
