"""Slots: staging memory for one page each. Taken all or nothing, given back synchronously, however the work ends (M6).

A ticket knows its holders: the coroutine that asked, and the store calls and device copies that touch the slots. The slots go
back to the pool when the last holder let go, so a coroutine may be cancelled at any await while a store call is still writing:
it releases its own hold at once, and the call's hold keeps the slots out of use until the call returned (M3). A slot that a
peer may touch even then is withheld: nobody gets it any more. It ends with its pool, once the buffer behind was unregistered.
"""

from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self


class SlotTicket:
    """A claim on slots: waiting, then granted, then spent. Leaving its `with` block lets go of the asker's hold."""

    __slots__ = ("_asker_left", "_pool", "_touching", "_wake", "count", "hopeless", "slots")

    def __init__(self, pool: "SlotPool", count: int, wake: Callable[[], None]) -> None:
        self._pool = pool
        self._wake = wake
        self._asker_left = False
        #: Calls and copies that touch the slots. The asker is not one of them: a release too many then fails where it is made,
        #: and cannot let go of the asker's hold.
        self._touching = 0
        self.count = count
        #: It asks for more slots than are left in use, so it will never be granted.
        self.hopeless = False
        #: Indices of the granted slots, ascending; empty while waiting.
        self.slots: tuple[int, ...] = ()

    @property
    def granted(self) -> bool:
        """Whether the slots are this ticket's now."""
        return len(self.slots) == self.count

    @property
    def quarantined(self) -> bool:
        """Whether only work that nobody waits for any more keeps the slots out of use."""
        return self._asker_left and self._touching > 0

    def hold(self) -> None:
        """Add a holder: a call or a copy that touches the slots begins."""
        if not self.granted or self._spent:
            raise AssertionError("a call may only hold slots that are granted and not given back")
        self._touching += 1

    def release(self) -> None:
        """Let go of one call's or copy's hold. The last one gives the slots back."""
        if not self._touching:
            raise AssertionError("a slot ticket was released more often than it was held")
        self._touching -= 1
        if self._spent:
            self._pool._ended(self)

    def leave(self) -> None:
        """Let go of the asker's hold. Idempotent; a ticket that still waits is withdrawn."""
        if not self._asker_left:
            self._asker_left = True
            if self._spent:
                self._pool._ended(self)

    def withhold(self, offsets: Iterable[int]) -> bool:
        """Keep the granted slots that begin at these bytes of the buffer out of use, also when the last holder has let go.

        True if they are the first of their pool.
        """
        slots = {offset // self._pool.slot_bytes for offset in offsets}
        if self._spent or not slots <= set(self.slots):
            raise AssertionError(f"slots {sorted(slots)} are not this ticket's, or not any more")
        return bool(slots) and self._pool._withhold(slots)

    @property
    def _spent(self) -> bool:
        return self._asker_left and not self._touching

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()


class SlotPool:
    """A fixed number of slots, granted first come, first served, so that a large claim cannot starve."""

    def __init__(self, count: int, *, slot_bytes: int = 1) -> None:
        """`slot_bytes`: of one slot; 1 where slots are only counted."""
        self.count = count
        self.slot_bytes = slot_bytes
        self._free = list(range(count))
        self._waiting: deque[SlotTicket] = deque()
        self._out: set[SlotTicket] = set()
        self._withheld: set[int] = set()

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def withheld(self) -> int:
        """Slots that are out of use for good: a peer may touch them."""
        return len(self._withheld)

    @property
    def usable(self) -> int:
        """Slots that a claim may get some time."""
        return self.count - len(self._withheld)

    @property
    def quarantined(self) -> int:
        """Slots that are withheld, or that only given-up work still holds (M3)."""
        given_up = (slot for ticket in self._out if ticket.quarantined for slot in ticket.slots)
        return len(self._withheld.union(given_up))

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of these."""
        return self.quarantined * self.slot_bytes

    def request(self, count: int, wake: Callable[[], None]) -> SlotTicket:
        """Ask for `count` slots at once. `wake` is called once: when they are granted, or when they never will be, which
        `hopeless` tells; at once if that is known now.
        """
        if not 0 < count <= self.count:
            raise AssertionError(f"{count} slots were asked for in one claim, of a pool of {self.count}")
        ticket = SlotTicket(self, count, wake)
        self._waiting.append(ticket)
        self._give_up_hope()
        self._grant()
        return ticket

    def _withhold(self, slots: set[int]) -> bool:
        first = not self._withheld
        self._withheld |= slots
        self._give_up_hope()
        self._grant()
        return first

    def _give_up_hope(self) -> None:
        """Claims that can never be granted must not hold up those behind them."""
        hopeless = [ticket for ticket in self._waiting if ticket.count > self.usable]
        for ticket in hopeless:
            self._waiting.remove(ticket)
            ticket.hopeless = True
        for ticket in hopeless:
            ticket._wake()

    def _ended(self, ticket: SlotTicket) -> None:
        if ticket in self._out:
            self._out.remove(ticket)
            self._free.extend(slot for slot in ticket.slots if slot not in self._withheld)
            # Kept in order, so that a claim gets neighbours where it can: adjacent slots are one copy instead of several.
            self._free.sort()
        elif not ticket.hopeless:
            self._waiting.remove(ticket)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0].count <= len(self._free):
            ticket = self._waiting.popleft()
            ticket.slots = tuple(self._free[: ticket.count])
            del self._free[: ticket.count]
            self._out.add(ticket)
            ticket._wake()
