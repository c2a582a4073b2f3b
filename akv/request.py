"""What an engine holds of one request and of its load."""

from collections.abc import Callable, Sequence

from akv.errors import LoadCancelled, LoadFailed
from akv.halves import Halves
from akv.ownership.request_record import LoadHold, RequestRecord
from akv.plan.lifecycle import Phase
from akv.plan.tokens import Tokens
from akv.values.messages import LoadState, PagesPerGroup
from akv.values.offers import Offer
from akv.values.requests import LoadCompleted


class Load:
    """A reservation: pages of one request that are the connector's until the load reached its terminal state (D2)."""

    def __init__(self, halves: Halves, hold: LoadHold, record: RequestRecord) -> None:
        self._halves = halves
        self._hold = hold
        self._record = record

    @property
    def state(self) -> LoadState | None:
        """The terminal state, None while the load is under way and the pages are the connector's."""
        return None if self._hold.completed is None else self._hold.completed.state

    async def wait(self) -> LoadCompleted:
        """Wait until the pages are filled; they may be read, freed and handed on at once.

        Raises LoadFailed if the pool did not deliver a page, LoadCancelled if the request was cancelled or finished meanwhile:
        the pages are the engine's again, with undefined content, but for those that the error names as quarantined. Raises
        ConnectorBroken or NotOpenError if the connector ended first. PagesLost if the connector degraded (`on_failure`) and
        nobody can see any more whether the copies into them have ended.
        **Cancellation:** only the wait ends; the load goes on and the pages stay the connector's. `Request.cancel()` ends a
        load.
        """
        await self._halves.until(self._hold.load_id, self._record, lambda: self._hold.completed is not None)
        self._halves.fetched(self._hold.load_id)
        completed = self._hold.completed
        if completed is None:
            raise AssertionError("a wait that returned has a terminal state")
        if completed.state is LoadState.LOADED:
            return completed
        quarantined = self._halves.scheduler.requests.pages.tell((completed.request_id, completed.incarnation))
        if completed.state is LoadState.FAILED:
            raise LoadFailed(self._record.request_id, self._hold.failed_key, completed.reason, quarantined)
        raise LoadCancelled(self._record.request_id, quarantined)


class Request:
    """One request of the engine, from `Connector.open_request()` until its pages are free again."""

    def __init__(self, halves: Halves, record: RequestRecord) -> None:
        self._halves = halves
        self._record = record
        self._load_ids: list[int] = []
        #: Incarnations whose pages in quarantine were not named yet.
        self._unnamed = [record.incarnation]
        self._quarantined: PagesPerGroup | None = None

    @property
    def request_id(self) -> str:
        """As the engine named it."""
        return self._record.request_id

    @property
    def incarnation(self) -> int:
        """Tells this use of the id from earlier and later ones; completions carry it (D8)."""
        return self._record.incarnation

    @property
    def closed(self) -> bool:
        """Whether nothing of akv's touches the request's pages any more, but for those in quarantine."""
        return self._record.phase is Phase.CLOSED

    @property
    def is_open(self) -> bool:
        """Whether passes may be planned for it: it has not begun to end, no load of it and no preemption is under way."""
        return self._record.phase is Phase.OPEN

    @property
    def lost(self) -> bool:
        """Whether nobody can give its pages back any more: what `PagesLost` says."""
        return self._halves.is_lost(self._record)

    @property
    def quarantined(self) -> PagesPerGroup:
        """Once it has closed: what `finished()` or `cancel()` returned, or would have if they had not been cancelled first.

        For users of `Connector.request()`, which calls them. `()` before that.
        """
        if self._quarantined is None and self.closed:
            self._quarantined = self._name()
        return self._quarantined or ()

    async def lookup(self, local_tokens: int = 0) -> Offer:
        """Ask how many tokens the pool holds beyond the engine's own match of `local_tokens` tokens, a multiple of T.

        An offer of 0 tokens is a normal answer; its outcome says why. May be repeated at any time before the request is
        computed (L5). Raises EngineContractError for a local match longer than the prompt, ConnectorBroken or NotOpenError at
        once if the connector ends meanwhile. **Cancellation:** nothing is held.
        """
        self._halves.latch.check()
        with self._halves.latch.ending_waits():
            return await self._halves.scheduler.lookup(self._record, local_tokens)

    def reserve(self, offer: Offer, honoured_tokens: int, pages: Sequence[Sequence[int]], *, priority: int = 0) -> Load:
        """Take up an offer: hand over the pages of its first `honoured_tokens` tokens, a multiple of T, to be filled.

        `pages` is the request's page table for each layer group: entry i is the page of block i, -1 for none. From here to the
        terminal state the pages behind the local match are the connector's: they must not be read, freed or reused. Of queued
        loads those with the larger `priority` go first, equal ones in order (V4). Raises EngineContractError naming request,
        group and block; then nothing was taken (L6).
        """
        self._halves.latch.check()
        hold = self._halves.scheduler.reserve(self._record, offer, honoured_tokens, pages, priority)
        self._load_ids.append(hold.load_id)
        return Load(self._halves, hold, self._record)

    def append(self, tokens: Tokens) -> None:
        """Add confirmed generated tokens, so that blocks which decoding completes can be saved (S12). No drafts. Also while
        the request is preempted: they may come from a pass that was under way.

        Raises TokenError for a token that cannot be hashed; then none was appended.
        """
        self._halves.latch.check()
        self._halves.scheduler.requests.must_go_on(self._record, "append tokens to")
        self._record.chain.append(tokens)

    def finish(self) -> None:
        """The request is complete: no further pass. Its saves go on; its pages stay held until `finished()` or
        `SavesCompleted`.

        Computed blocks that no pass listed are read live now, so call it before the pages are freed or changed. Idempotent.
        """
        self._halves.latch.check()
        self._halves.finish(self._record)

    async def finished(self) -> PagesPerGroup:
        """`finish()`, then wait until its saves ended: the pages are the engine's again (S7), but for those that it returns.

        These are in quarantine, as for `cancel()`; there are some only if a load was under way. Raises PagesLost, as
        `cancel()` does, if the connector degraded and nobody can see any more whether the pages are read.

        **Cancellation:** the wait ends, the saves go on and the pages stay held; ask again, or call `cancel()`.
        """
        self._halves.latch.check()
        await self._halves.scheduler.hash_rest(self._record)
        self.finish()
        return await self._until_closed()

    async def cancel(self) -> PagesPerGroup:
        """The request is not wanted any more: return when its pages are free (D6). At any moment, and idempotent.

        Loads and saves that have not begun are withdrawn; what runs is waited for: device copies, never store calls. Returns
        the pages, per layer group, that a store call still touches: they stay out of use until `Connector.completed()`
        delivers `PagesReleased` for them. `()` unless the engine declared `keeps_quarantined_pages`. What a LoadFailed named
        before is not named again; asked again, this returns the same, released meanwhile or not.

        **Cancellation:** the request is cancelled all the same; only the wait ends. Ask again, or watch `completed()`.
        """
        self._halves.latch.check()
        self._halves.cancel(self._record)
        return await self._until_closed()

    async def preempted(self) -> PagesPerGroup:
        """The engine takes the request's pages away, to go on with it later: return when they are free.

        Loads and saves that have not begun are withdrawn; what runs is waited for as for `cancel()`, and what is returned is
        the same. Then the request is open again, as a new incarnation without pages: `lookup()` covers the prompt and what was
        appended since, and finds what was saved. Offers, loads and planned passes from before count no more. Blocks whose save
        was withdrawn are saved when they have been computed again.

        On a request that has begun to end it only waits for that end. Raises ConnectorBroken or NotOpenError if the connector
        ends first. **Cancellation:** the pages are taken away all the same; only the wait ends. Ask again, or watch
        `completed()`: it delivers SavesCompleted with the incarnation that ended.
        """
        self._halves.latch.check()
        ending = self.incarnation
        self._halves.preempt(self._record)
        await self._until_ended(ending, lambda: self.closed or self.incarnation != ending)
        return self.quarantined if self.closed else self._name()

    async def _until_closed(self) -> PagesPerGroup:
        await self._until_ended(self.incarnation, lambda: self.closed)
        return self.quarantined

    async def _until_ended(self, incarnation: int, ended: Callable[[], bool]) -> None:
        if incarnation not in self._unnamed:
            self._unnamed.append(incarnation)
        await self._halves.until(incarnation, self._record, ended)
        self._told(incarnation)

    def _told(self, *ended: int) -> None:
        """Whoever waited for its end has been told; in the list of `completed()` it would only grow if nobody fetches that."""
        for number in (*self._load_ids, *self._unnamed, *ended, self.incarnation):
            self._halves.fetched(number)

    def _name(self) -> PagesPerGroup:
        """Name the pages in quarantine of what has ended, each once."""
        book, groups = self._halves.scheduler.requests.pages, range(self._halves.groups)
        over = [number for number in self._unnamed if self.closed or number != self.incarnation]
        self._unnamed = [number for number in self._unnamed if number not in over]
        named = [pages for number in over if (pages := book.tell((self.request_id, number)))]
        return tuple(tuple(page for pages in named for page in pages[group]) for group in groups) if named else ()
