"""A thousand requests cancelled in each state of a life, one after the other: every permit, slot, ticket, page, plan and
record is back at the end, and others are served as at the start (D2, D6, D9, S2, S7, M2, M3, M6).
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import anyio
import msgspec
import pytest

from akv import Connector, EngineContractError, LoadCancelled, LoadState, Request
from akv.plan.lifecycle import Phase
from akv.ports.calls import CallKind
from akv_testing import run_virtual, settle
from akv_testing.clock import BACKENDS
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import part

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

#: On asyncio and trio together.
ABORTS = 1_000
#: What every prompt begins with. It is in the store.
SHARED = tuple(range(8))
#: Tokens of a prompt: two blocks are loaded, two are computed by a first pass, one by a second.
TOKENS, FIRST_END = 21, 16
#: What else is served. Its two whole blocks are in the store.
OTHER = tuple(range(300, 309))


class Life:
    """One request's way after the other, on one server."""

    def __init__(self, server: FakeServer, kv: Connector) -> None:
        self.server = server
        self.kv = kv
        #: What the present life has come to.
        self.stage = ""
        self.request: Request
        #: Where a life stands still behind its second plan; None for one that goes on.
        self.between_passes: anyio.Event | None = None
        #: Whether it polls, as a batching loop does, in place of waiting for its load.
        self.polls = False

    async def run(self, number: int) -> None:
        """Look up, load, two passes, end. The pages are overwritten and reused as soon as its block has been left."""
        tokens = (*SHARED, *range(1000 * number, 1000 * number + TOKENS - len(SHARED)))
        table: PageTable = []
        self.stage = "looks up"
        try:
            async with self.kv.request("r", tokens) as self.request:
                offer = await self.request.lookup()
                table = self.server.allocate(tokens)
                load = self.request.reserve(offer, offer.tokens, table)
                self.stage = "loads"
                while self.polls and load.state is None:
                    await self.kv.changed.wait()
                    self.kv.completed()
                await load.wait()
                assert self.server.wrong_pages(tokens, table, 0, 2) == []
                await self._pass(tokens, table, offer.tokens, FIRST_END)
                await self._pass(tokens, table, FIRST_END, len(tokens))
                self.stage = "ends"
        except (LoadCancelled, EngineContractError):
            # Its request was cancelled beside it.
            pass
        finally:
            assert self.request.closed
            self.server.free(table)

    async def _pass(self, tokens: tuple[int, ...], table: PageTable, before: int, end: int) -> None:
        plan = self.kv.plan_pass([part(self.request, before, end - before, table)])
        self.stage = f"computes up to {end}"
        if self.between_passes is not None and before == FIRST_END:
            await self.between_passes.wait()
        self.server.write(tokens[:end], table, before // 4)
        await self.kv.after_forward(plan)


class State:
    """Where a life is cancelled. As it stands here: asking the pool."""

    #: Whether the pages are the engine's only once what holds the life up has been let go of.
    waits = False
    #: Whether slots stay out of use until then.
    keeps_slots = False
    slots = 16

    def around(self, life: Life) -> AbstractAsyncContextManager[None]:
        """What goes on beside all lives."""
        return nullcontext()

    def hold(self, life: Life) -> Callable[[], None]:
        """Hold the next life up, and return what lets go."""
        self.gate = life.server.runner.hold(CallKind.PROBE)
        return self.gate.release

    def is_reached(self, life: Life) -> bool:
        return bool(self.gate.holding)


class Hashing(State):
    """Its turn to hash is another's."""

    def hold(self, life: Life) -> Callable[[], None]:
        self.turn = life.kv._halves.scheduler._lookup.turn
        self.turn.acquire_nowait()
        return self.turn.release

    def is_reached(self, life: Life) -> bool:
        return life.stage == "looks up" and self.turn.statistics().tasks_waiting == 1


class Beside(State):
    """Beside two gets that do not return, of requests that go on waiting for them, or of which one was cancelled: with both
    given up a lookup offers nothing.
    """

    given_up = 1

    def around(self, life: Life) -> AbstractAsyncContextManager[None]:
        return self._beside_gets(life)

    @asynccontextmanager
    async def _beside_gets(self, life: Life) -> AsyncIterator[None]:
        gate = life.server.runner.hold_all(CallKind.GET)
        stuck = [await life.server.load(life.kv, f"stuck{number}", OTHER) for number in range(2)]
        await settle()
        assert gate.holding == 2
        for request, _, _ in stuck[: self.given_up]:
            await request.cancel()
        yield
        gate.release()
        for number, (request, load, table) in enumerate(stuck):
            if number >= self.given_up:
                await load.wait()
                await request.finished()
            life.server.free(table)

    def hold(self, life: Life) -> Callable[[], None]:
        return lambda: None


class Queued(Beside):
    """No loader is free."""

    given_up = 0

    def is_reached(self, life: Life) -> bool:
        return life.kv.pressure().queued_loads == 1


class WaitingForAPlace(Beside):
    """A loader has it, and each place is held by a call that does not return."""

    def is_reached(self, life: Life) -> bool:
        return life.kv._halves._desk._places[CallKind.GET].statistics().tasks_waiting == 1


class WaitingForSlots(Beside):
    """A loader has it, and every slot is held by a call that does not return."""

    slots = 2

    def is_reached(self, life: Life) -> bool:
        return len(life.kv._halves.local_worker.memory.stagings[0].slots._waiting) == 1


class InAGet(State):
    keeps_slots = True

    def hold(self, life: Life) -> Callable[[], None]:
        self.gate = life.server.runner.hold(CallKind.GET)
        return self.gate.release


class Parked(InAGet):
    """Nobody waits for the load; its end is polled for."""

    def hold(self, life: Life) -> Callable[[], None]:
        life.polls = True
        return super().hold(life)


class InAScatter(State):
    waits = keeps_slots = True
    copy = "scatter"

    def hold(self, life: Life) -> Callable[[], None]:
        self.held = life.server.device.script.hold(self.copy)  # type: ignore[arg-type]
        return self.held.release

    def is_reached(self, life: Life) -> bool:
        return self.held.holds


class InAGather(InAScatter):
    copy = "gather"


class InMidPrefill(State):
    """Behind the plan of its second pass, its first one stored."""

    def hold(self, life: Life) -> Callable[[], None]:
        life.between_passes = anyio.Event()
        return life.between_passes.set

    def is_reached(self, life: Life) -> bool:
        return life.stage == f"computes up to {TOKENS}" and life.kv.pressure().backlog_saves == 0


class InAPut(InMidPrefill):
    """As before, its first pass being stored."""

    keeps_slots = True

    def hold(self, life: Life) -> Callable[[], None]:
        self.gate = life.server.runner.hold(CallKind.PUT)
        go_on = super().hold(life)

        def let_go() -> None:
            go_on()
            self.gate.release()

        return let_go

    def is_reached(self, life: Life) -> bool:
        # The gather of the next group's pages runs beside it for a while.
        return life.stage == f"computes up to {TOKENS}" and bool(self.gate.holding) and not life.server.device.busy


class SaveQueued(InAPut):
    """As before, behind another's save that hangs."""

    keeps_slots = False

    def around(self, life: Life) -> AbstractAsyncContextManager[None]:
        return self._beside_a_save(life)

    @asynccontextmanager
    async def _beside_a_save(self, life: Life) -> AsyncIterator[None]:
        gate = life.server.runner.hold(CallKind.PUT)
        tokens = tuple(range(400, 405))
        table, request = life.server.allocate(tokens), life.kv.open_request("saves", tokens)
        await life.server.compute(life.kv, request, tokens, table)
        await gate.reached()
        yield
        gate.release()
        await request.finished()
        life.server.free(table)

    def is_reached(self, life: Life) -> bool:
        return life.stage == f"computes up to {TOKENS}" and life.kv._halves.local_worker._parts.saves.queued == 1


class Finishing(State):
    """Its last pages are being stored."""

    keeps_slots = True

    def hold(self, life: Life) -> Callable[[], None]:
        self.gate = life.server.runner.hold(CallKind.PUT)
        return self.gate.release

    def is_reached(self, life: Life) -> bool:
        finishes = life.request._record.phase is Phase.FINISHING
        return finishes and bool(self.gate.holding) and not life.server.device.busy


STATES = [
    Hashing,
    State,
    Queued,
    WaitingForAPlace,
    WaitingForSlots,
    InAGet,
    Parked,
    InAScatter,
    InMidPrefill,
    SaveQueued,
    InAGather,
    InAPut,
    Finishing,
]


async def reach(state: State, life: Life) -> None:
    for _ in range(50):
        await settle()
        if state.is_reached(life):
            return
        await anyio.sleep(0.001)
    raise AssertionError(f"a life came to {life.stage!r} and was not held up")


async def abort(state: State, life: Life, number: int, way: str, free: int) -> None:
    """One life, up to the state and not beyond. `free`: slots that nothing beside it holds."""
    let_go = state.hold(life)
    async with anyio.create_task_group() as group:
        if way == "natively":
            task = asyncio.ensure_future(life.run(number))
            cancel: Callable[[], object] = task.cancel
        else:
            scope = anyio.CancelScope()
            group.start_soon(in_scope, scope, partial(life.run, number))
            cancel = scope.cancel if way == "by a scope" else partial(group.start_soon, cancel_beside, lambda: life.request)
        await reach(state, life)
        cancel()
        await settle()
        assert life.request.closed is not state.waits
        assert (slots_free(life) < free) is state.keeps_slots
        let_go()
        if way == "natively":
            await asyncio.wait({task})
            assert task.cancelled()
    assert life.request.closed


def slots_free(life: Life) -> int:
    return sum(staging.slots.free for staging in life.kv._halves.local_worker.memory.stagings)


async def in_scope(scope: anyio.CancelScope, run: Callable[[], object]) -> None:
    with scope:
        await run()  # type: ignore[misc]


async def cancel_beside(request: Callable[[], Request]) -> None:
    await request().cancel()


async def others_are_served(life: Life, name: str) -> None:
    request, load, table = await life.server.load(life.kv, name, OTHER)
    assert (await load.wait()).state is LoadState.LOADED
    assert life.server.wrong_pages(OTHER, table, 0, 2) == []
    await life.server.compute(life.kv, request, OTHER, table, 8)
    await request.finished()
    life.server.free(table)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_D6_M6_a_thousand_requests_cancelled_in_one_state_leave_everything_as_it_was(
    backend: str, state: type[State], left_open: Callable[[Connector], list[str]]
) -> None:
    ways = ["by a scope", "by Request.cancel()", *(["natively"] if backend == "asyncio" else [])]

    async def main() -> None:
        server = FakeServer.warm(SHARED, OTHER, slots=state.slots, pages=16)
        async with server.open() as kv:
            life = Life(server, kv)
            await others_are_served(life, "before")
            at_the_start = kv.pressure()
            this = state()
            async with this.around(life):
                await settle()
                free = slots_free(life)
                for number in range(1, 1 + ABORTS // len(BACKENDS)):
                    await abort(this, life, number, ways[number % len(ways)], free)
            life.between_passes, life.polls = None, False
            await anyio.sleep(0.1)
            # Every end was told by the wait or the block that it ended.
            assert kv.completed() == []
            await others_are_served(life, "after")
            assert left_open(kv) == []
            # What loads have read is a sum, and nothing that is held.
            assert msgspec.structs.replace(kv.pressure(), reads=at_the_start.reads) == at_the_start
            assert server.free_pages == [16, 16]
        assert server.left_behind() == []
        assert server.wrong_values() == []

    run_virtual(backend, main)
