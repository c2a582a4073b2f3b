"""The batch: one task that computes pass after pass for the requests that have joined, with akv's two calls around each."""

from typing import TYPE_CHECKING, NamedTuple

import anyio
import torch
from anyio import to_thread

from akv.host import PagedSequence, youngest_behind
from akv.values.messages import PassPlan
from akv.values.requests import Scheduled
from akv_testing.engine.admission import Admission
from akv_testing.engine.computer import Computer
from akv_testing.engine.config import EngineConfig
from akv_testing.engine.job import Job
from akv_testing.engine.schedule import PassShape, next_pass
from akv_testing.engine.step import Chunk, Sampled

if TYPE_CHECKING:
    from akv.connector import Connector


#: Seconds that a request waits at most before it holds the loop for long: a step of decoding, on a GPU.
LULL_S = 0.01
#: Seconds within which the kernels of such a step are queued.
QUEUED_S = 0.001


class Part(NamedTuple):
    """One request's part in a pass."""

    job: Job
    #: Tokens that are known and computed.
    tokens: int
    #: Draft tokens on top.
    drafts: int

    @property
    def upto(self) -> int:
        """Tokens that need pages."""
        return self.job.computed + self.tokens + self.drafts


class Batch:
    """Continuous batching: requests join and leave between any two passes."""

    def __init__(self, config: EngineConfig, computer: Computer, kv: "Connector | None", admission: Admission) -> None:
        self._threads = config.threads
        self._shape = PassShape(
            chunk_tokens=config.chunk_tokens, max_tokens=config.max_tokens_per_pass, max_running=config.max_running
        )
        self._computer = computer
        self._kv = kv
        self._one_at_a_time = anyio.CapacityLimiter(1)
        self._admission = admission
        admission.on_free = self._wake
        self._jobs: dict[str, Job] = {}
        #: Pages of preempted requests, which come free when akv has let go of them.
        self._leaving: list[PagedSequence] = []
        self._work = anyio.Event()
        #: Whether passes follow each other, and the beginning of the next one: a new one for each.
        self._computes = False
        self._begins = anyio.Event()

    def join(self, job: Job) -> None:
        """From the next pass on this request is computed, until it is complete, preempted (`job.out`) or leaves."""
        job.out = anyio.Event()
        self._jobs[job.request_id] = job
        self._wake()

    def leave(self, job: Job) -> None:
        """No pass that begins from here on computes this request; `job.pass_over` tells of the present one."""
        self._jobs.pop(job.request_id, None)

    async def lull(self) -> None:
        """Return when a pass has begun and its kernels are queued, or at once if none is under way: until its end nothing of
        it needs the loop or the interpreter lock.

        Within `LULL_S` all the same: nobody waits for a pass that computes a prompt. Cancellation: nothing is held.
        """
        if self._computes:
            with anyio.move_on_after(LULL_S):
                await self._begins.wait()
                await anyio.sleep(QUEUED_S)

    async def run(self) -> None:
        """Compute until cancelled. What a pass raises leaves through here: the engine cannot go on."""
        while True:
            # By age, so that the oldest takes part in every pass: others may wait for it.
            batch = self._with_pages(next_pass(sorted(self._jobs.values(), key=lambda job: job.number), self._shape))
            self._computes = bool(batch)
            if batch:
                await self._pass(batch)
            else:
                if self._jobs and self._kv is not None:
                    self._kv.pressure()  # raises if it broke: then the pages that are waited for never come
                self._work = anyio.Event()
                await self._work.wait()

    def _wake(self) -> None:
        self._work.set()

    def _with_pages(self, batch: list[tuple[Job, int]]) -> list[Part]:
        """Those of a pass that have pages for what they compute in it. For one that has none a younger one gives way."""
        ready: dict[str, Part] = {}
        for job, count in sorted(batch, key=lambda part: part[0].number):
            if job.request_id not in self._jobs:
                continue  # it has just given way
            # For drafts nobody gives way.
            parts = [Part(job, count, drafts) for drafts in dict.fromkeys((job.drafts, 0))]
            there = next((part for part in parts if self._admission.grow(job, part.upto)), None)
            if there is not None:
                ready[job.request_id] = there
            else:
                self._preempt_behind(job)
        return [ready[job.request_id] for job, _ in batch if job.request_id in ready.keys() & self._jobs.keys()]

    def _preempt_behind(self, job: Job) -> None:
        """Let the youngest request behind this one leave the batch, between two passes; its task gives the pages back."""
        self._leaving = [sequence for sequence in self._leaving if not sequence.released]
        running = {other.number: other for other in self._jobs.values()}
        number = youngest_behind(job.number, running)
        if number is None or self._leaving:  # those pages may be enough
            return
        victim = running[number]
        del self._jobs[victim.request_id]
        if victim.sequence is not None:
            self._leaving.append(victim.sequence)
        victim.out.set()

    async def _pass(self, batch: list[Part]) -> None:
        over = anyio.Event()
        for part in batch:
            part.job.pass_over = over
            if part.job.sequence is not None:
                part.job.sequence.prepare(part.upto)
                part.job.read_tables()
        try:
            plan = self._plan(batch)
            sampled = await self._forward([job.chunk(count, drafts) for job, count, drafts in batch], plan)
            if self._kv is not None and plan is not None:
                await self._kv.after_forward(plan)
            for part, sample in zip(batch, sampled, strict=True):
                self._advance(part.job, part.tokens, sample)
        finally:
            for part in batch:
                part.job.pass_over = None
            over.set()

    def _plan(self, batch: list[Part]) -> PassPlan | None:
        if self._kv is None:
            return None
        return self._kv.plan_pass(
            Scheduled(request=job.request, computed_before=job.computed, tokens=count, draft_tokens=drafts, pages=job.tables)
            for job, count, drafts in batch
            if job.request is not None
        )

    async def _forward(self, chunks: list[Chunk], plan: PassPlan | None) -> list[Sampled | None]:
        """**Cancellation:** takes effect before the pass or behind it, never while a thread writes pages."""
        begins, self._begins = self._begins, anyio.Event()
        begins.set()
        try:
            return await to_thread.run_sync(self._compute, chunks, limiter=self._one_at_a_time)
        except BaseException:
            if self._kv is not None and plan is not None:
                self._kv.drop_pass(plan)
            raise

    def _compute(self, chunks: list[Chunk]) -> list[Sampled | None]:
        # Each time: torch keeps a part of this per thread, and which worker thread runs a pass is up to the backend.
        torch.set_num_threads(self._threads)
        return self._computer.compute(chunks)

    def _advance(self, job: Job, count: int, sample: Sampled | None) -> None:
        if job.request_id not in self._jobs or job.sequence is None:
            return  # it left while the pass ran
        accepted = len(sample.tokens) - 1 if sample is not None else 0
        # Drafts that were confirmed first: what is committed is known. Those that were not were never appended; what they left
        # in the pages is overwritten when these positions are computed.
        tokens = sample.tokens if sample is not None else ()
        job.append(tokens)
        job.token_times += [anyio.current_time()] * len(tokens)
        job.sequence.append(tokens)
        job.computed += count + accepted
        job.sequence.commit(job.computed)  # what windows release here is written by the next pass at the earliest
        job.read_tables()
        if sample is None:
            return
        if job.length - len(tokens) == job.prompt_tokens:
            job.ttft_s = anyio.current_time() - job.called_at
        job.guess = sample.guess
        job.drafts_accepted += accepted
        job.drafts_rejected += sample.rejected
        if job.request is not None:
            job.request.append(tokens)
        if sample.logits is not None:
            job.logits.append(sample.logits)
        if job.complete:
            del self._jobs[job.request_id]
            job.out.set()
