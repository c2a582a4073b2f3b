"""Blocking calls as records (M1): a wait may end at any moment, what the call touches stays owned until it returned.

The order is always the same. A place among the calls of its kind is awaited, and a wait that is cancelled there never started
anything. Between the place and the start nothing waits. From the start on the record in `ownership/store_calls.py` holds the
slots, and only the call's own end, delivered on the loop, lets go of them and of the place.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from anyio import CancelScope, CapacityLimiter, Event, WouldBlock
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from akv.errors import AkvError
from akv.flow.uncut import uncut
from akv.ownership.slots import SlotTicket
from akv.ownership.store_calls import CallRecord, StoreCalls
from akv.ports.calls import CallEnd, CallKind, CallRunner, CallSize
from akv.ports.device import PassEvent
from akv.values.messages import GroupPages


class CopyFailed(AkvError):
    """The device refused or failed a copy. At fault: the device or akv. Ends the load or the save that it belonged to."""


class NoSlots(AkvError):
    """So many slots are out of use that a batch has no place any more (M3). Fails its load, or refuses its blocks."""


class EventWatch(Protocol):
    """Whoever polls events; in a connector that is the one stream poller."""

    def watch(self, event: PassEvent, reached: Callable[[BaseException | None], None]) -> None:
        """Call `reached` once on the loop: with None when the event completed, or with what its work raised."""
        ...


async def event_reached(events: EventWatch, event: PassEvent) -> None:
    """Wait until an event completed. Raises CopyFailed if its work failed. Cancellation: nothing is held here."""
    reached = Event()
    failures: list[BaseException | None] = []

    def on_reached(failure: BaseException | None) -> None:
        failures.append(failure)
        reached.set()

    events.watch(event, on_reached)
    await reached.wait()
    if failures[0] is not None:
        raise CopyFailed("the device failed the work that a copy waits for") from failures[0]


class CallWatch(Protocol):
    """Whoever learns how calls end; in a connector that is the circuit breaker."""

    def began(self) -> int:
        """A call begins. Returns what `ended` is to be given."""
        ...

    def ended(self, began: int, kind: CallKind, value: Any, *, given_up: bool) -> None:
        """It returned a value, on the loop; `given_up`: nobody waits for it any more."""
        ...


def always() -> bool:
    """The `begin` of a call that touches no page."""
    return True


def nothing() -> None:
    """Its `end`."""


def lets_go(value: Any) -> None:
    """The `settle` of a call that touches nothing once it has returned."""


class QueuedCopy:
    """A copy whose call has returned. Made by `CallDesk.queue`."""

    def __init__(self, size: CallSize, give_up: Callable[[], None]) -> None:
        self._size = size
        self._give_up = give_up
        self._ended = Event()
        self._failures: list[BaseException | None] = []
        #: Set when the call returned.
        self.returned = Event()

    def has_ended(self, failure: BaseException | None) -> None:
        """The desk's: it ended, well or with a failure."""
        self._failures.append(failure)
        self._ended.set()

    async def ended(self) -> None:
        """Wait until its event completed. Raises CopyFailed from what its call raised, or its event.

        **Cancellation:** the wait ends at once; the copy goes on.
        """
        try:
            await self._ended.wait()
        finally:
            self._give_up()
        if self._failures[0] is not None:
            raise CopyFailed(f"a device copy of {self._size.keys} pages failed") from self._failures[0]


class CallDesk:
    """Starts every blocking call of one half of a connector and keeps its record."""

    def __init__(self, runner: CallRunner, records: StoreCalls, events: EventWatch, watch: CallWatch | None = None) -> None:
        self._runner = runner
        self._records = records
        self._events = events
        self._watch = watch
        #: Set at each end; `drained` makes a new one.
        self._idle = Event()
        self._places = {kind: CapacityLimiter(limit) for kind, limit in runner.limits.items()}
        #: What waits that no cancellation cuts short wait for. None once nothing is delivered any more.
        self._uncut: set[Event] | None = set()

    @property
    def places_taken(self) -> int:
        """Places among the calls of all kinds that somebody has. 0 when nothing is under way."""
        return sum(place.statistics().borrowed_tokens for place in self._places.values())

    async def run(
        self,
        kind: CallKind,
        call: Callable[[], Any],
        size: CallSize,
        ticket: SlotTicket | None = None,
        *,
        pages: GroupPages | None = None,
        begin: Callable[[], bool] = always,
        end: Callable[[], None] = nothing,
        waiting: Callable[[], AbstractContextManager[CancelScope]] = CancelScope,
        settle: Callable[[Any], None] = lets_go,
    ) -> Any:
        """Run `call` and return its value, or raise what it raised. None if `begin` refused, or what `waiting` gives was
        cancelled in the wait for a place: then nothing was started.

        `pages`, `begin` and `end` are for a call that touches the engine's pages: these, and `begin` is asked when the call
        has a place, with no wait between it and the start; `end` is called exactly once for each `begin` that agreed, when the
        call has returned. `settle` is given what it returned, on the loop, while the ticket's slots are still held.

        **Cancellation:** before the call began, nothing happened. Afterwards the wait ends at once, the call goes on, the
        ticket's slots stay out of use until it returned, and `end` is called then.
        """
        place = object()
        with waiting() as wait:
            await self._take(kind, place)
        if wait.cancelled_caught:
            return None
        if not begin():
            self._places[kind].release_on_behalf_of(place)
            return None
        record = self._records.begin(kind, *(() if ticket is None else (ticket,)), pages=pages)
        began = 0 if self._watch is None else self._watch.began()
        ended = Event()
        ends: list[CallEnd] = []

        def done(returned: CallEnd) -> None:
            self._places[kind].release_on_behalf_of(place)
            if returned.error is None:
                settle(returned.value)
            self._end(record)
            ends.append(returned)
            ended.set()
            end()
            if self._watch is not None and returned.error is None:
                self._watch.ended(began, kind, returned.value, given_up=record.given_up)

        try:
            self._runner.start(kind, call, size, done)
        except BaseException as error:
            # Refused, as by a runner that has closed: nothing runs, so nothing may stay on record.
            done(CallEnd(error=error))
            raise
        try:
            await ended.wait()
        finally:
            self._records.give_up(record)
        if ends[0].error is not None:
            raise ends[0].error
        return ends[0].value

    async def copy(
        self,
        call: Callable[[], PassEvent],
        size: CallSize,
        ticket: SlotTicket | None,
        *,
        begin: Callable[[], bool],
        end: Callable[[PassEvent | None], None],
    ) -> bool:
        """Issue a device copy and wait until its event completed. False if `begin` refused: then nothing was issued.

        `begin` is asked when the copy has a place, with no wait between it and the start; `end` is called exactly once for
        each `begin` that agreed, when the copy touches neither pages nor slots any more, with its event or with None if it
        failed. Raises CopyFailed.

        **Cancellation:** the wait ends at once; the copy goes on, and `end` is called at its end all the same.
        """
        queued = await self.queue(CallKind.COPY, call, size, ticket, begin=begin, end=end)
        if queued is None:
            return False
        await queued.ended()
        return True

    async def queue(
        self,
        kind: CallKind,
        call: Callable[[], PassEvent],
        size: CallSize,
        ticket: SlotTicket | None,
        *,
        begin: Callable[[], bool],
        end: Callable[[PassEvent | None], None],
    ) -> "QueuedCopy | None":
        """As `copy`, and return as soon as `call` has: its copy may still run, and has its place until it ended."""
        place = object()
        await self._take(kind, place)
        if not begin():
            self._places[kind].release_on_behalf_of(place)
            return None
        record = self._records.begin(kind, *(() if ticket is None else (ticket,)))
        queued = QueuedCopy(size, partial(self._records.give_up, record))

        def finished(event: PassEvent | None, failure: BaseException | None) -> None:
            self._places[kind].release_on_behalf_of(place)
            self._end(record)
            queued.has_ended(failure)
            end(event if failure is None else None)

        def issued(result: CallEnd) -> None:
            if result.error is not None:
                finished(None, result.error)
            else:
                self._events.watch(result.value, lambda failure: finished(result.value, failure))
            queued.returned.set()

        try:
            self._runner.start(kind, call, size, issued)
        except BaseException as error:
            finished(None, error)
            raise
        try:
            await queued.returned.wait()
        except BaseException:
            self._records.give_up(record)
            raise
        return queued

    async def issue(
        self,
        call: Callable[[], PassEvent],
        size: CallSize,
        tickets: Sequence[SlotTicket],
        queued: Callable[[PassEvent], None],
    ) -> None:
        """Have a snapshot queued on the execution stream, and return as soon as it is; `queued` is given its event.

        The tickets' slots stay out of use until the event completed. What the copy comes to is asked of the event, by whoever
        reads the slots. Raises what `call` raised: then nothing is queued. Returns without `queued` if nobody delivers its end
        any more (`no_more_ends`); then the slots stay out of use.

        **Cancellation:** before the call began, nothing happened. Afterwards it does not end the wait, neither an outer scope
        nor asyncio's own: whoever comes next may overwrite the pages, and must come behind the copy. Raised then.
        """
        kind, place = CallKind.SNAPSHOT, object()
        await self._take(kind, place)
        if self._uncut is None:
            self._places[kind].release_on_behalf_of(place)
            return
        record = self._records.begin(kind, *tickets)
        returned = Event()
        self._uncut.add(returned)
        errors: list[BaseException] = []

        def done(end: CallEnd) -> None:
            self._places[kind].release_on_behalf_of(place)
            if end.error is None:
                if not returned.is_set():
                    queued(end.value)
                self._events.watch(end.value, lambda _: self._end(record))
            else:
                errors.append(end.error)
                self._end(record)
            returned.set()
            if self._uncut is not None:
                self._uncut.discard(returned)

        try:
            self._runner.start(kind, call, size, done)
        except BaseException as error:
            done(CallEnd(error=error))
            raise
        await uncut(returned.wait, returned.is_set)
        if errors:
            raise errors[0]

    def hangs(self, kind: CallKind) -> bool:
        """Whether calls that nobody waits for any more have every place of this kind, so that none can begin."""
        return self._records.given_up_of(kind) >= self._places[kind].total_tokens

    def no_more_ends(self) -> None:
        """Whoever delivers the ends of calls has stopped. What waits for one uncut would never return, cancelled or not."""
        waits, self._uncut = self._uncut or (), None
        for returned in waits:
            returned.set()

    async def drained(self) -> None:
        """Return when every call and copy has ended, and its end was delivered. Cancellation: nothing is held."""
        await checkpoint()
        while self._records.outstanding:
            self._idle = Event()
            await self._idle.wait()

    async def _take(self, kind: CallKind, place: object) -> None:
        """Take a place, or wait for one. Cancellation: none is taken, also where one was free."""
        await checkpoint_if_cancelled()
        try:
            self._places[kind].acquire_on_behalf_of_nowait(place)
        except WouldBlock:
            await self._places[kind].acquire_on_behalf_of(place)

    def _end(self, record: CallRecord) -> None:
        self._records.ended(record)
        self._idle.set()


async def slots_granted(request: Callable[[Callable[[], None]], SlotTicket]) -> SlotTicket:
    """Ask for slots and wait for them. The returned ticket is granted; leave it with `with`. Raises NoSlots if they will never
    be free.

    **Cancellation:** the claim is withdrawn, or what it was granted goes back.
    """
    granted = Event()
    ticket = request(granted.set)
    try:
        await granted.wait()
    except BaseException:
        ticket.leave()
        raise
    if ticket.hopeless:
        ticket.leave()
        raise NoSlots(f"{ticket.count} slots are wanted and fewer are in use: peers may still touch the others")
    return ticket
