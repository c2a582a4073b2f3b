"""Tasks that take turns: a test says in which order steps of several tasks happen, and they happen in that order.

    turns = Sequencer()

    async def loader():
        async with turns(0):
            ...                       # first
        async with turns(2):
            ...                       # after the canceller's step

    async def canceller():
        async with turns(1):
            ...

As `trio.testing.Sequencer`, but on both backends, and with one difference: before a turn begins, every task has done all it
can do after the turn before (`settle()`), so that what follows from a step has happened when the next one begins.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from akv_testing.clock import settle


class SequenceBroken(AssertionError):
    """A turn was taken twice, or can never come because a task was cancelled while it waited for an earlier turn."""


class Sequencer:
    """Turns 0, 1, 2 and so on, each taken once, by whatever task."""

    def __init__(self) -> None:
        self._next = 0
        self._broken: str | None = None
        self._waiting: dict[int, anyio.Event] = {}

    @asynccontextmanager
    async def __call__(self, turn: int) -> AsyncIterator[None]:
        """Wait until all turns before this one have ended, and take it. Raises SequenceBroken.

        **Cancellation:** while waiting, the sequence is broken: every other wait ends with SequenceBroken, instead of hanging.
        Inside the turn, the turn ends.
        """
        if turn in self._waiting:
            raise SequenceBroken(f"turn {turn} was taken twice")
        self._waiting[turn] = anyio.Event()
        try:
            if turn == self._next:
                await anyio.lowlevel.checkpoint()
            else:
                await self._waiting[turn].wait()
            await settle()
        except anyio.get_cancelled_exc_class():
            self._break(f"the task of turn {turn} was cancelled while it waited")
            raise
        if self._broken is not None:
            raise SequenceBroken(self._broken)
        try:
            yield
        finally:
            self._next = turn + 1
            if self._next in self._waiting:
                self._waiting[self._next].set()

    def _break(self, why: str) -> None:
        if self._broken is None:
            self._broken = why
        for event in self._waiting.values():
            event.set()
