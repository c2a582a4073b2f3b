"""New weights, and restarted processes, on a real pool: pages are found under the name of the weights behind them (K8)."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import anyio
import pytest

import akv
from akv import Connector, SavesCompleted, Scheduled
from akv.pool import MooncakePool
from akv.ports.pool import KeyState
from akv_testing.engine import TINY, EngineConfig, Pages
from akv_testing.processes import halt

pytestmark = [pytest.mark.anyio, pytest.mark.mooncake]

#: Two whole blocks of eight, and four tokens; and another prompt of that length.
TOKENS, OTHER = tuple(range(20)), tuple(range(100, 120))

#: One server process. Arguments: the master's address, the model key, the revision that it starts with, and what it does, a
#: list in JSON: ["save", prompt, value], ["reset", revision], or ["load", prompt, value]. It prints what each load found, in
#: tokens; -1 for other bytes than `value`. It lends nothing, so what it saved outlives it.
PROCESS = """
import json, sys
import anyio
import akv
from akv_testing.engine import TINY, EngineConfig, Pages

address, name, revision, work = sys.argv[1:5]
pages = Pages(EngineConfig(model=TINY, tokens_per_block=8, pages=16))
settings = {
    "model_key": name, "revision": revision, "store": {"master_address": address, "segment_bytes": 0},
    "staging_buffer_bytes": "1MiB",
}

async def main():
    found = []
    async with akv.open_connector(settings, pages.layout, pages.caches) as kv:
        for number, (what, *of) in enumerate(json.loads(work)):
            if what == "reset":
                await kv.reset(of[0])
                continue
            tokens = range(of[0], of[0] + 20)
            async with kv.request(f"{number}", tokens) as request:
                if what == "save":
                    for tensor in pages.caches[0]:
                        tensor[:3] = of[1]
                    part = akv.Scheduled(request=request, computed_before=0, tokens=20, pages=[[0, 1, 2]])
                    await kv.after_forward(kv.plan_pass([part]))
                else:
                    offer = await request.lookup()
                    await request.reserve(offer, offer.tokens, [[5, 6, 7]]).wait()
                    held = all(bool((tensor[5:5 + offer.tokens // 8] == of[1]).all()) for tensor in pages.caches[0])
                    found.append(offer.tokens if held else -1)
    print(json.dumps(found))

anyio.run(main)
"""


def test_K8_a_restarted_process_finds_the_pages_of_its_own_revision(
    master: str, pool: MooncakePool, run_script: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    def process(revision: str, *work: list[Any]) -> list[int]:
        ended = run_script(PROCESS, master, "restarted/m", revision, json.dumps(work))
        assert ended.returncode == 0, ended.stderr
        found: list[int] = json.loads(ended.stdout)
        return found

    # The weights of r1 computed both, then new weights the first one.
    assert process("r1", ["save", 0, 1.5], ["save", 100, 1.5], ["reset", "r2"], ["load", 0, 0.0], ["save", 0, 2.5]) == [0]
    assert process("r1", ["load", 0, 1.5], ["load", 100, 1.5], ["reset", "r2"], ["load", 0, 2.5]) == [16, 16, 16]
    assert process("r2", ["load", 0, 2.5], ["load", 100, 0.0], ["reset", "r3"], ["load", 0, 0.0]) == [16, 0, 0]
    assert pool.calls_running == 0  # it held the pages meanwhile


class Server:
    """A connector on a master of its own, with one saver."""

    def __init__(self, master: str) -> None:
        self.pages = Pages(EngineConfig(model=TINY, tokens_per_block=8, pages=16))
        store = {"master_address": master, "segment_bytes": "32MiB"}
        self.settings = {"model_key": "m", "revision": "r1", "store": store, "staging_buffer_bytes": "1MiB"}

    def open(self) -> AbstractAsyncContextManager[Connector]:
        return akv.open_connector({**self.settings, "exit_guard": False}, self.pages.layout, self.pages.caches)

    async def compute(self, kv: Connector, request: akv.Request, pages: list[int]) -> None:
        part = Scheduled(request=request, computed_before=0, tokens=20, pages=[pages])
        await kv.after_forward(kv.plan_pass([part]))

    def stored(self, kv: Connector, tokens: tuple[int, ...]) -> list[bool]:
        """Whether the pool has the blocks of a prompt, under the names that the connector uses now."""
        scheduler: Any = kv._halves.scheduler
        hashes = scheduler._door._hashing.chain(akv.Scope(), tokens).hashes(0, 2)
        answers = scheduler._lookup.pool.probe(scheduler._lookup.keys.keys(0, hashes))
        return [answer.state is KeyState.OK for answer in answers]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    halt(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_K8_a_save_in_flight_while_the_weights_change_is_not_found_after_it(own_master: tuple[str, int]) -> None:
    address, pid = own_master
    server = Server(address)
    async with server.open() as kv:
        client: Any = kv._halves.scheduler._lookup.pool
        with frozen(pid):
            # The put of the first waits for the master, that of the second for the saver.
            for request_id, tokens, pages in (("in flight", TOKENS, [0, 1, 2]), ("queued", OTHER, [3, 4, 5])):
                request = kv.open_request(request_id, tokens)
                await server.compute(kv, request, pages)
                request.finish()
            while not client.calls_running:  # noqa: ASYNC110 - there is no event
                await anyio.sleep(0.001)
            await kv.reset("r2")
            assert {(type(end), end.request_id) for end in kv.completed()} == {
                (SavesCompleted, "in flight"),
                (SavesCompleted, "queued"),
            }
            assert client.calls_running == kv.pressure().outstanding_calls == 1
        while kv.pressure().outstanding_calls:  # noqa: ASYNC110 - there is no event
            await anyio.sleep(0.001)
        assert kv.pressure().breaker.name == "CLOSED"
        for request_id, tokens in (("again", TOKENS), ("and again", OTHER)):
            assert (await kv.open_request(request_id, tokens).lookup()).tokens == 0
            assert server.stored(kv, tokens) == [False, False]
        await kv.reset("r1")
        # What was in flight ended under the old name; what was queued, not at all.
        assert server.stored(kv, TOKENS) == [True, True]
        assert server.stored(kv, OTHER) == [False, False]
