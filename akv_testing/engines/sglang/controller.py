"""Drives storage backends in SGLang's order, with its threads: a query thread, a thread that transfers, a backup thread.

    cache = HiCache([Rank(config, make_backend, HostPool())])
    cache.compute(tokens); cache.backup(tokens).wait()        # what a request leaves behind
    cache.evict(tokens)
    cache.prefetch(tokens).wait()                             # pages that the next one need not compute
    cache.detach()

Under tensor parallelism every rank asks its own backend and all of them agree on the smallest answer, as SGLang's collectives
make them. A page counts only if every rank has it. What is not used of a prefetch is given back at once, and taken by the
next.
"""

import hashlib
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from akv_testing.engines.sglang.errors import BackendFault
from akv_testing.engines.sglang.host_pool import Indices
from akv_testing.engines.sglang.interface import PoolName
from akv_testing.engines.sglang.rank import STORAGE_BATCH_SIZE, Rank

#: Seconds that a thread may take to end, as at SGLang.
JOIN_S = 10.0


class Operation:
    """A prefetch or a backup under way."""

    def __init__(self, hashes: list[str]) -> None:
        self.hashes = hashes
        self._done = threading.Event()
        self._terminated = threading.Event()
        #: What the query found on every rank.
        self.hit_pages = 0
        #: Pages that were moved on every rank, from the first.
        self.pages = 0
        #: What the backend raised, if it did.
        self.error: BaseException | None = None

    def terminate(self) -> None:
        """The request is admitted, and takes what there is: no further batch begins."""
        self._terminated.set()

    @property
    def terminated(self) -> bool:
        """Whether it is to end early."""
        return self._terminated.is_set()

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return self._done.is_set()

    def end(self) -> None:
        """It ended."""
        self._done.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Whatever the backend raised is raised where somebody waits for the operation."""
        if error is not None:
            self.error = error
            self.end()
        return True

    def wait(self, limit_s: float = 30.0) -> int:
        """Wait for its end, and return how many pages it moved. Raises what the backend raised."""
        if not self._done.wait(limit_s):
            raise BackendFault(f"no end within {limit_s} seconds")
        if self.error is not None:
            raise self.error
        return self.pages


class HiCache:
    """The cache controller of one server, with all its ranks."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = list(ranks)
        self._page_size = self.ranks[0].pool.page_size
        self._queues: dict[str, SimpleQueue[Operation | None]] = {name: SimpleQueue() for name in ("query", "io", "backup")}
        work = {"query": self._query, "io": self._transfer, "backup": self._back_up}
        self._threads = [
            threading.Thread(target=self._serve, args=(self._queues[name], work[name]), name=f"hicache-{name}", daemon=True)
            for name in work
        ]
        for thread in self._threads:
            thread.start()

    def hashes(self, tokens: Sequence[int], extra_key: str | None = None) -> list[str]:
        """The hash of each whole page: of its tokens, and of all before it; `extra_key` separates adapters and salts."""
        last = hashlib.sha256(extra_key.encode()).digest() if extra_key is not None else b""
        chain: list[str] = []
        for at in range(0, len(tokens) - self._page_size + 1, self._page_size):
            words = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + self._page_size])
            last = hashlib.sha256(last + words).digest()
            chain.append(last.hex())
        return chain

    def compute(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A request is computed, and its pages are copied to the host."""
        for rank in self.ranks:
            rank.compute(self.hashes(tokens, extra_key))

    def backup(self, tokens: Sequence[int], extra_key: str | None = None) -> Operation:
        """Write a request's pages to the storage."""
        return self._begin("backup", Operation(self.hashes(tokens, extra_key)))

    def prefetch(self, tokens: Sequence[int], extra_key: str | None = None) -> Operation:
        """Fetch what the host does not hold of a prompt, behind what it does."""
        hashes = self.hashes(tokens, extra_key)
        local = next(
            (at for at, page_hash in enumerate(hashes) if page_hash not in self.ranks[0].held[PoolName.KV]), len(hashes)
        )
        return self._begin("query", Operation(hashes[local:]))

    def evict(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Drop a request's pages from the host."""
        for rank in self.ranks:
            rank.evict(self.hashes(tokens, extra_key))

    def clear_storage(self) -> None:
        """As the administrator's request does on every rank."""
        for rank in self.ranks:
            rank.backend.clear()

    def check(self) -> None:
        """Raise BackendFault if any page holds what it must not. Call it while nothing is under way, and often."""
        for rank in self.ranks:
            rank.check()

    def detach(self) -> None:
        """Stop the threads, then close the backends. Raises RuntimeError if a thread does not end, as SGLang does."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
        if alive := [thread.name for thread in self._threads if thread.is_alive()]:
            raise RuntimeError(f"Failed to stop HiCache storage threads cleanly: {alive}")
        for rank in self.ranks:
            rank.backend.close()

    def _begin(self, queue: str, operation: Operation) -> Operation:
        self._queues[queue].put(operation)
        return operation

    def _serve(self, queue: "SimpleQueue[Operation | None]", work: Any) -> None:
        while (operation := queue.get()) is not None:
            with operation:
                work(operation)

    def _query(self, operation: Operation) -> None:
        """The prefetch thread: ask, agree, find host memory, and hand over to the transfer thread."""
        operation.hit_pages = min(rank.query(operation.hashes) for rank in self.ranks) if operation.hashes else 0
        operation.hashes = operation.hashes[: operation.hit_pages]
        if not operation.hashes or operation.terminated:
            operation.end()
            return
        self._queues["io"].put(operation)

    def _transfer(self, operation: Operation) -> None:
        """The transfer thread: batch by batch, as long as every rank gets all of each."""
        hashes, size = operation.hashes, self._page_size
        places = [rank.pool.alloc(len(hashes)) for rank in self.ranks]
        if any(place is None for place in places):
            for rank, place in zip(self.ranks, places, strict=True):
                if place is not None:
                    rank.release(PoolName.KV, place)
            operation.end()
            return
        taken: list[Indices] = [place for place in places if place is not None]
        pages = 0
        for at in range(0, len(hashes), STORAGE_BATCH_SIZE):
            if operation.terminated:
                break
            batch = hashes[at : at + STORAGE_BATCH_SIZE]
            spans = [place[at * size : (at + len(batch)) * size] for place in taken]
            got = min(rank.get_batch(batch, span) for rank, span in zip(self.ranks, spans, strict=True))
            pages += got
            if got < len(batch):
                break
        if not self._sides_arrived(hashes[:pages], whole=pages == len(hashes) and not operation.terminated):
            pages = 0
        self._insert(hashes[:pages], taken)
        operation.pages = pages
        operation.end()

    def _sides_arrived(self, hashes: list[str], *, whole: bool) -> bool:
        """Fetch what the side pools need for a prefix. Whether it can be used: only if all of it came, on every rank."""
        if not self.ranks[0].sides:
            return True
        if not whole:
            return False
        arrived = True
        for rank in self.ranks:
            places: dict[PoolName, Indices] = {}
            for name, side in rank.sides.items():
                place = side.pool.alloc(len(side.hashes(hashes)))
                if place is None:
                    raise MemoryError(f"side pool {name.value} is full")
                places[name] = place
            came = rank.get_sides(hashes, places)
            arrived = arrived and came
            for name, side in rank.sides.items():
                if came:
                    rank.held[name].update(zip(side.hashes(hashes), side.pool.pages_of(places[name]), strict=True))
                else:
                    rank.release(name, places[name])
        return arrived

    def _insert(self, hashes: list[str], places: list[Indices]) -> None:
        """The pages that came are the tree's; those that did not are free, and the next one's, at once."""
        used = len(hashes) * self._page_size
        for rank, place in zip(self.ranks, places, strict=True):
            rank.held[PoolName.KV].update(zip(hashes, rank.pool.pages_of(place[:used]), strict=True))
            rank.release(PoolName.KV, place[used:])

    def _back_up(self, operation: Operation) -> None:
        """The backup thread."""
        operation.pages = min([rank.backup(operation.hashes) for rank in self.ranks if not self._skips(rank)] or [0])
        for rank in self.ranks:
            if self._skips(rank):
                rank.backup(operation.hashes)
        operation.end()

    @staticmethod
    def _skips(rank: Rank) -> bool:
        """Whether another rank writes the same KV."""
        return rank.config.is_mla_model and rank.config.tp_rank != 0
