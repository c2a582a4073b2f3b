"""What a request that decodes notices of others that load."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio

from akv.cli.bench.engine.figures import Times, times
from akv.cli.bench.engine.servers import Prompt, Server, Shape, prompt
from akv.errors import PoolError
from akv_testing.engine import Result

#: Steps at the beginning that do not count: the request's own prompt, and what is captured and allocated for its answer.
_FIRST = 10


class Window(NamedTuple):
    """When one request that loaded was under way, by the loop's clock."""

    asked: float
    #: Its pages are there. Passes that begin now compute its last tokens, too.
    loaded: float
    answered: float


class Steps(NamedTuple):
    """Steps of the request that decodes, in seconds."""

    alone: list[float]
    beside: list[float]


async def steps_beside(server: Server, shape: Shape, tokens: Prompt, loads: int, name: str) -> Steps:
    """Let a request decode; meanwhile ask `loads` times, one after the other, for a prompt that the pool has."""
    windows: list[Window] = []
    results: list[Result] = []

    async def decode() -> None:
        results.append(await server.decode(prompt(shape, name, shape.beside_prompt), shape.beside_answer))

    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        for _ in range(loads):
            await anyio.sleep(shape.pause_s)
            windows.append(await _window(lambda: server.pool_hit(tokens)))
    return sorted_steps(results[0].token_times, windows)


async def _window(ask: Callable[[], Awaitable[tuple[Result, object]]]) -> Window:
    asked = anyio.current_time()
    result, _ = await ask()
    loaded = asked + result.queue_s + result.lookup_s + result.load_s
    return Window(asked, loaded, asked + result.ttft_s)


def sorted_steps(token_times: Sequence[float], windows: Sequence[Window]) -> Steps:
    """Each step, from one token to the next, by what went on meanwhile. Passes that compute both requests count for none."""
    steps = Steps([], [])
    for began, ended in zip(token_times[_FIRST:], token_times[_FIRST + 1 :], strict=False):
        if any(began < window.loaded and ended > window.asked for window in windows):
            steps.beside.append(ended - began)
        elif not any(window.loaded <= began < window.answered for window in windows):
            steps.alone.append(ended - began)
    return steps


def times_of(steps: Steps) -> tuple[Times, Times]:
    """Alone and beside. Raises PoolError if there is nothing to compare."""
    if not steps.alone or not steps.beside:
        raise PoolError(
            f"the request that decodes had {len(steps.alone)} steps alone and {len(steps.beside)} beside loads: its answer is "
            "too short, and nothing was measured"
        )
    return times(steps.alone), times(steps.beside)
