"""The next stretch of a load is looked for while the one before it is copied: a query takes as long as tens of megabytes."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from anyio import Event

from akv.flow.overlap import Overlap
from akv.plan.batching import Batch

#: Reads what it can of a stretch, and returns the rest; None if the load gets no further. Once what it copies is on its way it
#: waits for its turn among the stretches.
Read: TypeAlias = Callable[[Sequence[Batch], Callable[[], Awaitable[None]]], Awaitable[Sequence[Batch] | None]]


class ReadAhead:
    """Stretches of one load, read two at a time: the copies come one by one all the same, on the loader's stream."""

    def __init__(self, read: Read, stretches: Sequence[Sequence[Batch]], transfer: Overlap) -> None:
        self._read = read
        self._stretches = stretches
        self._transfer = transfer
        self._rests: dict[int, Sequence[Batch] | None] = {}
        #: Of each stretch that was begun: set when it was read.
        self._over: list[Event] = []

    async def rest(self, number: int) -> Sequence[Batch] | None:
        """What is left of a stretch, asked for in their order; None if the load gets no further.

        **Cancellation:** what was begun is the transfer's, and ends with it.
        """
        if len(self._stretches) == 1:
            return await self._read(self._stretches[0], partial(self._turn, 0))
        for begun in range(len(self._over), min(number + 2, len(self._stretches))):
            self._over.append(Event())
            self._transfer.beside(partial(self._begin, begun))
        await self._over[number].wait()
        return self._rests[number]

    async def _begin(self, number: int) -> None:
        self._rests[number] = await self._read(self._stretches[number], partial(self._turn, number))
        self._over[number].set()

    async def _turn(self, number: int) -> None:
        """Wait until the stretch before this one is on its way. Two that were asked for at once may be answered in any order;
        whoever waited for the later one's copy first would not ask for the next one meanwhile.
        """
        if number:
            await self._over[number - 1].wait()
