"""A child process of the demo: reads a job from standard input, does its part, writes lines of JSON to standard output.

Its argument names the part, so that it imports what the part needs, torch above all, while its parent prepares the job.
"""

import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum

import anyio
import msgspec
import structlog

from akv.cli.demo.jobs import Job, Line
from akv.cli.demo.moved import BytesMoved

Do = Callable[[Job], Awaitable[None]]


class Part(StrEnum):
    """What a child does."""

    LEND = "lend"
    SAVE = "save"
    SERVE = "serve"


def main() -> None:
    """Do the job on standard input."""
    part = {Part.LEND: _lender, Part.SAVE: _saver, Part.SERVE: _server}[Part(sys.argv[1])]()
    line = sys.stdin.buffer.readline()
    if line:  # without a job the parent has failed, and tells why itself
        job = msgspec.json.decode(line, type=Job)
        anyio.run(part, job, backend=job.backend)


def _lender() -> Do:
    from akv.cli.demo.setting import settings  # noqa: PLC0415 - each part imports what it needs
    from akv.pool import open_pool  # noqa: PLC0415
    from akv.settings import StoreSettings  # noqa: PLC0415

    async def lend(job: Job) -> None:
        store = StoreSettings(master_address=job.master_address, segment_bytes=job.segment_bytes)
        async with open_pool(msgspec.structs.replace(settings(job.master_address, "none"), store=store)):
            _say(Line(ready=True))
            # The parent closes our input when it has done with the pool, and so does the kernel if the parent dies.
            await anyio.wrap_file(sys.stdin.buffer).read()

    return lend


def _saver() -> Do:
    from akv.cli.demo.saving import save  # noqa: PLC0415
    from akv.cli.demo.tracing import save_trace  # noqa: PLC0415

    async def do(job: Job) -> None:
        if job.trace is not None:
            _say(Line(replayed=await save_trace(job, job.trace, _moved(), _progress)))
        else:
            _say(Line(answered=await save(job, _progress)))

    return do


def _server() -> Do:
    from akv.cli.demo.serving import serve  # noqa: PLC0415
    from akv.cli.demo.tracing import serve_trace  # noqa: PLC0415

    async def do(job: Job) -> None:
        if job.trace is not None and job.replayed is not None:
            _say(Line(trace_figures=await serve_trace(job, job.trace, job.replayed, _moved(), _progress)))
        else:
            _say(Line(figures=await serve(job, _moved(), _progress)))

    return do


def _moved() -> BytesMoved:
    """Count what akv's events tell from here on; the events themselves go to the log that the parent keeps."""
    moved = BytesMoved()
    structlog.configure(
        processors=[moved, structlog.processors.JSONRenderer(default=str)],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return moved


def _progress(step: str, done: int, of: int) -> None:
    _say(Line(step=step, done=done, of=of))


def _say(line: Line) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
