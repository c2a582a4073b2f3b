"""The demo from beginning to end: a master, a lender of memory, process A, process B."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TypeVar

import msgspec

from akv.cli.demo.children import open_child
from akv.cli.demo.jobs import Figures, Job, Line, Progress, Replayed, TraceFigures, TraceJob, Turn
from akv.cli.demo.process import Part
from akv.cli.demo.setting import SEGMENT_BYTES, DemoLayout, trace_segment_bytes
from akv.errors import DependencyError
from akv.pool import open_embedded_master

AfterSaving = Callable[[str, tuple[tuple[Turn, ...], ...]], Awaitable[None]]
AfterReplaying = Callable[[str, Replayed], Awaitable[None]]
#: What process A hands over, and what process B's figures are.
Saved = TypeVar("Saved")
Served = TypeVar("Served")


async def run_demo(
    *,
    backend: str,
    layout: DemoLayout,
    conversations: int,
    turns: int,
    progress: Progress,
    device: str = "cpu",
    after_saving: AfterSaving | None = None,
) -> Figures:
    """Run all of it and return process B's figures.

    `progress(step, done, of)` is called as it goes. `after_saving(master_address, answered)` is called between the two
    processes, while everything is in the pool and nothing reads it: tests plant faults there. Raises DependencyError,
    PoolError.
    **Cancellation:** every process is ended before this returns.
    """
    job = Job(
        backend=backend,
        master_address="",
        segment_bytes=SEGMENT_BYTES,
        layout=layout,
        conversations=conversations,
        turns=turns,
        device=device,
    )
    return await _run(
        job,
        progress,
        saved=lambda line: line.answered,
        after_saving=after_saving,
        serve=lambda job, answered: msgspec.structs.replace(job, answered=answered),
        served=lambda line: line.figures,
    )


async def run_trace(
    *, backend: str, trace: TraceJob, progress: Progress, after_saving: AfterReplaying | None = None
) -> TraceFigures:
    """Replay a trace in process A and again in process B, and return the figures. All else as for `run_demo`."""
    size = trace_segment_bytes(trace.rows, trace.scale)
    job = Job(backend=backend, master_address="", segment_bytes=size, trace=trace)
    return await _run(
        job,
        progress,
        saved=lambda line: line.replayed,
        after_saving=after_saving,
        serve=lambda job, replayed: msgspec.structs.replace(job, replayed=replayed),
        served=lambda line: line.trace_figures,
    )


def refuse_if_missing(backend: str) -> None:
    """Raise DependencyError naming every package that a demo on this backend lacks, before anything of them is imported."""
    missing = [name for name in ("torch", "mooncake", backend) if find_spec(name) is None]
    if missing:
        raise DependencyError(f"the demo needs {', '.join(missing)}: pip install 'akv[demo]'")


async def _run(
    job: Job,
    progress: Progress,
    *,
    saved: Callable[[Line], Saved | None],
    after_saving: Callable[[str, Saved], Awaitable[None]] | None,
    serve: Callable[[Job, Saved], Job],
    served: Callable[[Line], Served | None],
) -> Served:
    """Process A, then process B. Each waits for its job, so that it has imported torch when its turn comes."""
    async with open_embedded_master() as address, open_child(Part.LEND) as lender, AsyncExitStack() as later:
        job = msgspec.structs.replace(job, master_address=address)
        async with open_child(Part.SAVE) as process_a:
            await lender.tell(job)
            await lender.answer(progress, lambda line: line.ready or None)
            await process_a.tell(job)
            # It outlives process A, and two processes that import at a time are enough for two cores.
            process_b = await later.enter_async_context(open_child(Part.SERVE))
            outcome = await process_a.answer(progress, saved)
        if after_saving is not None:
            await after_saving(address, outcome)
        await process_b.tell(serve(job, outcome))
        return await process_b.answer(progress, served)
