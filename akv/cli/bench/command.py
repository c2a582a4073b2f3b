"""The options of `akv bench`."""

import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, TypeVar

import anyio
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from akv.cli.bench.engine.command import add_engine
from akv.cli.bench.faults.figures import Figures
from akv.cli.bench.lookup import LookupFigures, bench_lookup
from akv.cli.bench.reads.command import add_reads
from akv.cli.bench.snapshot.command import add_snapshot
from akv.cli.bench.soak import SoakFigures, bench_soak
from akv.cli.bench.vllm.command import add_vllm
from akv.errors import DependencyError


class Loop(StrEnum):
    """An event loop."""

    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"
    TRIO = "trio"


def add_bench(app: typer.Typer) -> None:
    """Add the group of commands to the command line."""
    bench = typer.Typer(help="Measurements that can be repeated.", no_args_is_help=True)
    app.add_typer(bench, name="bench")

    @bench.command()
    def lookup(
        backend: Annotated[Loop, typer.Option(help="The event loop to measure.")] = Loop.ASYNCIO,
        tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 170_000,
        lookups: Annotated[int, typer.Option(min=1, help="Warm lookups while the loop is measured.")] = 20,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ) -> None:
        """Measure lookups of a long prompt against an embedded pool, and how late the loop wakes meanwhile."""
        figures = _run(partial(bench_lookup, backend.value, tokens, lookups), backend)
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            _show(figures)

    @bench.command()
    def faults(
        backend: Annotated[Loop, typer.Option(help="The event loop of the server.")] = Loop.ASYNCIO,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ) -> None:
        """Freeze and kill the master of an embedded pool, and the holder of the pages, under requests that load them.

        Takes half a minute. Exits with 1 if a request is lost, differs from a cold run or takes too long, with 2 if it cannot
        be run.
        """
        try:
            from akv.cli.bench.faults.run import bench_faults  # noqa: PLC0415 - loads torch
        except ImportError as error:
            raise DependencyError(f"this needs torch beside the store: pip install 'akv[demo]' ({error})") from error
        figures = _run(partial(bench_faults, backend.value), backend)
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            _show_faults(figures)
        raise typer.Exit(code=1 if figures.missed else 0)

    @bench.command()
    def soak(
        backend: Annotated[Loop, typer.Option(help="The event loop to run on.")] = Loop.ASYNCIO,
        requests: Annotated[int, typer.Option(min=1, help="Requests behind the warm-up.")] = 10_000,
        host_pages: Annotated[bool, typer.Option(help="Let the store read and write the engine's pages itself.")] = False,
        seed: Annotated[int, typer.Option(help="Of the prompts, and of what cancels them when.")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ) -> None:
        """Serve requests at random, cancelled wherever they stand, on a real store. Status 1 if anything is left behind."""
        figures = _run(partial(bench_soak, backend.value, requests, host_pages=host_pages, seed=seed), backend)
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            _show_soak(figures)
        raise typer.Exit(code=1 if figures.failures else 0)

    add_engine(bench)
    add_reads(bench)
    add_snapshot(bench)
    add_vllm(bench)


_Measured = TypeVar("_Measured")


def _run(measure: Callable[[], Awaitable[_Measured]], loop: Loop) -> _Measured:
    options: dict[str, Any] = {"use_uvloop": True} if loop is Loop.UVLOOP else {}
    return anyio.run(measure, backend="trio" if loop is Loop.TRIO else "asyncio", backend_options=options)


def _show_faults(figures: Figures) -> None:
    table = Table(
        *("", "requests", "lost", "differ", "cold s", "with it s", "pages again after s"),
        *("longest lookup s", "lookups meanwhile, p95 ms"),
        title=f"a master or a holder of pages that is gone, on {figures.backend}",
    )
    for fault in figures.faults:
        lookups = fault.lookups
        table.add_row(
            fault.fault.value.replace("_", " "),
            *(str(fault.requests), str(fault.lost), str(fault.differing)),
            *(f"{fault.cold_s:.2f}", f"{fault.slowest_s:.2f}", "" if fault.again_s is None else f"{fault.again_s:.2f}"),
            *("", "") if lookups is None else (f"{lookups.longest_s:.3f}", f"{1000 * lookups.while_open_p95_s:.2f}"),
        )
    console = Console()
    console.print(table)
    for sentence in figures.missed:
        console.print(sentence)


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


def _show_soak(figures: SoakFigures) -> None:
    before, after = figures.before, figures.after
    title = f"{figures.requests:,} requests in {figures.seconds:.1f} s, on {figures.backend}"
    table = Table("", "before", "after", title=title)
    for what in before.__struct_fields__:
        table.add_row(what.replace("_", " "), f"{getattr(before, what):,}", f"{getattr(after, what):,}")
    table.add_section()
    table.add_row("pages compared", "", f"{figures.pages_compared:,}")
    table.add_row("of them wrong", "", f"{figures.page_mismatches:,}")
    for how, count in (*figures.ended.items(), *((f"cut short {stage}", n) for stage, n in figures.cut_short.items())):
        table.add_row(how, "", f"{count:,}")
    console = Console()
    console.print(table)
    for failure in figures.failures:
        console.print(failure, style="red")
