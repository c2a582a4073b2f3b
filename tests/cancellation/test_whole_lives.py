"""A request's whole life, cancelled at each of its waits: window search, load, chunked prefill, decode, end; with window pages
that the engine reuses right after each pass, and with pages that the store reads and writes itself (D2, D6, S2, S3, S4, M6).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from akv import Connector, EngineCapabilities, LookupOutcome
from akv_testing import run_virtual
from akv_testing.calls import Latency
from akv_testing.clock import BACKENDS
from akv_testing.window_server import WindowServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from akv_testing.cancelling import Cancelling
    from tests.cancellation.conftest import Engine

#: Eleven whole blocks of four tokens, and three tokens more. The store holds the first six blocks, but for a window page.
PROMPT = tuple(range(47))
#: A prompt of one pass, whose window pages take all of the ring.
BESIDE = tuple(range(300, 322))
OTHER = tuple(range(500, 547))
#: Seconds of a call or copy: long enough that a life is mostly waiting, and each kind of its own length.
LATENCY = Latency(probe_s=0.0007, get_s=0.0011, put_s=0.0013, copy_s=0.0003, snapshot_s=0.0005)

KINDS = {
    "windows through slots": {"windows": ((10, 3),), "host_pages": False},
    "windows on host pages": {"windows": ((10, 3),), "host_pages": True},
    "host pages": {"windows": (), "host_pages": True},
}


class Life:
    """One server, and what its engine does until it is cancelled."""

    def __init__(self, engine: type[Engine], *, windows: tuple[tuple[int, int], ...], host_pages: bool) -> None:
        self.server = WindowServer(
            windows=windows,
            full=1 if windows else 2,
            host_pages=host_pages,
            capabilities=EngineCapabilities(window_retention_tokens=0, keeps_quarantined_pages=host_pages),
            slots=4,
            latency=LATENCY,
            rewind_tokens=4,
            # One closing pass has it, the next one waits for it.
            snapshot_slots=5,
            snapshot_wait_ms=100,
        )
        self.engine = engine(self.server)
        self.server.put_in_store(PROMPT[:24])
        if windows:
            self.server.store.evict(self.server.keys_of(PROMPT)[1][5])
        self.outcome: LookupOutcome | None = None

    async def run(self, kv: Connector) -> None:
        """Two requests: one closes a pass earlier, the other resumes, computes the rest of its prompt, and decodes."""
        engine = self.engine
        beside, mine = kv.open_request("beside", BESIDE), kv.open_request("mine", PROMPT)
        tables: list[list[list[int]]] = [[[] for _ in self.server.layout.groups] for _ in range(2)]
        try:
            offered, load = await engine.reserve(mine, PROMPT, tables[1])
            await load.wait()
            for before in range(offered, len(PROMPT) - 8, 12):
                await engine.run_pass(kv, mine, PROMPT, tables[1], before, min(before + 12, len(PROMPT) - 8))
            await engine.run_pass(kv, beside, BESIDE, tables[0], 0, len(BESIDE))
            await engine.run_pass(kv, mine, PROMPT, tables[1], len(PROMPT) - 8, len(PROMPT))
            sequence = PROMPT
            for token in range(900, 903):
                mine.append([token])
                sequence = (*sequence, token)
                await engine.run_pass(kv, mine, sequence, tables[1], len(sequence) - 1, len(sequence))
            await mine.finished()
            await beside.finished()
        finally:
            # Idempotent, and at once for those that have closed.
            await engine.cancel(kv, mine, tables[1])  # noqa: ASYNC102 - shielded there
            await engine.cancel(kv, beside, tables[0])  # noqa: ASYNC102 - shielded there

    async def goes_on(self, kv: Connector, left_open: Callable[[Connector], list[str]]) -> None:
        """Nothing is out of use, and others are served whole, the cancelled prompt too."""
        await anyio.sleep(0.1)
        self.engine.fetch(kv)
        assert left_open(kv) == []
        assert self.server.free_pages == [64] * len(self.server.layout.groups)
        assert not any(self.engine.pages)
        await self.server.serve(kv, "other", OTHER, chunk=20)
        assert self.server.ends(OTHER)[-1] == 11
        await self.server.serve(kv, "again", PROMPT, chunk=20)
        assert self.server.ends(PROMPT)[-1] == 11
        assert left_open(kv) == []
        assert self.server.wrong_values() == []


WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "with everybody waiting": {"after_s": 0.0},
    "between two ends": {"after_s": 0.0004},
    "natively": {"native": True},
    "natively, three times": {"native": True, "times": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("way", "backend"), [(w, b) for w in WAYS for b in BACKENDS if "native" not in WAYS[w] or b == "asyncio"]
)
def test_D6_S2_S4_M6_a_life_may_be_cancelled_at_each_of_its_waits(
    backend: str,
    way: str,
    kind: str,
    cancelling: type[Cancelling],
    engine: type[Engine],
    left_open: Callable[[Connector], list[str]],
) -> None:
    named = 0

    async def main(at: int) -> bool:
        nonlocal named
        life = Life(engine, **KINDS[kind])  # type: ignore[arg-type]
        async with life.server.open() as kv:
            ended = await cancelling(**WAYS[way]).run(partial(life.run, kv), at)
            await life.goes_on(kv, left_open)
        assert life.server.left_behind() == []
        assert life.server.wrong_values() == []
        named += life.engine.named
        return ended

    at = 1
    while not run_virtual(backend, main, at):
        at += 1
    assert at > 18, "a life has this many waits at least"
    # Where pages are reached through slots nothing is in quarantine, else some cancels meet a call.
    assert (named > 0) == KINDS[kind]["host_pages"]
