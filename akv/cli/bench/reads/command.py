"""The options of `akv bench reads`."""

import sys
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from akv.cli.bench.reads.figures import ReadsFigures
from akv.errors import DependencyError


def add_reads(bench: typer.Typer) -> None:
    """Add the command to those of `akv bench`."""

    @bench.command()
    def reads(
        mib: Annotated[int, typer.Option(min=1, help="MiB of pages that are moved at a time.")] = 160,
        rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 9,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    ) -> None:
        """Measure loads of pages that another process of this host lends: in place, through the store's client, as a copy.

        And saves into memory that was touched before, beside fresh memory. Needs some 5 GiB of memory and half a minute. Exits
        with 1 if akv is not as much faster as it must be, with 2 if it cannot be run.
        """
        missing = [name for name in ("torch", "mooncake") if find_spec(name) is None]
        if missing:
            raise DependencyError(f"this needs {' and '.join(missing)}: pip install 'akv[demo]'")
        from akv.cli.bench.reads.run import bench_reads  # noqa: PLC0415 - loads the pool

        figures = anyio.run(partial(bench_reads, mib << 20, rounds))
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            _show(figures)
        raise typer.Exit(code=1 if figures.missed else 0)


def _show(figures: ReadsFigures) -> None:
    table = Table(
        *("page", "regions", "in place", "through the client", "plain copy", "times the client", "of a plain copy"),
        title=f"pages that another process lends, GB/s, medians of {figures.rounds} rounds",
    )
    for each in figures.reads:
        table.add_row(
            *(f"{each.page_bytes >> 10} KiB", str(each.regions)),
            *(f"{speed / 1e9:.2f}" for speed in (each.direct, each.staged, each.plain)),
            *(f"{ratio:.2f}" for ratio in (each.direct_over_staged, each.direct_over_plain)),
        )
    console = Console()
    console.print(table)
    saves = figures.saves
    console.print(
        f"saves of pages of {saves.page_bytes >> 10} KiB: into touched memory {saves.touched / 1e9:.2f} GB/s, into fresh "
        f"memory {saves.fresh / 1e9:.2f}, {saves.touched_over_fresh:.2f} times as fast"
    )
    for sentence in figures.missed:
        console.print(sentence)
