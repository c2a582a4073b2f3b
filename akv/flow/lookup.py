"""First step: how much of a prompt's KV the pool holds beyond what the engine has itself (L1 to L4, W7).

`plan/lookup.py` and `plan/window_search.py` decide what is asked and what the answers amount to, `plan/hashing.py` and
`plan/keys.py` make the keys.
"""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import compress, islice
from typing import Any

import msgspec
from anyio import CancelScope, Lock, create_task_group, current_time, move_on_after
from anyio.lowlevel import checkpoint

from akv.flow.answers import answer_each
from akv.flow.calls import CallDesk
from akv.flow.gate import OpenGate, PoolGate
from akv.ownership.negative_keys import NegativeKeys
from akv.plan.breaker import Waited
from akv.plan.hashing import Chain
from akv.plan.keys import ServerKeys
from akv.plan.lookup import LookupRange, ProbeWalk, lookup_range, offer_of, prefix_length
from akv.plan.recent_chains import RecentChains
from akv.plan.window_search import GroupBlocks, WindowGroup, WindowSearch
from akv.ports.calls import CallKind, CallSize
from akv.ports.pool import KeyState, PagePool
from akv.values.offers import LookupOutcome

#: Keys that are built in the turn that hashed their blocks: they take a tenth of its time.
_FEW_KEYS = 64


class LookupParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a lookup works with."""

    pool: PagePool
    desk: CallDesk
    keys: ServerKeys
    groups: int
    #: The window groups among them; the others are full attention.
    windows: tuple[WindowGroup, ...]
    probe_head: int
    probe_chunk: int
    probe_concurrency: int
    #: R, and whether a resumable end is looked for further back than that. Unused without window groups.
    rewind_tokens: int
    window_fallback: bool
    #: Held for every stretch of hashing and of building keys. Many lookups that begin at once then take turns with all other
    #: tasks, and not one turn together (L3).
    turn: Lock
    recent: RecentChains
    #: Pages that count as missing, whatever the pool says of them (L8).
    negative: NegativeKeys
    deadline_s: float
    #: Shut while the pool does not answer.
    gate: PoolGate = OpenGate()

    def nothing(self, outcome: LookupOutcome, probed: int = 0, hole: int | None = None) -> "LookupAnswer":
        """An answer that offers nothing."""
        return LookupAnswer(0, outcome, probed, hole, () if self.windows else None)


class LookupAnswer(msgspec.Struct, frozen=True):
    """Tokens to offer beyond the local match, and why so many."""

    tokens: int
    outcome: LookupOutcome
    #: Keys that were asked for.
    probed: int = 0
    #: The first block that was asked for and not found; None if each was, or none asked for in time. Window pages aside:
    #: most of them are in no pool.
    hole: int | None = None
    #: As in `Offer`.
    ends: tuple[int, ...] | None = None
    #: The window pages that were asked for and not found: group, and hashes of blocks. Most of them were never stored.
    missing: tuple[tuple[int, list[bytes]], ...] = ()


async def look_up(parts: LookupParts, chain: Chain, request_id: str, local_tokens: int) -> LookupAnswer:
    """Ask the pool for the blocks behind the engine's local match.

    Raises EngineContractError for a local match that cannot be. The pool's trouble is never raised: it is a miss (L2).
    **Cancellation:** a probe that is under way goes on and touches nothing; nothing is held.
    """
    asked = lookup_range(chain.length, local_tokens, chain.tokens_per_block, request_id=request_id, lookahead=chain.lookahead)
    if isinstance(asked, LookupOutcome):
        await checkpoint()
        return parts.nothing(asked)
    if not parts.gate.lets_through():
        await checkpoint()
        return parts.nothing(LookupOutcome.UNAVAILABLE)
    search = _Search(parts, chain, asked)
    with move_on_after(parts.deadline_s) as timer, parts.gate.ending_waits() as shut:
        await search.run()
    if shut.cancelled_caught:
        return parts.nothing(LookupOutcome.UNAVAILABLE, search.probed)
    if timer.cancelled_caught:
        if search.asking:
            parts.gate.timed_out(Waited.LOOKUP)
        return parts.nothing(LookupOutcome.DEADLINE, search.probed)
    return search.answer()


async def hash_in_slices(chain: Chain, blocks: int, turn: Lock) -> None:
    """Hash up to `blocks` blocks, never for a millisecond at a stretch (L3). Cancellation: what is hashed stays hashed."""
    while chain.hash_up_to(0) < blocks:
        async with turn:
            chain.hash_up_to(blocks, chain.slice_blocks)


class _Search:
    """One lookup: what it has asked so far, and what that amounts to."""

    def __init__(self, parts: LookupParts, chain: Chain, asked: LookupRange) -> None:
        self._parts = parts
        self._chain = chain
        self._asked = asked
        windows = {window.group for window in parts.windows}
        #: The groups that need every page of a prefix.
        self._full = [group for group in range(parts.groups) if group not in windows]
        #: Keys of one block in these groups.
        width = sum(map(parts.keys.shards, self._full))
        self._walk = ProbeWalk(asked, width, parts.probe_head, parts.probe_chunk) if self._full else None
        #: Begun once the prefix is known.
        self._windows: WindowSearch | None = None
        #: Keys that were asked for.
        self.probed = 0
        #: Calls whose answer has not come.
        self.asking = 0
        #: Calls of which no key got an answer.
        self._unanswered = 0
        #: Whether it has looked for what recent chains have hashed.
        self._adopted = False

    @property
    def _found(self) -> int:
        """Blocks of the full-attention prefix. Without such groups nothing bounds it but the prompt."""
        return self._asked.last - self._asked.first if self._walk is None else self._walk.found

    async def run(self) -> None:
        """Ask until no answer can change what was found. Cancellation: calls that are under way go on and touch nothing."""
        if self._walk is not None:
            await self._ask_prefix(self._walk)
        if self._parts.windows and self._found:
            await self._ask_windows()

    def answer(self) -> LookupAnswer:
        """What the lookup amounts to."""
        found, hole = self._found, self._asked.first + self._found
        known_hole = hole if hole < self._asked.last else None
        ends = () if self._windows is None else self._windows.ends
        if self._unanswered and not (ends if self._parts.windows else found):
            return self._parts.nothing(LookupOutcome.UNAVAILABLE, self.probed, known_hole)
        if self._windows is None:
            tokens, outcome = offer_of(self._asked, found)
            return LookupAnswer(tokens, outcome, self.probed, known_hole, () if self._parts.windows else None)
        beyond = tuple((end - self._asked.first) * self._asked.tokens_per_block for end in ends)
        missing = tuple((group, _hashes(self._chain, blocks)) for group, blocks in self._windows.missing)
        return LookupAnswer(beyond[-1] if beyond else 0, self._windows.outcome, self.probed, known_hole, beyond, missing)

    async def _ask_prefix(self, walk: ProbeWalk) -> None:
        """Ask for the head, then for the rest in several calls at a time (L3)."""
        head = walk.next()
        if head is not None:
            await self._ask_blocks(walk, head)
        if not walk.settled:
            await _at_the_same_time(self._parts.probe_concurrency, lambda scope: self._ask_on(walk, scope))

    async def _ask_on(self, walk: ProbeWalk, all_of_them: CancelScope) -> None:
        """Ask for one portion after the other; once the answer is settled, nobody waits for the others any more."""
        while (blocks := walk.next()) is not None:
            await self._ask_blocks(walk, blocks)
            if walk.settled:
                all_of_them.cancel()

    async def _ask_blocks(self, walk: ProbeWalk, blocks: range) -> None:
        there = await self._ask([GroupBlocks(group, blocks) for group in self._full])
        # Keys were asked group by group; a block counts if it is there in each (L2).
        columns = (there[at : at + len(blocks)] for at in range(0, len(there), len(blocks)))
        walk.answered(blocks, prefix_length(zip(*columns, strict=True)))

    async def _ask_windows(self) -> None:
        """Ask for what the window groups need to resume in the prefix, step by step (W7)."""
        windowed = [window.group for window in self._parts.windows]
        windows = self._windows = WindowSearch(
            self._asked,
            self._asked.first + self._found,
            self._parts.windows,
            rewind_tokens=self._parts.rewind_tokens,
            fallback=self._parts.window_fallback,
            # In pages, each of which has a key for each of its shards.
            chunk=self._parts.probe_chunk // max(self._parts.keys.shards(group) for group in windowed),
        )
        # With a pool that cannot be asked any more the search would go on back to the local match, one time-out after another.
        before = self._unanswered
        while not windows.settled and self._unanswered == before:
            calls = min(self._parts.probe_concurrency, windows.waiting)
            await _at_the_same_time(calls, lambda scope: self._ask_portions(windows, scope))

    async def _ask_portions(self, windows: WindowSearch, all_of_them: CancelScope) -> None:
        before = self._unanswered
        while (portion := windows.next()) is not None:
            windows.answered(portion, await self._ask(portion))
            if self._unanswered > before:
                all_of_them.cancel()

    async def _ask(self, pages: Sequence[GroupBlocks]) -> list[bool]:
        """Ask the pool for pages in one call: which of them are there, in order. Those that failed lately are not (L8)."""
        parts = self._parts
        there, keys = await self._name(pages)
        if not keys:
            await checkpoint()
            return there
        self.probed += len(keys)
        self.asking += 1
        answered = await parts.desk.run(CallKind.PROBE, _probe(parts.pool, keys), CallSize(len(keys)))
        self.asking -= 1
        answers = answer_each(answered, len(keys))
        self._unanswered += all(answer.state is KeyState.UNAVAILABLE for answer in answers)
        told = (answer.state is KeyState.OK for answer in answers)
        # Of a page with one key, as all have where there is one rank, its own answer is the page's.
        whole = told if len(keys) == sum(there) else self._by_page(pages, there, told)
        return [asked and next(whole) for asked in there]

    def _by_page(self, pages: Sequence[GroupBlocks], asked: Sequence[bool], told: Iterator[bool]) -> Iterator[bool]:
        """Of each page that was asked for, whether every shard of it is there (L2)."""
        shards = (self._parts.keys.shards(group) for group, blocks in pages for _ in blocks)
        return (all(list(islice(told, width))) for width in compress(shards, asked))

    async def _name(self, pages: Sequence[GroupBlocks]) -> tuple[list[bool], list[str]]:
        """Which of these pages may be asked for, and the keys of those.

        Hashed in slices, and the keys built in a turn of their own; but all in one turn where that takes as long as a slice.
        Each turn is a round of the loop, and most prompts need no second one.
        """
        parts, chain = self._parts, self._chain
        end = max(blocks[-1] for _, blocks in pages) + 1
        few = sum(len(blocks) * parts.keys.shards(group) for group, blocks in pages) <= _FEW_KEYS
        async with parts.turn:
            if not self._adopted:
                # Once more: since the request was opened, another that shares its prompt may have been hashed.
                parts.recent.adopt(chain)
                self._adopted = True
            if chain.hash_up_to(end, chain.slice_blocks) >= end and few:
                return self._keys(pages)
        await hash_in_slices(chain, end, parts.turn)
        async with parts.turn:
            return self._keys(pages)

    def _keys(self, pages: Sequence[GroupBlocks]) -> tuple[list[bool], list[str]]:
        parts, now = self._parts, current_time()
        columns = [(group, _hashes(self._chain, blocks)) for group, blocks in pages]
        good = [[not bad for bad in parts.negative.are_bad(group, hashes, now)] for group, hashes in columns]
        keys = [
            key
            for (group, hashes), asked in zip(columns, good, strict=True)
            for key in parts.keys.keys(group, hashes if all(asked) else list(compress(hashes, asked)))
        ]
        return [asked for column in good for asked in column], keys


def _hashes(chain: Chain, blocks: Sequence[int]) -> list[bytes]:
    """The hashes of ascending blocks, which have gaps where one in each window's length is asked for."""
    hashes = chain.hashes(blocks[0], blocks[-1] + 1)
    return hashes if len(hashes) == len(blocks) else [hashes[block - blocks[0]] for block in blocks]


def _probe(pool: PagePool, keys: list[str]) -> Callable[[], object]:
    # A function of its own: the keys are bound at the call, and not read from the loop's variable when a thread gets to it.
    return lambda: pool.probe(keys)


async def _at_the_same_time(tasks: int, work: Callable[[CancelScope], Coroutine[Any, Any, None]]) -> None:
    """Run `work` in so many tasks, each given the scope of all of them. Raises what one of them raised as it is.

    Cancellation: all of them are cancelled.
    """
    error: BaseException | None = None
    try:
        async with create_task_group() as group:
            for _ in range(tasks):
                group.start_soon(work, group.cancel_scope)
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) > 1:
            raise
        # As the head's would be raised: whoever waits for a lookup knows of no group.
        error = errors.exceptions[0]
    if error is not None:
        raise error
