"""The options of `akv bench`."""

import sys
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import anyio
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from akv.cli.bench.lookup import LookupFigures, bench_lookup


class Loop(StrEnum):
    """An event loop."""

    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"
    TRIO = "trio"


def add_bench(app: typer.Typer) -> None:
    """Add the group of commands to the command line."""
    bench = typer.Typer(help="Measurements that can be repeated. They report, and judge nothing.", no_args_is_help=True)
    app.add_typer(bench, name="bench")

    @bench.callback()
    def _group() -> None:
        # With one command only, typer would leave its name out.
        """Measurements that can be repeated. They report, and judge nothing."""

    @bench.command()
    def lookup(
        backend: Annotated[Loop, typer.Option(help="The event loop to measure.")] = Loop.ASYNCIO,
        tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 170_000,
        lookups: Annotated[int, typer.Option(min=1, help="Warm lookups while the loop is measured.")] = 20,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ) -> None:
        """Measure lookups of a long prompt against an embedded pool, and how late the loop wakes meanwhile."""
        options: dict[str, Any] = {"use_uvloop": True} if backend is Loop.UVLOOP else {}
        run = partial(bench_lookup, backend.value, tokens, lookups)
        figures = anyio.run(run, backend="trio" if backend is Loop.TRIO else "asyncio", backend_options=options)
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            _show(figures)


def _show(figures: LookupFigures) -> None:
    table = Table(title=f"lookup of {figures.tokens:,} tokens, {figures.keys:,} keys, on {figures.backend}", show_header=False)
    table.add_row("cold", f"{figures.cold_ms:.1f} ms, {figures.cold_calls} calls for {figures.cold_keys} keys")
    table.add_row("one call for all keys", f"{figures.raw_call_ms:.1f} ms")
    table.add_row("warm, hashing included", f"{figures.warm_first_ms:.1f} ms")
    table.add_row("warm, prompt seen before", f"{figures.warm_ms:.1f} ms, {figures.warm_over_raw:.2f} of one call")
    for name, late in (
        ("loop alone", figures.idle),
        (f"beside {figures.lookups} one by one", figures.one_by_one),
        (f"beside {figures.lookups} at once", figures.at_once),
    ):
        table.add_row(f"late wakings, {name}", f"median {late.p50:.2f}, p99 {late.p99:.2f}, most {late.most:.2f} ms")
    Console().print(table)
