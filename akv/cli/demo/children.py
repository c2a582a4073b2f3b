"""The demo's child processes, as their parent sees them."""

import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from akv.cli.demo.jobs import Job, Line, Progress
from akv.cli.demo.process import Part
from akv.errors import PoolError

#: One line of a child at most; what process A answered is one line.
_LONGEST_LINE = 64 * 1024**2
#: Lines of a failed child's log that the error quotes.
_QUOTED_LINES = 15

Wanted = TypeVar("Wanted")


class ChildFailed(PoolError):
    """A process of the demo ended with an error. The text quotes the end of its log."""


class Child:
    """A process of ours, its lines, and its log. Made by `open_child()`."""

    def __init__(self, part: Part, process: Process, log: Path) -> None:
        self._part = part
        self._process = process
        self._log = log
        self._input: ByteSendStream = _pipe(process.stdin)
        self._lines = BufferedByteReceiveStream(_pipe(process.stdout))

    async def tell(self, job: Job) -> None:
        """Give the child its job."""
        # A child that has ended already says why when it is asked for its answer.
        with suppress(anyio.BrokenResourceError):
            await self._input.send(msgspec.json.encode(job) + b"\n")

    async def answer(self, progress: Progress, wanted: Callable[[Line], Wanted | None]) -> Wanted:
        """Pass progress on until the child says what is wanted. Raises ChildFailed if it ends before."""
        decode = msgspec.json.Decoder(Line).decode
        while True:
            text = None
            with suppress(anyio.IncompleteRead):
                text = await self._lines.receive_until(b"\n", _LONGEST_LINE)
            if text is None:
                status = await self._process.wait()
                log = "\n".join(self._log.read_text(errors="replace").splitlines()[-_QUOTED_LINES:])
                raise ChildFailed(f"the demo's process '{self._part}' ended with status {status}; the end of its log:\n{log}")
            if not text.startswith(b"{"):
                continue
            line = decode(text)
            if line.step:
                progress(line.step, line.done, line.of)
            found = wanted(line)
            if found is not None:
                return found

    async def end(self) -> None:
        """Close the child's input and wait for its end."""
        await self._input.aclose()
        await self._process.wait()


@asynccontextmanager
async def open_child(part: Part) -> AsyncIterator[Child]:
    """Run a part of the demo as a fresh process; it has ended when the block is left."""
    # The store's client writes to standard error as it likes; a file keeps that apart and tells what happened if the child
    # fails.
    with tempfile.NamedTemporaryFile(prefix="akv-demo-") as log:
        command = [sys.executable, "-m", "akv.cli.demo.process", part]
        async with await anyio.open_process(command, stderr=log.file) as process:
            try:
                child = Child(part, process, Path(log.name))
                yield child
                await child.end()
            except BaseException:
                with suppress(ProcessLookupError):
                    process.kill()
                raise


Pipe = TypeVar("Pipe", ByteSendStream, ByteReceiveStream)


def _pipe(stream: Pipe | None) -> Pipe:
    if stream is None:
        raise AssertionError("the child was started with pipes")
    return stream
