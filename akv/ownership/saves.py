"""Saves in the worker half: which pages are still to be read, and what became of each block (S2, S7, M7).

A ticket is one request's part of one pass. Its pages may be read from the pass's event until the ticket ended or was
withdrawn; a withdrawn ticket begins no further read, and the engine gets its pages back when the reads that had begun have
ended. The puts of what was read before go on from slots, and concern nobody's pages. A put that reads the pages themselves is
not waited for: its pages stay in quarantine until it returned (D6).
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from akv.values.messages import GroupPages, PagesReleased, PagesUnread, SaveOrder, SaveResult, pages_per_group


class SaveTicket:
    """One save order on its way to the pool."""

    __slots__ = (
        "_left",
        "_refused",
        "abandoned",
        "accepted",
        "after",
        "bytes",
        "calls",
        "let_go",
        "order",
        "reads",
        "reason",
        "rest_refused",
        "retries",
        "snapshot",
        "withdrawn",
    )

    def __init__(self, order: SaveOrder, after: Any, snapshot: Any = None) -> None:
        self.order = order
        #: Where the pages were copied at the pass; None if they are read live.
        self.snapshot = snapshot
        #: The event of the pass that computed the pages: no read may run before it (D5).
        self.after = after
        #: Reads of its pages that are queued or running.
        self.reads = 0
        #: The pages of store calls that read pages of it, and have not returned.
        self.calls: list[GroupPages] = []
        self.withdrawn = False
        #: Withdrawn, and its pages were given back, but for those of `calls`: these are in quarantine.
        self.let_go = False
        #: Its saver failed: called with its result when nothing of it touches pages any more.
        self.abandoned: Callable[[SaveResult], None] | None = None
        #: The pool takes nothing at present: what has not reached it counts as refused.
        self.rest_refused = False
        self.bytes = 0
        self.reason = ""
        #: Whether a put that failed is tried again. False once that was in vain: the pool is full, or gone, and a long ticket
        #: would hold its saver for the retries of each batch.
        self.retries = True
        #: Window pages that the pool accepted: they count as stored when a probe has found them (S5).
        self.accepted: list[GroupPages] = []
        #: Pages of each block that the pool has not taken yet: a block is stored when its pages of every group are (L2).
        self._left: dict[int, int] = {}
        for group in order.groups:
            for block in group.blocks:
                self._left[block] = self._left.get(block, 0) + 1
        self._refused: set[int] = set()

    @property
    def stopped(self) -> bool:
        """Whether nothing further of it is to begin."""
        return self.withdrawn or self.rest_refused

    def pages_stored(self, blocks: Sequence[int], page_bytes: int) -> None:
        """The pool took one page of each of these blocks."""
        self.bytes += page_bytes * len(blocks)
        for block in blocks:
            self._left[block] -= 1

    def pages_refused(self, blocks: Collection[int], reason: str) -> None:
        """One page of each of these blocks did not reach the pool; the first reason is kept."""
        if blocks:
            self._refused.update(blocks)
            self.reason = self.reason or reason

    def refuse_rest(self, reason: str) -> None:
        """Nothing further of it will reach the pool, which is to be offered these blocks again."""
        self.rest_refused = True
        self.reason = self.reason or reason

    def result(self) -> SaveResult:
        """What became of each block of the order."""
        stored = {block for block, left in self._left.items() if not left} - self._refused
        rest = self._left.keys() - self._refused - stored
        refused = self._refused | rest if self.rest_refused else self._refused
        return SaveResult(
            save_id=self.order.save_id,
            request_id=self.order.request_id,
            incarnation=self.order.incarnation,
            stored=tuple(sorted(stored)),
            refused=tuple(sorted(refused)),
            dropped=tuple(sorted(rest - refused)),
            bytes=self.bytes,
            reason=self.reason,
        )


class Saves:
    """All saves of one worker half."""

    def __init__(self, page_bytes: Sequence[int]) -> None:
        #: Bytes of one page in each layer group.
        self._page_bytes = page_bytes
        #: Bytes of pages that withdrawn saves left to a store call.
        self.quarantined_bytes = 0
        self._queue: deque[SaveTicket] = deque()
        self._active: dict[int, SaveTicket] = {}
        #: Incarnations that were withdrawn and whose pages a read still touches.
        self._unread: set[tuple[str, int]] = set()
        #: Passes that are about to queue copies of pages of these incarnations.
        self._copying: Counter[tuple[str, int]] = Counter()

    @property
    def active(self) -> int:
        """Tickets that have not ended."""
        return len(self._active)

    @property
    def queued(self) -> int:
        """Tickets that no saver has taken up."""
        return len(self._queue)

    def accept(self, order: SaveOrder, after: Any, snapshot: Any = None) -> SaveTicket:
        """Queue one order behind its pass's event. `snapshot` (its slots) is left when the ticket ends, however it ends."""
        ticket = SaveTicket(order, after, snapshot)
        self._active[order.save_id] = ticket
        self._queue.append(ticket)
        return ticket

    def next(self) -> SaveTicket | None:
        """The ticket that has waited longest; the caller works on it until `end`."""
        return self._queue.popleft() if self._queue else None

    def begin_read(self, ticket: SaveTicket) -> bool:
        """Ask to read pages of the ticket. False once its rest is refused, or it is withdrawn: then they may be the engine's
        again at any moment.
        """
        if ticket.stopped:
            return False
        ticket.reads += 1
        return True

    def end_read(self, ticket: SaveTicket) -> list[PagesUnread]:
        """A read's event completed (or the read failed): it touches no page any more."""
        ticket.reads -= 1
        self._end_abandoned(ticket)
        return self._unread_now((ticket.order.request_id, ticket.order.incarnation))

    def begin_copying(self, orders: Iterable[SaveOrder]) -> frozenset[tuple[str, int]]:
        """Pages of these orders are about to be copied on the execution stream. Returns what `end_copying` is to be given."""
        owners = frozenset((order.request_id, order.incarnation) for order in orders)
        self._copying.update(owners)
        return owners

    def end_copying(self, owners: Collection[tuple[str, int]]) -> list[PagesUnread]:
        """The copies are queued, or will not be: whoever writes the pages from now on comes behind them (M5)."""
        self._copying -= Counter(owners)
        return [unread for who in owners for unread in self._unread_now(who)]

    def begin_call(self, ticket: SaveTicket, pages: GroupPages) -> bool:
        """Ask to have the store read these pages. False once the ticket is withdrawn, or its rest refused."""
        if ticket.stopped:
            return False
        ticket.calls.append(pages)
        return True

    def end_call(self, ticket: SaveTicket, pages: GroupPages) -> PagesReleased | None:
        """The store call returned: it reads nothing any more. The pages leave quarantine, if they had got there."""
        ticket.calls.remove(pages)
        self._end_abandoned(ticket)
        if not ticket.let_go:
            return None
        self.quarantined_bytes -= self._bytes([pages])
        return PagesReleased(
            request_id=ticket.order.request_id,
            incarnation=ticket.order.incarnation,
            pages=pages_per_group([pages], len(self._page_bytes)),
        )

    def end(self, ticket: SaveTicket) -> SaveResult:
        """The ticket's work ended. A ticket ends once, by the saver that took it up, or by a withdrawal before that."""
        del self._active[ticket.order.save_id]
        if ticket.snapshot is not None:
            ticket.snapshot.claim.leave()
        return ticket.result()

    def abandon(self, ticket: SaveTicket, reason: str, ended: Callable[[SaveResult], None]) -> None:
        """Its saver failed. It ends, its rest refused, once nothing of it touches pages; `ended` is given the result then."""
        if ticket.order.save_id in self._active:
            ticket.refuse_rest(reason)
            ticket.abandoned = ended
            self._end_abandoned(ticket)

    def _end_abandoned(self, ticket: SaveTicket) -> None:
        if ticket.abandoned is not None and not ticket.reads and not ticket.calls:
            ended, ticket.abandoned = ticket.abandoned, None
            ended(self.end(ticket))

    @property
    def read(self) -> list[GroupPages]:
        """The pages of tickets that have reads queued or running."""
        return [group for ticket in self._active.values() if ticket.reads for group in ticket.order.groups]

    def refuse(self, reason: str) -> list[SaveResult]:
        """The pool takes nothing at present. Tickets that nobody took up end here, refused; of the others nothing further
        begins, and they end when what is under way has ended.
        """
        for ticket in self._active.values():
            ticket.refuse_rest(reason)
        queued, self._queue = self._queue, deque()
        return [self.end(ticket) for ticket in queued]

    def withdraw(self, request_id: str, incarnation: int) -> tuple[list[SaveResult], list[PagesUnread]]:
        """An incarnation's pages are wanted back (S7). Tickets that nobody took up end here, as dropped."""
        who = (request_id, incarnation)
        for ticket in self._active.values():
            if (ticket.order.request_id, ticket.order.incarnation) == who:
                ticket.withdrawn = True
        dropped = [ticket for ticket in self._queue if ticket.withdrawn]
        self._queue = deque(ticket for ticket in self._queue if not ticket.withdrawn)
        self._unread.add(who)
        return [self.end(ticket) for ticket in dropped], self._unread_now(who)

    def _unread_now(self, who: tuple[str, int]) -> list[PagesUnread]:
        if who not in self._unread:
            return []
        tickets = [t for t in self._active.values() if (t.order.request_id, t.order.incarnation) == who]
        if self._copying[who] or any(ticket.reads for ticket in tickets):
            return []
        self._unread.remove(who)
        # A request that is finished and then cancelled is withdrawn twice: a call is named, and counted, once.
        calls = [pages for ticket in tickets if not ticket.let_go for pages in ticket.calls]
        for ticket in tickets:
            ticket.let_go = True
        self.quarantined_bytes += self._bytes(calls)
        quarantined = pages_per_group(calls, len(self._page_bytes))
        return [PagesUnread(request_id=who[0], incarnation=who[1], quarantined=quarantined)]

    def _bytes(self, groups: Iterable[GroupPages]) -> int:
        return sum(len(group.pages) * self._page_bytes[group.group] for group in groups)
