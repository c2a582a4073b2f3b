"""The processes that are halted: a master, and a lender that holds the pages. Both are children of this process."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
from anyio.abc import Process

from akv.errors import PoolError
from akv.pool.embedded import LOOPBACK, START_DEADLINE_S, find_master, free_ports, watched_command
from akv.pool.reach import reach_master
from akv_testing.processes import children_of, halt

_ASK_AGAIN_S = 0.01


class Victim:
    """A process that can be frozen or killed, and be there again. Made by `open_victim()`."""

    def __init__(self, command: list[str], ready: Callable[[Process], Awaitable[int]], deadline_s: float) -> None:
        """`ready` waits until what was started works, `deadline_s` at most, and returns the id of the process to halt."""
        self._command = command
        self._deadline_s = deadline_s
        self._ready = ready
        self._process: Process | None = None
        self._pid = 0
        self._killed = False

    async def start(self) -> None:
        """Start it, and wait until it works. Raises PoolError if it does not."""
        self._process = await anyio.open_process(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._killed = False
        with anyio.move_on_after(self._deadline_s) as timer:
            self._pid = await self._ready(self._process)
        if timer.cancelled_caught:
            raise PoolError(f"a process of the benchmark did not work within {self._deadline_s:g} s: {self._command}")

    def freeze(self) -> None:
        """Stop it. None of its threads runs any more when this returns."""
        halt(self._pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it. None of its threads runs any more when this returns."""
        halt(self._pid, signal.SIGKILL)
        self._killed = True

    async def back(self) -> None:
        """Let it go on, or start it again if it was killed."""
        if self._killed:
            await self.end()
            await self.start()
        else:
            os.kill(self._pid, signal.SIGCONT)

    async def end(self) -> None:
        """End it, in whatever state it is, and reap it."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            if not self._killed and process.returncode is None and self._pid:
                os.kill(self._pid, signal.SIGKILL)
        await process.aclose()


@asynccontextmanager
async def open_master() -> AsyncIterator[tuple[str, Victim]]:
    """A master on loopback with the defaults of every master, and its address, which it keeps when it is started again."""
    rpc_port, metrics_port = free_ports(2)
    address = f"{LOOPBACK}:{rpc_port}"
    command = watched_command(find_master(), rpc_port, metrics_port)
    async with open_victim(command, partial(_master_ready, address)) as victim:
        yield address, victim


@asynccontextmanager
async def open_lender(
    address: str, segment_bytes: int, *, file_bytes: int | None = None, deadline_s: float = START_DEADLINE_S
) -> AsyncIterator[Victim]:
    """A process that lends memory to the pool of the master at `address`, in files of `file_bytes` if that is said.

    It allocates the memory first, which takes seconds for some tens of gigabytes: `deadline_s`.
    """
    command = [sys.executable, "-m", "akv.cli.bench.faults.lender", address, str(segment_bytes)]
    command += [] if file_bytes is None else [str(file_bytes)]
    async with open_victim(command, _lender_ready, deadline_s) as victim:
        yield victim


@asynccontextmanager
async def open_victim(
    command: list[str], ready: Callable[[Process], Awaitable[int]], deadline_s: float = START_DEADLINE_S
) -> AsyncIterator[Victim]:
    """Run a process for the length of the block. **Cancellation:** it is ended."""
    victim = Victim(command, ready, deadline_s)
    try:
        await victim.start()
        yield victim
    finally:
        with anyio.move_on_after(START_DEADLINE_S, shield=True):
            await victim.end()


async def _master_ready(address: str, watcher: Process) -> int:
    while True:
        with suppress(PoolError):
            await reach_master(address, 1.0)
            (pid,) = children_of(watcher.pid)
            return pid
        await anyio.sleep(_ASK_AGAIN_S)


async def _lender_ready(lender: Process) -> int:
    if lender.stdout is None:
        raise AssertionError("it was started with pipes")
    try:
        await lender.stdout.receive()
    except anyio.EndOfStream as error:
        raise PoolError("the process that lends memory to the pool ended before it lent any") from error
    return lender.pid
