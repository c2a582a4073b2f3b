"""Lookups that go on and on while the master is gone."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from statistics import median

import anyio

from akv.cli.bench.faults.figures import LookupTimes
from akv.connector import Connector
from akv.values.pressure import BreakerState
from akv.values.scope import Scope

#: Tasks that look up, and the seconds that each one rests between two lookups.
TASKS = 3
_REST_S = 0.02


class Lookups:
    """Looks one prompt up, again and again, as requests of its own."""

    def __init__(self, kv: Connector, prompt: Sequence[int], scope: Scope) -> None:
        self._kv = kv
        self._prompt = prompt
        self._scope = scope
        self._numbers = count()
        self._all: list[float] = []
        self._while_open: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look up while the block runs."""
        async with anyio.create_task_group() as group:
            for _ in range(TASKS):
                group.start_soon(self._run)
            yield
            group.cancel_scope.cancel()

    def times(self) -> LookupTimes:
        """What they took so far."""
        while_open = sorted(self._while_open)
        return LookupTimes(
            longest_s=max(self._all, default=0.0),
            while_open=len(while_open),
            while_open_p50_s=median(while_open) if while_open else 0.0,
            while_open_p95_s=while_open[int(0.95 * len(while_open))] if while_open else 0.0,
            while_open_most_s=while_open[-1] if while_open else 0.0,
        )

    async def _run(self) -> None:
        while True:
            async with self._kv.request(
                f"lookup {self._scope.salt} {next(self._numbers)}", self._prompt, self._scope
            ) as request:
                is_open = self._kv.pressure().breaker is not BreakerState.CLOSED
                began = anyio.current_time()
                await request.lookup()
                took = anyio.current_time() - began
            self._all.append(took)
            if is_open:
                self._while_open.append(took)
            await anyio.sleep(_REST_S)
