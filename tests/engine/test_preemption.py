"""A younger request gives way to an older one that needs a page, and goes on later with the same bits (D7, D8, S7)."""

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import anyio
import msgspec
import pytest
from torch import Tensor

from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing.engine import TINY_SLIDING, Engine, EngineConfig, Model, Pages, Result, open_engine
from akv_testing.engine.admission import Admission
from akv_testing.store import FakeStore

#: The fixtures `served`, `assert_same` and `until`: what they do is described in conftest.py.
OpenServed = Callable[..., AbstractAsyncContextManager[Any]]
Same = Callable[[Result, Result], None]
Until = Callable[[Callable[[], object]], Awaitable[None]]

pytestmark = pytest.mark.anyio

#: Three pages each to begin with, and eight at the end.
PROMPTS = {f"r{number}": [number, *(7 * position % 251 for position in range(1, 24))] for number in range(2)}
NEW_TOKENS = 40


async def alone(config: EngineConfig, model: Model, prompts: dict[str, list[int]], new_tokens: int) -> dict[str, Result]:
    """What each gives when nobody interrupts it."""
    async with open_engine(config, model=model) as engine:
        return {
            name: await engine.generate(
                name, prompt, max_new_tokens=new_tokens, local_reuse=False, keep_logits=True, keep_pages=True
            )
            for name, prompt in prompts.items()
        }


async def together(engine: Engine, prompts: dict[str, list[int]], new_tokens: int, **options: bool) -> dict[str, Result]:
    results: dict[str, Result] = {}

    async def client(name: str) -> None:
        results[name] = await engine.generate(
            name,
            prompts[name],
            max_new_tokens=new_tokens,
            keep_logits=True,
            keep_pages=True,
            **options,  # type: ignore[arg-type]
        )

    async with anyio.create_task_group() as group:
        for name in prompts:
            group.start_soon(client, name)
    return results


def overwrite_what_is_free(monkeypatch: pytest.MonkeyPatch, engine: Engine, pages: Pages) -> None:
    """From here on pages that are given back hold NaN at once: whoever still reads them stores or computes nonsense."""
    release = Admission.release

    def release_and_overwrite(admission: Admission, *arguments: Any) -> None:
        release(admission, *arguments)
        for caches, free in zip(pages.caches, engine.cache.free_page_lists(), strict=True):
            for cache in caches:
                cache[list(free)] = float("nan")

    monkeypatch.setattr(Admission, "release", release_and_overwrite)


@pytest.mark.parametrize("reuse", [True, False])
async def test_D7_a_preempted_request_gives_what_an_uninterrupted_one_does(
    fine: EngineConfig, model: Model, assert_same: Same, reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await alone(fine, model, PROMPTS, NEW_TOKENS)
    few = msgspec.structs.replace(fine, pages=10)
    pages = Pages(few)
    async with open_engine(few, model=model, pages=pages) as engine:
        overwrite_what_is_free(monkeypatch, engine, pages)
        results = await together(engine, PROMPTS, NEW_TOKENS, local_reuse=reuse)
        await engine.settled()
        assert engine.cache.check() == []
        assert engine.cache.available_blocks == 10
    counts = sorted(result.preemptions for result in results.values())
    assert counts[0] == 0  # the older one gives way to nobody
    assert counts[1] >= 1
    for name, result in results.items():
        assert_same(result, expected[name])


async def test_D7_windows_too_come_back(model: Model) -> None:
    sliding = Model(TINY_SLIDING)
    config = EngineConfig(
        model=TINY_SLIDING, tokens_per_block=8, pages=64, chunk_tokens=8, max_tokens_per_pass=64, max_running=8
    )
    expected = await alone(config, sliding, PROMPTS, NEW_TOKENS)
    async with open_engine(msgspec.structs.replace(config, pages=(10, 12, 20)), model=sliding) as engine:
        results = await together(engine, PROMPTS, NEW_TOKENS)
        await engine.settled()
        assert engine.cache.check() == []
        assert engine.cache.available_blocks == 10
    assert sum(result.preemptions for result in results.values()) >= 1
    for name, result in results.items():
        assert result.tokens == expected[name].tokens
        assert result.logits is not None
        assert result.logits.equal(cast(Tensor, expected[name].logits))


async def test_D8_what_was_saved_in_time_is_loaded_and_not_computed_again(
    fine: EngineConfig, model: Model, served: OpenServed, assert_same: Same
) -> None:
    expected = await alone(fine, model, PROMPTS, NEW_TOKENS)
    async with served(msgspec.structs.replace(fine, pages=10), FakeStore(anyio.current_time)) as fresh:
        results = await together(fresh.engine, PROMPTS, NEW_TOKENS, local_reuse=False)
        await fresh.engine.settled()
        assert fresh.engine.cache.check() == []
        assert fresh.engine.cache.available_blocks == 10
    assert sum(result.preemptions for result in results.values()) >= 1
    assert sum(result.reloaded_tokens for result in results.values()) >= 24
    for name, result in results.items():
        assert result.from_pool_tokens == result.local_tokens == 0  # no hits: it is its own
        assert_same(result, expected[name])


async def test_S7_pages_of_a_preempted_request_are_overwritten_while_its_save_is_queued(
    fine: EngineConfig,
    model: Model,
    served: OpenServed,
    assert_same: Same,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = await alone(fine, model, PROMPTS, NEW_TOKENS)
    store = FakeStore(anyio.current_time)
    # Three slots: the first put hangs in the store with what it gathered, and everything else waits in the queue.
    page_bytes = Pages(fine).layout.largest_page_bytes
    few = msgspec.structs.replace(fine, pages=10)
    async with served(few, store, staging_buffer_bytes=4 * page_bytes) as fresh:
        overwrite_what_is_free(monkeypatch, fresh.engine, fresh.pages)
        gate = fresh.runner.hold_all(CallKind.PUT)
        results: dict[str, Result] = {}

        async def clients() -> None:
            results.update(await together(fresh.engine, PROMPTS, NEW_TOKENS, local_reuse=False))

        async with anyio.create_task_group() as group:
            group.start_soon(clients)
            await gate.reached()
            # The older one ends, which takes pages of the younger one, while no save of either has ended. Its own are held
            # until they have, so the younger one goes on when the store answers again.
            await until(lambda: any(job.complete for job in fresh.engine._jobs.values()))
            assert sum(job.preemptions for job in fresh.engine._jobs.values()) >= 1
            assert store.keys() == []
            gate.release()
        await fresh.engine.settled()
        assert fresh.engine.cache.check() == []
    for name, result in results.items():
        assert_same(result, expected[name])
    # And what stands in the pool is what was computed: another server reads it, all of it.
    async with served(fine, store) as other:
        for name, result in expected.items():
            turn = [*PROMPTS[name], *result.tokens]
            hit = await other.engine.generate(name, turn, max_new_tokens=1, keep_pages=True)
            assert hit.from_pool_tokens == 56
            assert hit.page_digests[0][:7] == result.page_digests[0][:7]


async def test_D6_a_client_that_leaves_while_its_request_gives_way(
    fine: EngineConfig, served: OpenServed, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(msgspec.structs.replace(fine, pages=10), FakeStore(anyio.current_time)) as fresh:
        overwrite_what_is_free(monkeypatch, fresh.engine, fresh.pages)
        gate = fresh.runner.hold_all(CallKind.COPY)  # a save reads its pages, so they cannot be had yet
        scopes = {name: anyio.CancelScope() for name in PROMPTS}
        complete: list[str] = []

        async def client(name: str) -> None:
            with scopes[name]:
                await fresh.engine.generate(name, PROMPTS[name], max_new_tokens=NEW_TOKENS)
                complete.append(name)

        async with anyio.create_task_group() as group:
            for name in PROMPTS:
                group.start_soon(client, name)
            await until(lambda: any(job.preemptions for job in fresh.engine._jobs.values()))
            leaves = next(job.request_id for job in fresh.engine._jobs.values() if job.preemptions)
            scopes[leaves].cancel()
            await anyio.sleep(0.01)
            assert complete == []
            gate.release()
        await fresh.engine.settled()
        assert len(complete) == 1
        assert fresh.engine.cache.check() == []
        assert fresh.engine.cache.available_blocks == 10


@pytest.mark.parametrize("seed", range(4))
async def test_D7_D8_everything_finishes_on_few_pages_whatever_fails_or_leaves(
    fine: EngineConfig, model: Model, served: OpenServed, assert_same: Same, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    # They share beginnings, and no end: a block that one computed as a prompt and another token by token has other last bits.
    prompts = {
        f"r{number}": [
            draw.randrange(2),
            *(7 * position % 251 for position in range(1, draw.randrange(10, 60))),
            250 - number,
        ]
        for number in range(10)
    }
    expected = await alone(fine, model, prompts, 20)
    store = FakeStore(anyio.current_time)
    async with served(fine, store) as computing:
        for name in list(prompts)[:4]:
            await computing.engine.generate(name, prompts[name], max_new_tokens=1)
    leaving = set(draw.sample(sorted(prompts), 3))
    results: dict[str, Result] = {}
    async with served(msgspec.structs.replace(fine, pages=14), store) as fresh:
        overwrite_what_is_free(monkeypatch, fresh.engine, fresh.pages)
        for state in (KeyState.MISSING, KeyState.LEASE_EXPIRED, KeyState.HOLDER_LOST):
            fresh.pool.answer("get", state, skip=draw.randrange(20))

        async def client(name: str) -> None:
            with anyio.move_on_after(0.02 + draw.random() / 20 if name in leaving else None):
                results[name] = await fresh.engine.generate(
                    name, prompts[name], max_new_tokens=20, keep_logits=True, keep_pages=True
                )

        with anyio.fail_after(100):
            async with anyio.create_task_group() as group:
                for name in prompts:
                    group.start_soon(client, name)
            await fresh.engine.settled()
        assert fresh.engine.cache.check() == []
        assert fresh.engine.cache.available_blocks == 14
    assert set(prompts) - leaving <= set(results)
    for name, result in results.items():
        assert_same(result, expected[name])
