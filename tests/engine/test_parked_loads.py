"""Parked loads never deadlock: the reference engine books the rest of each prompt, and decoding takes none of it (D7)."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import msgspec
import pytest

from akv.ports.calls import CallKind
from akv_testing.engine import EngineConfig, Result
from akv_testing.store import FakeStore

#: The fixtures `served`, `assert_same` and `until`: what they do is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]
Same = Callable[[Result, Result], None]
Until = Callable[[Callable[[], object]], Awaitable[None]]

pytestmark = pytest.mark.anyio

T = 8


def prompt(first: int, blocks: int) -> list[int]:
    """Whole blocks of tokens."""
    return [first, *(7 * position % 251 for position in range(1, blocks * T))]


async def cold_runs(
    served: OpenServed, config: EngineConfig, store: FakeStore, parts: Sequence[tuple[int, int]]
) -> list[Result]:
    """For each of (blocks to load, blocks to compute) a cold run; the pool has the first ones afterwards."""
    results = []
    async with served(config, store) as computing:
        for number, (load, _) in enumerate(parts):
            await computing.engine.generate(f"stores {number}", prompt(number, load), max_new_tokens=1)
    async with served(config, FakeStore(anyio.current_time)) as reference:
        for number, part in enumerate(parts):
            tokens = prompt(number, sum(part))
            results.append(
                await reference.engine.generate("cold", tokens, max_new_tokens=1, keep_logits=True, keep_pages=True)
            )
            await reference.engine.settled()
    return results


@pytest.mark.parametrize(
    ("pages", "parts", "parked"),
    [(7, [(4, 1), (3, 1)], 1), (8, [(4, 2), (3, 1)], 1), (9, [(4, 1), (3, 1)], 2), (10, [(4, 2), (3, 1)], 2)],
)
async def test_D7_two_parked_loads_both_finish(
    fine: EngineConfig,
    served: OpenServed,
    assert_same: Same,
    until: Until,
    pages: int,
    parts: list[tuple[int, int]],
    parked: int,
) -> None:
    store = FakeStore(anyio.current_time)
    cold = await cold_runs(served, fine, store, parts)
    results: dict[int, Result] = {}
    async with served(msgspec.structs.replace(fine, pages=pages), store) as fresh:
        gate = fresh.runner.hold_all(CallKind.GET)

        async def client(number: int) -> None:
            results[number] = await fresh.engine.generate(
                f"r{number}", prompt(number, sum(parts[number])), max_new_tokens=1, keep_logits=True, keep_pages=True
            )

        async with anyio.create_task_group() as group:
            group.start_soon(client, 0)
            await until(lambda: gate.holding == 1)
            group.start_soon(client, 1)
            await until(lambda: len(fresh.engine._jobs) == 2 and gate.holding == parked)
            # There are free pages, and where the second one waits there are enough for its load; but they are promised.
            assert fresh.engine.cache.available_blocks == pages - sum(map(sum, parts[:parked]))
            assert fresh.engine.cache.free_pages == (pages - sum(load for load, _ in parts[:parked]),)
            gate.release()
        await fresh.engine.settled()
        assert fresh.engine.cache.available_blocks == pages
        assert fresh.engine.cache.check() == []
    for number, (load, _) in enumerate(parts):
        assert (results[number].from_pool_tokens, results[number].preemptions) == (load * T, 0)
        assert_same(results[number], cold[number])


async def test_D7_a_decoding_request_waits_for_a_page_that_is_booked(
    fine: EngineConfig, served: OpenServed, assert_same: Same, until: Until
) -> None:
    store = FakeStore(anyio.current_time)
    (cold,) = await cold_runs(served, fine, store, [(4, 2)])
    results: dict[str, Result] = {}
    async with served(msgspec.structs.replace(fine, pages=9), store) as fresh:
        gate = fresh.runner.hold_all(CallKind.GET)

        async def client(name: str, tokens: list[int], new_tokens: int) -> None:
            results[name] = await fresh.engine.generate(
                name, tokens, max_new_tokens=new_tokens, keep_logits=True, keep_pages=True
            )

        async with anyio.create_task_group() as group:
            group.start_soon(client, "parked", prompt(0, 6), 1)
            await gate.reached()
            group.start_soon(client, "decodes", prompt(9, 1), 40)
            await until(lambda: not fresh.engine.cache.available_blocks)
            await anyio.sleep(0.02)  # it has all pages that are nobody's, and needs three more
            assert fresh.engine.cache.free_pages == (2,)
            assert results == {}
            gate.release()
        await fresh.engine.settled()
        assert fresh.engine.cache.available_blocks == 9
        assert fresh.engine.cache.check() == []
    assert results["parked"].preemptions == 0
    assert_same(results["parked"], cold)
    assert len(results["decodes"].tokens) == 40
