"""The interface between SGLang and a storage backend, of the same shape as the real one and without torch."""

# ruff: noqa: D102 - what a method is for is told where `HiCache` and `Rank` call it

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from akv.engines.sglang import Interface


class PoolName(str, Enum):  # noqa: UP042 - as SGLang's, whose members hash otherwise than a StrEnum's
    """Host pools. As at SGLang a member's hash is that of its name, and not of its text: results are looked up by members."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"


class PoolHitPolicy(str, Enum):  # noqa: UP042 - as SGLang's
    """What of a side pool must be there for a prefix."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class HiCacheStorageConfig:
    """What a backend is made with."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0


@dataclass
class PoolTransfer:
    """Pages of one pool: which, and where they lie in host memory."""

    name: PoolName
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    indices_from_pool: PoolName | None = None


@dataclass
class PoolTransferResult:
    """What a query found, in pages."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    """What a backend counted since it was asked last."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage(abc.ABC):
    """What a backend must be. Without a word of what each method does: that is told where `HiCache` calls it."""

    @abc.abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abc.abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abc.abstractmethod
    def exists(self, key: str) -> bool: ...

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    def on_host_pools_registered(self) -> None:
        return None

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next((index for index, key in enumerate(keys) if not self.exists(key)), len(keys))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        return PoolTransferResult(0, {})

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return [False] * len(keys)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return [False] * len(keys)

    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

    def clear(self) -> Any:
        return None

    def get_stats(self) -> Any:
        return None

    def close(self) -> None:
        return None


INTERFACE = Interface(base=HiCacheStorage, result=PoolTransferResult, kv=PoolName.KV, metrics=StorageMetrics)
