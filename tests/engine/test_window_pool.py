"""The acceptance sweep on the real engine, small: every end that is to be resumable is, from the pool, with the bits of local
reuse; and nothing is offered that is not stored.

The prompts of one case share a stored sequence up to some block and go on otherwise, so that a lookup finds so many blocks of
full attention and has to find out where the windows can be resumed.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest
import torch

from akv.plan.hashing import Chain, scope_seed
from akv.plan.window import needed_blocks, stale_blocks
from akv.values.scope import EMPTY_SCOPE
from akv_testing.engine import TINY, AttentionGroup, Engine, EngineConfig, Model, Result, open_engine
from akv_testing.store import FakeStore

#: The fixture `served`: what it opens is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]

pytestmark = pytest.mark.anyio

T = 8
TOKENS = [7 * position % 251 for position in range(130)]
#: Long enough that most windows have moved on from the prompt's start, and a multiple of T.
BASE = 104
#: Rewind, retention (tokens), chunk. Chunks of 12 end inside blocks, so closing passes do too.
WAYS = [(0, 0, 16), (24, 24, 16), (24, 0, 12), (24, 24, 64), (0, 24, 12), (24, 0, 64), (24, 24, 12), (0, 0, 64)]


class Case(NamedTuple):
    """One sequence that is stored, and how."""

    window: int
    sinks: int
    rewind: int
    retention: int
    chunk: int
    tokens: int

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            model=model_of(self.window, self.sinks).config,
            tokens_per_block=T,
            pages=64,
            chunk_tokens=self.chunk,
            max_tokens_per_pass=96,
            max_running=8,
            window_retention_tokens=self.retention,
        )

    @property
    def blocks(self) -> int:
        return self.tokens // T

    def promised(self) -> list[int]:
        """The ends within the rewind that W3 stores windows for, as the table of W4 counts them."""
        passes = [*range(self.chunk, self.tokens, self.chunk), self.tokens]
        before = max([0, *(end for end in passes if end < self.blocks * T)])
        reach = max(self.rewind, T if (self.tokens - 1) // T < self.blocks else 0)
        ends = []
        for end in range(max(1, self.blocks - self.rewind // T), self.blocks + 1):
            for group in self.config.groups:
                lows = (self.blocks * T - reach, before - self.retention)
                stored = max(self._tail(group, max(0, low)) for low in lows)
                if group.window_tokens and self._tail(group, end * T) < stored:
                    break
            else:
                ends.append(end)
        return ends

    def _tail(self, group: AttentionGroup, history: int) -> int:
        """Where the live part of a window begins, behind its sinks, in blocks."""
        return stale_blocks(history, group.window_tokens, group.sink_tokens, T).stop


@lru_cache
def model_of(window: int, sinks: int) -> Model:
    """Full attention, the window in question, and one of another size, dtype and page size next to it."""
    groups = (
        AttentionGroup(layers=(0,)),
        AttentionGroup(layers=(1,), window_tokens=window, sink_tokens=sinks),
        AttentionGroup(layers=(2,), window_tokens=13, dtype="bfloat16", kv_heads=1),
    )
    return Model(msgspec.structs.replace(TINY, layers=3, groups=groups))


class Stored:
    """A naive model of what can be resumed, over the keys that are in the store."""

    def __init__(self, case: Case, store: FakeStore) -> None:
        self._groups = case.config.groups
        self._pages = {(key.rsplit("/", 3)[1], key.rsplit("/", 1)[1]) for key in [*store.keys()]}

    def ends(self, prompt: list[int]) -> tuple[int, list[int]]:
        """The longest prefix of full attention, at most up to the last block that leaves a token; resumable ends in it."""
        chain = Chain(scope_seed(EMPTY_SCOPE), T)
        chain.append(prompt)
        most = (len(prompt) - 1) // T
        hashes = [name.hex() for name in chain.hashes(0, most)]

        def has(group: int, block: int) -> bool:
            return (f"lg{group}", hashes[block]) in self._pages

        longest = next((block for block in range(most) if not has(0, block)), most)
        ends = [
            end
            for end in range(1, longest + 1)
            if all(
                has(number, block)
                for number, group in enumerate(self._groups)
                for blocks in needed_blocks(end, group.window_tokens, group.sink_tokens, T)
                for block in blocks
            )
        ]
        return longest, ends


def outcome_of(longest: int, ends: list[int], rewind: int) -> str:
    """W7, without a local match."""
    if not longest:
        return "full_attention_miss"
    if not ends:
        return "window_miss"
    if ends[-1] == longest:
        return "full"
    return "rewound" if ends[-1] >= longest - rewind // T else "recovered"


async def check_case(case: Case, served: OpenServed) -> int:
    """Store a sequence, then ask for its ends; returns how many were compared with local reuse."""
    model, tokens = model_of(case.window, case.sinks), TOKENS[: case.tokens]
    store = FakeStore(anyio.current_time)
    async with served(case.config, store, weights=model, rewind_tokens=case.rewind) as computing:
        await computing.engine.generate("stored", tokens, max_new_tokens=1)
        await computing.engine.settled()
    stored = Stored(case, store)
    assert set(case.promised()) <= set(stored.ends([*tokens, 255])[1])
    if case.tokens % T == 0:
        assert case.blocks - 1 in stored.ends(tokens)[1]  # the repeated prompt's end (W3: R')
    # The stored sequence again, and prompts that share so many blocks with it: the rewind's, some before it, and early ones.
    shared = (1, 4, *range(case.blocks - 6, case.blocks + 1))
    prompts = [tokens, *([*tokens[: end * T], 255, 254] for end in shared)]
    everything = msgspec.structs.replace(case.config, window_retention_tokens=1000)
    compared = 0
    async with (
        # It consumes only: what is stored stays as it is.
        served(case.config, store, weights=model, rewind_tokens=case.rewind, role="consumer") as fresh,
        open_engine(everything, model=model) as reference,
    ):
        await reference.generate("stored", tokens, max_new_tokens=1, local_at_most=0)
        for number, prompt in enumerate(prompts):
            longest, ends = stored.ends(prompt)
            hit = await ask(fresh.engine, number, prompt, local_reuse=False)
            assert hit.lookup_outcome == outcome_of(longest, ends, case.rewind)
            assert hit.from_pool_tokens == T * max([0, *ends])
            local = await ask(reference, number, prompt, local_at_most=hit.from_pool_tokens)
            assert local.local_tokens == hit.from_pool_tokens
            assert_same(hit, local)
            compared += bool(ends)
        await fresh.engine.settled()
        assert fresh.engine.cache.check() == []
    return compared


async def ask(engine: Engine, number: int, prompt: list[int], **options: Any) -> Result:
    return await engine.generate(f"r{number}", prompt, max_new_tokens=3, keep_logits=True, keep_pages=True, **options)


def assert_same(hit: Result, local: Result) -> None:
    assert hit.tokens == local.tokens
    assert hit.logits is not None
    assert local.logits is not None
    assert torch.equal(hit.logits, local.logits)
    for ours, theirs in zip(hit.page_digests, local.page_digests, strict=True):
        # Where the hit has none, its window gave the page back or never had it.
        assert all(a in (b, b"") for a, b in zip(ours, theirs, strict=True))


# On one backend: which ends are found depends on none, and there are thousands of forwards.
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("sinks", [0, 1, 40])
@pytest.mark.parametrize("window", [1, 8, 23, 40, 200])
async def test_W4_every_promised_end_is_resumed_with_the_bits_of_local_reuse(
    served: OpenServed, window: int, sinks: int
) -> None:
    compared = 0
    for residue, (rewind, retention, chunk) in enumerate(WAYS):
        compared += await check_case(Case(window, sinks, rewind, retention, chunk, BASE + residue), served)
    assert compared > len(WAYS)
