"""The options of `akv stat`."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from akv.cli.stat.pool import ask_master
from akv.cli.stat.report import lines, look
from akv.settings import read_store_settings


def add_stat(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("stat")(_stat)


def _stat(
    file: Annotated[Path | None, typer.Argument(help="A file of settings; else what AKV_CONFIG names, if anything.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", help="The URL of the master's metrics, http://10.0.0.1:9003 say: shows the pool, too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which way pages came to the servers of this user on this machine: read straight from memory, or through the store;
    and who lends, with --metrics in the whole pool.

    Servers post their counts every `stats_interval_s`, so what is shown is that old at most.
    """
    report = look(read_store_settings(file), None if metrics is None else ask_master(metrics))
    if as_json:
        told = {**msgspec.to_builtins(report), "troubles": report.troubles}
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    else:
        for line in lines(report):
            typer.echo(line)
