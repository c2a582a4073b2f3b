"""The demo from beginning to end: a master, a lender of memory, process A, process B."""

import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from akv.cli.demo.jobs import Figures, Job, Line, Turn
from akv.errors import DependencyError, PoolError
from akv.pool import open_embedded_master

#: One line of a child at most; what process A answered is one line.
_LONGEST_LINE = 64 * 1024**2
#: Lines of a failed child's log that the error quotes.
_QUOTED_LINES = 15

Progress = Callable[[str, int, int], None]
Wanted = TypeVar("Wanted")
AfterSaving = Callable[[str, tuple[tuple[Turn, ...], ...]], Awaitable[None]]


class ChildFailed(PoolError):
    """A process of the demo ended with an error. The text quotes the end of its log."""


async def run_demo(
    *, backend: str, conversations: int, turns: int, progress: Progress, after_saving: AfterSaving | None = None
) -> Figures:
    """Run all of it and return process B's figures.

    `progress(step, done, of)` is called as it goes. `after_saving(master_address, answered)` is called between the two
    processes, while everything is in the pool and nothing reads it: tests plant faults there. Raises DependencyError,
    PoolError.
    **Cancellation:** every process is ended before this returns.
    """
    missing = [name for name in ("torch", "mooncake", backend) if find_spec(name) is None]
    if missing:
        raise DependencyError(f"the demo needs {', '.join(missing)}: pip install 'akv[demo]'")
    async with open_embedded_master() as address:
        job = Job(part="lend", backend=backend, master_address=address, conversations=conversations, turns=turns)
        async with _child(job) as lender:
            await _last(lender, progress, lambda line: line.ready or None)
            async with _child(msgspec.structs.replace(job, part="save")) as process_a:
                answered = await _last(process_a, progress, lambda line: line.answered)
            if after_saving is not None:
                await after_saving(address, answered)
            async with _child(msgspec.structs.replace(job, part="serve", answered=answered)) as process_b:
                return await _last(process_b, progress, lambda line: line.figures)


class _Child:
    """A process of ours, its lines, and its log."""

    def __init__(self, part: str, process: Process, log: Path) -> None:
        self.part = part
        self.process = process
        self.log = log


@asynccontextmanager
async def _child(job: Job) -> AsyncIterator[_Child]:
    """Run a part of the demo as a fresh process; it has ended when the block is left."""
    # The store's client writes to standard error as it likes; a file keeps that apart and tells what happened if the child
    # fails.
    with tempfile.NamedTemporaryFile(prefix="akv-demo-") as log:
        command = [sys.executable, "-m", "akv.cli.demo.process"]
        async with await anyio.open_process(command, stderr=log.file) as process:
            if process.stdin is None:
                raise AssertionError("the child was started with a pipe")
            try:
                await process.stdin.send(msgspec.json.encode(job) + b"\n")
                yield _Child(job.part, process, Path(log.name))
                await process.stdin.aclose()
                await process.wait()
            except BaseException:
                with suppress(ProcessLookupError):
                    process.kill()
                raise


async def _last(child: _Child, progress: Progress, wanted: Callable[[Line], Wanted | None]) -> Wanted:
    """Pass progress on until the child says what is wanted."""
    if child.process.stdout is None:
        raise AssertionError("the child was started with a pipe")
    lines = BufferedByteReceiveStream(child.process.stdout)
    decode = msgspec.json.Decoder(Line).decode
    while True:
        text = None
        with suppress(anyio.IncompleteRead):
            text = await lines.receive_until(b"\n", _LONGEST_LINE)
        if text is None:
            status = await child.process.wait()
            log = "\n".join(child.log.read_text(errors="replace").splitlines()[-_QUOTED_LINES:])
            raise ChildFailed(f"the demo's process '{child.part}' ended with status {status}; the end of its log:\n{log}")
        if not text.startswith(b"{"):
            continue
        line = decode(text)
        if line.step:
            progress(line.step, line.done, line.of)
        found = wanted(line)
        if found is not None:
            return found
