"""First step: how much of a prompt's KV the pool holds beyond what the engine has itself (L1, L2).

`plan/lookup.py` decides what is asked and what the answers amount to, `plan/hashing.py` and `plan/keys.py` make the keys.
"""

from collections.abc import Callable

import msgspec
from anyio import move_on_after
from anyio.lowlevel import checkpoint

from akv.flow.calls import CallDesk
from akv.plan.hashing import Chain
from akv.plan.keys import KeySpace
from akv.plan.lookup import LookupRange, lookup_range, offer_of, prefix_length, probe_batches
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
    probed = [0]
    with move_on_after(parts.deadline_s):
        found, unavailable = await _found_blocks(parts, chain, asked, probed)
        hole = asked.first + found if asked.first + found < asked.last else None
        if unavailable and not found:
            return LookupAnswer(0, LookupOutcome.UNAVAILABLE, probed[0], hole)
        tokens, outcome = offer_of(asked, found)
        return LookupAnswer(tokens, outcome, probed[0], hole)
    return LookupAnswer(0, LookupOutcome.DEADLINE, probed[0])


async def _found_blocks(parts: LookupParts, chain: Chain, asked: LookupRange, probed: list[int]) -> tuple[int, bool]:
    """Whole blocks found from the first asked one on, and whether the search ended because the pool gave no answer."""
    found = 0
    for blocks in probe_batches(asked.first, asked.last, parts.groups, parts.probe_head, parts.probe_chunk):
        while chain.hash_up_to(blocks.stop, chain.slice_blocks) < blocks.stop:  # noqa: ASYNC110 - works in slices, waits for nothing
            await checkpoint()
        hashes = chain.hashes(blocks.start, blocks.stop)
        keys = [key for group in range(parts.groups) for key in parts.keys.keys(group, hashes)]
        answers = await parts.desk.run(CallKind.PROBE, _probe(parts.pool, keys), CallSize(len(keys)))
        probed[0] += len(keys)
        there = [answer.state is KeyState.OK for answer in answers]
        # Keys were asked group by group; a block counts if it is there in each (L2).
        whole = prefix_length(zip(*(there[g * len(blocks) : (g + 1) * len(blocks)] for g in range(parts.groups)), strict=True))
        found += whole
        if whole < len(blocks):
            return found, all(answer.state is KeyState.UNAVAILABLE for answer in answers)
    return found, False


def _probe(pool: PagePool, keys: list[str]) -> Callable[[], object]:
    # A function of its own: the keys are bound at the call, and not read from the loop's variable when a thread gets to it.
    return lambda: pool.probe(keys)
