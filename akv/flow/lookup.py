"""First step: how much of a prompt's KV the pool holds beyond what the engine has itself (L1 to L4).

`plan/lookup.py` decides what is asked and what the answers amount to, `plan/hashing.py` and `plan/keys.py` make the keys.
"""

from collections.abc import Callable

import msgspec
from anyio import CancelScope, Lock, create_task_group, move_on_after
from anyio.lowlevel import checkpoint

from akv.flow.calls import CallDesk
from akv.plan.hashing import Chain
from akv.plan.keys import KeySpace
from akv.plan.lookup import ProbeWalk, lookup_range, offer_of, prefix_length
from akv.plan.recent_chains import RecentChains
from akv.ports.calls import CallKind, CallSize
from akv.ports.pool import KeyState, PagePool
from akv.values.offers import LookupOutcome


class LookupParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a lookup works with."""

    pool: PagePool
    desk: CallDesk
    keys: KeySpace
    groups: int
    probe_head: int
    probe_chunk: int
    probe_concurrency: int
    #: Held for every stretch of hashing and of building keys. Many lookups that begin at once then take turns with all other
    #: tasks, and not one turn together (L3).
    turn: Lock
    recent: RecentChains
    deadline_s: float


class LookupAnswer(msgspec.Struct, frozen=True):
    """Tokens to offer beyond the local match, and why so many."""

    tokens: int
    outcome: LookupOutcome
    #: Keys that were asked for.
    probed: int = 0
    #: The first block that was asked for and not found; None if each was, or none asked for in time.
    hole: int | None = None


async def look_up(parts: LookupParts, chain: Chain, request_id: str, local_tokens: int) -> LookupAnswer:
    """Ask the pool for the blocks behind the engine's local match.

    Raises EngineContractError for a local match that cannot be. The pool's trouble is never raised: it is a miss (L2).
    **Cancellation:** a probe that is under way goes on and touches nothing; nothing is held.
    """
    asked = lookup_range(chain.length, local_tokens, chain.tokens_per_block, request_id=request_id)
    if isinstance(asked, LookupOutcome):
        await checkpoint()
        return LookupAnswer(0, asked)
    search = _Search(ProbeWalk(asked, parts.groups, parts.probe_head, parts.probe_chunk))
    with move_on_after(parts.deadline_s) as timer:
        async with parts.turn:
            # Once more: since the request was opened, another that shares its prompt may have been hashed.
            parts.recent.adopt(chain)
        await _search_all(parts, chain, search)
    if timer.cancelled_caught:
        return LookupAnswer(0, LookupOutcome.DEADLINE, search.probed)
    found = search.walk.found
    hole = asked.first + found if asked.first + found < asked.last else None
    if search.unavailable and not found:
        return LookupAnswer(0, LookupOutcome.UNAVAILABLE, search.probed, hole)
    tokens, outcome = offer_of(asked, found)
    return LookupAnswer(tokens, outcome, search.probed, hole)


class _Search:
    """What one lookup has asked so far."""

    def __init__(self, walk: ProbeWalk) -> None:
        self.walk = walk
        #: Keys that were asked for.
        self.probed = 0
        #: Whether some call got no answer at all.
        self.unavailable = False


async def _search_all(parts: LookupParts, chain: Chain, search: _Search) -> None:
    """Ask for the head, then for the rest in several calls at a time, until no answer can change what was found (L3).

    **Cancellation:** calls that are under way go on and touch nothing.
    """
    head = search.walk.next()
    if head is not None:
        await _ask(parts, chain, search, head)
    if search.walk.settled:
        return
    error: BaseException | None = None
    try:
        async with create_task_group() as group:
            for _ in range(parts.probe_concurrency):
                group.start_soon(_ask_on, parts, chain, search, group.cancel_scope)
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) > 1:
            raise
        # As the head's would be raised: whoever waits for a lookup knows of no group.
        error = errors.exceptions[0]
    if error is not None:
        raise error


async def _ask_on(parts: LookupParts, chain: Chain, search: _Search, all_of_them: CancelScope) -> None:
    """Ask for one portion after the other; once the answer is settled, nobody waits for the others any more."""
    while (blocks := search.walk.next()) is not None:
        await _ask(parts, chain, search, blocks)
        if search.walk.settled:
            all_of_them.cancel()


async def hash_in_slices(chain: Chain, blocks: int, turn: Lock) -> None:
    """Hash up to `blocks` blocks, never for a millisecond at a stretch (L3). Cancellation: what is hashed stays hashed."""
    while chain.hash_up_to(0) < blocks:
        async with turn:
            chain.hash_up_to(blocks, chain.slice_blocks)


async def _ask(parts: LookupParts, chain: Chain, search: _Search, blocks: range) -> None:
    await hash_in_slices(chain, blocks.stop, parts.turn)
    async with parts.turn:
        hashes = chain.hashes(blocks.start, blocks.stop)
        keys = [key for group in range(parts.groups) for key in parts.keys.keys(group, hashes)]
    search.probed += len(keys)
    answers = await parts.desk.run(CallKind.PROBE, _probe(parts.pool, keys), CallSize(len(keys)))
    there = [answer.state is KeyState.OK for answer in answers]
    # Keys were asked group by group; a block counts if it is there in each (L2).
    whole = prefix_length(zip(*(there[g * len(blocks) : (g + 1) * len(blocks)] for g in range(parts.groups)), strict=True))
    search.walk.answered(blocks, whole)
    if not whole and all(answer.state is KeyState.UNAVAILABLE for answer in answers):
        search.unavailable = True


def _probe(pool: PagePool, keys: list[str]) -> Callable[[], object]:
    # A function of its own: the keys are bound at the call, and not read from the loop's variable when a thread gets to it.
    return lambda: pool.probe(keys)
