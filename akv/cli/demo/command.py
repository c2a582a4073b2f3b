"""The options of `akv demo`."""

import sys
from enum import StrEnum
from functools import partial
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from akv.cli.demo.report import show
from akv.cli.demo.run import run_demo


class Backend(StrEnum):
    """What the demo's processes run on."""

    ASYNCIO = "asyncio"
    TRIO = "trio"


def add_demo(app: typer.Typer) -> None:
    """Add the command to the command line."""

    @app.command()
    def demo(
        backend: Annotated[Backend, typer.Option(help="The event loop of every process.")] = Backend.ASYNCIO,
        conversations: Annotated[int, typer.Option(min=1, max=24, help="Conversations, each about a text of its own.")] = 3,
        turns: Annotated[int, typer.Option(min=1, max=8, help="Turns of each; a prompt holds all turns before it.")] = 3,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ) -> None:
        """Compute conversations in one process, serve them in another from the pool, and compare bit for bit.

        Exits with 1 if anything differs, with 2 if it cannot be run.
        """
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bars:
            tasks: dict[str, int] = {}

            def progress(step: str, done: int, of: int) -> None:
                if step not in tasks:
                    tasks[step] = int(bars.add_task(step, total=of))
                bars.update(bars.task_ids[tasks[step]], completed=done)

            run = partial(run_demo, backend=backend.value, conversations=conversations, turns=turns, progress=progress)
            figures = anyio.run(run, backend=backend.value)
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            show(figures, Console())
        raise typer.Exit(code=1 if figures.differs else 0)
