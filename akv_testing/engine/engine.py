"""The reference engine: continuous batching on paged KV, with akv where a server has it. Unchanged on asyncio and trio.

`generate()` is a request's way, in the caller's task: book pages, ask the pool, wait for the load, join the batch, wait for
its tokens; and again from the start where a load failed or an older request needed the pages. The batch (`batch.py`) is one
task that waits for passes alone, so a request that waits holds up nobody. Who gets pages is decided in `admission.py`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count, zip_longest
from typing import TYPE_CHECKING

import anyio
import numpy as np
from anyio import to_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from akv.errors import ConnectorBroken, EngineContractError, LoadFailed, NotOpenError
from akv.host import PagedCache, PagedSequence, local_reuse
from akv.plan.tokens import Tokens
from akv.values.scope import EMPTY_SCOPE, Scope
from akv_testing.engine.admission import Admission
from akv_testing.engine.batch import Batch
from akv_testing.engine.computer import Computer, OneByOne
from akv_testing.engine.config import EngineConfig, check_config
from akv_testing.engine.job import Job, Result
from akv_testing.engine.model import Model
from akv_testing.engine.pages import Pages

if TYPE_CHECKING:
    from akv.connector import Connector

#: Seconds that a leaving request waits at most for akv to let go of its pages. Past it they stay out of use: a page that
#: something may still read is worth less than one that is lost.
RELEASE_GRACE_S = 30.0
#: Why loads fail that waited for the holder of a page in vain: it stands still, or has gone.
SLOW_FAILURES = frozenset({"deadline", "holder_lost"})


class EngineClosed(Exception):
    """The engine ended before the request did. Nothing of the request is left in the engine."""


class Engine:
    """What `open_engine()` yields."""

    def __init__(
        self, config: EngineConfig, computer: Computer, pages: Pages, kv: "Connector | None", group: TaskGroup
    ) -> None:
        self._config = config
        self._pages = pages
        self._kv = kv
        self._group = group
        #: Read-only for others: how full the cache is, and whether its books are right (`check()`).
        self.cache = PagedCache(
            config.tokens_per_block,
            config.page_counts,
            config.groups,
            retention_tokens=config.window_retention_tokens,
            chunk_tokens=config.chunk_tokens,
            lookahead_tokens=config.model.lookahead,
            local_reuse=local_reuse(
                config.local_reuse_backoff,
                reads=kv is not None and kv.reads,
                backoff_tokens=config.reuse_backoff_tokens,
                reuse_match_alignment=config.reuse_match_alignment,
            ),
        )
        self._admission = Admission(self.cache)
        self._batch = Batch(config, computer, kv, self._admission)
        #: Every request that has not given back its pages.
        self._jobs: dict[str, Job] = {}
        self._numbers = count()
        #: Set when the last request has left; a new one for each time that there are any.
        self._empty = anyio.Event()
        self._open = True

    async def generate(
        self,
        request_id: str,
        tokens: Tokens,
        *,
        max_new_tokens: int,
        scope: Scope = EMPTY_SCOPE,
        local_reuse: bool = True,
        local_at_most: int | None = None,
        reads_pool: bool = True,
        keep_logits: bool = False,
        keep_pages: bool = False,
        drafts: bool = True,
    ) -> Result:
        """Generate greedily, exactly `max_new_tokens` tokens, and return when they are there; saves go on.

        Long prompts are better numpy arrays: the loop is held for less.

        `scope.lora` is the adapter that computes it. `drafts=False`: without speculative decoding, which changes no token, and
        the last bits of logits, since several tokens are verified at once.

        `local_reuse=False` neither shares other requests' KV nor leaves this one's for them; `reads_pool=False` does not ask
        the pool. Both off, it is a cold run. `keep_logits` and `keep_pages` are for comparisons, and so is `local_at_most`: no
        more tokens than these are reused, so that the request resumes where another run did.

        A load that fails, and an older request that needs the pages, send the request back to the start with what it has
        generated so far: its pages are given back, and it is admitted again before all younger ones.

        Raises ValueError for a request that can never be served or whose id is in use (ids are free again once saves ended:
        `settled()`), EngineClosed if the engine ended first.

        **Cancellation:** the request leaves the batch, its load and its saves are withdrawn, and a task of the engine gives
        its pages back when neither a pass nor akv touches them any more.
        """
        job = Job(next(self._numbers), request_id, tokens, max_new_tokens, scope)
        job.local_reuse, job.local_at_most = local_reuse, local_at_most
        job.keep_logits, job.keep_pages = keep_logits, keep_pages
        job.draft_tokens = self._config.draft_tokens if drafts else 0
        self._refuse_if_hopeless(job)
        with job.stop:
            try:
                self._enter(job)
                while not job.complete:
                    sequence = await self._book(job)
                    if self._kv is not None and job.request is None:
                        job.request = self._kv.open_request(request_id, job.known, scope, reads_cache=reads_pool)
                    if await self._fill_from_pool(job, sequence):
                        self._batch.join(job)
                        await job.out.wait()
                        if not job.complete:
                            await self._give_way(job)
                if keep_pages:
                    await self._note_pages(job)
                return job.result()
            finally:
                self._leave(job)
        raise EngineClosed(f"the engine closed before request {request_id!r} was complete")

    async def settled(self) -> None:
        """Wait until no request is in the engine and no save of an earlier one is under way."""
        await checkpoint()
        while self._jobs:
            await self._empty.wait()

    def _refuse_if_hopeless(self, job: Job) -> None:
        model = self._config.model
        if not self._open:
            raise EngineClosed(f"the engine is closed: request {job.request_id!r} comes too late")
        if not job.length or job.max_new_tokens < 1:
            raise ValueError(f"request {job.request_id!r} has no tokens, or asks for none")
        # No loop of Python: over a prompt of 100,000 tokens it would hold everybody's steps for milliseconds.
        known = job.known
        least, most = (known.min(), known.max()) if isinstance(known, np.ndarray) else (min(known), max(known))
        if not model.any_ids and not 0 <= least <= most < model.vocabulary:
            raise ValueError(f"request {job.request_id!r} has tokens outside the vocabulary of {model.vocabulary}")
        if self._config.prefill_only and job.max_new_tokens > 1:
            # Alone: the server goes on with all others (P1).
            raise ValueError(
                f"request {job.request_id!r} is to decode here, and this engine is prefill_only: ask for one token, and for "
                "the others where requests are decoded"
            )
        if job.capacity_tokens > model.max_tokens or not self.cache.fits(job.capacity_tokens):
            raise ValueError(
                f"request {job.request_id!r} needs {job.capacity_tokens} tokens: the model takes {model.max_tokens}, "
                f"the cache {min(self._config.page_counts) * self._config.tokens_per_block}"
            )
        if job.request_id in self._jobs:
            raise ValueError(f"request {job.request_id!r} is in the engine already; ids are free again once its saves ended")

    def _enter(self, job: Job) -> None:
        if not self._jobs:
            self._empty = anyio.Event()
        self._jobs[job.request_id] = job

    async def _book(self, job: Job) -> PagedSequence:
        """Wait until there are pages for all tokens that are known: to load and compute these waits for no more."""
        began = anyio.current_time()
        self._admission.enqueue(job)
        await job.admitted.wait()
        if job.sequence is None:
            raise AssertionError("an admitted request has pages")
        if not job.preemptions:
            job.queue_s += anyio.current_time() - began
            job.local_tokens = job.sequence.local_tokens
        return job.sequence

    async def _fill_from_pool(self, job: Job, sequence: PagedSequence) -> bool:
        """Ask the pool, outside the batch, and wait until what it offers lies in the pages; the others go on computing.

        False if the load failed: the request has given its pages back and starts again.
        """
        if job.request is None:
            return True
        began = anyio.current_time()
        offer = await job.request.lookup(sequence.local_tokens)
        asked = anyio.current_time()
        if not job.preemptions:
            job.lookup_s += asked - began
            job.lookup_outcome = offer.outcome
        resume = sequence.local_tokens + offer.tokens
        # Asked in any case: it also tells akv of the local match, which may be longer than the one before a load that failed.
        if not job.takes_offers or not offer.tokens:
            return True
        # To take and to hand over thousands of pages holds the loop for two milliseconds.
        await self._batch.lull()
        if not sequence.grow(resume) or not sequence.prepare_load(resume):
            return True
        job.read_tables()
        load = job.request.reserve(offer, offer.tokens, job.tables)
        try:
            await load.wait()
        except LoadFailed as failure:
            self._restart(job, failure)
        if not job.preemptions:
            job.load_s += anyio.current_time() - asked
        if job.sequence is not None:
            await self._resume(job, sequence, resume)
        return job.sequence is not None

    def _restart(self, job: Job, failure: LoadFailed) -> None:
        """Nothing of what the load was to bring counts, and it may have brought a part: give the pages back uncommitted (D3).

        akv offers that no more, and nothing at all after `max_load_attempts`, so this comes to an end. Where the holder of a
        page stands still or has gone (`SLOW_FAILURES`) nothing is loaded any more: the rest of what it held would be
        offered once more, for another wait of seconds.
        """
        job.load_failure = failure.reason
        job.takes_offers = failure.reason not in SLOW_FAILURES
        job.failed_loads += 1
        self._admission.quarantine.name(job.request_id, failure.quarantined)
        self._admission.release(job)

    async def _resume(self, job: Job, sequence: PagedSequence, resume: int) -> None:
        """The pages up to `resume` are filled: compute what is behind."""
        if job.preemptions:
            job.reloaded_tokens += resume - job.computed
        else:
            job.from_pool_tokens = resume - job.computed
        job.computed = resume
        if job.keep_pages and any(group.window_tokens for group in self._config.groups):
            loaded = anyio.current_time()
            await self._note_pages(job)  # now, while windows hold all that was loaded
            job.called_at += anyio.current_time() - loaded  # who compares waits for that, and no client does
        sequence.commit(resume)  # from now on others may reuse it

    async def _give_way(self, job: Job) -> None:
        """The batch has preempted the request for an older one: give its pages back, when akv has let go of them."""
        job.preemptions += 1
        if job.request is not None:
            self._admission.quarantine.name(job.request_id, await job.request.preempted())
        self._admission.release(job)

    async def _note_pages(self, job: Job) -> None:
        """Digest the pages of each whole block; what a window has given back since keeps the digest that it had."""
        blocks = job.computed // self._config.tokens_per_block
        digests = await to_thread.run_sync(self._pages.digests, job.tables, blocks)
        job.page_digests = tuple(
            tuple(new or old for new, old in zip_longest(now, before, fillvalue=b""))
            for now, before in zip_longest(digests, job.page_digests, fillvalue=())
        )

    def _leave(self, job: Job) -> None:
        """The caller has its answer, or does not want it any more."""
        self._batch.leave(job)
        self._admission.leave(job)
        if job.sequence is None and job.request is None:
            self._gone(job)
        else:
            self._group.start_soon(self._release, job)

    async def _release(self, job: Job) -> None:
        """Give the pages back when neither a pass nor akv touches them any more.

        **Cancellation:** the engine is ending; the pages are given back all the same, within the grace.
        """
        with anyio.move_on_after(RELEASE_GRACE_S, shield=True):
            if job.pass_over is not None:
                await job.pass_over.wait()
            try:
                if job.request is not None:
                    quarantined = await (job.request.finished() if job.complete else job.request.cancel())
                    self._admission.quarantine.name(job.request_id, quarantined)
                self._admission.release(job)
            except (ConnectorBroken, NotOpenError):
                # Nobody can say any more what still reads the pages, so they stay booked. The batch surfaces the fault.
                await checkpoint()
        self._gone(job)

    def _gone(self, job: Job) -> None:
        del self._jobs[job.request_id]
        self._admission.freed()
        if not self._jobs:
            self._empty.set()

    async def _close(self) -> None:
        """Refuse new requests, end those that are under way, and wait until their pages are free, within the grace."""
        self._open = False
        for job in list(self._jobs.values()):
            job.stop.cancel()
        with anyio.move_on_after(RELEASE_GRACE_S, shield=True):
            await self.settled()


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    *,
    model: Model | None = None,
    pages: Pages | None = None,
    kv: "Connector | None" = None,
    computer: Computer | None = None,
) -> AsyncIterator[Engine]:
    """Run an engine for the length of an `async with` block.

    With a connector, `pages` are those that it was opened with: `open_connector(settings, pages.layout, pages.caches)`.
    Without (`kv=None`) requests reuse each other's KV only. `model` may be shared by engines; left out, it is made here.
    A `computer` computes in place of the small model, in the `pages` that come with it (`akv_testing.engine.large`).

    Leaving the block ends requests that are under way (their callers get EngineClosed) and waits for the saves of those that
    are complete. A fault of the batch ends the block. Raises SettingsError for a configuration that cannot run.
    """
    check_config(config)
    if pages is None:
        if kv is not None:
            raise EngineContractError("an engine with a connector computes in the pages that it was opened with: pass them")
        pages = Pages(config)
    if computer is None:
        if model is None:
            model = await to_thread.run_sync(lambda: Model(config.model, config.device))
        computer = OneByOne(model, pages)
    try:
        async with anyio.create_task_group() as group:
            engine = Engine(config, computer, pages, kv, group)
            group.start_soon(engine._batch.run)
            if kv is not None:
                group.start_soon(engine._admission.quarantine.follow, kv, engine._admission.freed)
            try:
                yield engine
            finally:
                await engine._close()  # noqa: ASYNC102 - shielded and bounded inside
                group.cancel_scope.cancel()
    except BaseExceptionGroup as failures:
        if len(failures.exceptions) > 1:
            raise
        # What the block or the batch raised, as it was raised: that there is a task group is the engine's own affair.
        only = failures.exceptions[0]
        raise only from only.__cause__  # noqa: ASYNC123 - its own context is kept, the group is what it is to be freed of
