"""Loads in the worker half: who may write into reserved pages, and when nobody can any more (D2, D6, M2).

A load ends with a verdict (all pages landed, one failed, it was withdrawn) and reaches its terminal state when it has a
verdict **and** no copy into its pages is queued or running. The two may come in any order, which is what makes a cancel quick:
the verdict is passed at once, and the pages are free as soon as the last copy's event completed, whatever the store is doing.
Where a store call writes the pages themselves nobody waits for it: the terminal state names its pages, which stay in
quarantine until the call returned (D2).
"""

from bisect import insort_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from akv.ownership.read_paths import ReadPaths, in_order
from akv.values.messages import BadPage, GroupPages, LoadOrder, LoadResult, LoadState, PagesReleased, pages_per_group


class Permit(Protocol):
    """Leave to write into a load's pages that a call was given before it knew whether it will."""

    def take_back(self) -> bool:
        """True if nothing of the call writes or ever will; False while something does."""
        ...


class LoadRecord:
    """One reservation, from the order to its terminal state."""

    __slots__ = (
        "asking",
        "bad_pages",
        "calls",
        "copies",
        "ended",
        "failed_key",
        "fence",
        "interrupt",
        "order",
        "paths",
        "permits",
        "queued_at",
        "reason",
        "verdict",
    )

    def __init__(self, order: LoadOrder, fence: Any, queued_at: float) -> None:
        self.order = order
        #: When it was accepted. One that has waited for longer than the lease asks again before it reads (D4).
        self.queued_at = queued_at
        #: Recorded on the execution stream when the pages were handed over; no copy may run before it (D5).
        self.fence = fence
        #: Copies into its pages that are queued or running.
        self.copies = 0
        #: Of those that a call issues once it knows where from: it has not begun, or writes, or has ended to.
        self.permits: list[Permit] = []
        #: The pages of store calls that write into pages of it, and have not returned.
        self.calls: list[GroupPages] = []
        #: Store calls of its work that are under way, or were when a deadline ended the wait for them.
        self.asking = 0
        #: Which way its pages came, so far.
        self.paths = ReadPaths()
        self.verdict: LoadState | None = None
        self.failed_key = ""
        self.reason = ""
        self.bad_pages: tuple[BadPage, ...] = ()
        #: Whether the terminal state was reached; the pages are the engine's again.
        self.ended = False
        #: Set by the loader that works on it: ends that work's wait.
        self.interrupt: Callable[[], object] | None = None


class Reservations:
    """All reservations of one worker half. Methods that can end one return its result, exactly once."""

    def __init__(self, page_bytes: Sequence[int]) -> None:
        #: Bytes of one page in each layer group, for the figures of a result.
        self._page_bytes = page_bytes
        #: In the order in which they are taken up.
        self._queue: list[LoadRecord] = []
        self._active: dict[int, LoadRecord] = {}
        #: Bytes of pages that ended loads left to a store call.
        self.quarantined_bytes = 0

    @property
    def active(self) -> int:
        """Reservations whose pages are the connector's."""
        return len(self._active)

    @property
    def queued(self) -> int:
        """Reservations that no loader has taken up."""
        return len(self._queue)

    def accept(self, order: LoadOrder, fence: Any, now: float = 0.0) -> LoadRecord:
        """Take ownership of the order's pages and queue the load. An order without pages is not queued: it has landed (D9)."""
        record = LoadRecord(order, fence, now)
        if order.groups:
            # Behind all of its own priority and above. A queue is short (`max_parked_loads`), so a sorted list will do.
            insort_right(self._queue, record, key=lambda queued: -queued.order.priority)
        self._active[order.load_id] = record
        return record

    def next(self) -> LoadRecord | None:
        """Of the loads with the highest priority the one that has waited longest; from now on it is dispatched."""
        return self._queue.pop(0) if self._queue else None

    def begin_copy(self, record: LoadRecord) -> bool:
        """Ask to write into the pages. False once a verdict is passed: the pages may be the engine's again at any moment."""
        if record.verdict is not None:
            return False
        record.copies += 1
        return True

    def end_copy(self, record: LoadRecord) -> LoadResult | None:
        """A copy's event completed (or the copy failed): it writes nothing any more."""
        record.copies -= 1
        return self._settle(record)

    def begin_read(self, record: LoadRecord, permit: Permit) -> bool:
        """Ask to write into the pages later, from where no verdict is seen: it takes the permit back. False once one is
        passed.
        """
        if not self.begin_copy(record):
            return False
        record.permits.append(permit)
        return True

    def end_read(self, record: LoadRecord, permit: Permit) -> LoadResult | None:
        """The call returned and its copy's event completed. Without effect if the permit was taken back."""
        if permit not in record.permits:
            return None
        record.permits.remove(permit)
        return self.end_copy(record)

    def begin_call(self, record: LoadRecord, pages: GroupPages) -> bool:
        """Ask to have the store write into these pages. False once a verdict is passed."""
        if record.verdict is not None:
            return False
        record.calls.append(pages)
        return True

    def end_call(self, record: LoadRecord, pages: GroupPages) -> PagesReleased | None:
        """The store call returned: it writes nothing any more. The pages leave quarantine, if they had got there."""
        record.calls.remove(pages)
        if not record.ended:
            return None
        self.quarantined_bytes -= self._bytes([pages])
        return PagesReleased(
            request_id=record.order.request_id,
            incarnation=record.order.incarnation,
            pages=pages_per_group([pages], len(self._page_bytes)),
        )

    def landed(self, record: LoadRecord) -> LoadResult | None:
        """Every page of the order is in place, seen by the host."""
        return self._decide(record, LoadState.LOADED)

    def fail(self, record: LoadRecord, key: str, reason: str, bad_pages: tuple[BadPage, ...] = ()) -> LoadResult | None:
        """A page cannot be had; what landed is discarded (D3). Without effect after another verdict.

        `bad_pages`: those that the pool did not deliver, where it is likely to do so again (L8).
        """
        if record.verdict is None:
            record.failed_key, record.reason, record.bad_pages = key, reason, bad_pages
        return self._decide(record, LoadState.FAILED)

    def refuse_queued(self, reason: str) -> list[LoadResult]:
        """The pool cannot be asked: loads that nobody took up fail now, without a key, since none was asked for."""
        queued, self._queue = self._queue, []
        return [result for record in queued if (result := self.fail(record, "", reason)) is not None]

    def fail_all(self, reason: str) -> tuple[list[LoadRecord], list[LoadResult]]:
        """No load will get anywhere any more: each fails, when nothing can write into its pages. Returns as `withdraw`."""
        self._queue.clear()
        records = list(self._active.values())
        return records, [result for record in records if (result := self.fail(record, "", reason)) is not None]

    @property
    def written(self) -> list[GroupPages]:
        """The pages of loads that have copies queued or running."""
        return [group for record in self._active.values() if record.copies for group in record.order.groups]

    def withdraw(self, request_id: str, incarnation: int) -> tuple[list[LoadRecord], list[LoadResult]]:
        """An incarnation ended: its load is cancelled wherever it stands. A queued one ends at once, undispatched (D9).

        Returns the loads whose work is to be interrupted, and the results of those that ended here.
        """
        found = [r for r in self._active.values() if (r.order.request_id, r.order.incarnation) == (request_id, incarnation)]
        results = []
        for record in found:
            if record in self._queue:
                self._queue.remove(record)
            result = self._decide(record, LoadState.CANCELLED)
            if result is not None:
                results.append(result)
        return found, results

    def _decide(self, record: LoadRecord, verdict: LoadState) -> LoadResult | None:
        # The first verdict stands: a cancel and a completion in the same instant end the load once (D6).
        if record.verdict is None:
            record.verdict = verdict
            for permit in [permit for permit in record.permits if permit.take_back()]:
                # Its call may hang in a query for as long as it likes.
                record.permits.remove(permit)
                record.copies -= 1
        return self._settle(record)

    def _settle(self, record: LoadRecord) -> LoadResult | None:
        if record.verdict is None or record.copies or record.ended:
            return None
        record.ended = True
        del self._active[record.order.load_id]
        groups = record.order.groups if record.verdict is LoadState.LOADED else ()
        self.quarantined_bytes += self._bytes(record.calls)
        return LoadResult(
            load_id=record.order.load_id,
            request_id=record.order.request_id,
            incarnation=record.order.incarnation,
            state=record.verdict,
            pages=sum(len(group.pages) for group in groups),
            bytes=self._bytes(groups),
            direct_pages=record.paths.direct_pages,
            direct_bytes=record.paths.direct_bytes,
            staged=in_order(record.paths.staged),
            staged_bytes=in_order(record.paths.staged_bytes),
            failed_key=record.failed_key,
            reason=record.reason,
            bad_pages=record.bad_pages,
            quarantined=pages_per_group(record.calls, len(self._page_bytes)),
        )

    def _bytes(self, groups: Iterable[GroupPages]) -> int:
        return sum(len(group.pages) * self._page_bytes[group.group] for group in groups)
