"""Calls that run on the connector's threads. A call is a record, not an await: a wait for it may end early, ownership may not
(M1).
"""

from akv.ownership.slots import SlotTicket
from akv.values.messages import GroupPages


class CallRecord:
    """One blocking call from its start to its return, with the slots and pages that it may touch until then."""

    __slots__ = ("given_up", "kind", "pages", "tickets")

    def __init__(self, kind: str, tickets: tuple[SlotTicket, ...], pages: GroupPages | None) -> None:
        self.kind = kind
        self.tickets = tickets
        #: The engine's pages that it reads or writes itself.
        self.pages = pages
        #: Nobody waits for it any more; it still owns what it touches.
        self.given_up = False


class StoreCalls:
    """Every call that has not returned. What stands here must not be freed, unregistered or closed."""

    def __init__(self) -> None:
        self._running: set[CallRecord] = set()

    @property
    def outstanding(self) -> int:
        """Calls that have not returned."""
        return len(self._running)

    @property
    def given_up(self) -> int:
        """Calls that have not returned and that nobody waits for."""
        return sum(record.given_up for record in self._running)

    def given_up_of(self, kind: str) -> int:
        """Of these, the calls of one kind."""
        return sum(record.given_up and record.kind == kind for record in self._running)

    @property
    def pages(self) -> list[GroupPages]:
        """The engine's pages that calls touch which have not returned, a batch for each call."""
        return [record.pages for record in self._running if record.pages is not None]

    def begin(self, kind: str, *tickets: SlotTicket, pages: GroupPages | None = None) -> CallRecord:
        """A call starts now and holds the tickets' slots until `ended`."""
        held: list[SlotTicket] = []
        try:
            for ticket in tickets:
                ticket.hold()
                held.append(ticket)
        except BaseException:
            # All or nothing (M6): no call will end and let go of these.
            for ticket in held:
                ticket.release()
            raise
        record = CallRecord(kind, tickets, pages)
        self._running.add(record)
        return record

    def give_up(self, record: CallRecord) -> None:
        """The wait for this call ended early. Idempotent, and without effect on a call that returned."""
        if record in self._running:
            record.given_up = True

    def ended(self, record: CallRecord) -> None:
        """The call returned: it touches nothing any more."""
        self._running.remove(record)
        for ticket in record.tickets:
            ticket.release()
