"""What akv holds of the engine's requests. Lives on the loop: every method runs there, and only lookups wait for the pool.

The engine tells pages and tokens once, as they are added, also for passes that then do not run: so they are noted when a pass
is planned, and not when it ran.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from anyio import move_on_after

from akv import observe
from akv.connector import Connector
from akv.engines.tensorrt_llm.ends import Ends
from akv.engines.tensorrt_llm.identity import Asked
from akv.errors import PagesLost, TokenError
from akv.request import Load, Request
from akv.values.messages import LoadState, PassPlan
from akv.values.offers import Offer
from akv.values.requests import Completion, LoadCompleted, SavesCompleted, Scheduled

Tables = list[list[int]]


class Reported(NamedTuple):
    """What the engine says of one request's part in a coming pass."""

    engine_id: int
    #: Whether this is its first pass with this allocation: then all its tokens and pages are told, else what was added.
    first: bool
    tokens: Sequence[int]
    pages: Tables
    #: Tokens that have KV, and tokens that the pass computes, drafts with them.
    computed: int
    scheduled: int


class Held:
    """One request of the engine, from its first question to its end."""

    def __init__(self, asked: Asked, request: Request) -> None:
        self.engine_id = asked.engine_id
        self.request = request
        #: Tokens that akv knows.
        self.known = len(asked.tokens)
        self.forget_pages()

    def forget_pages(self) -> None:
        """Its allocation has gone."""
        #: What the engine was answered and has not taken up.
        self.offer: Offer | None = None
        #: Whether the answer said that something would be loaded: the engine then waits for an end, whatever it takes up.
        self.parks = False
        self.load: Load | None = None
        self.allocated = False
        #: Whether a pass told all its pages. Without, additions would be counted from a place that nobody knows.
        self.introduced = False
        self.tables: Tables = []
        #: Tokens that the engine told in passes, and that have KV behind the last one that ran.
        self.told = 0
        self.computed = 0

    def catch_up(self, tokens: Sequence[int]) -> None:
        """The engine says all tokens that the request has by now."""
        if len(tokens) > self.known:
            self.request.append(tokens[self.known :])
            self.known = len(tokens)


class Serving:
    """The requests of one server."""

    def __init__(self, kv: Connector, ends: Ends, *, grace_s: float, windows: bool) -> None:
        """`grace_s`: what one question of the engine may wait for the pool. `windows`: the cache has window groups."""
        self.kv = kv
        self._ends = ends
        self._grace_s = grace_s
        self.windows = windows
        self._held: dict[int, Held] = {}
        #: Finished requests whose saves go on: the engine's id, by akv's.
        self._ending: dict[str, int] = {}
        #: What tells the engine that a load has ended, by request and incarnation.
        self._loading: dict[tuple[str, int], Callable[[str], None]] = {}
        #: The planned pass that has neither run nor been dropped, its number, and the requests in it with their ends.
        self._open: tuple[int, PassPlan, list[tuple[Held, int]]] | None = None

    # -- before it computes

    async def match(self, asked: Asked, local_tokens: int) -> int:
        """How many tokens the pool has behind the engine's own match; 0 too if it has not answered in time."""
        held = await self.look_up(asked, local_tokens)
        if held is None or held.offer is None:
            return 0
        held.parks = held.offer.tokens > 0
        return held.offer.tokens

    async def look_up(self, asked: Asked, local_tokens: int) -> Held | None:
        """Ask the pool for a request, opened where it is new: the answer is in `offer`. None for one that cannot be served.

        Cancellation: nothing is held.
        """
        held = self._held.get(asked.engine_id)
        if held is not None and (held.allocated or held.introduced):
            # One question per allocation: the earlier one has gone, though nobody said so.
            await self.reset(asked.engine_id)
        held = held or self._opened(asked)
        if held is not None:
            held.catch_up(asked.tokens)
            held.offer, held.parks = None, False
            with move_on_after(self._grace_s) as waiting:
                held.offer = await held.request.lookup(local_tokens)
            if waiting.cancelled_caught:
                observe.emit(observe.LOOKUP_LATE, request_id=held.request.request_id, grace_s=self._grace_s)
        return held

    def _opened(self, asked: Asked) -> Held | None:
        name, again = str(asked.engine_id), 1
        while name in self._ending:
            again += 1
            name = f"{asked.engine_id}.{again}"
        try:
            request = self.kv.open_request(name, asked.tokens, asked.scope, reads_cache=asked.reads_cache)
        except TokenError:
            # The fault of its caller, and no reason to end a server.
            observe.emit(observe.REQUEST_EXCLUDED, request_id=name, incarnation=0, reason="unhashable")
            return None
        held = self._held[asked.engine_id] = Held(asked, request)
        return held

    def holds(self, held: Held) -> bool:
        """Whether the engine still has this request."""
        return self._held.get(held.engine_id) is held

    def give_up(self, engine_id: int, start: int, end: int) -> None:
        """The engine will not take up what was offered for tokens [start, end). Loads that have begun go on."""
        held = self._held.get(engine_id)
        if held is None or held.offer is None:
            return
        first, last = held.offer.local_tokens, held.offer.local_tokens + held.offer.tokens
        if start <= first and end < last:
            held.offer = part_of(held.offer, max(first, end), last)
        elif start < last and end > first:
            held.offer = part_of(held.offer, first, start)

    def allocated(self, asked: Asked, tables: Tables, honoured: int | None) -> None:
        """The request has pages. What it takes up of its offer begins to load. Raises EngineContractError."""
        # Where nobody asked, reuse is turned off: what it computes is saved all the same.
        held = self._held.get(asked.engine_id) or self._opened(asked)
        if held is None:
            return
        held.tables, held.allocated = tables, True
        offer, held.offer = held.offer, None
        parks, held.parks = held.parks, False
        ended = partial(self._ends.load_ended, held.engine_id)
        self._ends.load_begins(held.engine_id)
        if offer is not None and offer.tokens:
            begin = offer.local_tokens
            self.load(held, offer, begin, begin + (offer.tokens if honoured is None else honoured), tables, ended)
        elif parks:
            ended("")

    def load(self, held: Held, offer: Offer, begin: int, upto: int, tables: Tables, ended: Callable[[str], None]) -> None:
        """Load tokens [begin, upto) of an offer; `ended` is called with why it failed, or "". Raises EngineContractError."""
        part = part_of(offer, begin, offer.local_tokens + offer.tokens)
        if self.windows:
            # A shorter end needs other window pages, and may never have been stored (W8).
            part = part.at_most(upto - begin)
            if part.tokens < upto - begin:
                ended("window_end")
                return
        held.load = held.request.reserve(part, upto - begin, tables)
        self._loading[held.request.request_id, held.request.incarnation] = ended

    # -- passes

    def plan(self, number: int, reported: Iterable[Reported]) -> None:
        """A pass is coming. One that was planned before and did not run has been vetoed. Raises EngineContractError."""
        if self._open is not None:
            _, vetoed, _ = self._open
            self._open = None
            self.kv.drop_pass(vetoed)
        parts: list[Scheduled] = []
        running: list[tuple[Held, int]] = []
        for one in reported:
            held = self._held.get(one.engine_id)
            if held is None:
                continue  # A dummy, or one that was never asked for and cannot be keyed.
            self._note(held, one)
            if held.introduced:
                drafts = max(0, one.computed + one.scheduled - held.known)
                tokens = max(0, one.scheduled - drafts)
                parts.append(
                    Scheduled(
                        request=held.request,
                        computed_before=one.computed,
                        tokens=tokens,
                        draft_tokens=drafts,
                        pages=held.tables,
                    )
                )
                running.append((held, one.computed + tokens))
        if parts:
            self._open = number, self.kv.plan_pass(parts), running

    @staticmethod
    def _note(held: Held, one: Reported) -> None:
        if one.first:
            held.introduced, held.told, held.tables = True, 0, [list(table) for table in one.pages]
        else:
            for table, added in zip(held.tables, one.pages, strict=True):
                table.extend(added)
        held.told += len(one.tokens)
        new = held.told - held.known
        if new > 0:
            held.request.append(one.tokens[len(one.tokens) - new :])
            held.known = held.told

    async def after(self, number: int) -> None:
        """The pass of this number has been queued on the execution stream."""
        if self._open is None or self._open[0] != number:
            return
        _, plan, running = self._open
        self._open = None
        for held, computed in running:
            held.computed = max(held.computed, computed)
        await self.kv.after_forward(plan)

    # -- the end of an allocation

    async def reset(self, engine_id: int) -> None:
        """The allocation has gone, and the request will begin again. Waits for copies that touch its pages."""
        held = self._held.get(engine_id)
        if held is None:
            return
        ended = self._loading.pop((held.request.request_id, held.request.incarnation), None)
        held.forget_pages()
        await held.request.preempted()
        if ended is not None:
            ended("")

    async def drop(self, engine_ids: Iterable[int]) -> None:
        """These leave the pass that is planned, without having computed anything, and lose their allocation."""
        for engine_id in engine_ids:
            await self.reset(engine_id)

    async def finished(self, engine_id: int, tables: Tables) -> bool:
        """The request has ended. Returns whether its pages are still read; `Ends` tells when no more."""
        held = self._held.pop(engine_id, None)
        if held is None:
            return False
        if self.windows and held.introduced and any(tables) and self._open is None:
            await self._tell_last_pages(held, tables)
        request = held.request
        request.finish()
        if request.closed:
            return False
        self._ending[request.request_id] = engine_id
        return True

    async def _tell_last_pages(self, held: Held, tables: Tables) -> None:
        """Window pages may have gone since the last pass, and nothing said so: the list that ends the request does."""
        last = Scheduled(request=held.request, computed_before=held.computed, tokens=0, pages=tables)
        await self.kv.after_forward(self.kv.plan_pass([last]))

    # -- what ended

    async def watch(self) -> None:
        """Sort what ends, for as long as the connector lives."""
        while True:
            await self.kv.changed.wait()
            try:
                for ended in self.kv.completed():
                    self._take(ended)
            except PagesLost:
                # Told as an event. Its pages must not be used again, so the engine is never told that they are free.
                continue

    def _take(self, ended: Completion) -> None:
        if isinstance(ended, LoadCompleted):
            tell = self._loading.pop((ended.request_id, ended.incarnation), None)
            if tell is not None:
                tell(ended.reason or "failed" if ended.state is LoadState.FAILED else "")
        elif isinstance(ended, SavesCompleted):
            engine_id = self._ending.pop(ended.request_id, None)
            if engine_id is not None:
                self._ends.saves_ended(engine_id)


def part_of(offer: Offer, begin: int, upto: int) -> Offer:
    """The part of an offer that covers tokens [begin, upto) of the sequence, as far as it can be loaded by itself."""
    skipped = begin - offer.local_tokens
    if skipped % offer.tokens_per_block:
        begin, upto, skipped = offer.local_tokens, offer.local_tokens, 0  # No block begins there (L1).
    ends = None if offer.ends is None else tuple(end - skipped for end in offer.ends if end > skipped)
    rest = Offer(
        request_id=offer.request_id,
        incarnation=offer.incarnation,
        local_tokens=begin,
        tokens=max(0, offer.tokens - skipped),
        outcome=offer.outcome,
        tokens_per_block=offer.tokens_per_block,
        ends=ends,
    )
    return rest if upto - begin >= rest.tokens else rest.at_most(upto - begin)
