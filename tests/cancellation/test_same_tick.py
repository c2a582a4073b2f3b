"""Ten thousand cancellations in the very tick in which a load completes, before it and behind it (D6, D8, M6).

Each round loads one page, and is cancelled a few turns of the loop after the last piece of its work ended, the copy or the
store call: in the same instant of the clock the load gets its verdict, is told, and whoever waits for it wakes up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from akv import Connector, Load, LoadCancelled, LoadCompleted, LoadState, Offer, Request, SavesCompleted
from akv_testing import run_virtual, settle, tiny_layout
from akv_testing.clock import BACKENDS
from akv_testing.server import FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from akv.values.requests import Completion


ROUNDS = 10_000
#: One whole block, and the token behind it that a lookup leaves to be computed.
PROMPT = tuple(range(5))
#: Turns of the loop between that end and the cancellation, at most. The load is told after two of them.
TURNS = 4


class Ticks:
    """One connector with a page that loads over and over, and a task that cancels in the tick of a load's completion."""

    def __init__(self, server: FakeServer, kv: Connector) -> None:
        self.server = server
        self.kv = kv
        self.page = server.allocate(1)
        self.content = server.content(server.hashes(PROMPT)[0], 0)
        self.seen: Counter[str] = Counter()
        reservations = kv._halves.local_worker._parts.reservations
        for last in ("end_copy", "end_call"):
            setattr(reservations, last, partial(self._ends, getattr(reservations, last)))
        #: What the next load's cancellation is; None for a load that nobody cancels.
        self._cancel: Callable[[], Awaitable[None]] | None = None
        self._due = anyio.Event()
        self._turns = 0
        self._offer: Offer | None = None

    def _ends(self, end: Callable[..., object], *args: Any) -> object:
        """The only copy of the load has completed, or its only call on the page has returned."""
        self._due.set()
        return end(*args)

    async def canceller(self) -> None:
        while True:
            await self._due.wait()
            self._due = anyio.Event()
            for _ in range(self._turns):
                await anyio.lowlevel.checkpoint()
            if self._cancel is not None:
                await self._cancel()

    async def reserve(self, request: Request) -> Load:
        """Load the page anew. The pool is asked once for all rounds, what is under test comes later."""
        if self._offer is None:
            self._offer = await request.lookup()
        return request.reserve(msgspec.structs.replace(self._offer, incarnation=request.incarnation), 4, self.page)

    def cancelled_by(self, cancel: Callable[[], Awaitable[object] | object], load: Load, number: int) -> None:
        """The load that is under way is cancelled so, `number % TURNS` turns after its work ended."""

        async def now() -> None:
            self.seen["before it was told" if load.state is None else "after it was told"] += 1
            self._cancel = None
            if isinstance(waits := cancel(), Awaitable):
                await waits
            else:
                await anyio.lowlevel.checkpoint()

        self._turns = number % TURNS
        self._cancel = now

    async def ended(self, request: Request) -> None:
        """The canceller had its turn, and akv is done with the request. The clock has not moved since the work ended."""
        if self._cancel is not None:
            await settle()
        assert self._cancel is None
        assert request.closed

    def give_back(self, state: LoadState) -> None:
        """The engine overwrites the page at once: a race, if anything still copies. What was loaded is right until then."""
        self.seen[state.name] += 1
        if state is LoadState.LOADED:
            assert self.server.device.read_page(0, self.page[0][0]) == self.content
        self.server.device.fill_page(0, self.page[0][0], 0xAA)


# -- what is cancelled, and how. Each round returns what became of its load.


async def a_wait(ticks: Ticks, number: int, native: bool) -> LoadState:
    """Only the wait ends: the load goes on, and is told by the wait or by `completed()`, never by both, never by neither."""
    request = ticks.kv.open_request("r", PROMPT)
    load = await ticks.reserve(request)
    told: list[Completion] = []

    async def wait() -> None:
        told.append(await load.wait())

    await cut_short(ticks, wait, load, number, native)
    if load.state is None:
        await settle()
    told += ticks.kv.completed()
    request.finish()
    await ticks.ended(request)
    told += ticks.kv.completed()
    assert [type(one) for one in told] == [LoadCompleted, SavesCompleted]
    assert {one.incarnation for one in told} == {request.incarnation}
    assert load.state is LoadState.LOADED
    return load.state


async def a_block(ticks: Ticks, number: int, native: bool) -> LoadState:
    """The task of a request's block: left when the page is free, whether or not the load came first."""
    loads: list[Load] = []
    requests: list[Request] = []

    async def life() -> None:
        async with ticks.kv.request("r", PROMPT) as request:
            requests.append(request)
            loads.append(await ticks.reserve(request))
            ticks.cancelled_by(cancel[0], loads[0], number)
            await loads[0].wait()

    cancel: list[Callable[[], object]] = []
    if native:
        task = asyncio.ensure_future(life())
        cancel.append(task.cancel)
        await asyncio.wait({task})
        assert task.cancelled() or task.exception() is None
    else:
        with anyio.CancelScope() as scope:
            cancel.append(scope.cancel)
            await life()
    assert requests[0].closed
    # The page is free now, not a turn later.
    assert ticks.server.device.busy == 0
    state = loads[0].state
    assert state is not None
    await ticks.ended(requests[0])
    assert ticks.kv.completed() == []
    return state


async def a_request(ticks: Ticks, number: int, native: bool) -> LoadState:
    """`Request.cancel()` beside a wait: both say the same, and `completed()` says nothing again."""
    request = ticks.kv.open_request("r", PROMPT)
    load = await ticks.reserve(request)
    told: list[LoadState] = []
    cancelled = anyio.Event()

    async def cancel() -> None:
        await request.cancel()
        told.append(load.state)  # type: ignore[arg-type]
        cancelled.set()

    ticks.cancelled_by(cancel, load, number)
    try:
        told.append((await load.wait()).state)
    except LoadCancelled:
        told.append(LoadState.CANCELLED)
    await cancelled.wait()
    assert request.closed
    assert len(told) == 2
    assert ticks.kv.completed() == []
    assert set(told) == {load.state}
    return told[0]


async def cut_short(ticks: Ticks, wait: Callable[[], Any], load: Load, number: int, native: bool) -> None:
    if native:
        task = asyncio.ensure_future(wait())
        ticks.cancelled_by(task.cancel, load, number)
        await asyncio.wait({task})
        assert task.cancelled() or task.exception() is None
        return
    with anyio.CancelScope() as scope:
        ticks.cancelled_by(scope.cancel, load, number)
        await wait()


#: (what, whether by asyncio's own `Task.cancel()`)
WAYS: dict[str, tuple[Callable[[Ticks, int, bool], Awaitable[LoadState]], bool]] = {
    "a wait by a scope": (a_wait, False),
    "a wait natively": (a_wait, True),
    "a block by a scope": (a_block, False),
    "a block natively": (a_block, True),
    "a request": (a_request, False),
}


def ways_of(backend: str) -> list[str]:
    return [way for way, (_, native) in WAYS.items() if not native or backend == "asyncio"]


@pytest.mark.parametrize("host_pages", [False, True], ids=["slots", "host pages"])
@pytest.mark.parametrize(("backend", "way"), [(backend, way) for backend in BACKENDS for way in ways_of(backend)])
def test_D6_D8_M6_cancelled_in_the_tick_of_its_completion_a_load_ends_once_and_gives_everything_back(
    backend: str, way: str, host_pages: bool, left_open: Callable[[Connector], list[str]]
) -> None:
    rounds = ROUNDS // (2 * len(ways_of(backend)))
    seen: Counter[str] = Counter()

    async def main() -> None:
        server = FakeServer.warm(PROMPT, layout=tiny_layout(groups=1), pages=1, slots=4, host_pages=host_pages)
        async with server.open() as kv, anyio.create_task_group() as group:
            ticks = Ticks(server, kv)
            group.start_soon(ticks.canceller)
            one_round, native = WAYS[way]
            for number in range(rounds):
                state = await one_round(ticks, number, native)
                ticks.give_back(state)
                assert left_open(kv) == []
            seen.update(ticks.seen)
            group.cancel_scope.cancel()
        assert server.left_behind() == []

    run_virtual(backend, main)
    # Both orders came, often.
    assert min(seen["before it was told"], seen["after it was told"]) > rounds // 8, seen
