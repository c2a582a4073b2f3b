"""What SGLang calls: a `HiCacheStorage` whose pages are in a Mooncake pool.

SGLang calls it from threads of its own: the query of a prefetch, its transfers and the backup, each from one; to register,
clear, read metrics and close from its scheduler. Every method waits for an answer, within akv's deadlines, and says of each
page whether it is there, arrived or was stored: trouble with the pool is never raised. What is raised is a fault of the
configuration, as the backend is attached, or of a caller that breaks the interface.

Nothing that the store may write is ever a page of SGLang's: when a method returns SGLang uses the pages again, whatever became
of the call, and cannot be told to wait. So pages pass through slots of akv's own (`page_store.py`), and `transfers.py` copies.
"""

import atexit
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from akv import observe
from akv.bridge import LoopThread
from akv.engines.sglang.extra_config import is_v1, settings_of
from akv.engines.sglang.hits import PoolPages, hits_of, prefix_length
from akv.engines.sglang.host_pages import HostPages, PagePlace, place_of_tensor
from akv.engines.sglang.interface import Interface
from akv.engines.sglang.metrics import TransferMetrics
from akv.engines.sglang.names import PageKeys, Ranks
from akv.engines.sglang.page_store import StorePorts, open_page_store
from akv.engines.sglang.transfers import StoredPool, Transfers
from akv.errors import EngineContractError, NotOpenError
from akv.ports.pool import KeyState

#: The pool that holds the model's own KV, as SGLang spells its name.
KV = "kv"
#: Seconds that `close()` waits beyond `shutdown_deadline_s`: the store's own `close` comes last and knows no deadline (O7).
GRACE_S = 5.0


class HiCacheBackend:
    """The methods of a `HiCacheStorage`. `storage_class()` makes a class of it that is one of the engine's own."""

    #: The engine's words; set by `storage_class`.
    interface: ClassVar[Interface]

    def __init__(self, storage_config: Any, kwargs: Any = None, *, ports: StorePorts | None = None) -> None:
        """Join the pool, on a loop in a thread of its own. As SGLang's factory calls it; `ports` are for tests.

        Raises SettingsError, DependencyError, PoolError: then SGLang does not start, and nothing stays open.
        """
        del kwargs  # SGLang hands its factory's own along.
        settings = self._settings = settings_of(storage_config)
        self._ranks = Ranks.of(storage_config)
        self._v1 = is_v1(storage_config)
        self._metrics = TransferMetrics(self.interface.metrics if storage_config.enable_storage_metrics else None)
        #: By SGLang's name of the pool.
        self._pools: dict[str, StoredPool] = {}
        #: The KV pool only hands out indices; side pools hold the bytes.
        self._kv_is_logical = False
        self._loop = LoopThread(lambda: open_page_store(settings, ports), name="akv-sglang")
        # Behind the exit guard, which was registered while the pool opened, and so run before it.
        atexit.register(self.close)
        self._transfers = Transfers(self._loop, settings.load_deadline_s)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the model's own KV. Raises SettingsError for one whose pages cannot be found."""
        self.mem_pool_host = mem_pool_host
        self._kv_is_logical = getattr(mem_pool_host, "kv_buffer", None) is None
        if not self._kv_is_logical:
            self._register(mem_pool_host, KV, flat=not self._v1)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A side pool. Raises as `register_mem_pool_host` does."""
        name = _word(host_pool_name)
        if name != KV:
            self._register(host_pool, name)

    def on_host_pools_registered(self) -> None:
        """Every pool is registered by itself."""

    def exists(self, key: str) -> bool:
        """Whether the page of that hash is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages lead of which every one is there. What keeps the pool from answering in time is a miss (L4)."""
        del extra_info
        if self._kv_is_logical:
            return len(keys)
        pool = self._pool(KV)
        return prefix_length(self._transfers.present(pool.keys.of(keys))) if self._reads and keys else 0

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """How many pages lead that can be used, with what the side pools need for it, by their policies."""
        kv_pages = self.batch_exists(keys, extra_info)
        asked = [(transfer, self._pool(_word(transfer.name))) for transfer in pool_transfers or ()]
        names = [name for _, pool in asked for name in pool.keys.of(keys[:kv_pages])]
        there = self._transfers.present(names, to_first_hole=False) if names else []
        pools = [
            PoolPages(
                name=transfer.name,
                policy=_word(transfer.hit_policy),
                trailing=len(transfer.keys or ()),
                there=there[at * kv_pages : (at + 1) * kv_pages],
            )
            for at, (transfer, _) in enumerate(asked)
        ]
        hits = hits_of(self.interface.kv, kv_pages, pools)
        return self.interface.result(hits.pages, hits.by_pool, hits.restorable)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill pages of the KV pool, and say which are filled."""
        del extra_info
        return [True] * len(keys) if self._kv_is_logical else self._load(KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the KV pool, and say which are in the store."""
        del extra_info
        return [True] * len(keys) if self._kv_is_logical else self._save(KV, keys, host_indices)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_get_v1` for pages of any pools."""
        del extra_info
        return {t.name: self._load(_word(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_set_v1` for pages of any pools."""
        del extra_info
        return {t.name: self._save(_word(t.name), t.keys or [], t.host_indices) for t in transfers}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fill a flat page, and return it; None if it is not filled."""
        del target_sizes
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fill flat pages of the KV pool, and return those that are filled, None for the others."""
        del target_sizes
        pool = self._flat_pool()
        targets = list(target_locations or ())
        places = [place_of_tensor(target, pool.pages.page_bytes) for target in targets]
        filled = self._prefetch(pool, keys, places)
        return [target if is_filled else None for target, is_filled in zip(targets, filled, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page."""
        del target_location, target_sizes
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store flat pages of the KV pool. Whether all of them are in the store."""
        del target_locations, target_sizes
        pool = self._flat_pool()
        places = [place_of_tensor(value, pool.pages.page_bytes) for value in values or ()]
        return all(self._back_up(pool, keys, places))

    def clear(self) -> bool:
        """Take this rank's pages out of the pool, whoever stored them, and no others. Whether all of them are gone."""
        cleared = True
        for name, pool in self._pools.items():
            state, pages = KeyState.UNAVAILABLE, 0
            try:
                answer = self._loop.call(self._loop.served.remove_all, pool.keys.prefix)
                state, pages = answer.state, answer.code if answer.state is KeyState.OK else 0
            except NotOpenError:
                cleared = False
            cleared = cleared and state is KeyState.OK
            observe.emit(observe.SGLANG_CLEARED, pool=name, pages=pages, state=state.value)
        return cleared

    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics` since the last call; None if it did not ask for metrics."""
        return self._metrics.take()

    def close(self) -> None:
        """Leave the pool, and end loop and thread. Idempotent. Afterwards nothing is there, and nothing is stored."""
        atexit.unregister(self.close)
        limit_s = self._settings.shutdown_deadline_s + GRACE_S
        if not self._loop.close(limit_s):
            observe.emit(observe.BRIDGE_UNCLOSED, waited_s=limit_s)

    @property
    def _reads(self) -> bool:
        return self._settings.role != "producer"

    def _register(self, host_pool: Any, name: str, *, flat: bool = False) -> None:
        pages = HostPages(host_pool, name, flat=flat)
        replicated = pages.is_replicated(self._ranks.replicated)
        keys = PageKeys(self._settings, pages.shape, self._ranks, replicated=replicated)
        self._loop.call(self._loop.served.make_room, pages.page_bytes)
        part = self._loop.call(self._loop.served.part, pages.page_bytes)
        self._pools[name] = StoredPool(pages, keys, part, writes=not replicated or self._ranks.tp_rank == 0)
        observe.emit(
            observe.SGLANG_POOL,
            pool=name,
            key_space=keys.prefix,
            layout=pages.shape.layout,
            page_bytes=pages.page_bytes,
            pieces=len(pages.shape.pieces),
        )

    def _pool(self, name: str) -> StoredPool:
        pool = self._pools.get(name)
        if pool is None:
            there = ", ".join(self._pools) or "none"
            raise EngineContractError(f"pool {name!r} was never registered; registered are: {there}")
        return pool

    def _flat_pool(self) -> StoredPool:
        pool = self._pool(KV)
        if pool.pages.shape.access != "flat":
            raise EngineContractError("flat pages were handed over, and interface_v1 says that SGLang names where pages lie")
        return pool

    def _load(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self._pool(name)
        return self._prefetch(pool, keys, pool.pages.places(host_indices, len(keys)) if keys else [])

    def _save(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self._pool(name)
        return self._back_up(pool, keys, pool.pages.places(host_indices, len(keys)) if keys else [])

    def _prefetch(self, pool: StoredPool, keys: Sequence[str], places: Sequence[PagePlace]) -> list[bool]:
        """Fill pages, and say which are filled; none where this role does not read."""
        _check_counts(keys, places)
        began = time.monotonic()
        filled = self._transfers.load(pool, pool.keys.of(keys), places) if keys and self._reads else [False] * len(keys)
        seconds, pages, nbytes = time.monotonic() - began, sum(filled), sum(filled) * pool.pages.page_bytes
        self._metrics.moved("prefetch", pages, nbytes, seconds)
        name, asked = pool.pages.name, len(keys)
        observe.emit(observe.SGLANG_PREFETCHED, pool=name, pages=asked, moved=pages, bytes=nbytes, duration_s=seconds)
        return filled

    def _back_up(self, pool: StoredPool, keys: Sequence[str], places: Sequence[PagePlace]) -> list[bool]:
        """Store pages, and say which are in the store; none where this role does not write."""
        _check_counts(keys, places)
        if not pool.writes:
            # Another rank stores the same bytes under the same keys (K3).
            return [True] * len(keys)
        began = time.monotonic()
        writes = keys and self._settings.role != "consumer"
        stored = self._transfers.save(pool, pool.keys.of(keys), places) if writes else [False] * len(keys)
        seconds, pages, nbytes = time.monotonic() - began, sum(stored), sum(stored) * pool.pages.page_bytes
        self._metrics.moved("backup", pages, nbytes, seconds)
        name, asked = pool.pages.name, len(keys)
        observe.emit(observe.SGLANG_BACKED_UP, pool=name, pages=asked, moved=pages, bytes=nbytes, duration_s=seconds)
        return stored


def storage_class(interface: Interface) -> type[HiCacheBackend]:
    """The backend as a class of the engine's own kind."""
    return type("AkvHiCacheStorage", (HiCacheBackend, interface.base), {"interface": interface, "__module__": __package__})


def _word(name: Any) -> str:
    """What a member of one of SGLang's enumerations is called."""
    return str(getattr(name, "value", name))


def _check_counts(keys: Sequence[str], places: Sequence[PagePlace]) -> None:
    if len(places) != len(keys):
        raise EngineContractError(f"{len(keys)} keys and {len(places)} pages do not belong together")
