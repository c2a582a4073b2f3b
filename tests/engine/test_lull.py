"""When a request holds the loop for long: while a pass is computed, so that no step waits for it."""

import threading
from collections.abc import Sequence
from functools import partial

import anyio
import pytest

from akv_testing.engine import TINY, EngineConfig, open_engine
from akv_testing.engine import batch as batch_module
from akv_testing.engine.step import Chunk, Sampled

pytestmark = pytest.mark.anyio


class Held:
    """Computes nothing, pass by pass as it is let."""

    def __init__(self) -> None:
        self._began, self._may = threading.Semaphore(0), threading.Semaphore(0)

    async def began(self) -> None:
        """Wait for the next pass's beginning."""
        assert await anyio.to_thread.run_sync(lambda: self._began.acquire(timeout=10))

    def let(self) -> None:
        self._may.release()

    def compute(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        self._began.release()
        assert self._may.acquire(timeout=10)
        return [None if chunk.following is not None else Sampled((1,), None, 0, None) for chunk in chunks]


CONFIG = EngineConfig(model=TINY, tokens_per_block=4, pages=16, chunk_tokens=16, max_tokens_per_pass=64)


async def test_a_lull_begins_with_the_next_pass_and_is_there_at_once_where_nothing_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_module, "LULL_S", 10.0)
    held, lulls = Held(), list[int]()

    async def lull(number: int) -> None:
        await engine._batch.lull()
        lulls.append(number)

    async with open_engine(CONFIG, computer=held) as engine, anyio.create_task_group() as group:
        with anyio.fail_after(1):
            await lull(0)
        group.start_soon(partial(engine.generate, "r", [1, 2, 3], max_new_tokens=2))
        await held.began()
        group.start_soon(lull, 1)
        await anyio.sleep(0.02)
        assert lulls == [0]
        held.let()
        await held.began()
        await anyio.sleep(0.02)
        assert lulls == [0, 1]
        held.let()
        await engine.settled()
        with anyio.fail_after(1):
            await lull(2)


async def test_nobody_waits_long_for_the_end_of_a_long_pass() -> None:
    held = Held()
    async with open_engine(CONFIG, computer=held) as engine, anyio.create_task_group() as group:
        group.start_soon(partial(engine.generate, "r", [1, 2, 3], max_new_tokens=1))
        await held.began()
        with anyio.move_on_after(1) as timer:
            await engine._batch.lull()
        held.let()
    assert not timer.cancelled_caught
