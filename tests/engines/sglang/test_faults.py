"""What SGLang sees of a pool in trouble: misses, in time; no exception, no wrong byte, no page that is written later."""

import time
from typing import Any

import pytest

from akv.errors import EngineContractError
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing.conformance.sglang import PAGE, prompt, side_pool, written_by
from akv_testing.engines.sglang import HiCache, HiCacheStorageConfig, HostPool, LatentHostPool, PoolName, PoolTransfer
from akv_testing.engines.sglang.host_pool import EMPTY
from akv_testing.engines.sglang.on_fakes import FakeBackends
from akv_testing.engines.sglang.rank import Rank

V1 = {"interface_v1": 1}


def server(backends: FakeBackends, *, v1: bool = True, sides: tuple[PoolName, ...] = (), **settings: Any) -> HiCache:
    """A server of one rank whose backend has these settings."""
    backends.settings = {"shutdown_deadline_s": 0.3, **settings}
    config = HiCacheStorageConfig(extra_config={"interface_v1": int(v1)})
    return HiCache([Rank(config, backends, HostPool(pages=40), {name: side_pool(name) for name in sides})])


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "flat"])
def test_M1_M2_a_get_that_hangs_ends_in_time_and_never_writes_into_a_page_of_sglangs(backends: FakeBackends, v1: bool) -> None:
    written_by(server(backends, v1=v1), prompt(6))
    cache = server(backends, v1=v1, load_deadline_s=0.1)
    go_on = backends.hold(CallKind.GET)
    began = time.monotonic()
    assert cache.prefetch(prompt(6)).wait() == 0
    assert time.monotonic() - began < 2.0
    assert backends.on_loop(backends.runners[-1].outstanding) == 1
    # SGLang uses the pages for another request, while the call is still under way.
    cache.compute(prompt(6, first=2))
    go_on()
    cache.check()
    cache.evict(prompt(6, first=2))
    assert cache.prefetch(prompt(6)).wait() == 6
    cache.check()
    cache.detach()


def test_M1_a_put_that_hangs_stores_what_it_was_given_and_not_what_lies_there_later(backends: FakeBackends) -> None:
    cache = server(backends, load_deadline_s=0.1)
    cache.compute(prompt(6))
    go_on = backends.hold(CallKind.PUT)
    assert cache.backup(prompt(6)).wait() == 0
    cache.evict(prompt(6))
    cache.compute(prompt(6, first=2))
    go_on()
    cache.evict(prompt(6, first=2))
    assert cache.prefetch(prompt(6)).wait() == 6
    cache.check()
    cache.detach()


def test_L4_a_query_that_hangs_is_a_miss_in_time(backends: FakeBackends) -> None:
    cache = server(backends, lookup_deadline_s=0.1)
    go_on = backends.hold(CallKind.PROBE)
    began = time.monotonic()
    assert cache.prefetch(prompt(6)).wait() == 0
    assert time.monotonic() - began < 2.0
    go_on()
    cache.detach()


@pytest.mark.parametrize(
    "state", [KeyState.MISSING, KeyState.HOLDER_LOST, KeyState.LEASE_EXPIRED, KeyState.REFUSED, KeyState.UNAVAILABLE]
)
def test_D3_what_goes_between_query_and_transfer_ends_the_prefix(backends: FakeBackends, state: KeyState) -> None:
    written_by(server(backends), prompt(6))
    cache = server(backends)
    fourth = cache.hashes(prompt(6))[3]
    backends.pools[-1].answer("get", state, key=lambda key: key.endswith(fourth))
    operation = cache.prefetch(prompt(6))
    assert operation.wait() == 3
    assert operation.hit_pages == 6
    cache.check()
    cache.detach()


def test_X4_a_short_or_a_long_value_fills_no_page_and_leaves_it_as_it_was(backends: FakeBackends) -> None:
    cache = server(backends)
    backend, pool = backends.made[0], cache.ranks[0].pool
    written_by(cache, prompt(4))
    hashes = cache.hashes(prompt(4))
    prefix = backends.store.keys()[0].rpartition("/")[0]
    for page_hash, size in ((hashes[1], pool.page_bytes - 1), (hashes[2], pool.page_bytes + 1)):
        backends.store.write(f"{prefix}/{page_hash}", b"?" * size)
    indices = pool.alloc(4)
    assert indices is not None
    assert backend.batch_get_v1(hashes, indices) == [True, False, False, True]
    pages = pool.pages_of(indices)
    assert [pool.read(page) == pool.content(page_hash, 0) for page, page_hash in zip(pages, hashes, strict=True)] == [
        True,
        False,
        False,
        True,
    ]
    assert set(pool.read(pages[1])) == set(pool.read(pages[2])) == {EMPTY}
    pool.free(indices)
    cache.detach()


def test_L8_a_page_that_did_not_come_is_not_asked_for_again_at_once(backends: FakeBackends) -> None:
    written_by(server(backends), prompt(6))
    cache = server(backends)
    backends.pools[-1].answer("get", KeyState.HOLDER_LOST)
    assert cache.prefetch(prompt(6)).wait() == 0
    gets = sum(call.operation == "get" for call in backends.pools[-1].calls)
    assert cache.prefetch(prompt(6)).wait() == 0
    assert sum(call.operation == "get" for call in backends.pools[-1].calls) == gets
    cache.detach()


def test_O7_with_the_pool_down_everything_is_a_miss_at_once_and_works_again_when_it_is_back(backends: FakeBackends) -> None:
    cache = server(backends)
    written_by(cache, prompt(6))
    backends.store.down = True
    assert cache.prefetch(prompt(6)).wait() == 0
    cache.compute(prompt(6))
    assert cache.backup(prompt(6)).wait() == 0
    assert cache.ranks[0].backend.clear() is False
    backends.store.down = False
    gate = backends.made[0]._loop.served.gate
    backends.wait_until(lambda: backends.on_loop(gate.lets_through))
    assert cache.backup(prompt(6)).wait() == 6
    cache.detach()


def test_a_full_pool_refuses_and_nothing_is_raised(backends: FakeBackends) -> None:
    cache = server(backends)
    cache.compute(prompt(6))
    backends.pools[-1].answer("put", KeyState.NO_SPACE, times=None)
    assert cache.backup(prompt(6)).wait() == 0
    cache.detach()


def test_after_a_part_that_was_refused_nothing_further_is_put(backends: FakeBackends) -> None:
    # Two pages fit into the slots of one direction: parts of one page.
    page = HostPool().page_bytes
    cache = server(backends, staging_buffer_bytes=2 * page)
    cache.compute(prompt(6))
    third = cache.hashes(prompt(6))[2]
    backends.pools[-1].answer("put", KeyState.REFUSED, key=lambda key: key.endswith(third), times=None)
    stored = cache.ranks[0].backend.batch_set_v1(*_held(cache, prompt(6)))
    assert stored == [True, True, False, False, False, False]
    assert [len(call.keys) for call in backends.pools[-1].calls if call.operation == "put"] == [1, 1, 1]
    stagings = backends.made[-1]._loop.served._stagings.values()
    assert backends.on_loop(lambda: [staging.slots.free for staging in stagings]) == [2, 2], "slots were kept"
    cache.detach()


def test_D3_behind_a_part_with_a_hole_nothing_further_is_asked_for(backends: FakeBackends) -> None:
    cache = server(backends, staging_buffer_bytes=2 * HostPool().page_bytes)
    written_by(cache, prompt(6))
    third = cache.hashes(prompt(6))[2]
    backends.pools[-1].answer("get", KeyState.MISSING, key=lambda key: key.endswith(third))
    assert cache.prefetch(prompt(6)).wait() == 2
    assert [len(call.keys) for call in backends.pools[-1].calls if call.operation == "get"] == [1, 1, 1]
    cache.detach()


def test_with_slots_for_one_page_everything_passes_one_by_one(backends: FakeBackends) -> None:
    cache = server(backends, staging_buffer_bytes=HostPool().page_bytes)
    written_by(cache, prompt(6))
    assert cache.prefetch(prompt(6)).wait() == 6
    cache.check()
    cache.detach()


def test_what_is_there_already_is_neither_copied_nor_put_again(backends: FakeBackends) -> None:
    cache = server(backends)
    written_by(cache, prompt(4))
    cache.compute(prompt(6))
    assert cache.backup(prompt(6)).wait() == 6
    assert [len(call.keys) for call in backends.pools[0].calls if call.operation == "put"] == [4, 2]
    cache.detach()


@pytest.mark.parametrize(("role", "stored", "found"), [("producer", 6, 0), ("consumer", 0, 6), ("both", 6, 6)])
def test_O1_a_role_does_what_it_says(backends: FakeBackends, role: str, stored: int, found: int) -> None:
    written_by(server(backends), prompt(6))
    cache = server(backends, role=role)
    assert cache.prefetch(prompt(6)).wait() == found
    cache.compute(prompt(6, first=2))
    assert cache.backup(prompt(6, first=2)).wait() == stored
    cache.detach()


def test_D3_what_one_rank_did_not_get_no_rank_uses(backends: FakeBackends) -> None:
    configs = [HiCacheStorageConfig(tp_rank=rank, tp_size=2, extra_config=dict(V1)) for rank in range(2)]
    cache = HiCache([Rank(config, backends, HostPool()) for config in configs])
    written_by(cache, prompt(6))
    backends.pools[1].answer("get", KeyState.MISSING, key=lambda key: key.endswith(cache.hashes(prompt(6))[3]))
    assert cache.prefetch(prompt(6)).wait() == 3
    cache.check()
    cache.detach()


def test_K3_of_ranks_with_the_same_bytes_one_writes(backends: FakeBackends) -> None:
    config = HiCacheStorageConfig(tp_rank=1, tp_size=2, is_mla_model=True, extra_config=dict(V1))
    rank = Rank(config, backends, LatentHostPool())
    cache = HiCache([rank])
    cache.compute(prompt(2))
    assert rank.backend.batch_set_v1(*_held(cache, prompt(2))) == [True, True]
    assert backends.store.keys() == []
    cache.detach()


def test_L2_a_side_pool_that_lost_a_page_takes_the_prefix_with_it(backends: FakeBackends) -> None:
    sides = (PoolName.INDEXER, PoolName.SWA)
    written_by(server(backends, sides=sides), prompt(6))
    cache = server(backends, sides=sides)
    last = cache.hashes(prompt(6))[5]
    backends.pools[-1].answer("get", KeyState.MISSING, key=lambda key: "/swa/" in key and key.endswith(last))
    operation = cache.prefetch(prompt(6))
    assert (operation.wait(), operation.hit_pages) == (0, 6)
    cache.check()
    cache.detach()


def test_O6_closing_beside_a_call_that_hangs_ends_in_time_and_afterwards_everything_is_a_miss(backends: FakeBackends) -> None:
    cache = server(backends, load_deadline_s=0.1)
    written_by(cache, prompt(4))
    backend = backends.made[0]
    backends.hold(CallKind.GET)
    assert cache.prefetch(prompt(4)).wait() == 0
    began = time.monotonic()
    cache.detach()
    assert time.monotonic() - began < 5.0
    backend.close()
    hashes = cache.hashes(prompt(4))
    indices = cache.ranks[0].pool.alloc(4)
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_get_v1(hashes, indices) == [False] * 4
    assert backend.batch_set_v1(hashes, indices) == [False] * 4
    assert backend.clear() is False
    # The call that hangs still writes into the staging memory: it stays registered, and nothing of SGLang's is touched.
    assert backends.pools[0].registered
    backends.pools[0]._registered.clear()
    cache.check()


def test_clearing_takes_the_pages_of_this_server_only(backends: FakeBackends) -> None:
    cache = server(backends)
    written_by(cache, prompt(4))
    backends.store.write("akv1/other/page", b"x")
    cache.clear_storage()
    assert backends.store.keys() == ["akv1/other/page"]
    cache.detach()


def test_metrics_come_as_sglang_counts_them_and_only_if_it_asks(backends: FakeBackends) -> None:
    config = HiCacheStorageConfig(enable_storage_metrics=True, extra_config=dict(V1))
    cache = HiCache([Rank(config, backends, HostPool())])
    written_by(cache, prompt(6))
    cache.prefetch(prompt(6)).wait()
    stats = cache.ranks[0].backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([6], [6])
    assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
    assert cache.ranks[0].backend.get_stats().prefetch_pgs == []
    cache.detach()
    quiet = server(backends)
    assert quiet.ranks[0].backend.get_stats() is None
    quiet.detach()


def test_a_logical_kv_pool_has_no_bytes_and_its_side_pools_decide(backends: FakeBackends) -> None:
    cache = server(backends, sides=(PoolName.INDEXER,))
    backend, side = cache.ranks[0].backend, cache.ranks[0].sides[PoolName.INDEXER].pool
    anchor = HostPool()
    anchor.kv_buffer = None
    backend.register_mem_pool_host(anchor)
    hashes = cache.hashes(prompt(4))
    assert backend.batch_exists(hashes) == 4
    assert backend.batch_get_v1(hashes, range(16)) == backend.batch_set_v1(hashes, range(16)) == [True] * 4
    indices = side.alloc(2)
    assert indices is not None
    transfer = PoolTransfer(PoolName.INDEXER, host_indices=indices, keys=hashes[:2])
    assert backend.batch_set_v2([transfer]) == {PoolName.INDEXER: [True, True]}
    result = backend.batch_exists_v2(hashes, [transfer])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (2, {PoolName.KV: 4, PoolName.INDEXER: 2})
    side.free(indices)
    cache.detach()


def test_a_caller_that_breaks_the_interface_is_told(backends: FakeBackends) -> None:
    cache = server(backends)
    backend, pool = cache.ranks[0].backend, cache.ranks[0].pool
    with pytest.raises(EngineContractError, match="2 pages of pool 'kv' have 8 indices"):
        backend.batch_get_v1(["a", "b"], range(PAGE))
    with pytest.raises(EngineContractError, match="2 pages of pool 'kv' have 8 indices, at 4 a page, and 0 were given"):
        backend.batch_set_v1(["a", "b"], None)
    with pytest.raises(EngineContractError, match="'swa' was never registered"):
        backend.batch_get_v2([PoolTransfer(PoolName.SWA, host_indices=range(4), keys=["a"])])
    with pytest.raises(EngineContractError, match="flat pages"):
        backend.batch_set(["a"], [pool.get_dummy_flat_data_page()])
    assert backend.batch_get_v1([], range(0)) == []
    cache.detach()
    flat = server(backends, v1=False)
    with pytest.raises(EngineContractError, match="1 keys and 0 pages"):
        flat.ranks[0].backend.batch_get(["a"], [])
    with pytest.raises(EngineContractError, match="flat page of 8 bytes"):
        flat.ranks[0].backend.set("a", HostPool(layers=1, heads=1, page_size=1).get_dummy_flat_data_page())
    assert flat.ranks[0].backend.get("a", pool.get_dummy_flat_data_page()) is None
    assert flat.ranks[0].backend.exists("a") is False
    flat.detach()


def _held(cache: HiCache, tokens: list[int]) -> tuple[list[str], Any]:
    rank, hashes = cache.ranks[0], cache.hashes(tokens)
    return hashes, rank._indices(PoolName.KV, hashes)
