"""The end of a server's process with a get, a put and an exists in flight at once, through an open connector (O6).

However it ends: never by a signal, and within the deadline.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.mooncake

#: Seconds that the process below gives its calls.
DEADLINE_S = 0.5
#: Seconds on top, from the moment at which it begins to end: the exit guard waits once more, a master that does not answer is
#: asked for a second, and the interpreter comes to its end on a busy machine.
MARGIN_S = 6.0

#: Arguments: the master's address and process id, "frozen" or "healthy", the event loop, the ending.
#: It prints a line when the three calls are in flight. From then on none of them returns: each is made again and again, so
#: that beside a healthy master, too, the process ends with all three inside the store's client.
PROCESS = f"""
import signal, sys, threading
import anyio
import akv
from akv.pool import MooncakePool
from akv_testing.engine import TINY, EngineConfig, Pages
from akv_testing.processes import halt

# A shell that started the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
address, pid, state, backend, ending = sys.argv[1:]
PAGES = Pages(EngineConfig(model=TINY, tokens_per_block=8, pages=16))
SETTINGS = {{
    "model_key": "m",
    "store": {{"master_address": address, "segment_bytes": "64MiB"}},
    "staging_buffer_bytes": "1MiB",
    "shutdown_deadline_s": {DEADLINE_S},
}}
STORED, OTHER, ABSENT = range(20), range(100, 120), range(200, 220)
endless = threading.Event()
inside = {{}}

def make_endless(name):
    call = getattr(MooncakePool, name)
    inside[name] = threading.Event()
    def calls(*arguments):
        while endless.is_set():
            inside[name].set()
            call(*arguments)
        return call(*arguments)
    setattr(MooncakePool, name, calls)

for name in ("get", "put", "probe"):
    make_endless(name)

async def compute(kv, request, pages):
    table = [pages] * len(PAGES.layout.groups)
    await kv.after_forward(kv.plan_pass([akv.Scheduled(request=request, computed_before=0, tokens=20, pages=table)]))

async def three_calls(kv):
    async with kv.request("stored", STORED) as request:
        await compute(kv, request, [0, 1, 2])
    reads, saves, asks = (kv.open_request(str(tokens), tokens) for tokens in (STORED, OTHER, ABSENT))
    offer = await reads.lookup()
    assert offer.tokens == 16
    endless.set()
    if state == "frozen":
        halt(int(pid))
    reads.reserve(offer, 16, [[3, 4]] * len(PAGES.layout.groups))
    await compute(kv, saves, [5, 6, 7])
    async with anyio.create_task_group() as group:
        group.start_soon(asks.lookup)
        while not all(event.is_set() for event in inside.values()):
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()

async def main():
    async with akv.open_connector(SETTINGS, PAGES.layout, PAGES.caches) as kv:
        await three_calls(kv)
        print("in flight", flush=True)
        if ending == "interrupt":
            await anyio.sleep_forever()
        if ending == "raise":
            raise ZeroDivisionError
        if ending == "exit":
            sys.exit(3)
    print("left", flush=True)

anyio.run(main, backend=backend)
"""


@contextmanager
def server(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The process above, from its line of output on. Killed if it is still there at the end."""
    command = [sys.executable, "-c", PROCESS, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said == "in flight\n", process.communicate()[1][-3000:]
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("ending", "state", "backend", "status", "said"),
    [
        ("return", "healthy", "asyncio", 0, "left\n"),
        ("return", "frozen", "trio", 0, "left\n"),
        ("raise", "frozen", "asyncio", 1, ""),
        # What the exit guard cannot see; it says how a program passes its status on.
        ("exit", "healthy", "trio", 0, ""),
        ("interrupt", "frozen", "asyncio", 1, ""),
        ("interrupt", "frozen", "trio", 1, ""),
    ],
)
def test_O6_a_server_with_three_calls_in_flight_ends_by_itself_within_its_deadline(
    ending: str, state: str, backend: str, status: int, said: str, own_master: tuple[str, int]
) -> None:
    address, pid = own_master
    try:
        with server(address, str(pid), state, backend, ending) as process:
            began = time.monotonic()
            if ending == "interrupt":
                process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
            took_s = time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (process.returncode, output) == (status, said), errors[-3000:]
    assert "akv.connector.unclean_exit" in errors
    assert took_s < DEADLINE_S + MARGIN_S
