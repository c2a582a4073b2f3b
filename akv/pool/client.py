"""The store's client as the adapter sees it: its import, and the part of its interface that akv uses."""

import importlib
from typing import Any, Protocol

from akv.errors import DependencyError

#: A library that the client's extension module misses -> what brings it.
_SYSTEM_LIBRARIES = {
    "libibverbs.so": "the system library libibverbs1 (Debian, Ubuntu: apt-get install -y --no-install-recommends libibverbs1)",
    "libnuma.so": "the system library libnuma1 (Debian, Ubuntu: apt-get install -y --no-install-recommends libnuma1)",
    "libmlx5.so": "the system library ibverbs-providers (Debian, Ubuntu: apt-get install -y ibverbs-providers)",
    "libcurl.so": "the system library libcurl4 (Debian, Ubuntu: apt-get install -y libcurl4)",
    "libcuda.so": "NVIDIA's driver; without a GPU use the client that needs none: pip install 'akv[mooncake-cpu]'",
    "libcudart.so": "the CUDA runtime; without a GPU use the client that needs none: pip install 'akv[mooncake-cpu]'",
}


class StoreClient(Protocol):
    """The part of `mooncake.store.MooncakeDistributedStore` that the adapter uses. Lists in, a list of codes out."""

    def batch_is_exist(self, keys: list[str]) -> Any:
        """1 for a key that is there, 0 for one that is not."""

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> Any:
        """The value's size for each key that was read."""

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: Any = ...) -> Any:
        """0 for each key that was accepted. `config`: a `ReplicateConfig`."""

    def batch_get_replica_desc(self, keys: list[str]) -> Any:
        """Where the values of those keys lie that are there, by key."""

    def mount_segment(self, path: str, size: int, offset: int, protocol: str, location: str) -> Any:
        """Lend a file: `ret` is 0 if it is mounted."""

    def batch_remove(self, keys: list[str], force: bool) -> Any:
        """0 for each key that was removed; `force` takes no notice of leases."""

    def remove_by_regex(self, regex_pattern: str, force: bool) -> Any:
        """How many keys were removed of those in which the pattern is found, or a negative code; `force` as above."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0 if the transport may use this memory now."""

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """0 if it cannot use it any more."""

    def get_hostname(self) -> str:
        """The name under which the master knows this process's segments."""

    def close(self) -> int:
        """Nothing may be called afterwards."""


def load_client_module() -> Any:
    """Import `mooncake.store`, which takes a few tenths of a second the first time.

    The client reads `MC_LOG_LEVEL` as it is imported, and the other variables of its own as it is set up.

    Raises DependencyError (fault of the installation): names the extra or the system package, and quotes the import error.
    """
    try:
        # Not `mooncake`: some versions swallow the ImportError of their own extension module there.
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise DependencyError(f"the pool needs {_what_is_missing(error)}. The import said: {error}") from error


def _what_is_missing(error: ImportError) -> str:
    for library, remedy in _SYSTEM_LIBRARIES.items():
        if library in str(error):
            return remedy
    return (
        "Mooncake's client: pip install 'akv[mooncake-cpu]' without a GPU, 'akv[mooncake]' with CUDA 12, "
        "'akv[mooncake-cuda13]' with CUDA 13 (one of them: they overwrite each other's files)"
    )
