"""The end of a process beside real store calls: never by a signal, within the deadline (O6)."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.mooncake

Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: Seconds that the process below gives its calls, and what it may need on top to start, to set up and to end.
DEADLINE_S, MARGIN_S = 0.5, 15.0

#: Arguments: the master's address and process id, the call, "frozen" or "healthy", the ending.
PROCESS = f"""
import os, signal, sys, threading
import anyio
from akv.pool import ThreadRunner, open_pool
from akv.ports.calls import CallKind, CallSize
from akv.settings import Settings, StoreSettings
from akv_testing.memory import FakeHostBuffer
from akv_testing.processes import halt

# A shell that started the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
address, pid, what, state, ending = sys.argv[1:6]
SIZE = 1 << 20

async def main():
    store = StoreSettings(master_address=address, segment_bytes=64 << 20)
    async with open_pool(Settings(model_key="m", store=store, shutdown_deadline_s={DEADLINE_S})) as pool:
        buffer = FakeHostBuffer(2 * SIZE)
        pool.register(buffer)
        assert pool.put(["warm"], buffer, [0], [SIZE])[0].code == 0
        numbers = iter(range(10**9))
        calls = {{
            "get": lambda: pool.get(["warm"], buffer, [SIZE], [SIZE]),
            "put": lambda: pool.put([f"k{{next(numbers) % 32}}"], buffer, [0], [SIZE]),
            "exists": lambda: pool.probe(["warm"]),
        }}
        inside = threading.Event()

        def call():
            while what != "none":
                inside.set()
                calls[what]()

        if state == "frozen":
            halt(int(pid))
        if what != "none":
            ThreadRunner({{}}).start(CallKind.GET, call, CallSize(), lambda end: None)
            inside.wait()
        if ending == "raise":
            raise ZeroDivisionError
        if ending == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            await anyio.sleep(10)
        if ending == "abrupt":
            sys.exit(3)
    print("left")

anyio.run(main, backend=sys.argv[6] if sys.argv[6:] else "asyncio")
"""


@pytest.mark.parametrize("call", ["get", "put", "exists"])
@pytest.mark.parametrize(("state", "ending", "status"), [("healthy", "return", 0), ("frozen", "raise", 1)])
def test_O6_a_process_with_a_call_in_flight_ends_by_itself(
    call: str, state: str, ending: str, status: int, own_master: tuple[str, int], run_script: Run
) -> None:
    address, pid = own_master
    began = time.monotonic()
    try:
        ended = run_script(PROCESS, address, str(pid), call, state, ending)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ended.returncode == status, ended.stderr[-2000:]
    assert time.monotonic() - began < DEADLINE_S + MARGIN_S
    assert ended.stdout == ("left\n" if ending == "return" else "")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("state", ["healthy", "frozen"])
def test_O6_an_interrupted_process_with_a_call_in_flight_ends_by_itself(
    state: str, backend: str, own_master: tuple[str, int], run_script: Run
) -> None:
    address, pid = own_master
    began = time.monotonic()
    try:
        ended = run_script(PROCESS, address, str(pid), "get", state, "interrupt", backend)
    finally:
        os.kill(pid, signal.SIGCONT)
    # As after any uncaught exception (O6).
    assert ended.returncode == 1, ended.stderr[-2000:]
    assert "KeyboardInterrupt" in ended.stderr
    assert time.monotonic() - began < DEADLINE_S + MARGIN_S
    assert ended.stdout == ""


def test_O6_a_store_whose_master_froze_is_not_closed(own_master: tuple[str, int], run_script: Run) -> None:
    address, pid = own_master
    began = time.monotonic()
    try:
        ended = run_script(PROCESS, address, str(pid), "none", "frozen", "return")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr[-2000:]
    assert "akv.connector.unclean_exit" in ended.stderr
    assert time.monotonic() - began < MARGIN_S


def test_O6_a_store_without_calls_is_closed_and_the_exit_is_ordinary(own_master: tuple[str, int], run_script: Run) -> None:
    address, pid = own_master
    ended = run_script(PROCESS, address, str(pid), "none", "healthy", "abrupt")
    assert ended.returncode == 3, ended.stderr[-2000:]
    assert "akv.connector.unclean_exit" not in ended.stderr


#: Argument: the master's address. It prints the states of each call.
FAILURES = """
import os, signal, sys
import anyio
from akv.pool import open_pool
from akv.settings import Settings, StoreSettings
from akv_testing.memory import FakeHostBuffer
from akv_testing.processes import halt

address, pid = sys.argv[1:]

async def main():
    store = StoreSettings(master_address=address, segment_bytes=16 << 20)
    async with open_pool(Settings(model_key="m", store=store)) as pool:
        buffer = FakeHostBuffer(20 << 20)
        pool.register(buffer)
        print(pool.put(["too large"], buffer, [0], [20 << 20])[0])
        os.kill(int(pid), signal.SIGKILL)
        print(pool.probe(["a"])[0])
        print(pool.get(["a"], buffer, [0], [1])[0])

anyio.run(main)
"""


def test_the_codes_of_a_full_pool_and_of_a_dead_master(own_master: tuple[str, int], run_script: Run) -> None:
    # On a master of its own: one put that finds no room lets the master evict fresh keys of everybody else.
    address, pid = own_master
    ended = run_script(FAILURES, address, str(pid))
    assert ended.returncode == 0, ended.stderr[-2000:]
    states = [line.partition("state=")[2].partition(":")[0] + line.partition("code=")[2] for line in ended.stdout.splitlines()]
    assert states == ["<KeyState.NO_SPACE-200)", "<KeyState.UNAVAILABLE-900)", "<KeyState.UNAVAILABLE-900)"]
