"""A `PagePool` in memory, under a clock, with scripted answers. Codes are those that the Mooncake client gives.

store = FakeStore(anyio.current_time, capacity_bytes=1 << 20, lease_s=5)
a, b = FakePool(store, name="a"), FakePool(store, name="b")       # two processes on one pool
b.answer("get", KeyState.MISSING, key=some_key)                   # the next get of that key fails
store.evict(some_key)                                             # and now for real, unless leased
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from akv.errors import NotOpenError, PoolError
from akv.ports.device import HostBuffer
from akv.ports.pool import UNSETTLED, KeyAnswer, KeyState
from akv.values.segments import Replica
from akv_testing.errors import MisuseError, UnregisteredBuffer
from akv_testing.memory import HOST_POISON, FakeHostBuffer
from akv_testing.store import FakeStore

Operation = Literal["probe", "get", "put", "remove", "describe"]

#: The store's code for each trouble, as the Mooncake client reports it.
CODES: dict[KeyState, int] = {
    KeyState.OK: 0,
    KeyState.MISSING: -704,
    KeyState.WRONG_SIZE: -800,
    # No store says that: akv does, of bytes that a store delivered.
    KeyState.DAMAGED: -1,
    KeyState.LEASE_EXPIRED: -707,
    KeyState.NO_SPACE: -200,
    KeyState.UNAVAILABLE: -900,
    KeyState.HOLDER_LOST: -800,
    KeyState.REFUSED: -600,
}
#: A get or probe of a key that another client is still writing.
UNFINISHED_CODE = -703


@dataclass(frozen=True)
class PoolCall:
    """One call of a pool, for assertions."""

    operation: Operation
    keys: tuple[str, ...]
    answers: tuple[KeyAnswer, ...]
    #: The store's clock when it was answered, in seconds.
    at: float


@dataclass(eq=False)
class _Script:
    operation: Operation
    answer: KeyAnswer
    key: str | Callable[[str], bool] | None
    skip: int
    times: int | None

    def takes(self, operation: Operation, key: str) -> bool:
        fits = self.key(key) if callable(self.key) else self.key in {None, key}
        if operation != self.operation or not fits or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(frozen=True)
class _Unsettled:
    """A piece of memory that a transfer may touch, though its call returned."""

    operation: Operation
    key: str
    buffer: HostBuffer
    offset: int
    size: int

    def overlaps(self, buffer: HostBuffer, offset: int, size: int) -> bool:
        return self.buffer is buffer and offset < self.offset + self.size and self.offset < offset + size


class FakePool:
    """Implements `akv.ports.pool.PagePool`: one process's client of a `FakeStore`.

    Loud where Mooncake over TCP is lenient: a call that names an unregistered buffer raises `UnregisteredBuffer`, pieces that
    overlap or leave the buffer raise `MisuseError`. Where a get does not deliver, its piece is overwritten with
    `HOST_POISON`, because "undefined" must not mean "as before" to anybody.

    With `lets_go_at_return = False` it plays RDMA: behind an answer of `akv.ports.pool.UNSETTLED` its transfer goes on. Until
    the buffer was unregistered a call that names such a piece again raises `MisuseError`, but for another put of the same key.
    """

    def __init__(self, store: FakeStore, *, name: str = "pool") -> None:
        self.store = store
        self.name = name
        #: Every call so far, in order.
        self.calls: list[PoolCall] = []
        #: As the port says. Set it False before a connector opens to play a transport whose peers may write after a return.
        self.lets_go_at_return = True
        #: Refuse to take registrations back, as a store does that cannot.
        self.refuses_unregister = False
        #: Bytes that gets delivered and that puts handed over.
        self.bytes_moved: Counter[Operation] = Counter()
        self._registered: dict[int, HostBuffer] = {}
        self._unsettled: list[_Unsettled] = []
        self._scripts: list[_Script] = []
        self._open = True

    @property
    def registered(self) -> list[HostBuffer]:
        """The buffers that are registered at present. Empty after a clean close."""
        return list(self._registered.values())

    @property
    def unsettled_bytes(self) -> int:
        """Bytes of registered buffers that peers may touch, though no call names them any more."""
        return sum(piece.size for piece in self._unsettled)

    @property
    def is_open(self) -> bool:
        """Whether `close()` has not been called."""
        return self._open

    def answer(
        self,
        operation: Operation,
        answer: KeyState | KeyAnswer,
        *,
        key: str | Callable[[str], bool] | None = None,
        skip: int = 0,
        times: int | None = 1,
    ) -> None:
        """Script an answer: the next `times` keys (None: all) in calls of `operation` get it, after `skip` that fit.

        `key`: the key, or a test of it; None fits any. Nothing else happens for such a key: a put that answers OK by script
        stores nothing, a get that answers OK leaves poison. Earlier scripts go first.
        """
        given = answer if isinstance(answer, KeyAnswer) else KeyAnswer(answer, CODES[answer])
        self._scripts.append(_Script(operation, given, key, skip, times))

    def probe(self, keys: Sequence[str]) -> list[KeyAnswer]:
        """As the port says. Grants a lease on each key that is there."""
        return self._call("probe", keys, lambda index: self._probe_one(keys[index]))

    def get(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """As the port says. Grants a lease on each key that is there."""
        self._check_pieces("get", keys, buffer, offsets, sizes)
        answers = self._call("get", keys, lambda index: self._get_one(keys[index], buffer, offsets[index], sizes[index]))
        self._goes_on("get", keys, buffer, offsets, sizes, answers)
        return answers

    def put(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """As the port says. Grants no lease."""
        self._check_pieces("put", keys, buffer, offsets, sizes)
        answers = self._call("put", keys, lambda index: self._put_one(keys[index], buffer, offsets[index], sizes[index]))
        self._goes_on("put", keys, buffer, offsets, sizes, answers)
        return answers

    def describe(self, keys: Sequence[str]) -> list[Replica | None]:
        """As the port says. Grants a lease on each key that it names a place of; by script it names none."""
        places: list[Replica | None] = [None] * len(keys)

        def one(index: int) -> KeyAnswer:
            scripted = self._scripted("describe", keys[index])
            if scripted is None:
                places[index] = self.store.replica(keys[index])
            return scripted or _answer(KeyState.MISSING if places[index] is None else KeyState.OK)

        self._call("describe", keys, one)
        return places

    def remove(self, keys: Sequence[str]) -> list[KeyAnswer]:
        """As the port says."""
        return self._call("remove", keys, lambda index: self._remove_one(keys[index]))

    def remove_all(self, prefix: str) -> KeyAnswer:
        """As the port says."""
        self._check_open()
        with self.store.lock:
            if self.store.down:
                return _answer(KeyState.UNAVAILABLE)
            found = [key for key in self.store.keys() if key.startswith(prefix)]  # noqa: SIM118 - it is no dict
            return KeyAnswer(KeyState.OK, sum(map(self.store.remove, found)))

    def register(self, buffer: HostBuffer) -> None:
        """As the port says. Refuses what overlaps a registered buffer, itself included."""
        self._check_open()
        with self.store.lock:
            for other in self._registered.values():
                if buffer.address < other.address + other.nbytes and other.address < buffer.address + buffer.nbytes:
                    raise PoolError(f"{buffer!r} overlaps {other!r}, which is registered already (store code -600)")
            self._registered[buffer.address] = buffer

    def unregister(self, buffer: HostBuffer) -> None:
        """As the port says."""
        with self.store.lock:
            if self.refuses_unregister and buffer.address in self._registered:
                raise PoolError(f"the store refused to unregister {buffer!r} (script)")
            self._registered.pop(buffer.address, None)
            self._unsettled = [piece for piece in self._unsettled if piece.buffer is not buffer]

    def close(self) -> None:
        """As the port says."""
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise NotOpenError(f"{self.name} is closed; on a real store this call would crash the process")

    def _check_pieces(
        self,
        operation: Operation,
        keys: Sequence[str],
        buffer: HostBuffer,
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self._check_open()
        if self._registered.get(buffer.address) is not buffer:
            raise UnregisteredBuffer(f"{buffer!r} is not registered with {self.name}: RDMA would refuse this call")
        if not len(keys) == len(offsets) == len(sizes):
            raise MisuseError(f"{len(keys)} keys, {len(offsets)} offsets and {len(sizes)} sizes: the store refuses them all")
        pieces = sorted(zip(offsets, sizes, strict=True))
        for offset, size in pieces:
            if offset < 0 or offset + size > buffer.nbytes:
                raise MisuseError(f"bytes [{offset}, {offset + size}) lie outside {buffer!r}")
        for (offset, size), (behind, _) in pairwise(pieces):
            if operation == "get" and offset + size > behind:
                raise MisuseError(f"two pieces of one get share bytes of {buffer!r} from {behind} on")
        for key, offset, size in zip(keys, offsets, sizes, strict=True):
            for piece in self._unsettled:
                again = operation == piece.operation == "put" and key == piece.key
                if piece.overlaps(buffer, offset, size) and not again:
                    raise MisuseError(
                        f"a {operation} at byte {offset} of {buffer!r}, where a {piece.operation} may go on (M3)"
                    )

    def _goes_on(
        self,
        operation: Operation,
        keys: Sequence[str],
        buffer: HostBuffer,
        offsets: Sequence[int],
        sizes: Sequence[int],
        answers: Sequence[KeyAnswer],
    ) -> None:
        """Note where transfers go on behind these answers."""
        if not self.lets_go_at_return:
            for key, offset, size, answer in zip(keys, offsets, sizes, answers, strict=True):
                if answer.state in UNSETTLED:
                    self._unsettled.append(_Unsettled(operation, key, buffer, offset, size))

    def _call(self, operation: Operation, keys: Sequence[str], one: Callable[[int], KeyAnswer]) -> list[KeyAnswer]:
        self._check_open()
        with self.store.lock:
            answers = [one(index) for index in range(len(keys))]
            self.calls.append(PoolCall(operation, tuple(keys), tuple(answers), self.store.now()))
        return answers

    def _scripted(self, operation: Operation, key: str) -> KeyAnswer | None:
        for script in self._scripts:
            if script.takes(operation, key):
                return script.answer
        return _answer(KeyState.UNAVAILABLE) if self.store.down else None

    def _probe_one(self, key: str) -> KeyAnswer:
        scripted = self._scripted("probe", key)
        if scripted is not None:
            return scripted
        if not key:
            return _answer(KeyState.REFUSED)
        return KeyAnswer(KeyState.MISSING) if self.store.touch(key) is None else KeyAnswer(KeyState.OK, 1)

    def _remove_one(self, key: str) -> KeyAnswer:
        scripted = self._scripted("remove", key)
        if scripted is not None:
            return scripted
        return _answer(KeyState.OK if self.store.remove(key) else KeyState.MISSING)

    def _get_one(self, key: str, buffer: HostBuffer, offset: int, size: int) -> KeyAnswer:
        answer, data = self._read(key, size)
        _write(buffer, offset, data[:size].ljust(size, bytes([HOST_POISON])))
        if answer.state is KeyState.OK:
            self.bytes_moved["get"] += len(data)
        return answer

    def _read(self, key: str, size: int) -> tuple[KeyAnswer, bytes]:
        """The answer to a get, and the bytes that it leaves in the buffer."""
        scripted = self._scripted("get", key)
        if scripted is not None:
            return scripted, b""
        if not key or not size:
            return _answer(KeyState.REFUSED), b""
        data = self.store.touch(key)
        if data is None:
            return KeyAnswer(KeyState.MISSING, UNFINISHED_CODE if self.store.is_unfinished(key) else -704), b""
        if self.store.get_takes_s > self.store.lease_s:
            return _answer(KeyState.LEASE_EXPIRED), b""
        if len(data) != size:
            return KeyAnswer(KeyState.WRONG_SIZE, len(data) if len(data) < size else -600), data if len(data) < size else b""
        return KeyAnswer(KeyState.OK, size), data

    def _put_one(self, key: str, buffer: HostBuffer, offset: int, size: int) -> KeyAnswer:
        scripted = self._scripted("put", key)
        if scripted is not None:
            return scripted
        if not key or not size:
            return _answer(KeyState.REFUSED)
        data = _read(buffer, offset, size)
        self.bytes_moved["put"] += size
        return _answer(KeyState.OK if self.store.add(key, data) else KeyState.NO_SPACE)


def _answer(state: KeyState) -> KeyAnswer:
    return KeyAnswer(state, CODES[state])


def _read(buffer: HostBuffer, offset: int, size: int) -> bytes:
    if isinstance(buffer, FakeHostBuffer):
        return buffer.host_read(offset, size)
    return bytes(buffer.view()[offset : offset + size])


def _write(buffer: HostBuffer, offset: int, data: bytes) -> None:
    if isinstance(buffer, FakeHostBuffer):
        buffer.host_write(offset, data)
    else:
        buffer.view()[offset : offset + len(data)] = data
