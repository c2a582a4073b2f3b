"""A forked child of a process with an open store: refused in Python, and its own end is no crash."""

import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.mooncake

#: Argument: the master's address. The child prints what was refused, and both exit statuses are printed by the parent.
PROCESS = """
import os, sys, threading
import anyio
from akv.errors import NotOpenError
from akv.pool import ThreadRunner, open_pool
from akv.ports.calls import CallKind, CallSize
from akv.settings import Settings, StoreSettings
from akv_testing.memory import FakeHostBuffer

settings = Settings(model_key="m", store=StoreSettings(master_address=sys.argv[1], segment_bytes=16 << 20))

async def open_another():
    try:
        async with open_pool(settings):
            pass
    except NotOpenError:
        print("refused open")

def in_child(pool, runner, buffer):
    for name, call in {
        "probe": lambda: pool.probe(["a"]),
        "get": lambda: pool.get(["a"], buffer, [0], [1]),
        "put": lambda: pool.put(["a"], buffer, [0], [1]),
        "register": lambda: pool.register(buffer),
        "close": pool.close,
        "start": lambda: runner.start(CallKind.GET, str, CallSize(), lambda end: None),
    }.items():
        try:
            call()
        except NotOpenError:
            print("refused", name)
    another = threading.Thread(target=lambda: anyio.run(open_another))
    another.start()
    another.join()
    sys.exit(5)

async def main():
    async with open_pool(settings) as pool:
        runner, buffer = ThreadRunner({}), FakeHostBuffer(1000)
        pool.register(buffer)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            in_child(pool, runner, buffer)
        status = os.waitpid(child, 0)[1]
        print("child", os.waitstatus_to_exitcode(status), flush=True)
        os._exit(0)  # A child that ends its copy of an event loop takes the parent's out of the shared epoll.

anyio.run(main)
"""


def test_O6_a_forked_child_is_refused_by_name_and_ends_without_a_signal(
    own_master: tuple[str, int], run_script: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    ended = run_script(PROCESS, own_master[0])
    assert ended.returncode == 0, ended.stderr[-2000:]
    calls = ["probe", "get", "put", "register", "close", "start", "open"]
    assert ended.stdout.splitlines() == [f"refused {name}" for name in calls] + ["child 0"]
