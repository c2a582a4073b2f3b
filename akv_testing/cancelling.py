"""Cancelling a task at its n-th wait, on either backend.

`while not await Cancelling(times=2).run(work, at): at += 1` goes on until `at` lies behind the last wait of `work`, and each
time something was owned at that wait.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, NamedTuple

import anyio

from akv_testing.clock import settle


class Watched(Generator[Any, Any, None]):
    """Awaits a coroutine, and calls `cancel` at its waits number `at` to `at + times - 1`, the first being 1."""

    def __init__(self, work: Coroutine[Any, Any, None], at: int, times: int, cancel: Callable[[], object]) -> None:
        self._steps = work.__await__()
        self._at = range(at, at + times)
        self._cancel = cancel
        #: How many waits there were so far.
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, None]:
        return self

    def send(self, value: Any) -> Any:
        """As a generator's."""
        return self._waits(self._steps.send(value))

    def throw(self, *error: Any) -> Any:
        """As a generator's."""
        return self._waits(self._steps.throw(*error))

    def _waits(self, waits_for: Any) -> Any:
        self.waits += 1
        if self.waits in self._at:
            self._cancel()
        return waits_for


class Cancelling(NamedTuple):
    """How a task is cancelled at its wait number `at`."""

    #: By asyncio's own `Task.cancel()`; else by a cancel scope.
    native: bool = False
    #: At how many waits in a row.
    times: int = 1
    #: Seconds later, with everybody else as far as they come by then; None at once, before anybody else had a turn.
    after_s: float | None = None

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]], at: int) -> bool:
        """Run `work` in a task and cancel it. True if it came to its end: then `at` lies behind its last wait."""
        ended = []

        async def whole() -> None:
            await work()
            ended.append(True)

        if self.native:
            task = asyncio.ensure_future(self._watched(whole, at, lambda: task.cancel()))  # noqa: PLW0108 - made just now
            await asyncio.wait({task})
            if not task.cancelled():
                await task
            return bool(ended)
        async with anyio.create_task_group() as outside:
            with anyio.CancelScope() as scope:

                async def later() -> None:
                    await anyio.sleep(self.after_s or 0)
                    await settle()
                    scope.cancel()

                await self._watched(whole, at, scope.cancel if self.after_s is None else partial(outside.start_soon, later))
            outside.cancel_scope.cancel()
        return bool(ended)

    async def _watched(self, work: Callable[[], Coroutine[Any, Any, None]], at: int, cancel: Callable[[], object]) -> None:
        await Watched(work(), at, self.times, cancel)
