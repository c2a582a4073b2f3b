"""`akv bench faults` from beginning to end.

One pool on loopback: a master, a lender that holds every page, and this process, which computes, stores and loads. For each
fault three prompts are computed and stored; then they are asked for again, and while the pages of two of them are read the
master or the lender is halted. They are computed then, and must come to the same bits. Nothing here waits for longer than the
store does.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack

import anyio

from akv.cli.bench.faults.figures import (
    LOAD_DEADLINE_S,
    LOOKUP_DEADLINE_S,
    MOST_UNTIL_AGAIN_S,
    Fault,
    FaultFigures,
    Figures,
    missed,
)
from akv.cli.bench.faults.lookups import Lookups
from akv.cli.bench.faults.server import PAGE_BYTES, PROMPTS, Answer, Server, open_server
from akv.cli.bench.faults.victims import Victim, open_lender, open_master
from akv.errors import PoolError
from akv.values.scope import Scope

#: Bytes that the lender lends: the pages of every run, several times over.
SEGMENT_BYTES = 64 * PAGE_BYTES
#: Seconds for which the master is gone at least: time for the breaker to open, and for lookups to meet it.
OUTAGE_S = 2.5


async def bench_faults(backend: str) -> Figures:
    """Halt the one and the other, both ways. Raises DependencyError or PoolError if there is nothing to measure.

    **Cancellation:** every process that was started has ended when this returns.
    """
    async with AsyncExitStack() as stack:
        address, master = await stack.enter_async_context(open_master())
        lender = await stack.enter_async_context(open_lender(address, SEGMENT_BYTES))
        server = await stack.enter_async_context(open_server(address))
        # Memory that is touched for the first time costs as much as the rest.
        for _ in range(2):
            await server.stored(Scope(salt="warm"))
            await server.ask(Scope(salt="warm"))
        figures = (
            await _holder_halted(server, lender, Fault.HOLDER_FROZEN, lender.freeze),
            await _master_halted(server, master, Fault.MASTER_FROZEN, master.freeze),
            await _master_halted(server, master, Fault.MASTER_KILLED, master.kill),
            # Last: the master goes on naming what a dead holder held for some ten seconds, and lets others put there.
            await _holder_halted(server, lender, Fault.HOLDER_KILLED, lender.kill),
        )
    return Figures(
        backend=backend,
        load_deadline_s=LOAD_DEADLINE_S,
        lookup_deadline_s=LOOKUP_DEADLINE_S,
        faults=figures,
        missed=tuple(sentence for fault in figures for sentence in missed(fault)),
    )


async def _holder_halted(server: Server, lender: Victim, fault: Fault, halt: Callable[[], None]) -> FaultFigures:
    scope = Scope(salt=fault.value)
    cold = await server.stored(scope)
    halted = server.pool.halt_inside_a_get(halt)
    answers = await server.ask(scope, halt=halted)
    _refuse_if_not_halted(halted.halted.is_set(), answers)
    await lender.back()
    await server.calls_returned()
    after = await server.ask(scope)
    return _figures(fault, cold, answers, after, inside_a_get=halted.inside_a_get)


async def _master_halted(server: Server, master: Victim, fault: Fault, halt: Callable[[], None]) -> FaultFigures:
    scope = Scope(salt=fault.value)
    cold = await server.stored(scope)
    lookups = Lookups(server.kv, PROMPTS[0], scope)
    async with lookups.running():
        halted = server.pool.halt_inside_a_get(halt)
        until = anyio.current_time() + OUTAGE_S
        answers = await server.ask(scope, halt=halted)
        _refuse_if_not_halted(halted.halted.is_set(), answers)
        await anyio.sleep_until(until)
        times = lookups.times()
        began = anyio.current_time()
        await master.back()
        with anyio.move_on_after(MOST_UNTIL_AGAIN_S):
            await _pages_again(server, scope)
        again_s = anyio.current_time() - began
    await server.calls_returned()
    after = await server.ask(scope)
    return _figures(fault, cold, answers, after, inside_a_get=halted.inside_a_get, again_s=again_s, lookups=times)


async def _pages_again(server: Server, scope: Scope) -> None:
    """Ask until a request has pages from the pool."""
    while True:
        (answer,) = await server.ask(scope, PROMPTS[:1])
        if answer.result is not None and answer.result.from_pool_tokens:
            return
        await anyio.sleep(0.02)


def _refuse_if_not_halted(halted: bool, answers: list[Answer]) -> None:
    if not halted:
        outcomes = [answer.result.lookup_outcome for answer in answers if answer.result is not None]
        raise PoolError(f"not every request had pages to load (lookups: {outcomes}), so nothing was measured")


def _figures(
    fault: Fault, cold: list[Answer], answers: list[Answer], after: list[Answer], *, inside_a_get: bool, **more: object
) -> FaultFigures:
    everything = [*answers, *after]
    return FaultFigures(
        fault=fault,
        requests=len(everything),
        lost=sum(answer.result is None for answer in everything),
        differing=sum(not answer.equals(same) for answer, same in zip(everything, [*cold, *cold], strict=True)),
        inside_a_get=inside_a_get,
        load_failures=tuple(answer.result.load_failure for answer in answers if answer.result is not None),
        again_loaded=sum(answer.result is not None and answer.result.from_pool_tokens > 0 for answer in after),
        cold_s=max(answer.took_s for answer in cold),
        slowest_s=max(answer.took_s for answer in answers),
        **more,  # type: ignore[arg-type]
    )
