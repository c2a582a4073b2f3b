"""The slots of one direction and the memory behind them."""

import msgspec

from akv.flow.calls import slots_granted
from akv.ownership.slots import SlotPool, SlotTicket
from akv.plan.batching import slot_offsets
from akv.ports.device import HostBuffer


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory that pages pass through, cut into slots that any page of the layout fits in."""

    buffer: HostBuffer
    slots: SlotPool
    slot_bytes: int
    #: Slots that one loader or saver may hold: the pool shared evenly, so that none waits for another's.
    share: int

    @property
    def batch(self) -> int:
        """Pages that are moved together: half a share, so that a copy and a store call overlap."""
        return max(1, self.share // 2)

    async def take(self, count: int) -> SlotTicket:
        """Wait for `count` slots, at most `share`. Cancellation: none is kept."""
        return await slots_granted(lambda wake: self.slots.request(count, wake))

    def offsets(self, ticket: SlotTicket) -> list[int]:
        """Where the ticket's slots begin in the buffer, in bytes."""
        return slot_offsets(ticket.slots, self.slot_bytes)
