"""The engines that are asked: one without a connector, one with akv, and one whose akv reads through the store's client alone.

They share one process, one device and one model; each has pages of its own. The memory of the pool is another process's.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from anyio import to_thread

from akv.cli.bench.engine.loads import Load, Moved
from akv.connector import Connector, open_connector
from akv.errors import PoolError
from akv.settings import Settings, StoreSettings
from akv_testing.engine import Engine, EngineConfig, ModelConfig, Pages, Result, capabilities_of, open_engine
from akv_testing.engine.large import LLAMA_8B, LLAMA_8B_WINDOWS, SMALL, SMALL_WINDOWS, LargeComputer, LargeModel, open_pages

Prompt: TypeAlias = npt.NDArray[np.int64]

#: Bytes that a producer may have handed over: its pages are the device's own, so none is short of memory meanwhile.
_BACKLOG_BYTES = 1 << 40
#: Seconds. What is measured are times, not how something degrades.
_PATIENCE_S = 60.0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: a model, and how its engine cuts prompts."""

    name: str
    model: ModelConfig
    tokens_per_block: int
    chunk_tokens: int
    #: Prompts, by default.
    tokens: tuple[int, ...]
    #: Tokens of the prompt of the request that decodes beside loads, and of its answer.
    beside_prompt: int
    beside_answer: int
    #: Seconds that it decodes before the first load, and between two of them.
    pause_s: float
    #: Bytes of one file of the memory that is lent.
    file_bytes: int = 8 << 30
    staging_buffer_bytes: int = 1 << 30


def shape_of(device: str, *, windows: bool) -> Shape:
    """A server's on CUDA; on a CPU a small one, which shows that everything works and no more."""
    if device.startswith("cuda"):
        return Shape(
            name="llama-8b-windows" if windows else "llama-8b",
            model=LLAMA_8B_WINDOWS if windows else LLAMA_8B,
            tokens_per_block=64,
            chunk_tokens=8192,
            tokens=(8_000, 32_000, 96_000),
            beside_prompt=1_000,
            beside_answer=1_500,
            pause_s=1.0,
        )
    return Shape(
        name="small-windows" if windows else "small",
        model=SMALL_WINDOWS if windows else SMALL,
        tokens_per_block=16,
        chunk_tokens=256,
        tokens=(200, 400, 800),
        beside_prompt=40,
        beside_answer=60,
        pause_s=0.05,
        file_bytes=32 << 20,
        staging_buffer_bytes=4 << 20,
    )


def prompt(shape: Shape, name: str, tokens: int) -> Prompt:
    """The prompt of that name: tokens at random."""
    return np.random.default_rng(list(name.encode())).integers(0, shape.model.vocabulary, tokens)


class Server:
    """One engine, and what it is asked."""

    def __init__(self, name: str, shape: Shape, engine: Engine, moved: Moved) -> None:
        self.name = name
        self._shape = shape
        self._engine = engine
        self._moved = moved
        self._numbers = count()

    async def cold(self, tokens: Prompt) -> Result:
        """Compute a prompt that nobody has seen. What it computed stays for `local_hit()`, and goes to the pool, if any."""
        result = await self._ask(tokens, local_reuse=True)
        self._refuse_if_served_otherwise(result, local=0, pool=0)
        return result

    async def local_hit(self, tokens: Prompt) -> Result:
        """Ask for a prompt again."""
        result = await self._ask(tokens, local_reuse=True, reads_pool=False)
        self._refuse_if_served_otherwise(result, local=self._whole(tokens), pool=0)
        return result

    async def pool_hit(self, tokens: Prompt) -> tuple[Result, Load]:
        """Ask for a prompt whose pages the pool has all of. Nothing of it is here, nor stays here."""
        result = await self._ask(tokens)
        self._refuse_if_served_otherwise(result, local=0, pool=self._whole(tokens))
        return result, self._moved.loads[result.request_id]

    async def decode(self, tokens: Prompt, answer: int) -> Result:
        """Answer at some length."""
        return await self._ask(tokens, max_new_tokens=answer)

    async def settled(self) -> None:
        """Wait until all saves have ended."""
        await self._engine.settled()

    def saved_bytes(self, result: Result) -> int:
        """What a request has saved."""
        return self._moved.saved_bytes.get(result.request_id, 0)

    async def forget(self) -> None:
        """Keep nothing of what was computed here."""
        await self._engine.settled()
        self._engine.cache.evict_idle()

    async def _ask(
        self, tokens: Prompt, *, max_new_tokens: int = 1, local_reuse: bool = False, reads_pool: bool = True
    ) -> Result:
        name = f"{self.name} {next(self._numbers)}"
        return await self._engine.generate(
            name, tokens, max_new_tokens=max_new_tokens, local_reuse=local_reuse, reads_pool=reads_pool
        )

    def _whole(self, tokens: Prompt) -> int:
        size = self._shape.tokens_per_block
        return (len(tokens) - 1) // size * size

    def _refuse_if_served_otherwise(self, result: Result, local: int, pool: int) -> None:
        if (result.local_tokens, result.from_pool_tokens) != (local, pool):
            raise PoolError(
                f"request {result.request_id!r} had {result.local_tokens} tokens from its own cache and "
                f"{result.from_pool_tokens} from the pool, not {local} and {pool} (lookup: {result.lookup_outcome or 'none'}, "
                f"load: {result.load_failure or 'none failed'}): nothing can be measured"
            )


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked in turn."""

    shape: Shape
    model: LargeModel
    #: Without a connector; with its parts, for who measures attention alone.
    plain: Server
    plain_config: EngineConfig
    plain_computer: LargeComputer
    #: With akv as it comes.
    pooled: Server
    #: With akv that reads nothing in place.
    staged: Server


@asynccontextmanager
async def open_servers(
    shape: Shape, device: str, address: str, longest: int, at_once: int, moved: Moved
) -> AsyncIterator[Servers]:
    """`longest`: tokens of the longest prompt; `at_once`: of all that are asked at once, together."""
    model = await to_thread.run_sync(lambda: LargeModel(shape.model, device))
    # Beside the prompts the request that decodes, and an answer's token for each.
    beside = shape.beside_prompt + shape.beside_answer + 64 * shape.tokens_per_block
    small, large = _config(shape, device, longest + beside), _config(shape, device, max(longest, at_once) + beside)
    async with AsyncExitStack() as stack:
        pages = open_pages(small)
        computer = LargeComputer(small, model, pages)
        plain = await stack.enter_async_context(open_engine(small, pages=pages, computer=computer))
        pooled = await stack.enter_async_context(_with_akv(shape, large, model, address, "auto"))
        staged = await stack.enter_async_context(_with_akv(shape, small, model, address, "staged"))
        yield Servers(
            shape=shape,
            model=model,
            plain=Server("plain", shape, plain, moved),
            plain_config=small,
            plain_computer=computer,
            pooled=Server("pooled", shape, pooled, moved),
            staged=Server("staged", shape, staged, moved),
        )


def _config(shape: Shape, device: str, tokens: int) -> EngineConfig:
    running = 16
    windows = any(group.window_tokens for group in shape.model.groups)
    return EngineConfig(
        model=shape.model,
        tokens_per_block=shape.tokens_per_block,
        pages=-(-tokens // shape.tokens_per_block),
        chunk_tokens=shape.chunk_tokens,
        max_tokens_per_pass=shape.chunk_tokens + running * shape.tokens_per_block,
        max_running=running,
        window_retention_tokens=1024 if windows else 0,
        device=device,
    )


@asynccontextmanager
async def _with_akv(
    shape: Shape, config: EngineConfig, model: LargeModel, address: str, read_path: Literal["auto", "staged"]
) -> AsyncIterator[Engine]:
    pages = open_pages(config)
    computer = LargeComputer(config, model, pages)
    async with (
        _connector(shape, config, model, address, read_path, pages, computer) as kv,
        open_engine(config, pages=pages, kv=kv, computer=computer) as engine,
    ):
        yield engine


@asynccontextmanager
async def _connector(
    shape: Shape,
    config: EngineConfig,
    model: LargeModel,
    address: str,
    read_path: Literal["auto", "staged"],
    pages: Pages,
    computer: LargeComputer,
) -> AsyncIterator[Connector]:
    settings = Settings(
        model_key=model.key,
        # It lends nothing: what it saves lies in another process's memory.
        store=StoreSettings(master_address=address, segment_bytes=0),
        staging_buffer_bytes=shape.staging_buffer_bytes,
        read_path=read_path,
        backlog_bytes=_BACKLOG_BYTES,
        backlog_passes=1 << 20,
        save_hold_max_s=_PATIENCE_S,
        load_deadline_s=_PATIENCE_S,
    )
    async with open_connector(
        settings, pages.layout, pages.caches, stream=computer.stream, capabilities=capabilities_of(config)
    ) as kv:
        yield kv
