"""Five hundred requests at random, many at a time, cancelled wherever they stand, beside calls that hang and pages that go: at
the end everything is as at the start, and no page of a load was wrong (D2, D6, D8, S2, S7, M2, M3, M6, M7).
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING

import anyio
import msgspec
import pytest

from akv import Connector
from akv.ownership.request_record import RequestRecord
from akv.ownership.reservations import LoadRecord
from akv.ownership.saves import SaveTicket
from akv.ownership.slots import SlotTicket
from akv.ownership.store_calls import CallRecord
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import FakeStore, run_virtual
from akv_testing.calls import Latency
from akv_testing.clock import BACKENDS
from akv_testing.server import FakeServer
from akv_testing.soak import Soak

if TYPE_CHECKING:
    from collections.abc import Callable

    from akv_testing import FakeDevice

REQUESTS = 500
#: Requests at a time, and pages for them and for some in quarantine.
AT_A_TIME, PAGES = 8, 192
#: What a request holds in `ownership/`, and nobody may keep.
HELD = (RequestRecord, LoadRecord, SaveTicket, SlotTicket, CallRecord)


class KernelPages:
    """The fake device's pages: every access is checked."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def write(self, group: int, page: int, content: bytes) -> None:
        self._device.kernel(writes=[(group, page, content)])

    def read(self, group: int, page: int) -> bytes:
        return self._device.read_page(group, page)


def held() -> Counter[str]:
    """What there is of these in the process."""
    gc.collect()
    # By `type()`: isinstance() asks each object, and some of other libraries answer with a warning.
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in HELD)


async def trouble(server: FakeServer, soak: Soak) -> None:
    """Calls hang for a while, some fail, and keys are evicted."""
    while True:
        kind = soak.random.choice([CallKind.GET, CallKind.PUT, CallKind.PROBE])
        gate = server.runner.hold(kind, after_body=soak.random.random() < 0.5)
        if len(server.pool._scripts) < 2:
            server.pool.answer("get", KeyState.MISSING, skip=soak.random.randrange(30))
            server.pool.answer("put", KeyState.NO_SPACE, skip=soak.random.randrange(20))
        try:
            await anyio.sleep(soak.random.random() / 50)
        finally:
            gate.release()


@pytest.mark.parametrize("host_pages", [False, True], ids=["slots", "host pages"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_D6_D8_M6_after_hundreds_of_requests_with_random_cancels_everything_is_back(
    backend: str, host_pages: bool, left_open: Callable[[Connector], list[str]]
) -> None:
    # What a test that failed before this one keeps alive, with its traceback.
    of_others = held()
    seen: Counter[str] = Counter()
    cut_short: Counter[str] = Counter()

    async def main() -> None:
        # Small enough to evict. What a probe or a get leased stays for a while.
        store = FakeStore(anyio.current_time, capacity_bytes=60_000, lease_s=0.05, high_watermark=0.95)
        latency = Latency(probe_s=0.0002, get_s=0.0005, put_s=0.0008)
        server = FakeServer(store=store, pages=PAGES, slots=24, latency=latency, host_pages=host_pages)
        soak = Soak(server.layout, KernelPages(server.device), PAGES, seed=BACKENDS.index(backend), moment_s=0.02)
        settings = {"lease_s": 0.05, "load_deadline_s": 0.02, "negative_ttl_s": 0.01, "save_backoff_s": 0.001}
        async with server.open(loaders=3, savers=2, **settings) as kv:
            at_the_start = kv.pressure()
            async with anyio.create_task_group() as group:
                group.start_soon(trouble, server, soak)
                await soak.run(kv, REQUESTS, at_a_time=AT_A_TIME)
                group.cancel_scope.cancel()
            await anyio.sleep(1)
            soak.fetch(kv)
            assert soak.wrong == []
            assert left_open(kv) == []
            assert kv.completed() == []
            # What loads have read is a sum, and nothing that is held.
            assert msgspec.structs.replace(kv.pressure(), reads=at_the_start.reads) == at_the_start
            assert soak.free_pages == [PAGES, PAGES]
            kept = held() - of_others
            assert not kept, kept
        assert server.left_behind() == []
        assert server.wrong_values() == []
        seen.update(soak.seen)
        cut_short.update(soak.cut_short)
        assert soak.pages_compared > REQUESTS

    run_virtual(backend, main)
    assert seen["ended"] + seen["cut short"] + seen["load failed"] == REQUESTS
    assert min(cut_short[stage] for stage in ("looking up", "loading", "computing", "ending")) > 5, cut_short
    assert min(seen[what] for what in ("ended", "loaded", "preempted")) > 0, seen
