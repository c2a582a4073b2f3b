"""One engine that embeds akv, on the pool whose processes are halted, and the requests that it is asked."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import anyio
import msgspec

from akv.cli.bench.faults.figures import LOAD_DEADLINE_S, LOOKUP_DEADLINE_S
from akv.cli.bench.faults.halting_pool import LOADS, Halt, HaltingPool
from akv.connector import Connector, open_connector
from akv.device import open_torch_device
from akv.pool import ThreadRunner, open_pool
from akv.ports import Ports
from akv.ports.calls import CallKind
from akv.settings import Settings, StoreSettings
from akv.values.scope import Scope
from akv_testing.engine import Engine, EngineConfig, ModelConfig, Pages, Result, capabilities_of, open_engine

#: Few tokens with much KV: computing them is quick, and a get of one page, 4 MiB, takes long enough to be met.
MODEL = ModelConfig(layers=2, hidden=32, heads=16, kv_heads=16, head_size=256, intermediate=64, max_tokens=512)
TOKENS_PER_BLOCK = 64
#: Chunks of one block: what is computed together does not depend on where a request resumes, so each request has one output.
CONFIG = EngineConfig(
    model=MODEL,
    tokens_per_block=TOKENS_PER_BLOCK,
    chunk_tokens=TOKENS_PER_BLOCK,
    max_tokens_per_pass=2 * TOKENS_PER_BLOCK,
    max_running=8,
    pages=24,
)
#: Two blocks, and so two gets, and a few tokens more.
PROMPT_TOKENS = 2 * TOKENS_PER_BLOCK + 5
#: One more than there are loads as the process is halted: the last one is asked once it is.
PROMPTS = tuple(tuple((7 * at + 31 * number) % MODEL.vocabulary for at in range(PROMPT_TOKENS)) for number in range(LOADS + 1))
PAGE_BYTES = MODEL.kv_bytes_per_token * TOKENS_PER_BLOCK
#: Seconds after which a request counts as lost.
LOST_AFTER_S = 30.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a request came to."""

    took_s: float
    #: None if it did not end.
    result: Result | None

    def equals(self, cold: "Answer") -> bool:
        """Whether it ended as the other one did, bit for bit."""
        ours, theirs = self.result, cold.result
        if ours is None or theirs is None or ours.logits is None or theirs.logits is None:
            return False
        return ours.tokens == theirs.tokens and ours.logits.equal(theirs.logits)


class Server:
    """Answers the same prompts again and again. The scope alone says what may be reused: no request finds local KV."""

    def __init__(self, kv: Connector, engine: Engine, pool: HaltingPool) -> None:
        self.kv = kv
        self.pool = pool
        self._engine = engine
        self._numbers = count()

    async def ask(
        self,
        scope: Scope,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        *,
        reads_pool: bool = True,
        halt: Halt | None = None,
    ) -> list[Answer]:
        """Ask all prompts at once, and wait for the answers; the last one once there was a halt, if one is planned.

        Without the pool it is a cold run. Saves go on.
        """
        answers: dict[int, Answer] = {}

        async def one(at: int) -> None:
            if halt is not None and at >= LOADS:
                await halt.over()
            began = anyio.current_time()
            result = None
            with anyio.move_on_after(LOST_AFTER_S):
                result = await self._engine.generate(
                    f"request {next(self._numbers)}",
                    prompts[at],
                    max_new_tokens=1,
                    scope=scope,
                    local_reuse=False,
                    reads_pool=reads_pool,
                    keep_logits=True,
                )
            answers[at] = Answer(took_s=anyio.current_time() - began, result=result)

        async with anyio.create_task_group() as group:
            for at in range(len(prompts)):
                group.start_soon(one, at)
        return [answers[at] for at in range(len(prompts))]

    async def stored(self, scope: Scope) -> list[Answer]:
        """A cold run of all prompts, and their pages in the pool."""
        answers = await self.ask(scope, reads_pool=False)
        await self._engine.settled()
        return answers

    async def calls_returned(self) -> None:
        """Wait until no store call is under way that was given up."""
        while True:
            if not self.kv.pressure().given_up_calls:
                return
            await anyio.sleep(0.01)


@asynccontextmanager
async def open_server(address: str) -> AsyncIterator[Server]:
    """An engine and its connector. It lends nothing: what it stores lies in the memory of others."""
    settings = Settings(
        model_key=MODEL.key,
        store=StoreSettings(master_address=address, segment_bytes=0),
        staging_buffer_bytes=2 * LOADS * PAGE_BYTES,
        loaders=LOADS,
        load_deadline_s=LOAD_DEADLINE_S,
        lookup_deadline_s=LOOKUP_DEADLINE_S,
    )
    pages = Pages(CONFIG)
    device = open_torch_device(pages.layout, pages.caches)
    limits = {
        CallKind.PROBE: settings.probe_concurrency,
        CallKind.GET: settings.loaders,
        CallKind.PUT: settings.savers,
        CallKind.COPY: settings.loaders + settings.savers,
    }
    async with open_pool(settings) as mooncake:
        pool = HaltingPool(mooncake)
        ports = Ports(pool=pool, device=device, runner=ThreadRunner(limits))
        capabilities = capabilities_of(CONFIG)
        opening = open_connector(settings, pages.layout, pages.caches, capabilities=capabilities, ports=ports)
        async with opening as kv, open_engine(CONFIG, pages=pages, kv=kv) as engine:
            yield Server(kv, engine, pool)
    device.close()
