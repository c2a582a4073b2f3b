"""Pages on their way between SGLang's host pools and the store, part by part, in the thread that SGLang calls from.

While one part is copied the next one is on its way. A copy touches a page only here, so none is under way when a method
returns; a store call that hangs keeps slots, and no page.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import compress

from akv.bridge import LoopThread
from akv.engines.sglang.host_pages import HostPages, PagePlace, base_of, copy_from_slots, copy_into_slots
from akv.engines.sglang.names import PageKeys
from akv.engines.sglang.page_store import Fetched, PageStore
from akv.errors import NotOpenError


class StoredPool:
    """A host pool that was registered: its pages, their keys, and how many are moved together."""

    def __init__(self, pages: HostPages, keys: PageKeys, part: int, *, writes: bool) -> None:
        self.pages = pages
        self.keys = keys
        self.part = part
        #: Whether this rank stores its pages. Of the ranks that hold the same bytes one does.
        self.writes = writes


class Transfers:
    """The way of pages to and from the store on a loop in a thread. Once that has ended nothing is there, and nothing is
    stored.
    """

    def __init__(self, loop: LoopThread[PageStore], deadline_s: float) -> None:
        """`deadline_s`: seconds that a load may take in all, and that each part of a save may."""
        self._loop = loop
        self._store = loop.served
        self._deadline_s = deadline_s

    def present(self, keys: Sequence[str], *, to_first_hole: bool = True) -> list[bool]:
        """Which keys are there, as `PageStore.present` says."""
        with suppress(NotOpenError):
            return self._loop.call(lambda: self._store.present(keys, to_first_hole=to_first_hole))
        return [False] * len(keys)

    def load(self, pool: StoredPool, keys: Sequence[str], places: Sequence[PagePlace]) -> list[bool]:
        """Fill pages, and say which are filled. A part with a hole is the last one that is asked for: SGLang takes the pages
        before the first that is missing.

        A page that is not filled is as it was: nothing but whole values of the right size is copied (X4).
        """
        deadline = time.monotonic() + self._deadline_s
        filled: list[bool] = []
        # NotOpenError: the loop ended meanwhile.
        with suppress(NotOpenError):
            pending: Future[Fetched] | None = self._fetch(pool, keys, 0, deadline)
            while pending is not None:
                fetched = pending.result()
                at, end = len(filled), len(filled) + len(fetched.arrived)
                going_on = all(fetched.arrived) and end < len(keys)
                pending = self._fetch(pool, keys, end, deadline) if going_on else None
                base = base_of(fetched.buffer)
                copy_from_slots(compress(places[at:end], fetched.arrived), base, compress(fetched.offsets, fetched.arrived))
                filled += fetched.arrived
                self._loop.post(self._store.leave, fetched)
        return filled + [False] * (len(keys) - len(filled))

    def save(self, pool: StoredPool, keys: Sequence[str], places: Sequence[PagePlace]) -> list[bool]:
        """Store pages that are not there yet, and say which are in the pool as far as known. After a part of which one page
        was not taken no further one is put: whoever finds the chain stops there.
        """
        stored = self.present(keys, to_first_hole=False)
        missing = [index for index, is_there in enumerate(stored) if not is_there]
        under_way: tuple[list[int], Future[list[bool]]] | None = None

        def settle() -> bool:
            """Write down what became of the part that is under way. Whether all of it was taken."""
            if under_way is None:
                return True
            took = under_way[1].result()
            for index, taken in zip(under_way[0], took, strict=True):
                stored[index] = taken
            return all(took)

        with suppress(NotOpenError):
            for at in range(0, len(missing), pool.part):
                part = missing[at : at + pool.part]
                room = self._loop.call(self._store.room, len(part), pool.pages.page_bytes, self._deadline_s)
                if room is None:
                    break
                copy_into_slots((places[index] for index in part), base_of(room.buffer), room.offsets)
                if not settle():
                    under_way = None
                    self._loop.post(room.slots.leave)
                    break
                names = [keys[index] for index in part]
                put = self._loop.begin(self._store.put, room, names, pool.pages.page_bytes, self._deadline_s)
                under_way = (part, put)
            settle()
        return stored

    def _fetch(self, pool: StoredPool, keys: Sequence[str], at: int, deadline: float) -> "Future[Fetched]":
        left_s = deadline - time.monotonic()
        return self._loop.begin(self._store.fetch, keys[at : at + pool.part], pool.pages.page_bytes, left_s)
