"""The options of `akv doctor`."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from akv.cli.doctor.segments import Finding, examine
from akv.settings import read_store_settings
from akv.values.segments import SegmentEntry


def add_doctor(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(_doctor)


def _doctor(
    file: Annotated[Path | None, typer.Argument(help="A file of settings; else what AKV_CONFIG names, if anything.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Remove nothing; only look.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at the segments that processes of this user lend on this machine, and remove those of processes that are dead.

    Exits with 1 if something is left to do: entries that are refused, stale segments with --keep, too little room for
    `store.segment_bytes`.
    """
    finding = examine(read_store_settings(file), keep=keep)
    if as_json:
        told = {**msgspec.to_builtins(finding), "troubles": finding.troubles}
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    else:
        for line in _lines(finding):
            typer.echo(line)
    raise typer.Exit(1 if finding.troubles else 0)


def _lines(finding: Finding) -> list[str]:
    shared = finding.shared_memory
    said = [f"register       {finding.register}"]
    if shared is not None:
        said.append(f"shared memory  {_size(shared.free_bytes)} of {_size(shared.total_bytes)} free")
    if finding.room is not None:
        room = finding.room
        promised = _size(finding.claimed_bytes)
        said.append(f"room           {_size(room.free_bytes)} free, {room.what}; {promised} of it promised")
    said += [f"lent           {_entry(entry)}" for entry in finding.lent]
    said += [f"starting       {_entry(entry)}" for entry in finding.starting]
    word = "removed" if finding.removed else "stale"
    said += [f"{word:<14} {_entry(entry)}, its owner is dead" for entry in finding.stale]
    said += [f"{word:<14} {path}, nobody's" for path in finding.orphans]
    if finding.freed_bytes:
        said.append(f"given back     {_size(finding.freed_bytes)}")
    said += [f"trouble        {trouble}" for trouble in finding.troubles]
    return said


def _entry(entry: SegmentEntry) -> str:
    return f"{_size(entry.size)} by process {entry.owner_pid} ({entry.path})"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
