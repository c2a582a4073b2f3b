"""A pool whose values carry a trailer behind each page, by which a page is known that is not the one its key names (S11)."""

from collections.abc import Sequence

from akv import observe
from akv.plan.integrity import TRAILER_BYTES, trailer
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState, PagePool
from akv.values.segments import Replica


class SealedPool:
    """Implements `akv.ports.pool.PagePool` on another: callers give and get pages, the pool holds pages with their trailers.

    Behind each piece of a put or a get the buffer has `TRAILER_BYTES` more that are the caller's to lend: slots are so much
    larger. Trailers are computed where the calls are made, on the threads of the runner.
    """

    def __init__(self, pool: PagePool, secret: bytes) -> None:
        """`secret` keys a MAC; empty for a checksum."""
        self._pool = pool
        self._secret = secret

    @property
    def lets_go_at_return(self) -> bool:
        """As the port says."""
        return self._pool.lets_go_at_return

    def probe(self, keys: Sequence[str]) -> list[KeyAnswer]:
        """As the port says. Says nothing of what the values hold."""
        return self._pool.probe(keys)

    def get(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """As the port says, and DAMAGED for a value whose trailer is not its page's, and for one of another size: that stands
        in the key. Such a value is removed, whoever put it: each of its readers would fail, and no put could replace it.
        """
        answers = self._pool.get(keys, buffer, offsets, [size + TRAILER_BYTES for size in sizes])
        view = buffer.view()
        damaged = [
            index
            for index, (key, at, size, answer) in enumerate(zip(keys, offsets, sizes, answers, strict=False))
            if answer.state is KeyState.WRONG_SIZE
            or (
                answer.state is KeyState.OK
                and trailer(key, view[at : at + size], self._secret) != view[at + size : at + size + TRAILER_BYTES]
            )
        ]
        if damaged:
            self._pool.remove([keys[index] for index in damaged])
            observe.emit(observe.PAGES_DAMAGED, pages=len(damaged))
        for index in damaged:
            answers[index] = KeyAnswer(KeyState.DAMAGED, answers[index].code)
        return answers

    def put(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """As the port says, with the trailer written behind each piece first."""
        view = buffer.view()
        for key, at, size in zip(keys, offsets, sizes, strict=True):
            view[at + size : at + size + TRAILER_BYTES] = trailer(key, view[at : at + size], self._secret)
        return self._pool.put(keys, buffer, offsets, [size + TRAILER_BYTES for size in sizes])

    def describe(self, keys: Sequence[str]) -> Sequence[Replica | None]:
        """As the port says. Pages that are to be checked go through slots: nobody asks."""
        return self._pool.describe(keys)

    def remove(self, keys: Sequence[str]) -> list[KeyAnswer]:
        """As the port says."""
        return self._pool.remove(keys)

    def remove_all(self, prefix: str) -> KeyAnswer:
        """As the port says."""
        return self._pool.remove_all(prefix)

    def register(self, buffer: HostBuffer) -> None:
        """As the port says."""
        self._pool.register(buffer)

    def unregister(self, buffer: HostBuffer) -> None:
        """As the port says."""
        self._pool.unregister(buffer)

    def close(self) -> None:
        """As the port says."""
        self._pool.close()
