"""Process B: serves the same conversations from the pool, and compares every step with local reuse.

Three engines with the same weights serve each request in turn: one that computes everything (cold), one that has computed the
same conversations itself and reuses its own pages (the reference), and one that has nothing and reads the pool. The last two
resume behind the same block and cut the rest alike, so their logits are equal bit for bit or something is wrong (Q1).
"""

from akv import open_connector
from akv.cli.demo.conversations import reusable_tokens
from akv.cli.demo.jobs import Figures, Job, Progress, TimesToFirstToken
from akv.cli.demo.moved import BytesMoved
from akv.cli.demo.rounding import milliseconds, share
from akv.cli.demo.saving import answer_all
from akv.cli.demo.setting import ANSWER_TOKENS, TOKENS_PER_BLOCK, engine_config, settings
from akv_testing.engine import Engine, Model, Pages, Result, open_engine


class Comparison:
    """What the requests of process B add up to."""

    def __init__(self) -> None:
        self.prompt_tokens = self.reusable_tokens = self.from_pool_tokens = 0
        self.compared = self.identical = self.pages_compared = self.page_mismatches = 0
        self.cold: list[float] = []
        self.pool_hit: list[float] = []
        self.local_hit: list[float] = []

    def add(self, cold: Result, local: Result, pool: Result, reusable: int) -> None:
        """One request, served three times."""
        self.prompt_tokens += pool.prompt_tokens
        self.reusable_tokens += reusable
        self.from_pool_tokens += pool.from_pool_tokens
        self.cold.append(cold.ttft_s)
        self.local_hit.append(local.ttft_s)
        if pool.from_pool_tokens:
            self.pool_hit.append(pool.ttft_s)
            self.compared += 1
            self.identical += _same_bits(local, pool)
        blocks = pool.from_pool_tokens // TOKENS_PER_BLOCK
        for ours, theirs in zip(pool.page_digests, local.page_digests, strict=True):
            self.pages_compared += blocks
            self.page_mismatches += sum(a != b for a, b in zip(ours[:blocks], theirs[:blocks], strict=True))


async def serve(job: Job, moved: BytesMoved, progress: Progress) -> Figures:
    """Serve what process A answered. `moved` must be among structlog's processors."""
    config = engine_config()
    model = Model(config.model, config.device)
    pages = Pages(config)
    comparison = Comparison()
    async with (
        open_engine(config, model=model) as reference,
        open_connector(settings(job.master_address), pages.layout, pages.caches) as kv,
        open_engine(config, model=model, pages=pages, kv=kv) as engine,
    ):
        # The reference's pages come from the schedule that process A computed by; then each request finds all of it locally.
        await answer_all(reference, job, lambda done, of: progress("reference run", done, of))
        await _warm_up(reference)
        await _compare_all(job, reference, engine, comparison, progress)
    return Figures(
        layout="full",
        backend=job.backend,
        requests=len(comparison.cold),
        prompt_tokens=comparison.prompt_tokens,
        reusable_tokens=comparison.reusable_tokens,
        from_pool_tokens=comparison.from_pool_tokens,
        reuse=share(comparison.from_pool_tokens, comparison.reusable_tokens),
        compared=comparison.compared,
        identical_to_local_reuse=comparison.identical,
        pages_compared=comparison.pages_compared,
        page_mismatches=comparison.page_mismatches,
        bytes_saved=moved.saved,
        bytes_loaded=moved.loaded,
        ttft_ms=TimesToFirstToken(
            cold=milliseconds(comparison.cold),
            pool_hit=milliseconds(comparison.pool_hit),
            local_hit=milliseconds(comparison.local_hit),
        ),
    )


async def _compare_all(job: Job, reference: Engine, engine: Engine, comparison: Comparison, progress: Progress) -> None:
    stored = [turn.prompt + turn.answer[:-1] for turns in job.answered for turn in turns]
    turns = [(f"c{c}t{t}", turn) for c, answered in enumerate(job.answered) for t, turn in enumerate(answered)]
    for done, (request_id, turn) in enumerate(turns, 1):
        cold = await reference.generate(
            f"{request_id}-cold", turn.prompt, max_new_tokens=1, local_reuse=False, reads_pool=False
        )
        local = await reference.generate(
            request_id, turn.prompt, max_new_tokens=ANSWER_TOKENS, keep_logits=True, keep_pages=True
        )
        # Without local reuse, so that all it has comes from the pool and both resume behind the same block.
        pool = await engine.generate(
            request_id, turn.prompt, max_new_tokens=ANSWER_TOKENS, local_reuse=False, keep_logits=True, keep_pages=True
        )
        await reference.settled()
        await engine.settled()
        comparison.add(cold, local, pool, reusable_tokens(turn.prompt, stored, pool.local_tokens, TOKENS_PER_BLOCK))
        progress("serve from the pool", done, len(turns))


async def _warm_up(engine: Engine) -> None:
    """The first forward passes of a process allocate; no request should pay for it in the figures."""
    await engine.generate("warm-up", tuple(range(200)), max_new_tokens=2, local_reuse=False, reads_pool=False)
    await engine.settled()


def _same_bits(local: Result, pool: Result) -> bool:
    if local.logits is None or pool.logits is None or local.local_tokens != pool.from_pool_tokens:
        return False
    # As bytes: equality of floats calls 0.0 and -0.0 equal, and NaN unequal to itself.
    return local.tokens == pool.tokens and local.logits.numpy().tobytes() == pool.logits.numpy().tobytes()
