"""The two processes of `akv demo --trace`: A computes the trace's requests and saves them, B answers them from the pool.

Both answer many requests at a time, so what a pass computes together is chance. Their pages are compared and not their logits
(Q1): each page that B loaded with the one that A had computed for the same prefix and layer group.
"""

from collections.abc import Callable

from akv import open_connector
from akv.cli.demo.jobs import Job, Progress, Replayed, TraceFigures, TraceJob, TraceSeconds, TraceTimes
from akv.cli.demo.moved import BytesMoved
from akv.cli.demo.pagebook import PageBook, block_names
from akv.cli.demo.replay import Replay
from akv.cli.demo.rounding import milliseconds, share
from akv.cli.demo.scaling import ReplayedRequest, scaled
from akv.cli.demo.setting import settings, trace_engine_config
from akv_testing.engine import Pages, Result, capabilities_of, open_engine

Answered = Callable[[ReplayedRequest, Result], None]


async def save_trace(job: Job, trace: TraceJob, moved: BytesMoved, progress: Progress) -> Replayed:
    """Process A. Every save has ended when it returns. `moved` must be among structlog's processors."""
    book = PageBook()
    answers: dict[str, tuple[int, ...]] = {}
    times: list[float] = []
    tokens_per_block = trace_engine_config().tokens_per_block

    def answered(request: ReplayedRequest, result: Result) -> None:
        # Of the last token there is no KV. Pages stay as they were computed, so at the request's end they are what was saved.
        book.note(request.prompt + result.tokens[:-1], tokens_per_block, result.page_digests)
        answers[result.request_id] = result.tokens
        times.append(result.ttft_s)
        progress("compute and save", len(times), len(trace.rows))

    replay = await _run(job, trace, reads_pool=False, answered=answered)
    return Replayed(
        book=book,
        answers=answers,
        bytes_saved=moved.saved,
        ttft_ms=milliseconds(times),
        seconds=round(replay.seconds, 2),
    )


async def serve_trace(job: Job, trace: TraceJob, replayed: Replayed, moved: BytesMoved, progress: Progress) -> TraceFigures:
    """Process B. `moved` must be among structlog's processors."""
    config = trace_engine_config()
    comparison = TraceComparison(replayed, config.tokens_per_block)

    def answered(request: ReplayedRequest, result: Result) -> None:
        comparison.add(request.prompt, result)
        progress("serve from the pool", comparison.requests, len(trace.rows))

    replay = await _run(job, trace, reads_pool=True, answered=answered)
    return TraceFigures(
        layout="full",
        backend=job.backend,
        scale=trace.scale,
        speed=trace.speed,
        requests=comparison.requests,
        peak_in_flight=replay.peak_in_flight,
        prompt_tokens=comparison.prompt_tokens,
        local_tokens=comparison.local_tokens,
        reusable_tokens=comparison.reusable_tokens,
        from_pool_tokens=comparison.from_pool_tokens,
        reuse=share(comparison.from_pool_tokens, comparison.reusable_tokens),
        failed_loads=comparison.failed_loads,
        answers_compared=comparison.requests,
        answer_mismatches=comparison.answer_mismatches,
        pages_compared=comparison.pages_compared,
        page_mismatches=comparison.page_mismatches,
        reference_contradictions=replayed.book.contradictions,
        bytes_saved=replayed.bytes_saved,
        bytes_loaded=moved.loaded,
        ttft_ms=TraceTimes(computed=replayed.ttft_ms, pool_hit=milliseconds(comparison.pool_hits)),
        replay_s=TraceSeconds(process_a=replayed.seconds, process_b=round(replay.seconds, 2)),
    )


class TraceComparison:
    """What process B's requests add up to, against what process A handed over."""

    def __init__(self, replayed: Replayed, tokens_per_block: int) -> None:
        self._replayed = replayed
        self._tokens_per_block = tokens_per_block
        self.requests = self.prompt_tokens = self.local_tokens = self.reusable_tokens = self.from_pool_tokens = 0
        self.failed_loads = self.answer_mismatches = self.pages_compared = self.page_mismatches = 0
        #: Seconds to the first token of each request that loaded from the pool.
        self.pool_hits: list[float] = []

    def add(self, prompt: tuple[int, ...], result: Result) -> None:
        """One request, answered."""
        size = self._tokens_per_block
        names = block_names(prompt, size)
        local, loaded = result.local_tokens // size, result.from_pool_tokens // size
        # What could come from the pool (Q2). All of A's saves ended before B began. What B saves meanwhile adds nothing: its
        # prompts are A's, and so are its answers, or the run fails by that.
        most = min(self._replayed.book.known_blocks(names), (len(prompt) - 1) // size)
        self.requests += 1
        self.prompt_tokens += len(prompt)
        self.local_tokens += result.local_tokens
        self.reusable_tokens += size * max(0, most - local)
        self.from_pool_tokens += result.from_pool_tokens
        self.failed_loads += bool(result.load_failure)
        self.answer_mismatches += result.tokens != self._replayed.answers.get(result.request_id)
        if loaded:
            self.pool_hits.append(result.ttft_s)
        pages = list(zip(*result.page_digests, strict=True))
        for block in range(local, local + loaded):
            self.pages_compared += len(pages[block])
            self.page_mismatches += self._replayed.book.differing(names[block], pages[block])


async def _run(job: Job, trace: TraceJob, *, reads_pool: bool, answered: Answered) -> Replay:
    config = trace_engine_config()
    pages = Pages(config)
    began_ms = trace.rows[0].timestamp
    requests = [scaled(row, trace.scale, trace.speed, began_ms) for row in trace.rows]
    its_settings = settings(job.master_address, config.model.key)
    async with (
        open_connector(its_settings, pages.layout, pages.caches, capabilities=capabilities_of(config)) as kv,
        open_engine(config, pages=pages, kv=kv) as engine,
    ):
        replay = Replay(engine, reads_pool=reads_pool, answered=answered)
        await replay.run(requests)
        await engine.settled()
    return replay
