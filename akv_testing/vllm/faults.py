"""A store whose pages are named and cannot be read, in a real server: gets fail at the client's boundary, and nothing else."""

from multiprocessing import get_context
from typing import Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

import akv.pool
from akv.pool import LentSegments, MooncakePool
from akv.settings import StoreSettings

#: What the client answers where the transfer from the holder of a page failed.
_TRANSFER_FAILED = -800


#: Of which rank gets fail: of every one, or of none.
_ALL, _NONE = -1, -2


class FailingGets:
    """Makes gets of this server's stores fail while it is told to, those of its ranks among them, which are forked from it."""

    def __init__(self) -> None:
        """Wraps every client that akv sets up from now on in this process, and in those that are forked from it."""
        shared = get_context("fork")
        self._rank = shared.Value("i", _NONE)
        self._failed = shared.Value("i", 0)
        set_up = akv.pool.set_up_store

        def wrapped(store: StoreSettings, lent: LentSegments | None = None) -> MooncakePool:
            pool = set_up(store, lent)
            # The one place between akv and the real client.
            pool._client = _Client(pool._client, self)
            return pool

        akv.pool.set_up_store = wrapped

    def fail(self, *, fail: bool, rank: int | None) -> None:
        """From now on every get fails, or those of one rank do, or none does. Counts anew."""
        self._rank.value = _NONE if not fail else _ALL if rank is None else rank
        self._failed.value = 0

    @property
    def failed(self) -> int:
        """How many have."""
        return int(self._failed.value)

    def fails(self) -> bool:
        """Whether a get of this process fails now, which is counted."""
        rank: int = self._rank.value
        fails: bool = rank == _ALL or (rank >= 0 and rank == get_tensor_model_parallel_rank())
        if fails:
            with self._failed.get_lock():
                self._failed.value += 1
        return fails


class _Client:
    """The store's client but for gets that fail."""

    def __init__(self, client: Any, gets: FailingGets) -> None:
        self._client = client
        self._gets = gets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> Any:
        if not self._gets.fails():
            return self._client.batch_get_into(keys, addresses, sizes)
        return [_TRANSFER_FAILED] * len(keys)
