"""What an engine without a paged cache of its own needs to embed akv: pages, and the prefixes that they can be reused for.

Pure and synchronous: one owner calls it, nothing here waits, nothing knows a device. `PagedCache` decides which page holds
which block; the engine's tensors hold the bytes. Read `cache.py` first.
"""

from akv.host.booking import Window
from akv.host.cache import PagedCache
from akv.host.preemption import youngest_behind
from akv.host.sequence import Hold, PagedSequence
from akv.host.trimming import DeclaredReuse, LocalReuse, declared_reuse, local_reuse

__all__ = [
    "DeclaredReuse",
    "Hold",
    "LocalReuse",
    "PagedCache",
    "PagedSequence",
    "Window",
    "declared_reuse",
    "local_reuse",
    "youngest_behind",
]
