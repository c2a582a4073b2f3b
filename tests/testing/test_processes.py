"""What tests ask of other processes."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from akv_testing.processes import children_of, command_of, halt

COUNT = "import itertools, sys\nfor n in itertools.count(): sys.stdout.write(f'{n}\\n'); sys.stdout.flush()"


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_children_are_found_while_threads_come_and_go(child: "subprocess.Popen[bytes]") -> None:
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        for _ in range(300):
            assert child.pid in children_of(os.getpid())
    finally:
        done.set()
        churning.join()


def test_a_process_that_has_gone_has_no_children(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    assert children_of(child.pid) == []


def test_a_child_is_known_by_its_command(child: "subprocess.Popen[bytes]") -> None:
    assert command_of(child.pid)[:2] == [sys.executable, "-c"]


def test_a_child_that_is_just_starting_is_known_by_its_command() -> None:
    # Popen returns in the midst of the kernel's work on the new program, when it has no command line for an instant.
    for _ in range(50):
        with subprocess.Popen(["/bin/true", "and", "more"]) as process:
            command = command_of(process.pid)
        assert command in (["/bin/true", "and", "more", ""], [""])


def test_a_child_that_ended_has_no_command(child: "subprocess.Popen[bytes]") -> None:
    halt(child.pid, signal.SIGKILL)
    assert command_of(child.pid) == [""]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.timeout(30)
def test_a_halted_process_writes_nothing_more(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", COUNT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        halt(process.pid, number)
        while _readable(process.stdout.fileno()):
            # What lay in the pipe; a process that goes on would fill it as fast as this empties it.
            if not os.read(process.stdout.fileno(), 1 << 16):
                break
        assert process.poll() in (None, -signal.SIGKILL)
        process.kill()


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
