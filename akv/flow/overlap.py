"""Two batches of one load or save at a time: while one takes its second step, the next one takes its first.

A load's steps are the store call and the scatter, a save's the gather and the store call. One of each at a time and no more: a
stream gets its copies in order, and two batches are all that a share of the slots holds.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from anyio import Event, create_task_group
from anyio.abc import TaskGroup

from akv.flow.staging import Staging
from akv.ownership.slots import SlotTicket


class Overlap:
    """The batches of one transfer that are under way. Made by `overlapping()`."""

    def __init__(self, staging: Staging, group: TaskGroup, taken: ExitStack) -> None:
        self._staging = staging
        self._group = group
        self._taken = taken
        #: Set when no second step is under way.
        self._free = Event()
        self._free.set()

    async def take(self, count: int) -> SlotTicket:
        """Wait for slots for a batch's first step; at most `staging.batch`. They are given back when its second step ended, or
        by the block's end.

        Cancellation: none is kept.
        """
        if self._staging.share < 2 * self._staging.batch:
            # A share of one slot: a second one would be another's.
            await self._free.wait()
        return self._taken.enter_context(await self._staging.take(count))

    async def then(
        self,
        slots: SlotTicket | None,
        second: Callable[[], Awaitable[None]],
        third: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Start the second step of the batch in `slots`, if it has any, beside the caller, once the step before it has ended.

        A `third` step follows it, beside all others. Cancellation: nothing is started.
        """
        while not self._free.is_set():
            # Another one may have come first.
            await self._free.wait()
        self._free = Event()
        self._group.start_soon(self._run, slots, second, third, self._free)

    def beside(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start what needs no slots, beside all steps. Leaving the block waits for it."""
        self._group.start_soon(work)

    async def _run(
        self,
        slots: SlotTicket | None,
        second: Callable[[], Awaitable[None]],
        third: Callable[[], Awaitable[None]] | None,
        ended: Event,
    ) -> None:
        await second()
        if slots is not None:
            slots.leave()
        ended.set()
        if third is not None:
            await third()


@asynccontextmanager
async def overlapping(staging: Staging) -> AsyncIterator[Overlap]:
    """Leaving the block waits for the second step that is under way.

    An error in the block or in a step ends the waits of both, and is raised as it is; as a group only if both failed.

    **Cancellation:** the waits end. Calls and copies that are under way keep their slots until they ended.
    """
    error: BaseException | None = None
    try:
        # The slots are the block's, not the step's: a task that is cancelled before it began runs nothing.
        with ExitStack() as taken:
            async with create_task_group() as group:
                yield Overlap(staging, group, taken)
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) > 1:
            raise
        # What failed is named in logs by its type: a group around one error would hide it.
        error = errors.exceptions[0]
    if error is not None:
        raise error
