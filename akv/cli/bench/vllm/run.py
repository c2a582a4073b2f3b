"""`akv bench vllm` from beginning to end.

For each connector a server process and a pool of its own, all there all the time: in one pool the pages of each would lie with
all. They are asked in turn, each what the others were asked, in another order each round; so what the machine does besides
meets all of them. A request that was not served from where it should be ends the run: its time would say nothing.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from random import Random
from statistics import median

from anyio import to_thread

from akv.cli.bench.faults.victims import open_lender
from akv.cli.bench.vllm.figures import ConnectorFigures, VllmFigures, missed, times
from akv.errors import PoolError
from akv.pool.embedded import open_embedded_master
from akv_testing.vllm.client import Server, mooncake_file, open_nursery
from akv_testing.vllm.models import VOCABULARY, write_model
from akv_testing.vllm.protocol import AKV, MOONCAKE_STORE, NO_CONNECTOR, Answer, Generate, Options, Reset, Settle

#: 60 blocks of 32 tokens, and one more token, which is always computed.
PROMPT_TOKENS = 1921
TOKENS_PER_BLOCK = 32
AT_ONCE = 12
#: Bytes of each pool's memory: what some twenty rounds store of the widest model.
SEGMENT_BYTES = 2 * 1024**3
#: Rounds before those that count: memory that is touched for the first time costs as much as the rest.
_WARM_UP = 2

_COLD, _LOCAL, _POOL, _AT_ONCE = "cold", "local_hit", "pool_hit", "at_once"


async def bench_vllm(
    model: str, connectors: Sequence[str], rounds: int, answer_tokens: int, *, pages_elsewhere: bool, ranks: int = 0
) -> VllmFigures:
    """Measure. `ranks`: tensor-parallel ranks in processes of their own; 0: one in the server's. `pages_elsewhere`: another
    process lends each pool its memory, as others hold most of a large pool's; else the server lends it.

    Raises DependencyError or PoolError if there is nothing to measure, ServerFailed if a server fails.

    **Cancellation:** waits for the round under way; every process that was started has ended when this returns.
    """
    async with AsyncExitStack() as stack:
        pools = []
        for connector in connectors:
            address = await stack.enter_async_context(open_embedded_master())
            if pages_elsewhere and connector != NO_CONNECTOR:
                await stack.enter_async_context(open_lender(address, SEGMENT_BYTES))
            pools.append((connector, mooncake_file(address, 0 if pages_elsewhere else SEGMENT_BYTES)))
        measured = await to_thread.run_sync(partial(_measure, pools, model, rounds, answer_tokens, ranks))
    none, theirs, ours = (measured.get(connector) for connector in (NO_CONNECTOR, MOONCAKE_STORE, AKV))
    return VllmFigures(
        vllm=_version(),
        model=model,
        prompt_tokens=PROMPT_TOKENS,
        answer_tokens=answer_tokens,
        pages_elsewhere=pages_elsewhere,
        ranks=ranks,
        rounds=rounds,
        at_once=AT_ONCE,
        connectors=tuple(measured.values()),
        missed=missed(none, theirs, ours, pages_elsewhere=pages_elsewhere),
    )


def _measure(
    pools: Sequence[tuple[str, Mapping[str, object]]], model: str, rounds: int, answer_tokens: int, ranks: int
) -> dict[str, ConnectorFigures]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="akv-bench-")))
        nursery = stack.enter_context(open_nursery(folder))
        guests = []
        for connector, pool in pools:
            extra = {"model_key": model} if connector == AKV else {}
            options = Options(model=str(write_model(model, folder)), connector=connector, ranks=ranks, extra=extra)
            guests.append(Guest(connector, stack.enter_context(nursery.server(options, pool)), answer_tokens))
        for guest in guests:
            guest.store_the_many()
        for number in range(_WARM_UP + rounds):
            if number == _WARM_UP:
                for guest in guests:
                    guest.forget()
            # Each one comes first as often as the others.
            first = number % len(guests)
            for guest in (*guests[first:], *guests[:first]):
                guest.round(number)
    return _figures(guests)


class Guest:
    """One connector's server, and what its requests took."""

    def __init__(self, connector: str, server: Server, answer_tokens: int) -> None:
        self.connector = connector
        self._server = server
        self._tokens = answer_tokens
        self._has_pool = connector != NO_CONNECTOR
        self._many = [prompt(f"many {number}") for number in range(AT_ONCE)]
        self.seconds: dict[str, list[float]] = {}
        self.forget()

    def forget(self) -> None:
        """Begin to count."""
        self.seconds = {kind: [] for kind in (_COLD, _LOCAL, _POOL, _AT_ONCE)}

    def store_the_many(self) -> None:
        """Compute and store the prompts that are asked at once."""
        for each in self._many:
            self._ask(_COLD, [each])
        self._settle_and_reset()

    def round(self, number: int) -> None:
        """Ask each kind of request once. The prompt is one that nobody has seen."""
        fresh = [prompt(f"round {number}")]
        self._ask(_COLD, fresh)
        self._settle()
        self._ask(_LOCAL, fresh)
        self._settle_and_reset()
        self._ask(_POOL, fresh)
        self._settle_and_reset()
        self._ask(_AT_ONCE, self._many)
        self._settle_and_reset()

    def _ask(self, kind: str, prompts: list[list[int]]) -> None:
        report = self._server.ask(Generate(prompts=prompts, tokens=self._tokens))
        reused = PROMPT_TOKENS // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        from_pool = reused if self._has_pool and kind in {_POOL, _AT_ONCE} else 0
        expected = (reused if kind == _LOCAL else 0, from_pool)
        for answer in report.answers:
            if (answer.local_tokens, answer.external_tokens) != expected:
                raise PoolError(_not_served(self.connector, kind, answer, expected))
        self.seconds[kind].append(report.seconds)

    def _settle(self) -> None:
        self._server.ask(Settle())

    def _settle_and_reset(self) -> None:
        self._settle()
        self._server.ask(Reset())


def prompt(seed: str) -> list[int]:
    """The prompt of that name: tokens at random."""
    random = Random(seed)  # noqa: S311 - prompts, no secrets
    return [random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]


def _not_served(connector: str, kind: str, answer: Answer, expected: tuple[int, int]) -> str:
    return (
        f"with connector {connector!r} a request of kind {kind!r} had {answer.local_tokens} tokens from its own cache and "
        f"{answer.external_tokens} from the pool, not {expected[0]} and {expected[1]}: nothing can be measured"
    )


def _figures(guests: list[Guest]) -> dict[str, ConnectorFigures]:
    none = next((guest for guest in guests if guest.connector == NO_CONNECTOR), None)
    return {
        guest.connector: ConnectorFigures(
            connector=guest.connector,
            **{kind: times(seconds) for kind, seconds in guest.seconds.items()},
            pool_beyond_local=_median_difference(guest.seconds[_POOL], guest.seconds[_LOCAL]),
            cold_beyond_none=None if none is None else _median_difference(guest.seconds[_COLD], none.seconds[_COLD]),
        )
        for guest in guests
    }


def _median_difference(more: list[float], less: list[float]) -> float:
    return 1000 * median(a - b for a, b in zip(more, less, strict=True))


def _version() -> str:
    names = metadata.packages_distributions().get("vllm", [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names))) or "unknown"
