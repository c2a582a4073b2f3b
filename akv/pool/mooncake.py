"""The store's client behind the pool port: the only place of akv that knows Mooncake.

What the client does not forgive is refused here in Python: calls before `setup()` or after `close()` crash the process, so do
`close()` beside a running call and any call in a forked child, and TCP moves memory that was never registered, which a
transport with registration would refuse.
"""

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from akv.errors import DependencyError, NotOpenError, PoolError
from akv.observe import POOL_CALL_FAILED, emit
from akv.pool.codes import get_answer, probe_answer, put_answer, read_codes
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState

#: Keys in one call of the client that moves pages. Over TCP a peer takes at most 2,052 transfers in flight over all threads,
#: one per page of ours; past it calls fail or block for a minute and the peer stays wedged. Eight such calls at a time stay
#: below it, and with 256 pages the call's own cost (0.2 ms) vanishes.
KEYS_PER_TRANSFER = 256

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

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> Any:
        """0 for each key that was accepted."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0 if the transport may use this memory now."""

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """0 if it cannot use it any more."""

    def close(self) -> int:
        """Nothing may be called afterwards."""


def load_client_module() -> Any:
    """Import `mooncake.store`, which takes a few tenths of a second the first time.

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


class MooncakePool:
    """A store that is set up, as a `akv.ports.pool.PagePool`. Thread safe; made by `akv.pool.open_pool()`.

    `get` and `put` go to the client in calls of at most `KEYS_PER_TRANSFER` keys, one after the other, so a call of any length
    keeps within what a TCP peer takes. Two calls with one key in common are the caller's affair, as with any store.
    """

    def __init__(self, client: StoreClient, address: str) -> None:
        self._client = client
        #: The master's address, for errors and logs.
        self.address = address
        self._lock = threading.Lock()
        self._calls_running = 0
        self._closed = False
        self._pid = os.getpid()
        #: Registered memory by its address. The reference keeps it alive for as long as the store knows it.
        self._buffers: dict[int, HostBuffer] = {}

    @property
    def calls_running(self) -> int:
        """Calls that are inside the client now. `close()` beside one of them would crash the process."""
        return self._calls_running

    @property
    def buffers_registered(self) -> int:
        """Buffers that the transport may touch."""
        return len(self._buffers)

    def probe(self, keys: Sequence[str]) -> list[KeyAnswer]:
        """Say for each key whether it can be read now; the caller chunks (L3), one call is one call of the client."""
        with self._calling() as client:
            if not keys:
                return []
            began = time.monotonic()
            raw = _ask(lambda: client.batch_is_exist(list(keys)))
            return _reported("probe", began, read_codes(raw, len(keys), lambda code, _: probe_answer(code)))

    def get(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """Read each value to its offset. A longer value than its size is not written at all, a shorter one in part."""
        with self._calling() as client:
            pointers = self._pointers(keys, buffer, offsets, sizes)

            def transfer(part: slice) -> list[KeyAnswer]:
                raw = _ask(lambda: client.batch_get_into(list(keys[part]), pointers[part], list(sizes[part])))
                return read_codes(raw, len(keys[part]), lambda code, index: get_answer(code, sizes[part][index]))

            return _reported("get", time.monotonic(), _in_parts(len(keys), transfer))

    def put(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """Store each piece under its key. A key listed twice is stored once, its first piece, and answered alike (S5)."""
        with self._calling() as client:
            pointers = self._pointers(keys, buffer, offsets, sizes)
            # Inside one batch the client does not keep its promise that the first value stays.
            first = {key: index for index, key in reversed(list(enumerate(keys)))}
            order = sorted(first.values())

            def transfer(part: slice) -> list[KeyAnswer]:
                chosen = order[part]
                raw = _ask(
                    lambda: client.batch_put_from(
                        [keys[index] for index in chosen],
                        [pointers[index] for index in chosen],
                        [sizes[index] for index in chosen],
                    )
                )
                return read_codes(raw, len(chosen), lambda code, _: put_answer(code))

            answered = _reported("put", time.monotonic(), _in_parts(len(order), transfer))
            answers = dict(zip(order, answered, strict=True))
            return [answers[first[key]] for key in keys]

    def register(self, buffer: HostBuffer) -> None:
        """Make a buffer known to the transport. Raises PoolError if the store refuses (registered before, or overlapping)."""
        with self._calling() as client:
            code = client.register_buffer(buffer.address, buffer.nbytes)
            if code != 0:
                raise PoolError(
                    f"the store refused to register a buffer of {buffer.nbytes} bytes (code {code}): it overlaps one that is "
                    "registered, or the transport cannot pin it (RDMA: raise the limit of locked memory, ulimit -l)"
                )
            with self._lock:
                self._buffers[buffer.address] = buffer

    def unregister(self, buffer: HostBuffer) -> None:
        """Take a registration back. Without effect for a buffer that is not registered, and after `close()`.

        Raises PoolError if the store refuses: a peer may still write then, so the memory must not be used again (M3).
        """
        self._refuse_in_a_fork()
        if self._closed or not self._is_registered(buffer):
            return
        with self._calling() as client:
            code = client.unregister_buffer(buffer.address)
            if code != 0:
                raise PoolError(f"the store refused to unregister a buffer of {buffer.nbytes} bytes (code {code})")
            with self._lock:
                del self._buffers[buffer.address]

    def close(self) -> None:
        """Leave the pool, which takes the lent segment back. Idempotent. Holds the interpreter lock for 1 to 3 seconds (O7).

        Raises PoolError, and closes nothing, while a call is running.
        """
        self._refuse_in_a_fork()
        with self._lock:
            if self._closed:
                return
            if self._calls_running:
                raise PoolError(f"{self._calls_running} store calls are running: closing beside them would crash the process")
            self._closed = True
        self._client.close()
        self._buffers.clear()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[StoreClient]:
        """Count one call of the client, refused where the client would crash."""
        self._refuse_in_a_fork()
        with self._lock:
            if self._closed:
                raise NotOpenError("the pool was closed: its store cannot be used any more")
            self._calls_running += 1
        try:
            yield self._client
        finally:
            with self._lock:
                self._calls_running -= 1

    def _refuse_in_a_fork(self) -> None:
        if os.getpid() != self._pid:
            raise NotOpenError(
                f"this store was opened by process {self._pid} and cannot be used in its forked child {os.getpid()}: the "
                "client's threads do not exist here. Start workers with the 'spawn' method and open a connector in each."
            )

    def _is_registered(self, buffer: HostBuffer) -> bool:
        known = self._buffers.get(buffer.address)
        return known is not None and known.nbytes == buffer.nbytes

    def _pointers(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The addresses of the pieces, after every check that the client leaves out. Raises ValueError: a bug of akv's own."""
        if not len(keys) == len(offsets) == len(sizes):
            raise ValueError(f"{len(keys)} keys, {len(offsets)} offsets and {len(sizes)} sizes do not belong together")
        if keys and not self._is_registered(buffer):
            raise ValueError(f"the buffer of {buffer.nbytes} bytes is not registered with the pool")
        for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            if offset < 0 or size < 1 or offset + size > buffer.nbytes:
                raise ValueError(f"piece {index}, {size} bytes at {offset}, is not inside the buffer of {buffer.nbytes} bytes")
        return [buffer.address + offset for offset in offsets]


def _ask(call: Callable[[], Any]) -> Any:
    """What the client returned; None, which reads as refused, for a C++ exception that it let through."""
    try:
        return call()
    except RuntimeError:
        return None


def _reported(call: str, began: float, answers: list[KeyAnswer]) -> list[KeyAnswer]:
    """The answers, after trouble among them was logged. `began`: `time.monotonic()` before the call."""
    trouble = [answer for answer in answers if answer.state not in {KeyState.OK, KeyState.MISSING}]
    if trouble:
        emit(
            POOL_CALL_FAILED,
            call=call,
            state=trouble[0].state.value,
            code=trouble[0].code,
            keys=len(answers),
            failed=len(trouble),
            duration_s=time.monotonic() - began,
        )
    return answers


def _in_parts(count: int, transfer: Callable[[slice], list[KeyAnswer]]) -> list[KeyAnswer]:
    """Answers for `count` keys, `KEYS_PER_TRANSFER` at a time.

    Once the pool answered for a whole part that it is unavailable, the rest is not tried: each part would wait as long again.
    """
    answers: list[KeyAnswer] = []
    while len(answers) < count:
        part = transfer(slice(len(answers), min(count, len(answers) + KEYS_PER_TRANSFER)))
        answers += part
        if all(answer.state is KeyState.UNAVAILABLE for answer in part):
            answers += [part[-1]] * (count - len(answers))
    return answers
