"""What the adapter needs of SGLang itself: its base class, a few of its words, and a version that it can work with."""

import importlib
from importlib import metadata
from typing import Any

import msgspec

from akv.errors import DependencyError

#: Versions of SGLang whose interface this adapter speaks: the first, and the first that it may not. Before 0.5.20 the hash of
#: a page says nothing of a request's LoRA adapter and cache salt, so that one adapter would be answered from another's pages.
FIRST, BEFORE = (0, 5, 20), (0, 6)


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """Classes and words of the engine. The stand-in of `akv_testing` has its own, of the same shape."""

    #: `HiCacheStorage`, which a dynamic backend must be a subclass of.
    base: type
    #: `PoolTransferResult(kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages)`.
    result: Any
    #: `PoolName.KV`: results are looked up by it, and an Enum's hash is not that of its text.
    kv: Any
    #: `StorageMetrics()`, with four lists; None where there are no metrics.
    metrics: Any = None


def load_interface() -> Interface:
    """Import SGLang's part. Raises DependencyError (fault of the installation): it is missing, or of another version."""
    check_version(_installed())
    try:
        storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        metrics = importlib.import_module("sglang.srt.observability.metrics_collector")
    except ImportError as error:
        raise DependencyError(f"SGLang's hierarchical cache cannot be imported: {error}") from error
    return Interface(
        base=storage.HiCacheStorage,
        result=storage.PoolTransferResult,
        kv=storage.PoolName.KV,
        metrics=getattr(metrics, "StorageMetrics", None),
    )


def check_version(version: str) -> None:
    """Refuse a version of SGLang that this adapter does not know. Raises DependencyError with the range that it does."""
    if not FIRST <= _numbers(version) < BEFORE:
        raise DependencyError(
            f"SGLang {version} is installed, and akv.engines.sglang works with {_text(FIRST)} and later, before "
            f"{_text(BEFORE)}. Earlier ones leave LoRA adapters and cache salts out of the hashes of pages, so that requests "
            "would be answered from pages of others; later ones may call a storage backend in another way."
        )


def _installed() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise DependencyError("akv.engines.sglang is a part of SGLang, and the package 'sglang' is not installed") from error


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 5, 20) of "0.5.20.post1"."""
    numbers: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
