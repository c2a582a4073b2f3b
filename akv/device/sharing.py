"""Work that a second thread shares: one core does not copy as fast as the memory of a server can."""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

Part = TypeVar("Part")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def shared(work: Callable[[Part], None], parts: Iterable[Part]) -> None:
    """Do `work` on every part, here and on one more thread at a time: each takes the next part when it is done with one.

    Blocks until no thread works any more, and raises what either raised; parts that nobody has begun are then left out. What
    is not to hold the interpreter lock must let go of it.
    """
    left = deque(parts)

    def next_part() -> Part | None:
        # Taken in one step of the interpreter, so by one thread alone; whether one is left may change before it.
        with suppress(IndexError):
            return left.popleft()
        return None

    def take() -> None:
        try:
            while (part := next_part()) is not None:
                work(part)
        except BaseException:
            left.clear()
            raise

    with ThreadPoolExecutor(1, "akv-copy") as helper:
        beside = helper.submit(take)
        take()
    beside.result()
