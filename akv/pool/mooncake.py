"""The store's client behind the pool port: the only place of akv that knows Mooncake.

What the client does not forgive is refused here in Python: calls before `setup()` or after `close()` crash the process, so do
`close()` beside a running call and any call in a forked child, and TCP moves memory that was never registered, which a
transport with registration would refuse.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import Any, NoReturn, TypeVar

from akv.errors import NotOpenError, PoolError
from akv.pool.client import StoreClient
from akv.pool.codes import probe_answer, put_answer, read_codes, read_sizes, remove_answer
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.replicas import read_replicas
from akv.pool.segments import LentSegments
from akv.pool.transfers import PROCESS_BUDGET, TransferBudget
from akv.pool.trouble import TroubleLog
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState
from akv.values.segments import Replica

#: Keys in one call of the client that moves pages, at most. With 256 pages the call's own cost (0.2 ms) vanishes, and other
#: calls find room beside it in the budget of transfers.
KEYS_PER_TRANSFER = 256

#: What a whole part is answered with where each further one would wait as long again.
_NOBODY_ANSWERS = frozenset({KeyState.UNAVAILABLE, KeyState.HOLDER_LOST})

_Item = TypeVar("_Item")


class MooncakePool:
    """A store that is set up, as a `akv.ports.pool.PagePool`. Thread safe; made by `akv.pool.open_pool()`.

    `get` and `put` go to the client in calls of at most `KEYS_PER_TRANSFER` keys, one after the other, each of which holds its
    entries of `budget`: so calls of any length and number keep within what a TCP peer takes. A call whose turn does not come
    is answered UNAVAILABLE, with code 0, and moved nothing.

    `protocol`: of the store's transport, which decides what `lets_go_at_return` says; one that is not known says no.
    `after_call`: run on the calling thread after each call of the client; it reads the client's log.
    `own_first`: what tells the client that a value is to go to this process's own segment, as long as that has room (R5).
    `lent`: segments that go with the client.
    """

    def __init__(
        self,
        client: StoreClient,
        address: str,
        *,
        protocol: str = "",
        budget: TransferBudget = PROCESS_BUDGET,
        trouble: TroubleLog | None = None,
        after_call: Callable[[], object] = lambda: None,
        own_first: object = None,
        lent: LentSegments | None = None,
    ) -> None:
        self._client = client
        #: The master's address, for errors and logs.
        self.address = address
        self._lets_go_at_return = protocol == "tcp"
        self._budget = budget
        self._trouble = TroubleLog() if trouble is None else trouble
        self._after_call = after_call
        self._own_first = own_first
        #: What this process lends in files, if anything.
        self.lent = lent
        self._lock = threading.Lock()
        self._calls_running = 0
        self._closed = False
        self._pid = os.getpid()
        #: Registered memory by its address. The reference keeps it alive for as long as the store knows it.
        self._buffers: dict[int, HostBuffer] = {}

    @property
    def lets_go_at_return(self) -> bool:
        """Over TCP: the bytes come and go through this process's own sockets, and the call waits for them.

        Not over RDMA, where a peer that was told an address may still write there after a transfer error (M3).
        """
        return self._lets_go_at_return

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
            raw = _ask(client.batch_is_exist, _listed(keys))
            return self._reported("probe", began, read_codes(raw, len(keys), probe_answer))

    def get(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """Read each value to its offset. A longer value than its size is not written at all, a shorter one in part."""
        with self._calling() as client:
            pointers = self._pointers(keys, buffer, offsets, sizes)

            def transfer(part: slice) -> list[KeyAnswer]:
                room = _listed(sizes[part])
                raw = _ask(client.batch_get_into, _listed(keys[part]), pointers[part], room)
                return read_sizes(raw, room)

            return self._reported("get", time.monotonic(), self._in_parts(len(keys), transfer))

    def put(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """Store each piece under its key. A key listed twice is stored once, its first piece, and answered alike (S5).

        Own memory first, where this process lends any: a hit here is then a copy within this machine (R5).
        """
        if len(set(keys)) < len(keys):
            return self._put_each_once(keys, buffer, offsets, sizes)
        return self._put(keys, buffer, offsets, sizes, () if self._own_first is None else (self._own_first,))

    def put_anywhere(
        self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[KeyAnswer]:
        """As `put`, of distinct keys, to whatever memory of the pool the master picks."""
        return self._put(keys, buffer, offsets, sizes, ())

    def _put(
        self,
        keys: Sequence[str],
        buffer: HostBuffer,
        offsets: Sequence[int],
        sizes: Sequence[int],
        config: tuple[()] | tuple[object],
    ) -> list[KeyAnswer]:
        with self._calling() as client:
            pointers = self._pointers(keys, buffer, offsets, sizes)

            def transfer(part: slice) -> list[KeyAnswer]:
                chosen = _listed(keys[part])
                raw = _ask(client.batch_put_from, chosen, pointers[part], _listed(sizes[part]), *config)
                return read_codes(raw, len(chosen), put_answer)

            return self._reported("put", time.monotonic(), self._in_parts(len(keys), transfer))

    def _put_each_once(
        self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[KeyAnswer]:
        # Inside one batch the client does not keep its promise that the first value stays.
        with self._calling():
            self._pointers(keys, buffer, offsets, sizes)  # What is left out must be in order too.
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        order = list(first.values())
        answers = self.put(list(first), buffer, [offsets[index] for index in order], [sizes[index] for index in order])
        answered = dict(zip(first, answers, strict=True))
        return [answered[key] for key in keys]

    def describe(self, keys: Sequence[str]) -> list[Replica | None]:
        """Say where each key's value lies in memory, and protect it for a lease; None for a key without one there."""
        with self._calling() as client:
            return read_replicas(_ask(client.batch_get_replica_desc, _listed(keys)), keys) if keys else []

    def remove(self, keys: Sequence[str]) -> list[KeyAnswer]:
        """Take values out of the pool, leased or not, whoever put them: one answer per key, in order."""
        with self._calling() as client:
            if not keys:
                return []
            began = time.monotonic()
            raw = _ask(client.batch_remove, _listed(keys), True)
            return self._reported("remove", began, read_codes(raw, len(keys), remove_answer))

    def remove_all(self, prefix: str) -> KeyAnswer:
        """Take every value out of the pool whose key begins with `prefix`; the master looks for them."""
        with self._calling() as client:
            began = time.monotonic()
            removed = _ask(client.remove_by_regex, "^" + re.escape(prefix), True)
            answer = KeyAnswer(KeyState.OK, removed) if type(removed) is int and removed >= 0 else _failed_removal(removed)
            return self._reported("remove", began, [answer])[0]

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

        Raises PoolError if the store refuses: a peer may still write then, so the memory is kept to the end of the process,
        whoever lets go of it (M3).
        """
        self._refuse_in_a_fork()
        if self._closed or not self._is_registered(buffer):
            return
        with self._calling() as client:
            code = client.unregister_buffer(buffer.address)
            if code != 0:
                PROCESS_GUARD.keep(buffer)
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
            if self.lent is not None and not self.lent.stop():
                raise PoolError("a thread touches the segment's memory still: unmapping it would crash the process")
            self._closed = True
        self._trouble.flush()
        self._client.close()
        self._buffers.clear()
        if self.lent is not None:
            self.lent.remove()

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
        if not keys:
            return []
        if not self._is_registered(buffer):
            raise ValueError(f"the buffer of {buffer.nbytes} bytes is not registered with the pool")
        if min(offsets) < 0 or min(sizes) < 1 or max(map(add, offsets, sizes)) > buffer.nbytes:
            _refuse_first_outside(buffer, offsets, sizes)
        base = buffer.address
        return [base + offset for offset in offsets]

    def _in_parts(self, count: int, transfer: Callable[[slice], list[KeyAnswer]]) -> list[KeyAnswer]:
        """Answers for `count` keys, `KEYS_PER_TRANSFER` at a time and never more than the budget has.

        Once nobody answered for a whole part, the rest is not tried: each part would wait as long again.
        """
        answers: list[KeyAnswer] = []
        while len(answers) < count:
            most = min(KEYS_PER_TRANSFER, self._budget.limit)
            chosen = slice(len(answers), min(count, len(answers) + most))
            entries = chosen.stop - chosen.start  # One buffer for each key.
            with self._budget.hold(entries) as granted:
                part = transfer(chosen) if granted else [KeyAnswer(KeyState.UNAVAILABLE)] * entries
            answers += part
            if all(answer.state in _NOBODY_ANSWERS for answer in part):
                answers += [part[-1]] * (count - len(answers))
        return answers

    def _reported(self, call: str, began: float, answers: list[KeyAnswer]) -> list[KeyAnswer]:
        """The answers, after trouble among them was told. `began`: `time.monotonic()` before the call."""
        self._trouble.look_at(call, began, answers)
        self._after_call()
        return answers


def _listed(sequence: Sequence[_Item]) -> list[_Item]:
    """A list, which is all that the client takes; the same one if it is one already."""
    return sequence if isinstance(sequence, list) else list(sequence)


def _ask(call: Callable[..., Any], *arguments: object) -> Any:
    """What the client returned; None, which reads as refused, for a C++ exception that it let through."""
    try:
        return call(*arguments)
    except RuntimeError:
        return None


def _failed_removal(code: object) -> KeyAnswer:
    """The answer for a code that is no number of keys. No key is missing where none is named."""
    answer = remove_answer(code) if type(code) is int else KeyAnswer(KeyState.REFUSED)
    return KeyAnswer(KeyState.OK, 0) if answer.state is KeyState.MISSING else answer


def _refuse_first_outside(buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> NoReturn:
    index, offset, size = next(
        (index, offset, size)
        for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
        if offset < 0 or size < 1 or offset + size > buffer.nbytes
    )
    raise ValueError(f"piece {index}, {size} bytes at {offset}, is not inside the buffer of {buffer.nbytes} bytes")
