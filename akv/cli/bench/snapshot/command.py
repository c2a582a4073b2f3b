"""The options of `akv bench snapshot`."""

import sys
from enum import StrEnum
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from akv.cli.bench.snapshot.figures import SnapshotFigures
from akv.errors import DependencyError


class Place(StrEnum):
    """Where the pages lie."""

    CUDA = "cuda"
    CPU = "cpu"


def add_snapshot(bench: typer.Typer) -> None:
    """Add the command to those of `akv bench`."""

    @bench.command()
    def snapshot(
        pages: Annotated[int, typer.Option(min=1, help="Window pages of one pass.")] = 130,
        buffers: Annotated[int, typer.Option(min=1, help="Tensors that hold a piece of each page.")] = 48,
        buffer_kib: Annotated[int, typer.Option(min=1, help="KiB of a page in each of them.")] = 128,
        runs: Annotated[int, typer.Option(min=1, help="Runs that count.")] = 9,
        device: Annotated[Place | None, typer.Option(help="Where the pages lie. Else CUDA where there is one.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ) -> None:
        """Measure how long a snapshot of window pages holds the execution stream, beside a bulk copy and a copy per buffer.

        Exits with 1 if it holds it too long, or takes too much of the host; with 2 if it cannot be run. A CPU has no streams:
        there it measures host time, and holds nothing against it.
        """
        try:
            from akv.cli.bench.snapshot.run import bench_snapshot  # noqa: PLC0415 - loads torch
        except ImportError as error:
            raise DependencyError(f"this needs torch: pip install 'akv[cli,torch]' ({error})") from error
        figures = bench_snapshot(device.value if device else "", pages, buffers, buffer_kib * 1024, runs)
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            _show(figures)
        raise typer.Exit(code=1 if figures.missed else 0)


def _show(figures: SnapshotFigures) -> None:
    table = Table(
        *("", "stream ms", "host ms", "times the snapshot's stream time"),
        title=f"{figures.pages} pages x {figures.buffers} buffers of {figures.buffer_bytes >> 10} KiB on {figures.device}, "
        f"torch {figures.torch}, medians of {figures.runs}",
    )
    for name, way, over in (
        ("snapshot", figures.snapshot, 1.0),
        ("one bulk copy", figures.bulk, figures.bulk_over_snapshot),
        ("a copy per buffer", figures.copies, figures.copies_over_snapshot),
    ):
        if way.stream_ms is None or over is None:
            table.add_row(name, "", f"{way.host_ms:.2f}", "")
        else:
            table.add_row(name, f"{way.stream_ms:.3f}", f"{way.host_ms:.2f}", f"{over:.1f}")
    console = Console()
    console.print(table)
    if figures.snapshot.stream_ms is None:
        console.print("A CPU has no streams: there is no stream time, and nothing is held against the host time.")
    for sentence in figures.missed:
        console.print(sentence)
