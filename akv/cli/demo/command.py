"""The options of `akv demo`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from akv.cli.demo import jobs
from akv.cli.demo.report import show, show_trace
from akv.cli.demo.run import refuse_if_missing, run_demo, run_trace
from akv.cli.demo.setting import DemoLayout
from akv.cli.demo.trace_job import DEFAULT_SCALE, DEFAULT_SPEED, SCALES, open_trace


class Backend(StrEnum):
    """What the demo's processes run on."""

    ASYNCIO = "asyncio"
    TRIO = "trio"


#: Conversations and turns by default, without windows and with. With them as many as a block has tokens, so that prompts
#: end at each place of one.
_DEFAULTS = {False: (3, 3), True: (8, 4)}
#: Options that only one of the two demos has.
_OF_CONVERSATIONS = ("layout", "conversations", "turns", "device")
_OF_TRACES = ("requests", "scale", "speed")


def add_demo(app: typer.Typer) -> None:
    """Add the command to the command line."""

    @app.command()
    def demo(
        context: typer.Context,
        backend: Annotated[Backend, typer.Option(help="The event loop of every process.")] = Backend.ASYNCIO,
        layout: Annotated[
            DemoLayout,
            typer.Option(help="The model: full attention, or windows in turn with it; each also with a drafter."),
        ] = DemoLayout.FULL,
        conversations: Annotated[
            int | None,
            typer.Option(min=1, max=24, help="Conversations, each about a text of its own. Default: 3; with windows: 8."),
        ] = None,
        turns: Annotated[
            int | None,
            typer.Option(min=1, max=8, help="Turns of each; a prompt holds all turns before it. Default: 3; with windows: 4."),
        ] = None,
        device: Annotated[str, typer.Option(help="Where both processes compute, for torch: cpu, or cuda for a GPU.")] = "cpu",
        trace: Annotated[
            Path | None, typer.Option(help="Replay this trace, in Mooncake's format, and not conversations.")
        ] = None,
        requests: Annotated[int | None, typer.Option(min=1, help="Of the trace: its first requests. Default: all.")] = None,
        scale: Annotated[
            int, typer.Option(help=f"Of the trace: tokens for each one replayed. One of {', '.join(map(str, SCALES))}.")
        ] = DEFAULT_SCALE,
        speed: Annotated[
            float, typer.Option(help="Of the trace: how many times faster requests follow each other.")
        ] = DEFAULT_SPEED,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ) -> None:
        """Compute requests in one process, serve them in another from the pool, and compare bit for bit.

        The requests are conversations, one at a time, or those of a trace, as they overlap. Exits with 1 if anything differs,
        with 2 if it cannot be run.
        """
        _refuse_foreign(context, _OF_TRACES if trace is None else _OF_CONVERSATIONS, trace)
        refuse_if_missing(backend.value)
        # Before a progress bar is shown or a process is started: a trace that cannot be replayed is refused at the door.
        replayed = None if trace is None else open_trace(trace, requests, scale, speed)
        figures: jobs.Figures | jobs.TraceFigures
        with _progress() as progress:
            if replayed is None:
                most, deepest = _DEFAULTS[layout.has_windows]
                run = partial(
                    run_demo, layout=layout, conversations=conversations or most, turns=turns or deepest, device=device
                )
                figures = anyio.run(partial(run, backend=backend.value, progress=progress), backend=backend.value)
            else:
                replay = partial(run_trace, trace=replayed)
                figures = anyio.run(partial(replay, backend=backend.value, progress=progress), backend=backend.value)
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        elif isinstance(figures, jobs.TraceFigures):
            show_trace(figures, Console())
        else:
            show(figures, Console())
        raise typer.Exit(code=1 if figures.differs else 0)


@contextmanager
def _progress() -> Iterator[jobs.Progress]:
    """Bars on standard error, one for each step, gone when the block is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, int] = {}

        def progress(step: str, done: int, of: int) -> None:
            if step not in tasks:
                tasks[step] = int(bars.add_task(step, total=of))
            bars.update(bars.task_ids[tasks[step]], completed=done)

        yield progress


def _refuse_foreign(context: typer.Context, options: tuple[str, ...], trace: Path | None) -> None:
    """Refuse options that the chosen demo would ignore. Raises BadParameter, which exits with 2."""
    for option in options:
        source = context.get_parameter_source(option)
        # By name: whose enumeration it is, typer's or click's, depends on typer's version.
        if source is not None and source.name == "COMMANDLINE":
            why = "is about a trace: add --trace FILE" if trace is None else "is about conversations: leave out --trace"
            raise typer.BadParameter(f"--{option} {why}, or leave it out", context)
