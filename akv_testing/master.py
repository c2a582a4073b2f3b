"""A real master for tests without an event loop, that they may stop or kill."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from akv.errors import PoolError
from akv.pool import embedded
from akv.pool.reach import reach_master
from akv_testing.processes import children_of


@contextmanager
def running_master(*flags: str) -> Iterator[tuple[str, int]]:
    """A master under the watcher for the length of the block: its address, "host:port", and its process id."""
    rpc_port, metrics_port = embedded.free_ports(2)
    command = [*embedded.watched_command(embedded.find_master(), rpc_port, metrics_port), *flags]
    with subprocess.Popen(  # noqa: S603 - the master, with arguments of our own
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as watcher:
        address = f"{embedded.LOOPBACK}:{rpc_port}"
        anyio.run(_wait_for, address)
        (child,) = children_of(watcher.pid)
        yield address, child
        if watcher.stdin is not None:
            watcher.stdin.close()


async def _wait_for(address: str) -> None:
    with anyio.fail_after(embedded.START_DEADLINE_S):
        while True:
            try:
                return await reach_master(address, 1.0)
            except PoolError:
                await anyio.sleep(0.01)
