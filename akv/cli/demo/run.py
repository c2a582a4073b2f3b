"""The demo from beginning to end: a master, a lender of memory, process A, process B."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec

import msgspec

from akv.cli.demo.children import Child, open_child
from akv.cli.demo.jobs import Figures, Job, Progress, Replayed, TraceFigures, TraceJob, Turn
from akv.cli.demo.process import Part
from akv.cli.demo.setting import SEGMENT_BYTES, trace_segment_bytes
from akv.errors import DependencyError
from akv.pool import open_embedded_master

AfterSaving = Callable[[str, tuple[tuple[Turn, ...], ...]], Awaitable[None]]
AfterReplaying = Callable[[str, Replayed], Awaitable[None]]


async def run_demo(
    *, backend: str, conversations: int, turns: int, progress: Progress, after_saving: AfterSaving | None = None
) -> Figures:
    """Run all of it and return process B's figures.

    `progress(step, done, of)` is called as it goes. `after_saving(master_address, answered)` is called between the two
    processes, while everything is in the pool and nothing reads it: tests plant faults there. Raises DependencyError,
    PoolError.
    **Cancellation:** every process is ended before this returns.
    """
    job = Job(backend=backend, master_address="", segment_bytes=SEGMENT_BYTES, conversations=conversations, turns=turns)
    async with _pool_and_server(job, progress) as (job, process_b):
        async with open_child(Part.SAVE) as process_a:
            await process_a.tell(job)
            answered = await process_a.answer(progress, lambda line: line.answered)
        if after_saving is not None:
            await after_saving(job.master_address, answered)
        await process_b.tell(msgspec.structs.replace(job, answered=answered))
        return await process_b.answer(progress, lambda line: line.figures)


async def run_trace(
    *, backend: str, trace: TraceJob, progress: Progress, after_saving: AfterReplaying | None = None
) -> TraceFigures:
    """Replay a trace in process A and again in process B, and return the figures. All else as for `run_demo`."""
    size = trace_segment_bytes(trace.rows, trace.scale)
    job = Job(backend=backend, master_address="", segment_bytes=size, trace=trace)
    async with _pool_and_server(job, progress) as (job, process_b):
        async with open_child(Part.SAVE) as process_a:
            await process_a.tell(job)
            replayed = await process_a.answer(progress, lambda line: line.replayed)
        if after_saving is not None:
            await after_saving(job.master_address, replayed)
        await process_b.tell(msgspec.structs.replace(job, replayed=replayed))
        return await process_b.answer(progress, lambda line: line.trace_figures)


@asynccontextmanager
async def _pool_and_server(job: Job, progress: Progress) -> AsyncIterator[tuple[Job, Child]]:
    """A pool with memory in it, the job with its address, and process B, which waits for its job.

    Process B is started first so that it has imported torch when its turn comes; until then it does nothing.
    """
    missing = [name for name in ("torch", "mooncake", job.backend) if find_spec(name) is None]
    if missing:
        raise DependencyError(f"the demo needs {', '.join(missing)}: pip install 'akv[demo]'")
    async with open_embedded_master() as address, open_child(Part.LEND) as lender, open_child(Part.SERVE) as process_b:
        job = msgspec.structs.replace(job, master_address=address)
        await lender.tell(job)
        await lender.answer(progress, lambda line: line.ready or None)
        yield job, process_b
