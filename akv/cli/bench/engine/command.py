"""The options of `akv bench engine`."""

import sys
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from akv.cli.bench.engine.figures import EngineFigures
from akv.errors import DependencyError


def add_engine(bench: typer.Typer) -> None:
    """Add the command to those of `akv bench`."""

    @bench.command()
    def engine(
        device: Annotated[str, typer.Option(help="For torch: cuda, or cpu for a small shape that is not judged.")] = "cuda",
        tokens: Annotated[str, typer.Option(help="Lengths of prompts, by commas. Default on CUDA: 8000,32000,96000.")] = "",
        windows: Annotated[bool, typer.Option("--windows", help="Five layers of six with a window of 1,024 tokens.")] = False,
        rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with prompts that nobody has seen.")] = 2,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    ) -> None:
        """Measure an engine of Llama 3 8B's shape on a GPU: cold, saving, local hits, hits from another process's memory.

        And the steps of a request that decodes beside others that load. It needs some 80 GB of the GPU's memory, and as much
        of the host's. Exits with 1 if akv's figures are not what they must be, with 2 if it cannot be run.
        """
        missing = [name for name in ("torch", "mooncake") if find_spec(name) is None]
        if missing:
            raise DependencyError(
                f"this needs {' and '.join(missing)}: pip install 'akv[demo]', or akv[mooncake-cuda13] for CUDA"
            )
        from akv.cli.bench.engine.run import bench_engine  # noqa: PLC0415 - loads torch

        lengths = _lengths(tokens)
        run = partial(bench_engine, device, lengths, rounds, windows=windows, tell=partial(print, file=sys.stderr, flush=True))
        figures = anyio.run(run)
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            _show(figures)
        raise typer.Exit(code=1 if figures.missed else 0)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise typer.BadParameter(f"--tokens takes whole numbers by commas, not {text!r}") from error
    if any(length < 2 for length in lengths):
        raise typer.BadParameter("--tokens takes lengths of at least 2")
    return lengths


def _show(figures: EngineFigures) -> None:
    title = f"{figures.shape} on {figures.device}, medians of {figures.rounds} rounds, ms to the first token"
    table = Table(
        *("tokens", "cold", "cold, saved", "local hit", "hit from the pool", "beyond local", "staged"),
        *("loaded GB/s", "saved GB/s", "saved after"),
        title=title,
    )
    for each in figures.prompts:
        table.add_row(
            f"{each.tokens:,}",
            *(f"{value:.1f}" for value in (each.cold, each.cold_with_saving, each.local_hit, each.pool_hit)),
            *(f"{value:.1f}" for value in (each.beyond_local, each.staged_hit)),
            *(f"{value / 1e9:.1f}" for value in (each.loaded_bytes_per_s, each.saved_bytes_per_s)),
            f"{each.saved_after:.0f}",
        )
    console = Console()
    console.print(table)
    beside = figures.beside
    steps = Table(
        "", "median", "p99", "most", "steps", title=f"ms of a step, beside {beside.loads} loads of {beside.tokens:,} tokens"
    )
    for name, row in (("alone", beside.alone), ("beside", beside.beside), ("beside staged loads", beside.beside_staged)):
        if row is not None:
            steps.add_row(name, *(f"{value:.2f}" for value in (row.median, row.p99, row.most)), str(row.count))
    console.print(steps)
    at_once = figures.at_once
    console.print(f"{at_once.requests} loads of {at_once.tokens:,} tokens at once: {at_once.seconds:.2f} s")
    console.print(
        f"a copy from pinned memory: {figures.pinned_copy_bytes_per_s / 1e9:.1f} GB/s; attention of the longest prompt: SDPA "
        f"{figures.sdpa_flops / 1e12:.2f} TFLOP/s, the engine {figures.engine_flops / 1e12:.2f}"
    )
    for sentence in figures.missed:
        console.print(sentence)
