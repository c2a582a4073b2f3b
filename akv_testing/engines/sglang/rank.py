"""One rank of the stand-in: its host pools, its backend, and what it does when the controller says so."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from akv_testing.engines.sglang.errors import BackendFault
from akv_testing.engines.sglang.host_pool import HostPool, Indices
from akv_testing.engines.sglang.interface import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer

#: Pages of one call that moves pages of the KV pool; queries of its side pools come whole.
STORAGE_BATCH_SIZE = 128
#: Makes a backend, as SGLang's factory does.
MakeBackend = Callable[[HiCacheStorageConfig], Any]


class SidePool:
    """A pool beside the KV: which of its pages a prefix needs."""

    def __init__(self, pool: HostPool, policy: PoolHitPolicy, trailing: int = 1) -> None:
        self.pool = pool
        self.policy = policy
        #: Pages at the end of a prefix, with `TRAILING_PAGES`.
        self.trailing = trailing

    def hashes(self, hashes: Sequence[str]) -> list[str]:
        """Those pages of a prefix that it needs."""
        return list(hashes if self.policy is PoolHitPolicy.ALL_PAGES else hashes[-self.trailing :])


class Rank:
    """A rank's host pools and its backend. `sides` have indices of their own."""

    def __init__(
        self, config: HiCacheStorageConfig, make: MakeBackend, pool: HostPool, sides: dict[PoolName, SidePool] | None = None
    ) -> None:
        self.config = config
        self.pool = pool
        self.sides = sides or {}
        self._v1 = bool((config.extra_config or {}).get("interface_v1"))
        self.backend = make(config)
        self.backend.register_mem_pool_host(pool)
        for name, side in self.sides.items():
            self.backend.register_mem_host_pool_v2(side.pool, name)
        self.backend.on_host_pools_registered()
        #: What each page holds that is not free, by its hash; the KV pool's, then the side pools'.
        self.held: dict[PoolName, dict[str, int]] = {name: {} for name in (PoolName.KV, *self.sides)}

    def pool_of(self, name: PoolName) -> HostPool:
        """The host pool of that name."""
        return self.pool if name is PoolName.KV else self.sides[name].pool

    def compute(self, hashes: Sequence[str]) -> None:
        """Fill pages as a forward and its copies to the host do, those that are not held."""
        for name in self.held:
            wanted = hashes if name is PoolName.KV else self.sides[name].hashes(hashes)
            pool = self.pool_of(name)
            for page_hash in wanted:
                if page_hash not in self.held[name]:
                    indices = pool.alloc(1)
                    if indices is None:
                        raise MemoryError(f"host pool {name.value} is full: evict something")
                    (page,) = pool.pages_of(indices)
                    pool.write(page, pool.content(page_hash, self.config.tp_rank))
                    self.held[name][page_hash] = page

    def query(self, hashes: list[str]) -> int:
        """How many pages a prefetch would get: what a storage query asks."""
        if self.sides:
            transfers = [
                PoolTransfer(name, keys=side.hashes(hashes), hit_policy=side.policy) for name, side in self.sides.items()
            ]
            result = self.backend.batch_exists_v2(hashes, transfers)
            restorable = result.restorable_prefix_pages
            if restorable is not None and (restorable[-1] if restorable else 0) != result.kv_hit_pages:
                raise BackendFault("the longest prefix is not the last of those that can be restored")
            return _count(result.kv_hit_pages, len(hashes))
        found = 0
        for at in range(0, len(hashes), STORAGE_BATCH_SIZE):
            batch = hashes[at : at + STORAGE_BATCH_SIZE]
            hit = _count(self.backend.batch_exists(batch), len(batch))
            found += hit
            if hit < len(batch):
                break
        return found

    def get_batch(self, hashes: list[str], indices: Indices) -> int:
        """Fill pages of the KV pool, and say how many lead that are filled."""
        if self._v1:
            return _leading(_answers(self.backend.batch_get_v1(hashes, indices), len(hashes)))
        flat = self.backend.batch_get(hashes, [self.pool.get_dummy_flat_data_page() for _ in hashes])
        count = 0
        for at, page in enumerate(flat):
            if page is None:
                break
            self.pool.set_from_flat_data_page(int(indices[at * self.pool.page_size]), page)
            count += 1
        return count

    def get_sides(self, hashes: list[str], places: dict[PoolName, Indices]) -> bool:
        """Fill the pages of the side pools that a prefix needs. Whether all of them are filled."""
        transfers = [
            PoolTransfer(name, host_indices=places[name], keys=side.hashes(hashes)) for name, side in self.sides.items()
        ]
        results = self.backend.batch_get_v2(transfers)
        return all(all(_answers(results[t.name], len(t.keys or ()))) for t in transfers)

    def backup(self, hashes: list[str]) -> int:
        """Store pages of the KV pool, after what the side pools have for them. How many lead that were stored."""
        writes = not self.config.is_mla_model or self.config.tp_rank == 0
        transfers = [
            PoolTransfer(name, host_indices=self._indices(name, side.hashes(hashes)), keys=side.hashes(hashes))
            for name, side in self.sides.items()
            # States are split over the ranks, whatever the KV is.
            if writes or name is PoolName.MAMBA
        ]
        if transfers:
            results = self.backend.batch_set_v2(transfers)
            for transfer in transfers:
                _answers(results[transfer.name], len(transfer.keys or ()))
        stored = 0
        for at in range(0, len(hashes) if writes else 0, STORAGE_BATCH_SIZE):
            batch = hashes[at : at + STORAGE_BATCH_SIZE]
            if not self._set_batch(batch):
                break
            stored += len(batch)
        return stored

    def release(self, name: PoolName, indices: Indices) -> None:
        """Give pages back."""
        self.pool_of(name).free(indices)

    def evict(self, hashes: Sequence[str]) -> None:
        """Drop pages that the host holds, those of the side pools too."""
        for name, pages in self.held.items():
            for page_hash in hashes:
                if page_hash in pages:
                    page, size = pages.pop(page_hash), self.pool_of(name).page_size
                    self.release(name, _span(page, size))

    def check(self) -> None:
        """Raise BackendFault if a page holds what it must not."""
        for name, pages in self.held.items():
            pool = self.pool_of(name)
            for page_hash, page in pages.items():
                if pool.read(page) != pool.content(page_hash, self.config.tp_rank):
                    raise BackendFault(f"page {page} of pool {name.value} on rank {self.config.tp_rank} holds wrong bytes")
            pool.check_free_pages()

    def _set_batch(self, hashes: list[str]) -> bool:
        if self._v1:
            answers = self.backend.batch_set_v1(hashes, self._indices(PoolName.KV, hashes))
            return all(_answers(answers, len(hashes)))
        pages = [self.pool.get_data_page(self.held[PoolName.KV][page_hash] * self.pool.page_size) for page_hash in hashes]
        return bool(self.backend.batch_set(hashes, pages))

    def _indices(self, name: PoolName, hashes: Sequence[str]) -> Indices:
        size = self.pool_of(name).page_size
        return _joined([_span(self.held[name][page_hash], size) for page_hash in hashes])


def _span(page: int, size: int) -> Indices:
    return np.arange(page * size, (page + 1) * size, dtype=np.int64)


def _joined(spans: Sequence[Indices]) -> Indices:
    return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)


def _count(pages: Any, most: int) -> int:
    if not isinstance(pages, int) or not 0 <= pages <= most:
        raise BackendFault(f"of {most} pages a query found {pages!r}")
    return pages


def _answers(answers: Any, count: int) -> list[bool]:
    if not isinstance(answers, list) or len(answers) != count or not all(isinstance(answer, bool) for answer in answers):
        raise BackendFault(f"{count} pages were asked for, and the answer is {answers!r}")
    return answers


def _leading(answers: Sequence[bool]) -> int:
    return answers.index(False) if False in answers else len(answers)
