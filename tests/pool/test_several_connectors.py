"""Several connectors of one process on a real pool: one client between them, and nobody's pages are another's (O8, O6)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import anyio
import pytest

import akv
from akv import Connector, LookupOutcome, Scheduled
from akv.pool import open_embedded_master
from akv.pool.exit_guard import PROCESS_GUARD
from akv_testing.engine import TINY, EngineConfig, Pages

pytestmark = [pytest.mark.anyio, pytest.mark.mooncake]

Events = Callable[..., list[dict[str, Any]]]

#: Two whole blocks of eight, and four tokens.
TOKENS = tuple(range(20))


class Model:
    """The caches of one model, and a connector of its own."""

    def __init__(self, master: str, name: str, **settings: Any) -> None:
        self.pages = Pages(EngineConfig(model=TINY, tokens_per_block=8, pages=16))
        store = {"master_address": master, "segment_bytes": "32MiB", **settings.pop("store", {})}
        self.settings = {"model_key": name, "store": store, "staging_buffer_bytes": "32MiB", "exit_guard": False, **settings}
        self.groups = len(self.pages.layout.groups)

    def open(self) -> AbstractAsyncContextManager[Connector]:
        return akv.open_connector(self.settings, self.pages.layout, self.pages.caches)

    def fill(self, value: float, pages: Sequence[int] = (0, 1, 2)) -> None:
        for regions in self.pages.caches:
            for tensor in regions:
                tensor[list(pages)] = value

    def holds(self, value: float, pages: Sequence[int]) -> bool:
        return all(bool((tensor[list(pages)] == value).all()) for regions in self.pages.caches for tensor in regions)

    async def save(self, kv: Connector, request_id: str, tokens: Sequence[int] = TOKENS) -> None:
        async with kv.request(request_id, tokens) as request:
            part = Scheduled(request=request, computed_before=0, tokens=len(tokens), pages=[[0, 1, 2]] * self.groups)
            await kv.after_forward(kv.plan_pass([part]))

    async def load(self, kv: Connector, request_id: str, tokens: Sequence[int] = TOKENS) -> akv.Offer:
        """Into the pages 5 and 6."""
        async with kv.request(request_id, tokens) as request:
            offer = await request.lookup()
            await request.reserve(offer, offer.tokens, [[5, 6, 7]] * self.groups).wait()
            return offer


async def test_O8_a_model_and_its_drafter_share_a_client_and_no_page(
    master: str, events: Events, new_key: Callable[[], str]
) -> None:
    target, drafter = Model(master, f"{new_key()}/target"), Model(master, f"{new_key()}/drafter")
    target.fill(1.5)
    drafter.fill(2.5)
    async with target.open() as kv, drafter.open() as its:
        await target.save(kv, "r")
        assert (await its.open_request("miss", TOKENS).lookup()).outcome is LookupOutcome.FULL_ATTENTION_MISS
        await drafter.save(its, "r")
        assert (await target.load(kv, "again")).tokens == 16
        assert (await drafter.load(its, "again")).tokens == 16
        assert target.holds(1.5, (5, 6))
        assert drafter.holds(2.5, (5, 6))
    assert len(events("akv.pool.open", outcome="ok")) == 1
    assert len(events("akv.pool.shared")) == 1
    assert len(events("akv.pool.close", outcome="ok")) == 1
    assert events("akv.connector.unclean_exit") == []


async def test_O8_one_comes_and_goes_while_the_other_moves_pages(master: str, events: Events) -> None:
    """Buffers are registered and taken back beside calls of the same client."""
    steady, passing = Model(master, "beside/steady"), Model(master, "beside/passing")
    steady.fill(3.5)
    passing.fill(4.5)
    done = anyio.Event()
    rounds = 0

    async def moves(kv: Connector) -> None:
        nonlocal rounds
        while not done.is_set():
            await steady.save(kv, f"save {rounds}", [rounds, *TOKENS])
            assert (await steady.load(kv, f"load {rounds}", [rounds, *TOKENS])).tokens == 16
            assert steady.holds(3.5, (5, 6))
            steady.fill(0.0, (5, 6))
            rounds += 1

    async with steady.open() as kv, anyio.create_task_group() as group:
        group.start_soon(moves, kv)
        for number in range(5):
            async with passing.open() as its:
                await passing.save(its, "r", [number, *TOKENS])
                assert (await passing.load(its, "again", [number, *TOKENS])).tokens == 16
        done.set()
    assert rounds > 0
    assert len(events("akv.pool.open", outcome="ok")) == 1
    assert len(events("akv.pool.shared")) == 5
    assert len(events("akv.pool.close", outcome="ok")) == 1
    assert [dict(event) for event in events("akv.load.failed")] == []


async def test_O8_who_came_first_may_leave_first_and_one_after_the_other_works(master: str, events: Events) -> None:
    first, second = Model(master, "order/first"), Model(master, "order/second")
    second.fill(5.5)
    opened, left = anyio.Event(), anyio.Event()

    async def stays() -> None:
        async with second.open() as kv:
            opened.set()
            await left.wait()
            await second.save(kv, "r")

    async with anyio.create_task_group() as group:
        async with first.open():
            group.start_soon(stays)
            await opened.wait()
        left.set()
    assert len(events("akv.pool.open", outcome="ok")) == 1
    assert len(events("akv.pool.close", outcome="ok")) == 1
    # What was lent has gone with the client; a new one begins anew.
    async with second.open() as kv:
        await second.save(kv, "r")
        assert (await second.load(kv, "again")).tokens == 16
        assert second.holds(5.5, (5, 6))
    assert len(events("akv.pool.open", outcome="ok")) == 2
    assert len(events("akv.pool.close", outcome="ok")) == 2


async def test_O8_two_pools_in_one_process_know_nothing_of_each_other(master: str, events: Events) -> None:
    async with open_embedded_master() as other:
        here, there = Model(master, "pools/m"), Model(other, "pools/m")
        here.fill(6.5)
        async with here.open() as kv, there.open() as its:
            await here.save(kv, "r")
            assert (await kv.open_request("hit", TOKENS).lookup()).tokens == 16
            assert (await its.open_request("miss", TOKENS).lookup()).tokens == 0
        assert len(events("akv.pool.open", outcome="ok")) == 2
        assert len(events("akv.pool.close", outcome="ok")) == 2


async def test_O8_a_connector_with_other_process_wide_settings_is_refused(master: str) -> None:
    async with Model(master, "refused/one").open() as kv:
        other = Model(master, "refused/other", client={"rpc_timeout_ms": 2500})
        with pytest.raises(akv.SettingsError, match=r"client\.rpc_timeout_ms.*2500.*1500"):
            async with other.open():
                raise AssertionError("it is not open")
        assert (await kv.open_request("r", TOKENS).lookup()).tokens == 0


#: Arguments: the master's address, and bytes of a segment that stays.
LENDER = "import runpy; runpy.run_module('akv.cli.bench.faults.lender', run_name='__main__')"
#: Argument: the master's address. Two loops in two threads, at once and again and again. They lend nothing: a page lies in
#: whatever memory the pool chose, and that of the other loop's client goes when this one closes.
TWO_LOOPS = """
import sys, threading
import anyio
from tests.pool.test_several_connectors import Model

ends = []

async def lives(name):
    model = Model(sys.argv[1], name, exit_guard=True, store={"segment_bytes": 0})
    model.fill(7.5)
    for number in range(3):
        async with model.open() as kv:
            await model.save(kv, "r", [number, *range(20)])
            assert (await model.load(kv, "again", [number, *range(20)])).tokens == 16
            assert model.holds(7.5, (5, 6))
    ends.append(name)

threads = [threading.Thread(target=anyio.run, args=(lives, name), kwargs={"backend": name}) for name in ("asyncio", "trio")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(ends))
"""


def test_O8_two_loops_in_two_threads_each_with_a_client(
    own_master: tuple[str, int], lender: Callable[..., AbstractContextManager[object]], run_script: Callable[..., Any]
) -> None:
    address, _ = own_master
    with lender(LENDER, address, str(64 << 20)):
        ended = run_script(TWO_LOOPS, address, timeout_s=90.0)
    assert (ended.returncode, ended.stdout.strip()) == (0, "['asyncio', 'trio']"), ended.stderr[-2000:]


async def test_O6_none_is_left_with_the_guard(master: str) -> None:
    before = list(PROCESS_GUARD._held)
    async with Model(master, "guard/one").open(), Model(master, "guard/two").open():
        assert len(PROCESS_GUARD._held) == len(before) + 1
    assert before == PROCESS_GUARD._held
