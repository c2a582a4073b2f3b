"""The master of a real pool dies or stands still under a connector with lookups running, and comes back (O7)."""

import json
import subprocess
from collections.abc import Callable

import pytest

from akv.pool import embedded

SCRIPT = """
import json, os, signal, subprocess, sys
import anyio
import akv
from akv.pool import embedded
from akv_testing.engine import TINY, EngineConfig, Pages
from akv_testing.processes import children_of, halt

RPC, METRICS, BACKEND, WAY = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
PAGES = Pages(EngineConfig(model=TINY, tokens_per_block=8, pages=16))
STORE = {"master_address": f"{embedded.LOOPBACK}:{RPC}", "segment_bytes": "32MiB"}
SETTINGS = {"model_key": "m", "store": STORE, "staging_buffer_bytes": "32MiB", "lookup_deadline_s": 0.5}
TOKENS = [*range(20)]
TABLE = [[0, 1, 2]] * len(PAGES.layout.groups)

def start_master():
    command = embedded.watched_command(embedded.find_master(), RPC, METRICS)
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watcher = subprocess.Popen(command, **quiet)
    while True:
        if found := children_of(watcher.pid):
            return watcher, found[0]

class Lookups:
    def __init__(self, kv):
        self.kv, self.number = kv, 0
        self.longest = 0.0
        self.while_open = []
        self.outcomes = {}

    async def run(self):
        while True:
            await self.once()
            await anyio.sleep(0.02)

    async def once(self):
        self.number += 1
        async with self.kv.request(f"lookup {self.number}", TOKENS) as request:
            is_open, began = self.kv.pressure().breaker is not akv.BreakerState.CLOSED, anyio.current_time()
            offer = await request.lookup()
            took = anyio.current_time() - began
        self.outcomes[offer.outcome.value] = self.outcomes.get(offer.outcome.value, 0) + 1
        self.longest = max(self.longest, took)
        if is_open:
            self.while_open.append(took)
        return offer.tokens

async def saved(kv, lookups, patience_s):
    # Compute and look up until the pool holds it. Seconds that this took.
    began, number = anyio.current_time(), 0
    with anyio.fail_after(patience_s):
        while True:
            number += 1
            async with kv.request(f"save {number} {began}", TOKENS) as request:
                part = akv.Scheduled(request=request, computed_before=0, tokens=20, pages=TABLE)
                await kv.after_forward(kv.plan_pass([part]))
            if await lookups.once() == 16:
                return anyio.current_time() - began
            await anyio.sleep(0.05)

async def main():
    watcher, pid = start_master()
    for _ in range(500):
        try:
            await embedded.reach_master(STORE["master_address"], 1.0)
            break
        except akv.PoolError:
            await anyio.sleep(0.01)
    async with akv.open_connector(SETTINGS, PAGES.layout, PAGES.caches) as kv:
        lookups = Lookups(kv)
        await saved(kv, lookups, 10.0)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(lookups.run)
            await anyio.sleep(0.2)
            lookups.longest = 0.0
            halt(pid, signal.SIGKILL if WAY == "killed" else signal.SIGSTOP)
            await anyio.sleep(2.5)
            down = kv.pressure().breaker.value
            began = anyio.current_time()
            if WAY == "killed":
                watcher, pid = start_master()
            else:
                os.kill(pid, signal.SIGCONT)
            with anyio.fail_after(30):
                while kv.pressure().breaker is not akv.BreakerState.CLOSED:
                    await anyio.sleep(0.02)
            await saved(kv, lookups, 30.0)
            used_again = anyio.current_time() - began
            group.cancel_scope.cancel()
        told = {"down": down, "longest_s": lookups.longest, "while_open_s": sorted(lookups.while_open)}
        print(json.dumps({**told, "used_again_s": used_again, "outcomes": lookups.outcomes}))

anyio.run(main, backend=BACKEND)
"""


@pytest.mark.mooncake
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["killed", "frozen"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_O7_a_master_that_is_gone_holds_no_lookup_and_is_used_again_when_it_is_back(
    backend: str, way: str, run_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ports = [str(port) for port in embedded.free_ports(2)]
    done = run_script(SCRIPT, *ports, backend, way, timeout_s=100.0)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["down"] in {"open", "probing"}
    # The deadline is half a second.
    assert told["longest_s"] < 0.55
    while_open = told["while_open_s"]
    assert len(while_open) > 100
    # All but those that met the scheduler of a busy machine: they wait for nothing but their turn.
    assert while_open[int(0.95 * len(while_open))] < 0.005
    assert while_open[len(while_open) // 2] < 0.001
    assert told["used_again_s"] < 30
    assert told["outcomes"]["full"] > 0
    assert told["outcomes"]["unavailable"] >= len(while_open)
