"""The stand-in for SGLang and the conformance suite, on a backend that is not akv's, and on such that are wrong."""

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from akv_testing.conformance.sglang import HiCacheConformance, prompt, written_by
from akv_testing.engines.sglang import (
    BackendFault,
    HiCache,
    HiCacheStorage,
    HiCacheStorageConfig,
    HostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from akv_testing.engines.sglang.rank import Rank


class DictStorage(HiCacheStorage):
    """Keeps values in a dictionary that all of a test share: the least that a backend must do."""

    values: ClassVar[dict[str, bytes]] = {}

    def __init__(self, config: HiCacheStorageConfig) -> None:
        self.config = config
        self.pools: dict[PoolName, HostPool] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.pools[PoolName.KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.pools[host_pool_name] = host_pool

    def name(self, pool: PoolName, key: str) -> str:
        replicated = self.config.is_mla_model and pool is not PoolName.MAMBA
        rank = "" if replicated else f"{self.config.tp_size}-{self.config.tp_rank}"
        return f"{pool.value}/{self.pools[pool].layout}/{rank}/{key}"

    def exists(self, key: str) -> bool:
        return self.name(PoolName.KV, key) in self.values

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        ends = list(range(1, self.batch_exists(keys) + 1))
        for transfer in pool_transfers or ():
            there = [self.name(transfer.name, key) in self.values for key in keys]
            reach = len(keys) if transfer.hit_policy is PoolHitPolicy.ALL_PAGES else len(transfer.keys)
            ends = [end for end in ends if all(there[max(0, end - reach) : end])]
        return PoolTransferResult(ends[-1] if ends else 0, {}, ends)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {t.name: [self.fill(t.name, key, place) for key, place in self.placed(t)] for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {t.name: [self.keep(t.name, key, place) for key, place in self.placed(t)] for t in transfers}

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self.batch_get_v2([PoolTransfer(PoolName.KV, host_indices, keys)])[PoolName.KV]

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self.batch_set_v2([PoolTransfer(PoolName.KV, host_indices, keys)])[PoolName.KV]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        place = [(target_location.data_ptr(), target_location.numel())]
        return target_location if self.fill(PoolName.KV, key, place) else None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.keep(PoolName.KV, key, [(value.data_ptr(), value.numel())])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def clear(self) -> None:
        self.values.clear()

    def placed(self, transfer: PoolTransfer) -> list[tuple[str, list[tuple[int, int]]]]:
        addresses, sizes = self.pools[transfer.name].get_page_buffer_meta(transfer.host_indices)
        keys = transfer.keys or []
        pieces = list(zip(addresses, sizes, strict=True))
        each = len(pieces) // max(1, len(keys))
        return [(key, pieces[at * each : (at + 1) * each]) for at, key in enumerate(keys)]

    def fill(self, pool: PoolName, key: str, place: list[tuple[int, int]]) -> bool:
        value = self.values.get(self.name(pool, key))
        for address, nbytes in place if value is not None else ():
            assert value is not None
            ctypes.memmove(address, value[:nbytes], nbytes)
            value = value[nbytes:]
        return value is not None

    def keep(self, pool: PoolName, key: str, place: list[tuple[int, int]]) -> bool:
        self.values.setdefault(self.name(pool, key), b"".join(ctypes.string_at(*piece) for piece in place))
        return True


@pytest.fixture(autouse=True)
def empty() -> None:
    DictStorage.values.clear()


class TestAnotherBackend(HiCacheConformance):
    """Whoever does what SGLang asks for passes, akv or not."""

    @pytest.fixture
    def make_backend(self) -> Callable[[HiCacheStorageConfig], Any]:
        return DictStorage


class WritesLate(DictStorage):
    """Answers that a page did not come, and writes it afterwards."""

    late: ClassVar[list[Callable[[], object]]] = []

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        fetch = super().batch_get_v1
        self.late.append(lambda: fetch(keys, host_indices))
        return [False] * len(keys)


class Unfilled(DictStorage):
    """Says that a page came which it did not write."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return [True] * len(keys)


class OneForAllRanks(DictStorage):
    """Forgets that ranks hold different bytes."""

    def name(self, pool: PoolName, key: str) -> str:
        return key


class Codes(DictStorage):
    """Answers with the codes of its store."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        return [1] * len(keys)


class TooMany(DictStorage):
    """Finds more than it was asked for."""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return len(keys) + 1


class Raises(DictStorage):
    """Raises where its store fails."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        raise ConnectionError


def server(kind: Callable[[HiCacheStorageConfig], Any], ranks: int = 1) -> HiCache:
    configs = [HiCacheStorageConfig(tp_rank=rank, tp_size=ranks, extra_config={"interface_v1": 1}) for rank in range(ranks)]
    return HiCache([Rank(config, kind, HostPool()) for config in configs])


@pytest.mark.parametrize("kind", [Unfilled, OneForAllRanks])
def test_wrong_bytes_are_found_out(kind: type[DictStorage]) -> None:
    cache = server(kind, ranks=2)
    written_by(cache, prompt(4))
    assert cache.prefetch(prompt(4)).wait() == 4
    with pytest.raises(BackendFault, match="wrong bytes"):
        cache.check()
    cache.detach()


@pytest.mark.parametrize("reused", [False, True])
def test_M1_a_write_behind_the_end_of_a_transfer_is_found_out(reused: bool) -> None:
    cache = server(WritesLate)
    written_by(cache, prompt(4))
    assert cache.prefetch(prompt(4)).wait() == 0
    if reused:
        cache.compute(prompt(4, first=2))
    cache.check()
    WritesLate.late.pop()()
    with pytest.raises(BackendFault, match="wrong bytes" if reused else "while it was free"):
        cache.check()
    cache.detach()


@pytest.mark.parametrize(("kind", "told"), [(Codes, r"the answer is \[1, 1"), (TooMany, "of 4 pages a query found 5")])
def test_answers_of_another_form_are_found_out(kind: type[DictStorage], told: str) -> None:
    cache = server(kind)
    written_by(cache, prompt(4))
    with pytest.raises(BackendFault, match=told):
        cache.prefetch(prompt(4)).wait()
    cache.detach()


def test_what_a_backend_raises_is_raised_where_its_operation_is_waited_for() -> None:
    cache = server(Raises)
    written_by(cache, prompt(4))
    with pytest.raises(ConnectionError):
        cache.prefetch(prompt(4)).wait()
    cache.detach()


def test_pages_that_did_not_come_are_free_again() -> None:
    cache = server(DictStorage)
    written_by(cache, prompt(4))
    free = cache.ranks[0].pool.available
    del DictStorage.values[DictStorage.name(cache.ranks[0].backend, PoolName.KV, cache.hashes(prompt(4))[2])]
    # The query is answered before the page goes.
    cache.ranks[0].backend.batch_exists = len
    assert cache.prefetch(prompt(4)).wait() == 2
    assert cache.ranks[0].pool.available == free - 2
    cache.detach()
