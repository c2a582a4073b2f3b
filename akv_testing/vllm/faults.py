"""A store whose pages are named and cannot be read, in a real server: gets fail at the client's boundary, and nothing else."""

from typing import Any

import akv.pool
from akv.pool import LentSegments, MooncakePool
from akv.settings import StoreSettings

#: What the client answers where the transfer from the holder of a page failed.
_TRANSFER_FAILED = -800


class FailingGets:
    """Makes gets of this process's store fail while it is told to."""

    def __init__(self) -> None:
        """Wraps every client that akv sets up from now on in this process."""
        self.on = False
        self.failed = 0
        set_up = akv.pool.set_up_store

        def wrapped(store: StoreSettings, lent: LentSegments | None = None) -> MooncakePool:
            pool = set_up(store, lent)
            # The one place between akv and the real client.
            pool._client = _Client(pool._client, self)
            return pool

        akv.pool.set_up_store = wrapped


class _Client:
    """The store's client but for gets that fail."""

    def __init__(self, client: Any, gets: FailingGets) -> None:
        self._client = client
        self._gets = gets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> Any:
        if not self._gets.on:
            return self._client.batch_get_into(keys, addresses, sizes)
        self._gets.failed += 1
        return [_TRANSFER_FAILED] * len(keys)
