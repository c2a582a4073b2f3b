"""The end of a process beside calls that hang, looked at from outside. No store: a call here is a wait."""

import subprocess
import time
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: Seconds that a process may take over its deadline: to start, to import, to end.
MARGIN_S = 8.0

PRELUDE = """
import atexit, logging, logging.handlers, sys, threading
import anyio
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.threads import ThreadRunner
from akv.ports.calls import CallKind, CallSize

runner = ThreadRunner({CallKind.GET: 1})
begun = threading.Event()

def start(seconds):
    def call():
        begun.set()
        threading.Event().wait(seconds)

    async def main():
        runner.start(CallKind.GET, call, CallSize(), lambda end: None)

    anyio.run(main)
    begun.wait()
"""
ARMED = PRELUDE + "PROCESS_GUARD.arm(0.3)\n"


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 0),  # A hook cannot see it: whoever knows the status passes it on.
        ("raise ZeroDivisionError", 1),
        ("raise KeyboardInterrupt", 1),
        ("PROCESS_GUARD.exit_with(7)", 7),
        ("PROCESS_GUARD.exit_with(0); raise ZeroDivisionError", 0),
        ("sys.stdout.close(); sys.stderr.close()", 0),
        ("sys.stdout = None", 0),
    ],
)
def test_O6_beside_a_call_that_hangs_a_process_leaves_at_the_deadline(ending: str, status: int, run_script: Run) -> None:
    began = time.monotonic()
    ended = run_script(ARMED + "start(3600)\n" + ending)
    assert ended.returncode == status, ended.stderr
    assert time.monotonic() - began < 0.3 + MARGIN_S


def test_O6_what_an_ordinary_exit_flushes_is_flushed(run_script: Run) -> None:
    ended = run_script(
        ARMED
        + """
target = logging.StreamHandler(sys.stderr)
logging.getLogger().addHandler(logging.handlers.MemoryHandler(1000, logging.CRITICAL, target))
logging.getLogger().warning("to the log")
start(3600)
print("to the output", end="")
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "to the output", "to the log\n")


def test_O6_calls_that_return_in_time_leave_an_ordinary_exit(run_script: Run) -> None:
    ended = run_script(PRELUDE + "atexit.register(print, 'earlier hook')\nPROCESS_GUARD.arm(60)\nstart(0.1)\nsys.exit(3)")
    assert (ended.returncode, ended.stdout) == (3, "earlier hook\n"), ended.stderr


def test_O6_the_longest_deadline_counts_and_the_hook_runs_once(run_script: Run) -> None:
    script = PRELUDE + "[PROCESS_GUARD.arm(deadline_s) for deadline_s in (0.05, 60, 0.05)]\nstart(0.3)\nsys.exit(3)"
    assert run_script(script).returncode == 3


def test_O6_a_store_that_stays_open_is_left_without_its_destructor(run_script: Run) -> None:
    script = """
class Store:
    def __del__(self):
        print("destroyed")
PROCESS_GUARD.hold(Store())
"""
    ended = run_script(ARMED + script + "sys.exit(3)")
    assert (ended.returncode, ended.stdout) == (0, ""), "an ordinary exit would have given 3"
    ended = run_script(ARMED + script + "PROCESS_GUARD.release(PROCESS_GUARD._held[0])\nsys.exit(3)")
    assert (ended.returncode, ended.stdout) == (3, "destroyed\n")


def test_O6_no_call_begins_while_the_process_waits_for_the_running_ones(run_script: Run) -> None:
    ended = run_script(
        ARMED
        + """
async def main():
    runner.start(CallKind.GET, lambda: threading.Event().wait(0.1), CallSize(), lambda end: None)
    runner.start(CallKind.GET, lambda: print("begun too late"), CallSize(), lambda end: None)
anyio.run(main)
"""
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_O6_a_guard_that_is_not_armed_leaves_the_exit_alone(run_script: Run) -> None:
    ended = run_script(PRELUDE + "start(3600)\nPROCESS_GUARD.exit_with(7)\nsys.exit(3)")
    assert ended.returncode == 3, ended.stderr


def test_O6_last_words_are_spoken_before_leaving_and_not_at_an_ordinary_exit(run_script: Run) -> None:
    script = "PROCESS_GUARD.before_leaving(lambda: print('last words'))\n"
    assert run_script(ARMED + script + "start(3600)").stdout == "last words\n"
    assert run_script(ARMED + script + "start(0)").stdout == ""
