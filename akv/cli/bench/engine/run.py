"""`akv bench engine` from beginning to end.

A master and a process that lends all of the pool's memory, on this host; engines in this process. For each length of prompt
they are asked in turn, round by round: a cold request without a connector, the same with one that saves, a local hit, a hit
from the pool, and one that reads through the store's client. A request that was not served from where it should be ends all.
"""

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import anyio
import msgspec
from anyio import to_thread

from akv.cli.bench.engine.beside import steps_beside, times_of
from akv.cli.bench.engine.figures import (
    AT_ONCE,
    AT_ONCE_TOKENS,
    AtOnceFigures,
    BesideFigures,
    EngineFigures,
    PromptFigures,
    missed,
    times,
)
from akv.cli.bench.engine.loads import Load, Moved
from akv.cli.bench.engine.servers import Prompt, Servers, Shape, open_servers, prompt, shape_of
from akv.cli.bench.faults.victims import open_lender
from akv.errors import PoolError
from akv.pool import open_embedded_master
from akv.values.settings import DEFAULT_REWIND_TOKENS
from akv_testing.engine import Result
from akv_testing.engine.large.ceilings import engine_flops, pinned_copy_bytes_per_s, sdpa_flops

#: Hits of each kind in a round: they are short, and vary.
HITS = 3
#: Short prompts are asked more often: so many tokens in a round at least.
_TOKENS_PER_ROUND = 32_000
#: Loads beside a request that decodes.
LOADS = 5
#: Of the memory that is lent, what the pages of a run may take at most: the master begins to evict at nine tenths.
_FILL = 0.88
#: Seconds until the memory that another process lends is mapped and pinned here, and until it was allocated there.
_MAPPED_WITHIN_S = 120.0
#: Python's own is 5 ms, most of a step.
SWITCH_S = 0.0001
#: Called with a line for people as the run goes.
Tell = Callable[[str], None]


async def bench_engine(device: str, tokens: Sequence[int], rounds: int, *, windows: bool, tell: Tell) -> EngineFigures:
    """Measure. Raises DependencyError or PoolError if there is nothing to measure.

    **Cancellation:** every process that was started has ended when this returns.
    """
    shape = shape_of(device, windows=windows)
    moved = Moved()
    moved.listen()
    lengths = tuple(sorted(tokens or shape.tokens))
    lent = max(int(_stored_bytes(shape, lengths, rounds) / _FILL), 4 * shape.file_bytes)
    tell(f"lending {lent / 2**30:.1f} GiB")
    async with (
        open_embedded_master() as address,
        open_lender(address, lent, file_bytes=shape.file_bytes, deadline_s=_MAPPED_WITHIN_S),
        open_servers(shape, device, address, lengths[-1], AT_ONCE * at_once_tokens(lengths), moved) as servers,
    ):
        run = _Run(servers, lengths, rounds, tell)
        return await run.all(device)


def at_once_tokens(lengths: Sequence[int]) -> int:
    """Of the requests that are asked at once."""
    return AT_ONCE_TOKENS if AT_ONCE_TOKENS in lengths else sorted(lengths)[(len(lengths) - 1) // 2]


def _turns(length: int) -> int:
    return min(4, max(1, _TOKENS_PER_ROUND // length))


def _stored_bytes(shape: Shape, lengths: Sequence[int], rounds: int) -> int:
    """Every round's, the warm-up's, and those of the requests at once that are no beginnings of others."""
    stored = [length for length in lengths for _ in range(rounds * _turns(length))] + [lengths[0], lengths[-1]]
    at_once = at_once_tokens(lengths)
    stored += [at_once] * max(0, AT_ONCE - sum(_serves(shape, length, at_once) for length in stored))
    return sum(_prompt_bytes(shape, length) for length in stored)


def _serves(shape: Shape, stored: int, asked: int) -> bool:
    """Whether a stored prompt's beginning can be asked for: with windows none can be resumed there but at its end."""
    windows = any(group.window_tokens for group in shape.model.groups)
    return stored == asked if windows else stored >= asked


def _prompt_bytes(shape: Shape, tokens: int) -> int:
    """What is stored of a prompt: of windows its end alone, with what a lookup may walk back, and room for rounding."""
    model, total = shape.model, 0
    for group in model.layer_groups():
        kept = tokens
        if group.window_tokens:
            kept = min(tokens, group.window_tokens + DEFAULT_REWIND_TOKENS + 4 * shape.tokens_per_block)
        total += kept * 2 * len(group.layers) * group.kv_heads * model.head_size * group.bytes_per_element
    return total


@contextmanager
def _lock_handed_over_within(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Run:
    def __init__(self, servers: Servers, lengths: Sequence[int], rounds: int, tell: Tell) -> None:
        self._servers, self._lengths, self._rounds, self._tell = servers, lengths, rounds, tell
        self._shape: Shape = servers.shape
        #: Milliseconds to the first token by length and kind; and what was loaded and saved.
        self._took: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._loads: dict[int, list[Load]] = defaultdict(list)
        self._saves: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
        #: Prompts that the pool has all pages of.
        self._stored: list[Prompt] = []
        self._not_in_place = 0

    async def all(self, device: str) -> EngineFigures:
        pinned, sdpa, engine = await to_thread.run_sync(self._ceilings)
        await self._warm_up()
        # As servers do: a collection that looks at all that was loaded takes 70 ms of somebody's step, and a thread that wants
        # the interpreter lock is given it after 5 ms.
        gc.collect()
        gc.freeze()
        with _lock_handed_over_within(SWITCH_S):
            for number in range(self._rounds):
                for length in self._lengths:
                    for turn in range(_turns(length)):
                        await self._round(f"{number} {turn}", length, saves_first=(number + turn) % 2 == 1)
            at_once = await self._at_once(at_once_tokens(self._lengths))
            beside = await self._beside()
        figures = EngineFigures(
            device=await to_thread.run_sync(self._servers.model.device_name),
            shape=self._shape.name,
            tokens_per_block=self._shape.tokens_per_block,
            rounds=self._rounds,
            prompts=tuple(self._figures(length) for length in self._lengths),
            beside=beside,
            at_once=at_once,
            pinned_copy_bytes_per_s=pinned,
            sdpa_flops=sdpa,
            engine_flops=engine,
            not_in_place=self._not_in_place,
        )
        # The bounds are those of one machine and of shapes that servers run.
        judged = device.startswith("cuda")
        return msgspec.structs.replace(figures, missed=missed(figures)) if judged else figures

    def _ceilings(self) -> tuple[float, float, float]:
        servers, longest = self._servers, self._lengths[-1]
        pinned = pinned_copy_bytes_per_s(servers.model.device)
        sdpa = sdpa_flops(servers.model, longest)
        engine = engine_flops(servers.plain_config, servers.model, servers.plain_computer, longest)
        self._tell(f"pinned copy {pinned / 1e9:.1f} GB/s, SDPA {sdpa / 1e12:.1f} TFLOP/s, the engine's {engine / 1e12:.1f}")
        return pinned, sdpa, engine

    async def _warm_up(self) -> None:
        """Once through everything that allocates, captures and maps, by the shortest prompt and by the longest."""
        servers = self._servers
        for length in (self._lengths[0], self._lengths[-1]):
            tokens = prompt(self._shape, f"warm {length}", length)
            await servers.plain.cold(tokens)
            await servers.plain.local_hit(tokens)
            await servers.plain.forget()
            await servers.pooled.cold(tokens)
            await servers.pooled.forget()
            self._stored.append(tokens)
            self._tell(f"warm {length}")
            await self._until_in_place(tokens)
            await servers.staged.pool_hit(tokens)
            await servers.staged.forget()
        for server in (servers.pooled, servers.staged):
            await server.decode(prompt(self._shape, "warm", self._shape.beside_prompt), self._shape.beside_answer // 10)
            await server.forget()

    async def _until_in_place(self, tokens: Prompt) -> None:
        """Memory is mapped in the background, once pages were seen in it. While gigabytes are pinned, loads may fail."""
        began = anyio.current_time()
        in_place = False
        while not in_place and anyio.current_time() - began < _MAPPED_WITHIN_S:
            try:
                _, load = await self._servers.pooled.pool_hit(tokens)
                in_place = load.in_place
            except PoolError as failed:
                self._tell(f"not loaded yet: {failed}")
                await self._servers.pooled.forget()
            await anyio.sleep(0.2)
        self._tell(f"read in place after {anyio.current_time() - began:.1f} s: {in_place}")

    async def _round(self, name: str, length: int, *, saves_first: bool) -> None:
        """`saves_first`: in turn, so that what comes first meets both kinds alike."""
        servers, tokens = self._servers, prompt(self._shape, f"round {name} {length}", length)
        if saves_first:
            await self._cold_with_saving(tokens)
        self._note(length, "cold", await servers.plain.cold(tokens))
        if not saves_first:
            await self._cold_with_saving(tokens)
        for _ in range(HITS):
            self._note(length, "local hit", await servers.plain.local_hit(tokens))
            result, load = await servers.pooled.pool_hit(tokens)
            self._note(length, "pool hit", result)
            self._loads[length].append(load)
            self._not_in_place += not load.in_place
        result, _ = await servers.staged.pool_hit(tokens)
        self._note(length, "staged hit", result)
        for server in (servers.plain, servers.pooled, servers.staged):
            await server.forget()

    async def _cold_with_saving(self, tokens: Prompt) -> None:
        server, began = self._servers.pooled, time.perf_counter()
        result = await server.cold(tokens)
        self._note(len(tokens), "cold with saving", result)
        await server.settled()
        took = time.perf_counter() - began
        self._saves[len(tokens)].append((server.saved_bytes(result), took, took - result.ttft_s))
        self._tell(f"  saved {server.saved_bytes(result) / 1e9:.2f} GB in {took:.2f} s")
        await server.forget()
        self._stored.append(tokens)

    async def _at_once(self, length: int) -> AtOnceFigures:
        """Prompts that can be resumed at their ends, as far as such are stored; for the others more is stored."""
        server = self._servers.pooled
        while sum(_serves(self._shape, len(tokens), length) for tokens in self._stored) < AT_ONCE:
            tokens = prompt(self._shape, f"at once {len(self._stored)}", length)
            await server.cold(tokens)
            await server.forget()
            self._stored.append(tokens)
        asked = [tokens[:length] for tokens in self._stored if _serves(self._shape, len(tokens), length)][:AT_ONCE]
        measured = [await self._all_of(asked) for _ in range(HITS)]
        seconds, firsts = min(measured, key=lambda each: abs(each[0] - median(taken for taken, _ in measured)))
        self._tell(f"{AT_ONCE} loads of {length} at once: {[round(taken, 3) for taken, _ in measured]} s")
        return AtOnceFigures(requests=AT_ONCE, tokens=length, seconds=seconds, first_tokens=times(firsts))

    async def _all_of(self, prompts: Sequence[Prompt]) -> tuple[float, list[float]]:
        firsts: list[float] = []

        async def one(tokens: Prompt) -> None:
            result, load = await self._servers.pooled.pool_hit(tokens)
            firsts.append(result.ttft_s)
            self._not_in_place += not load.in_place

        async with anyio.create_task_group() as group:
            for tokens in prompts:
                group.start_soon(one, tokens)
        await self._servers.pooled.forget()
        return max(firsts), firsts

    async def _beside(self) -> BesideFigures:
        longest = max(self._stored, key=len)
        found = {}
        for server in (self._servers.pooled, self._servers.staged):
            steps = await steps_beside(server, self._shape, longest, LOADS, f"beside {server.name}")
            alone, beside = found[server.name] = times_of(steps)
            await server.forget()
            self._tell(f"steps, {server.name}: alone {alone}, beside {beside}")
        (alone, beside), (_, staged) = found.values()
        return BesideFigures(tokens=len(longest), loads=LOADS, alone=alone, beside=beside, beside_staged=staged)

    def _note(self, length: int, kind: str, result: Result) -> None:
        self._took[length, kind].append(result.ttft_s)
        took, lookup, load = (1000 * seconds for seconds in (result.ttft_s, result.lookup_s, result.load_s))
        self._tell(f"{length} {kind}: {took:.1f} ms, lookup {lookup:.1f}, load {load:.1f}")

    def _figures(self, length: int) -> PromptFigures:
        def of(kind: str) -> float:
            return 1000 * median(self._took[length, kind])

        loads, saves = self._loads[length], self._saves[length]
        if not loads or not saves:
            raise PoolError(f"nothing of {length} tokens was measured")
        return PromptFigures(
            tokens=length,
            cold=of("cold"),
            local_hit=of("local hit"),
            cold_with_saving=of("cold with saving"),
            saved_after=1000 * median(after for _, _, after in saves),
            saved_bytes=saves[-1][0],
            saved_bytes_per_s=median(nbytes / took for nbytes, took, _ in saves),
            pool_hit=of("pool hit"),
            staged_hit=of("staged hit"),
            loaded_bytes=loads[-1].bytes,
            loaded_bytes_per_s=median(load.bytes / load.seconds for load in loads),
        )
