"""The embedded master: it answers, and it ends with its parent, however the parent ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from akv.errors import DependencyError, PoolError
from akv.pool import embedded, open_embedded_master
from akv.pool.reach import reach_master
from akv_testing.processes import children_of, command_of, halt

pytestmark = pytest.mark.mooncake

#: Starts a process that runs an embedded master: (way to end, backend) -> the process, the master's port.
StartParent = Callable[[str, str], tuple["subprocess.Popen[str]", str]]

#: Seconds within which the master must be gone. Left alone it would live for ever, so a busy machine may take its time.
GONE_WITHIN_S = 10.0


def listens(port: str) -> bool:
    """Whether a process of this machine listens on a loopback port, read from the kernel: no connection is made."""
    rows = (row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == int(port) for row in rows)


def gone_after(port: str) -> float:
    """Seconds until nobody listens any more."""
    began = time.monotonic()
    while listens(port) and time.monotonic() - began < 3 * GONE_WITHIN_S:
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture
def own_children() -> Callable[[], list[int]]:
    """The children of this process that the test started; a session's master is one of the others."""
    others = children_of(os.getpid())
    return lambda: [pid for pid in children_of(os.getpid()) if pid not in others]


@pytest.mark.anyio
async def test_it_answers_on_loopback_and_leaves_nothing_behind(own_children: Callable[[], list[int]]) -> None:
    async with open_embedded_master() as address:
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        await reach_master(address, 1.0)
        (watcher,) = own_children()
        (master,) = children_of(watcher)
        assert {"--metrics_host=127.0.0.1", "--rpc_address=127.0.0.1"} <= set(command_of(master))
    assert not listens(port)
    assert own_children() == []


@pytest.mark.anyio
async def test_it_ends_when_its_block_is_cancelled(own_children: Callable[[], list[int]]) -> None:
    with anyio.CancelScope() as scope:
        async with open_embedded_master() as address:
            scope.cancel()
            await anyio.sleep(1)
    assert not listens(address.rpartition(":")[2])
    assert own_children() == []


@pytest.mark.anyio
async def test_a_start_that_is_cancelled_leaves_no_child(
    own_children: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = anyio.Event()

    async def never(watcher: object, address: str) -> bool:
        started.set()
        await anyio.sleep_forever()
        return True

    monkeypatch.setattr(embedded, "_answers", never)
    async with anyio.create_task_group() as group:

        async def start() -> None:
            async with open_embedded_master():
                pytest.fail("it was never told to have started")

        group.start_soon(start)
        await started.wait()
        group.cancel_scope.cancel()
    assert own_children() == []


def test_a_port_that_was_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    free_ports = embedded.free_ports
    offered: list[list[int]] = []

    async def start_and_ask() -> str:
        async with open_embedded_master() as address:
            await reach_master(address, 1.0)
            return address

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def first_taken(count: int) -> list[int]:
            offered.append(free_ports(count) if offered else [port, *free_ports(count - 1)])
            return offered[-1]

        monkeypatch.setattr(embedded, "free_ports", first_taken)
        address = anyio.run(start_and_ask)
    assert len(offered) == 2
    assert address == f"127.0.0.1:{offered[1][0]}"


@pytest.mark.anyio
async def test_a_master_that_does_not_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "mooncake_master"
    broken.write_text("#!/bin/sh\necho 'E1130 no such flag: --rpc_port' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_master", lambda: str(broken))
    with pytest.raises(PoolError, match=r"(?s)did not answer.*status 1.*no such flag: --rpc_port"):
        async with open_embedded_master():
            pytest.fail("it did not start")


@pytest.mark.anyio
async def test_a_master_that_stays_silent_is_ended_and_quoted(
    own_children: Callable[[], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "mooncake_master"
    silent.write_text("#!/bin/sh\necho 'waiting for etcd' >&2\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(embedded, "find_master", lambda: str(silent))
    monkeypatch.setattr(embedded, "START_DEADLINE_S", 0.3)
    with pytest.raises(PoolError, match=r"(?s)did not answer.*waiting for etcd"):
        async with open_embedded_master():
            pytest.fail("it did not start")
    assert own_children() == []


def test_the_program_is_found_without_PATH_and_its_absence_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert os.access(embedded.find_master(), os.X_OK)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(DependencyError, match=r"akv\[mooncake-cpu\]"):
        embedded.find_master()
    program = tmp_path / "mooncake_master"
    program.write_text("#!/bin/sh\n")
    assert not os.access(program, os.X_OK)
    with pytest.raises(DependencyError):
        embedded.find_master()
    program.chmod(0o755)
    assert embedded.find_master() == str(program)


PARENT = """
import os, signal, sys, anyio
from akv.pool import open_embedded_master

async def main():
    async with open_embedded_master() as address:
        if sys.argv[1] == "fork":
            if os.fork() == 0:
                signal.pause()
        print(address.rpartition(":")[2], flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        if sys.argv[1] == "raise":
            raise ZeroDivisionError
        if sys.argv[1] == "exit":
            sys.exit(0)
        if sys.argv[1] == "_exit":
            os._exit(0)

anyio.run(main, backend=sys.argv[2])
"""


@pytest.fixture
def parent() -> Iterator[StartParent]:
    """A process that runs an embedded master and waits for a line; with it the master's port."""
    started: list[subprocess.Popen[str]] = []

    def start(way: str, backend: str) -> tuple["subprocess.Popen[str]", str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, way, backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert listens(port)
        return process, port

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("way", "backend"), [("return", "asyncio"), ("raise", "trio"), ("exit", "asyncio"), ("_exit", "trio")]
)
def test_it_ends_with_a_parent_that_ends_by_itself(way: str, backend: str, parent: StartParent) -> None:
    process, port = parent(way, backend)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    process.wait(10)
    assert gone_after(port) < GONE_WITHIN_S


@pytest.mark.parametrize(
    ("way", "backend", "kill"),
    [
        ("return", "asyncio", signal.SIGTERM),
        ("return", "trio", signal.SIGKILL),
        ("fork", "asyncio", signal.SIGKILL),
        ("fork", "trio", signal.SIGKILL),
    ],
)
def test_it_ends_with_a_parent_that_is_killed_even_if_a_forked_child_lives_on(
    way: str, backend: str, kill: signal.Signals, parent: StartParent
) -> None:
    process, port = parent(way, backend)
    process.send_signal(kill)
    process.wait(10)
    assert gone_after(port) < GONE_WITHIN_S


def test_it_ends_with_its_watcher(parent: StartParent) -> None:
    process, port = parent("return", "asyncio")
    (watcher,) = children_of(process.pid)
    os.kill(watcher, signal.SIGKILL)
    assert gone_after(port) < GONE_WITHIN_S


def test_a_stopped_master_ends_with_its_parent_too(parent: StartParent) -> None:
    process, port = parent("return", "asyncio")
    (watcher,) = children_of(process.pid)
    (master,) = children_of(watcher)
    halt(master)
    process.kill()
    process.wait(10)
    assert gone_after(port) < GONE_WITHIN_S
