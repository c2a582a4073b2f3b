"""Process B: serves the same conversations from the pool, and compares every step with local reuse.

Two engines with the same weights: the reference has computed the same conversations itself, as process A did, and keeps every
page; the other one has nothing and reads the pool. Each request is served by that one, then by the reference without reuse
(cold), then by the reference resuming from its own pages where the first one resumed. The two that resume cut the rest alike,
so their logits are equal bit for bit or something is wrong (Q1).

Beside a drafter each of the two answers once more, with drafts: a drafter's page that is wrong changes no token, but which
drafts are right. What is saved is then compared as well: prompts that go on where one of process A's ended are computed behind
a hit and saved, and the second answer loads that. The prompts before them are served without saving: no answer's end is in the
pool then, so a prompt that leaves behind one computes the answer anew, in other chunks than process A had decoded it in.
Whoever loaded such pages would rightly have other bits than the reference.

So it is with windows on a GPU, where the bits of a token depend on how many are computed with it: what process B computes anew
behind a rewound hit is not what process A had there, bit for bit, and saved it would be served to the next prompt.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import msgspec

from akv import open_connector
from akv.cli.demo.conversations import aside, forks, reusable_tokens
from akv.cli.demo.jobs import Figures, Job, Progress, TimesToFirstToken
from akv.cli.demo.moved import BytesMoved
from akv.cli.demo.rounding import milliseconds, share
from akv.cli.demo.setting import (
    ANSWER_TOKENS,
    REWIND_TOKENS,
    TOKENS_PER_BLOCK,
    engine_config,
    settings,
)
from akv.plan.window import load_blocks
from akv.settings import Settings
from akv_testing.engine import (
    AttentionGroup,
    Engine,
    EngineConfig,
    Model,
    Pages,
    Result,
    capabilities_of,
    open_engine,
)


class Drafting(NamedTuple):
    """One request, answered with drafts from the pool and by local reuse."""

    pool: Result
    local: Result

    @property
    def agree(self) -> bool:
        """Whether the tokens are equal, and which drafts were right."""
        pool, local = self
        return (pool.tokens, pool.from_pool_tokens, pool.drafts_accepted, pool.drafts_rejected) == (
            local.tokens,
            local.local_tokens,
            local.drafts_accepted,
            local.drafts_rejected,
        )


class Comparison:
    """What the requests of process B add up to."""

    def __init__(self, groups: tuple[AttentionGroup, ...]) -> None:
        self._groups = groups
        self.prompt_tokens = self.reusable_tokens = self.from_pool_tokens = 0
        self.compared = self.identical = self.pages_compared = self.page_mismatches = self.own_pages_compared = 0
        self.drafts_accepted = self.drafts_rejected = 0
        self.outcomes: Counter[str] = Counter()
        self.cold: list[float] = []
        self.pool_hit: list[float] = []
        self.local_hit: list[float] = []

    def add(self, cold: Result, local: Result, pool: Result, reusable: int, drafting: "Drafting | None") -> None:
        """One request, served three times; and twice more with drafts, beside a drafter."""
        self.prompt_tokens += pool.prompt_tokens
        self.reusable_tokens += reusable
        self.from_pool_tokens += pool.from_pool_tokens
        self.outcomes[pool.lookup_outcome] += 1
        self.cold.append(cold.ttft_s)
        if not pool.from_pool_tokens:
            return
        self.local_hit.append(local.ttft_s)
        self.pool_hit.append(pool.ttft_s)
        self.compared += 1
        self.identical += _same_bits(local, pool) and (drafting is None or drafting.agree)
        self._compare_pages(local, pool)
        if drafting is not None:
            self.drafts_accepted += drafting.pool.drafts_accepted
            self.drafts_rejected += drafting.pool.drafts_rejected
            # What the first answer had to compute, the second one loads: only the first can have saved it.
            self._compare_pages(drafting.local, drafting.pool, own_from=pool.from_pool_tokens)

    def _compare_pages(self, local: Result, pool: Result, own_from: int | None = None) -> None:
        """Compare what was loaded with what local reuse read; `own_from`: tokens from which on process B had saved it."""
        end = pool.from_pool_tokens // TOKENS_PER_BLOCK
        own = range(end if own_from is None else own_from // TOKENS_PER_BLOCK, end)
        for group, ours, theirs in zip(self._groups, pool.page_digests, local.page_digests, strict=True):
            for blocks in load_blocks(0, end, group.window_tokens, group.sink_tokens, TOKENS_PER_BLOCK):
                self.pages_compared += len(blocks)
                self.own_pages_compared += sum(block in own for block in blocks)
                self.page_mismatches += sum(ours[block] != theirs[block] for block in blocks)


async def serve(job: Job, moved: BytesMoved, progress: Progress) -> Figures:
    """Serve what process A answered. `moved` must be among structlog's processors."""
    config = engine_config(job.layout, job.device)
    model = Model(config.model, config.device)
    pages = Pages(config)
    comparison = Comparison(config.groups)
    both = settings(job.master_address, config.model.key)
    async with open_engine(_keeping_everything(config), model=model) as reference:
        await _compute_as_process_a(reference, job, progress)
        await _warm_up(reference)
        reads = msgspec.structs.replace(both, role="consumer") if reads_alone(job) else both
        async with _open_server(config, reads, model, pages) as engine:
            await _compare_all(job, _prompts(job), reference, engine, comparison, partial(progress, "serve from the pool"))
        if job.layout.has_drafter:
            async with _open_server(config, both, model, pages) as engine:
                await _compare_all(
                    job, _asides(job), reference, engine, comparison, partial(progress, "serve, save, load again")
                )
    return Figures(
        layout=job.layout,
        backend=job.backend,
        device=job.device,
        requests=len(comparison.cold),
        prompt_tokens=comparison.prompt_tokens,
        reusable_tokens=comparison.reusable_tokens,
        from_pool_tokens=comparison.from_pool_tokens,
        reuse=share(comparison.from_pool_tokens, comparison.reusable_tokens),
        compared=comparison.compared,
        identical_to_local_reuse=comparison.identical,
        outcomes=dict(comparison.outcomes.most_common()),
        pages_compared=comparison.pages_compared,
        page_mismatches=comparison.page_mismatches,
        own_pages_compared=comparison.own_pages_compared,
        drafts_accepted=comparison.drafts_accepted,
        drafts_rejected=comparison.drafts_rejected,
        bytes_saved=moved.saved,
        bytes_loaded=moved.loaded,
        ttft_ms=TimesToFirstToken(
            cold=milliseconds(comparison.cold),
            pool_hit=milliseconds(comparison.pool_hit),
            local_hit=milliseconds(comparison.local_hit),
        ),
    )


def reads_alone(job: Job) -> bool:
    """Whether process B saves nothing of the prompts that process A's prompts are compared with."""
    return job.layout.has_drafter or (job.layout.has_windows and job.device != "cpu")


@asynccontextmanager
async def _open_server(config: EngineConfig, its_settings: Settings, model: Model, pages: Pages) -> AsyncIterator[Engine]:
    """An engine that has nothing but the pool."""
    async with (
        open_connector(its_settings, pages.layout, pages.caches, capabilities=capabilities_of(config)) as kv,
        open_engine(config, model=model, pages=pages, kv=kv) as engine,
    ):
        yield engine


def _keeping_everything(config: EngineConfig) -> EngineConfig:
    """The reference can resume wherever the pool can: what windows keep changes no bit of what is computed."""
    return msgspec.structs.replace(config, window_retention_tokens=config.model.max_tokens)


async def _compute_as_process_a(reference: Engine, job: Job, progress: Progress) -> None:
    """Give the reference the pages that process A computed: they follow from where its requests resumed."""
    turns = [(f"c{c}t{t}", turn) for c, answered in enumerate(job.answered) for t, turn in enumerate(answered)]
    for done, (request_id, turn) in enumerate(turns, 1):
        await reference.generate(
            request_id, turn.prompt, max_new_tokens=len(turn.answer), local_at_most=turn.local_tokens, reads_pool=False
        )
        await reference.settled()
        progress("reference run", done, len(turns))


def _prompts(job: Job) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What process B is asked: all prompts of process A again, and with windows prompts that leave them half-way."""
    for number, turns in enumerate(job.answered):
        for at, turn in enumerate(turns):
            yield f"c{number}t{at}", turn.prompt
        if job.layout.has_windows:
            for at, prompt in enumerate(forks(turns, number, REWIND_TOKENS)):
                yield f"c{number}f{at}", prompt


def _asides(job: Job) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Beside a drafter: for each conversation a prompt whose end process B computes and saves."""
    for number, turns in enumerate(job.answered):
        yield f"c{number}a", aside(turns[-1], number)


async def _compare_all(
    job: Job,
    asked: Iterable[tuple[str, tuple[int, ...]]],
    reference: Engine,
    engine: Engine,
    comparison: Comparison,
    progress: Callable[[int, int], None],
) -> None:
    drafter, lookahead = job.layout.has_drafter, engine_config(job.layout).model.lookahead
    # Beside a drafter only prompts are saved.
    stored = [turn.prompt + turn.answer[: 0 if drafter else -1] for turns in job.answered for turn in turns]
    prompts = list(asked)
    for done, (request_id, prompt) in enumerate(prompts, 1):
        # Without local reuse, so that all it has comes from the pool.
        pool = await _ask(engine, request_id, prompt, local_reuse=False)
        cold = await reference.generate(f"{request_id}-cold", prompt, max_new_tokens=1, local_reuse=False)
        local = await _ask(reference, request_id, prompt, local_at_most=pool.from_pool_tokens)
        drafting = await _draft(reference, engine, request_id, prompt) if drafter else None
        await reference.settled()
        await engine.settled()
        reusable = reusable_tokens(prompt, stored, pool.local_tokens, TOKENS_PER_BLOCK, lookahead)
        comparison.add(cold, local, pool, reusable, drafting)
        progress(done, len(prompts))


async def _draft(reference: Engine, engine: Engine, request_id: str, prompt: tuple[int, ...]) -> Drafting:
    """Answer with drafts, from all that is in the pool by now, and the same by local reuse."""
    await engine.settled()
    await reference.settled()
    pool = await _ask(engine, f"{request_id}-drafts", prompt, local_reuse=False, drafts=True)
    local = await _ask(reference, f"{request_id}-drafts", prompt, local_at_most=pool.from_pool_tokens, drafts=True)
    return Drafting(pool, local)


async def _ask(
    engine: Engine,
    request_id: str,
    prompt: tuple[int, ...],
    *,
    local_reuse: bool = True,
    local_at_most: int | None = None,
    drafts: bool = False,
) -> Result:
    """Answer with all that is compared, and with nothing else that is in the way."""
    return await engine.generate(
        request_id,
        prompt,
        max_new_tokens=ANSWER_TOKENS,
        local_reuse=local_reuse,
        local_at_most=local_at_most,
        keep_logits=True,
        keep_pages=True,
        drafts=drafts,
    )


async def _warm_up(engine: Engine) -> None:
    """The first forward passes of a process allocate; no request should pay for it in the figures."""
    await engine.generate("warm-up", tuple(range(200)), max_new_tokens=2, local_reuse=False, reads_pool=False)
    await engine.settled()


def _same_bits(local: Result, pool: Result) -> bool:
    if local.logits is None or pool.logits is None or local.local_tokens != pool.from_pool_tokens:
        return False
    # As bytes: equality of floats calls 0.0 and -0.0 equal, and NaN unequal to itself.
    return local.tokens == pool.tokens and local.logits.numpy().tobytes() == pool.logits.numpy().tobytes()
