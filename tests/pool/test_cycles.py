"""Joining and leaving a real pool again and again leaves a process as it was (O6)."""

import sys

import anyio
import pytest

from akv.pool import open_embedded_master

LIVES = """
import gc, os, resource, sys, threading
import anyio, torch
import akv
from akv_testing.engine import TINY, EngineConfig, Pages

PAGES = Pages(EngineConfig(model=TINY, tokens_per_block=8, pages=16))
STORE = {"master_address": sys.argv[1], "segment_bytes": "32MiB"}
SETTINGS = {"model_key": "m", "store": STORE, "staging_buffer_bytes": "32MiB"}

async def life(number):
    async with akv.open_connector(SETTINGS, PAGES.layout, PAGES.caches) as kv:
        async with kv.request("r", [number] * 20) as request:
            offer = await request.lookup()
            pages = [[0, 1, 2]] * len(PAGES.layout.groups)
            plan = kv.plan_pass([akv.Scheduled(request=request, computed_before=0, tokens=20, pages=pages)])
            await kv.after_forward(plan)

def now():
    gc.collect()
    tasks, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    with open("/proc/self/statm") as statm:
        return threading.active_count(), tasks, files, int(statm.read().split()[1])

async def main():
    # The first lives load code, and start what the client keeps for the life of a process. Another of its threads comes in one
    # of the first eight or so, the later the busier the machine, and takes 17 MiB, once; 13 more came once in a while.
    for number in range(4):
        await life(number)
    first = now()
    for number in range(4, 10):
        await life(number)
    last = now()
    assert last[0] == first[0], ("threads of Python", first, last)
    # The bare client, set up and closed in a loop, starts a worker of its own late, once, and grows by some MiB for ten lives.
    assert last[1] <= first[1] + 1, ("threads", first, last)
    assert last[2] <= first[2], ("descriptors", first, last)
    # Eight MiB for each life: less than any of its buffers has.
    assert (last[3] - first[3]) * os.sysconf("SC_PAGE_SIZE") < 48 * 2**20, ("resident pages", first, last)
    print("as it was")

anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.mooncake
@pytest.mark.timeout(120)
def test_O6_forty_lives_in_four_processes_leave_each_as_it_was() -> None:
    async def lives() -> list[tuple[int, str, str]]:
        async with open_embedded_master() as address, anyio.create_task_group() as group:
            for backend in ("asyncio", "trio", "asyncio", "trio"):
                group.start_soon(life, [sys.executable, "-c", LIVES, address, backend])
        return ends

    async def life(command: list[str]) -> None:
        done = await anyio.run_process(command, check=False)
        ends.append((done.returncode, done.stdout.decode().strip(), done.stderr.decode()[-2000:]))

    ends: list[tuple[int, str, str]] = []
    for status, said, log in anyio.run(lives):
        assert (status, said) == (0, "as it was"), log
    assert len(ends) == 4
