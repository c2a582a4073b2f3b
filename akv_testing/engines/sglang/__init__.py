"""A stand-in for SGLang's hierarchical cache, which drives a storage backend in the order of the real one.

It was written from SGLang 0.5.20 to 0.5.23: `mem_cache/hicache_storage.py` (the interface), `managers/cache_controller.py` and
`mem_cache/hybrid_cache/hybrid_cache_controller.py` (who calls what, from which thread, and what becomes of the answers). It
knows nothing of akv but the shape of `Interface`, and works with any `HiCacheStorage` that is a subclass of `INTERFACE.base`.
`akv_testing.conformance.sglang` holds what a backend must pass.
"""

from akv_testing.engines.sglang.controller import HiCache
from akv_testing.engines.sglang.errors import BackendFault
from akv_testing.engines.sglang.host_pool import HostPool, LatentHostPool, StatePool
from akv_testing.engines.sglang.interface import (
    INTERFACE,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageMetrics,
)

__all__ = [
    "INTERFACE",
    "BackendFault",
    "HiCache",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HostPool",
    "LatentHostPool",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "StatePool",
    "StorageMetrics",
]
