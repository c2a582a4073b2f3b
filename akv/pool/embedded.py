"""`pool = "embedded"`: a master of our own, as a child process on loopback that ends with this process, however it ends.

Between this process and the master stands `watcher.py`, which tells why.
"""

import importlib.util
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import Process

from akv.errors import DependencyError, PoolError
from akv.observe import POOL_EMBEDDED_EXIT, POOL_EMBEDDED_START, emit, step
from akv.pool.reach import reach_master

#: The one address that nobody outside this machine reaches.
LOOPBACK = "127.0.0.1"
#: Seconds that a master may take to answer. It takes 0.05 on an idle machine.
START_DEADLINE_S = 10.0
#: Seconds for one question to a starting master, and between two of them.
_ASK_DEADLINE_S = 1.0
_ASK_AGAIN_S = 0.01
#: A port that was free a moment ago may be taken by the time the master binds it. If that happens more often than this,
#: something else is wrong.
_ATTEMPTS = 4
#: Seconds that the watcher may take to end once its pipe is closed, before it is killed too (which kills the master at once).
_END_DEADLINE_S = 2.0

_WATCHER = Path(__file__).with_name("watcher.py")


@asynccontextmanager
async def open_embedded_master(lease_s: float | None = None) -> AsyncIterator[str]:
    """Start a real `mooncake_master` on free loopback ports; yield its address, "host:port"; end it when the block is left.

    `lease_s`: seconds for which it protects what was asked for or read; None leaves the master's own default, 10. It holds no
    memory of its own: whoever opens a pool at this address with `store.segment_bytes` lends it.

    Raises DependencyError if there is no `mooncake_master`, and PoolError, quoting its last log lines, if it does not answer
    (fault of the installation or the machine).

    **Cancellation:** the master and its watcher are gone when this returns; ending them takes milliseconds and is shielded.
    """
    program = find_master()
    parent = os.getpid()
    # The master takes milliseconds. Rounded up: a lease that is longer than whoever relies on it thinks does no harm.
    flags = [] if lease_s is None else [f"--default_kv_lease_ttl={math.ceil(lease_s * 1000)}"]
    with step(POOL_EMBEDDED_START) as fields:
        watcher, address = await _start(program, flags)
        fields.update(pid=watcher.pid, master_address=address)
    try:
        yield address
    finally:
        if os.getpid() == parent:  # In a forked child the master is the parent's.
            expected = watcher.returncode is None
            with anyio.move_on_after(2 * _END_DEADLINE_S, shield=True):
                await _end(watcher)
            emit(POOL_EMBEDDED_EXIT, pid=watcher.pid, status=watcher.returncode, expected=expected)


def find_master() -> str:
    """The path of `mooncake_master`. Raises DependencyError if no Mooncake wheel is installed.

    The binary inside the package comes first: it fits the client, and is there whether or not the environment is on PATH.
    """
    package = importlib.util.find_spec("mooncake")
    places = [Path(place) for place in (package and package.submodule_search_locations) or ()]
    for place in (*places, Path(sys.executable).parent):
        candidate = place / "mooncake_master"
        # An installer may drop the binary's executable bit; the script of the same name beside the interpreter restores it.
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("mooncake_master")
    if found is None:
        raise DependencyError(
            "pool 'embedded' needs the program mooncake_master, which comes with Mooncake's client: pip install "
            "'akv[mooncake-cpu]' without a GPU, 'akv[mooncake]' with CUDA 12, 'akv[mooncake-cuda13]' with CUDA 13"
        )
    return found


async def _start(program: str, flags: Sequence[str]) -> tuple[Process, str]:
    """A master that answers, under its watcher, and its address."""
    said = ""
    for _ in range(_ATTEMPTS):
        rpc_port, metrics_port = free_ports(2)
        watcher = await anyio.open_process(
            [*watched_command(program, rpc_port, metrics_port), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal reaches every process of the session's group; the pool must outlive our own orderly end.
            start_new_session=True,
        )
        address = f"{LOOPBACK}:{rpc_port}"
        answered = False
        try:
            answered = await _answers(watcher, address)
        finally:
            if not answered:
                with anyio.move_on_after(2 * _END_DEADLINE_S, shield=True):
                    said = await _end(watcher)
        if answered:
            return watcher, address
        if watcher.returncode in {0, 128 + 9}:
            break  # It ran and did not answer: other ports would not help.
    raise PoolError(
        f"the embedded master ({program}) did not answer on {LOOPBACK} within {START_DEADLINE_S:g} s; it ended with status "
        f"{watcher.returncode}. Its last words:\n{said.strip() or '(none)'}"
    )


def watched_command(program: str, rpc_port: int, metrics_port: int) -> list[str]:
    """The command of a master that ends with this process. Its stdin must be a pipe, whose closing ends the master.

    Loopback only, both servers: by default the master listens on every interface of the machine.
    """
    return [
        *(sys.executable, "-I", "-S", str(_WATCHER), str(os.getpid())),
        program,
        f"--rpc_address={LOOPBACK}",
        f"--rpc_port={rpc_port}",
        f"--metrics_host={LOOPBACK}",
        f"--metrics_port={metrics_port}",
        "--enable_metric_reporting=false",
        "--logtostderr",
    ]


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that nobody listens on at this moment."""
    held = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


async def _answers(watcher: Process, address: str) -> bool:
    """Wait until the master answers; False if it ended, or did not answer in time."""
    with anyio.move_on_after(START_DEADLINE_S):
        while True:
            # Nothing announces that a foreign program listens, so it is asked. A master that cannot bind ends by itself.
            with suppress(PoolError):
                await reach_master(address, _ASK_DEADLINE_S)
                return watcher.returncode is None
            with anyio.move_on_after(_ASK_AGAIN_S):
                await watcher.wait()
                return False
    return False


async def _end(watcher: Process) -> str:
    """End the watcher, and with it the master; reap it; return the master's last lines. Callers shield it."""
    said = b""
    if watcher.stdin is not None:
        with suppress(anyio.BrokenResourceError, OSError):
            await watcher.stdin.aclose()
    with anyio.move_on_after(_END_DEADLINE_S):
        if watcher.stdout is not None:
            with suppress(anyio.BrokenResourceError):
                async for chunk in watcher.stdout:
                    said += chunk
        await watcher.wait()
    if watcher.returncode is None:
        watcher.kill()
    await watcher.aclose()
    return said.decode(errors="replace")
