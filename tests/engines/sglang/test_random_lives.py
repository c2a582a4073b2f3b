"""Two servers on a small pool that evicts, refuses, loses and hangs, at random: no wrong byte, no late write, no page lost."""

import random
import time
from collections.abc import Callable

import pytest

from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing.conformance.sglang import PAGE, prompt, side_pool
from akv_testing.engines.sglang import HiCache, HiCacheStorageConfig, HostPool, PoolName
from akv_testing.engines.sglang.on_fakes import FakeBackends
from akv_testing.engines.sglang.rank import Rank
from akv_testing.store import FakeStore

#: Pages of the host pools, and of the longest prompt.
PAGES, LONGEST = 60, 9
TROUBLE = [KeyState.MISSING, KeyState.HOLDER_LOST, KeyState.LEASE_EXPIRED, KeyState.NO_SPACE, KeyState.UNAVAILABLE]


class Life:
    """One test's servers, and what may happen to them."""

    def __init__(self, seed: int, backends: FakeBackends) -> None:
        self.random = random.Random(seed)
        self.backends = backends
        page = HostPool().page_bytes
        backends.store = FakeStore(time.monotonic, capacity_bytes=80 * page, lease_s=0.001, high_watermark=0.9)
        backends.settings = {
            "staging_buffer_bytes": self.random.choice([2 * page, 5 * page, 40 * page]),
            "load_deadline_s": 0.02,
            "lookup_deadline_s": 0.02,
            "negative_ttl_s": 0.01,
            "shutdown_deadline_s": 2.0,
            "integrity": self.random.choice(["off", "checksum"]),
        }
        v1, sides = self.random.random() < 0.7, self.random.random() < 0.3
        self.servers = [self.server(v1, sides) for _ in range(2)]
        self.held: list[Callable[[], None]] = []
        #: What each server holds.
        self.prompts: list[set[tuple[int, ...]]] = [set(), set()]

    def server(self, v1: bool, sides: bool) -> HiCache:
        config = HiCacheStorageConfig(extra_config={"interface_v1": int(v1)})
        names = (PoolName.INDEXER, PoolName.SWA) if sides else ()
        return HiCache([Rank(config, self.backends, HostPool(pages=PAGES), {name: side_pool(name) for name in names})])

    def step(self) -> None:
        at = self.random.randrange(2)
        cache, held = self.servers[at], self.prompts[at]
        tokens = prompt(self.random.randint(1, LONGEST), first=self.random.randint(1, 3))
        match self.random.randrange(8):
            case 0 | 1:
                self.evict(at)
                cache.compute(tokens)
                held.add(tuple(tokens))
                cache.backup(tokens).wait()
            case 2 | 3:
                self.evict(at)
                operation = cache.prefetch(tokens)
                if self.random.random() < 0.2:
                    operation.terminate()
                pages = operation.wait()
                assert pages <= operation.hit_pages
                # Whatever came is the tree's: forget it with the prompt.
                held.add(tuple(tokens))
            case 4:
                pool = self.backends.pools[at]
                pool.answer(
                    self.random.choice(["get", "put", "probe"]), self.random.choice(TROUBLE), times=self.random.randint(1, 3)
                )
            case 5 if not self.held:
                self.held.append(self.backends.hold(self.random.choice([CallKind.GET, CallKind.PUT, CallKind.PROBE]), at))
            case 6 if self.held:
                self.held.pop()()
            case _:
                for key in self.random.sample(self.backends.store.keys(), min(2, len(self.backends.store.keys()))):
                    self.backends.store.evict(key)
        for server in self.servers:
            server.check()

    def evict(self, at: int) -> None:
        for tokens in self.prompts[at]:
            self.servers[at].evict(list(tokens))
        self.prompts[at].clear()
        assert self.servers[at].ranks[0].pool.available == PAGES, "pages were lost"

    def end(self) -> None:
        while self.held:
            self.held.pop()()
        for at, server in enumerate(self.servers):
            self.evict(at)
            server.check()
            server.detach()


@pytest.mark.parametrize("seed", range(8))
def test_M1_X4_whatever_the_pool_does_sglang_sees_misses_and_right_bytes(backends: FakeBackends, seed: int) -> None:
    life = Life(seed, backends)
    for _ in range(50):
        life.step()
    life.end()
    assert all(len(tokens) % PAGE == 0 for tokens in life.prompts[0])
