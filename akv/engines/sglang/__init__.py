"""SGLang's hierarchical cache on a Mooncake pool: a `HiCacheStorage` that SGLang loads from outside itself.

SGLang names it as a "dynamic" backend, by this module and `AkvHiCacheStorage`; `docs/how-to/sglang.md` shows how. Importing
this module imports nothing of SGLang: asking for the class does, since it must be one of SGLang's own kind.

Read `backend.py` first, which is what SGLang calls; `page_store.py` is what happens on the loop.
"""

from typing import Any

from akv.engines.sglang.backend import HiCacheBackend, storage_class
from akv.engines.sglang.interface import Interface, load_interface

__all__ = ["AkvHiCacheStorage", "HiCacheBackend", "Interface", "storage_class"]


def __getattr__(name: str) -> Any:
    if name != "AkvHiCacheStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Kept, so that it is the same class however often it is asked for.
    made = globals()[name] = storage_class(load_interface())
    return made
