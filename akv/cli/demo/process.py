"""A child process of the demo: reads a job from standard input, does its part, writes lines of JSON to standard output."""

import sys

import anyio
import msgspec
import structlog

from akv.cli.demo.jobs import Job, Line
from akv.cli.demo.saving import save
from akv.cli.demo.serving import BytesMoved, serve
from akv.cli.demo.setting import SEGMENT_BYTES, settings
from akv.pool import open_pool
from akv.settings import StoreSettings


def main() -> None:
    """Do the job on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    parts = {"lend": _lend, "save": _save, "serve": _serve}
    anyio.run(parts[job.part], job, backend=job.backend)


async def _lend(job: Job) -> None:
    store = StoreSettings(master_address=job.master_address, segment_bytes=SEGMENT_BYTES)
    async with open_pool(msgspec.structs.replace(settings(job.master_address), store=store)):
        _say(Line(ready=True))
        # The parent closes our input when it has done with the pool, and so does the kernel if the parent dies.
        await anyio.wrap_file(sys.stdin.buffer).read()


async def _save(job: Job) -> None:
    _say(Line(answered=await save(job, _progress)))


async def _serve(job: Job) -> None:
    moved = BytesMoved()
    structlog.configure(
        processors=[moved, structlog.processors.JSONRenderer(default=str)],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    _say(Line(figures=await serve(job, moved, _progress)))


def _progress(step: str, done: int, of: int) -> None:
    _say(Line(step=step, done=done, of=of))


def _say(line: Line) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
