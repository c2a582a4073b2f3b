"""The options of `akv config`."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from akv.cli.config.describe import explanation, schema
from akv.cli.config.sharing import Comparison, compare
from akv.settings import explain_settings

File = Annotated[Path | None, typer.Argument(help="A TOML or JSON file of settings; else what AKV_CONFIG names, if anything.")]


def add_config(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    config = typer.Typer(
        help="Check, explain and describe settings. They are read as a server reads them: defaults, the file of "
        "MOONCAKE_CONFIG_PATH, akv's own file, AKV_ variables; the later wins.",
        no_args_is_help=True,
    )
    config.command("check")(_check)
    config.command("explain")(_explain)
    config.command("schema")(_schema)
    app.add_typer(config, name="config")


def _check(
    file: File = None,
    other: Annotated[
        Path | None, typer.Argument(help="The settings of another server: say why the two share pages, or why they do not.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object. With two files only.")] = False,
) -> None:
    """Say whether a server could start with these settings; exits with 2, and the one error, if not.

    With two files, A and B: say whether servers that are started with them share pages; exits with 1 if they do not. Variables
    of this environment count for both.
    """
    explained = explain_settings(file)
    if other is not None:
        comparison = compare(explained.settings, explain_settings(other).settings)
        if as_json:
            _print_json(msgspec.to_builtins(comparison))
        else:
            _print_comparison(comparison)
        raise typer.Exit(0 if comparison.share else 1)
    for note in explained.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"settings of {explained.settings.model_key!r} are complete and consistent")


def _print_comparison(comparison: Comparison) -> None:
    typer.echo("A and B share pages, if:" if comparison.share else "A and B share no page:")
    for line in comparison.conditions if comparison.share else comparison.reasons:
        typer.echo(f"- {line}")


def _explain(
    file: File = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show every setting with its value, where that was found, its unit and its meaning, and the keys that they lead to."""
    told = explanation(explain_settings(file))
    if as_json:
        _print_json(told)
    else:
        _print_table(told)


def _schema() -> None:
    """Print the JSON schema of a file of settings, for editors and for checks before a deployment."""
    _print_json(schema())


def _print_json(told: dict[str, Any]) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())


def _print_table(told: dict[str, Any]) -> None:
    console = Console()
    table = Table("setting", "value", "unit", "found in", "meaning", title="akv settings", show_lines=True)
    for setting in told["settings"]:
        value = msgspec.json.encode(setting["value"]).decode()
        # Not as markup: a value or a path may hold brackets.
        row = (setting["name"], value, setting["unit"] or "", setting["source"], setting["description"])
        table.add_row(*(console.render_str(cell, markup=False, emoji=False, highlight=False) for cell in row))
    console.print(table)
    console.print(f"keys begin with {told['key_space']['prefix']}", markup=False, emoji=False, highlight=False)
    keys = Table("part", "in the key", "decided by", "meaning", title="the key of a page", show_lines=True)
    for part in told["key_space"]["parts"]:
        cells = (part["name"], part["spelt"] or "(nothing)", ", ".join(part["decided_by"]), part["meaning"])
        keys.add_row(*(console.render_str(cell, markup=False, emoji=False, highlight=False) for cell in cells))
    for column in keys.columns:
        column.overflow = "fold"
    console.print(keys)
    for note in told["notes"]:
        console.print(f"note: {note}", markup=False, emoji=False, highlight=False)
