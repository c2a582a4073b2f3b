"""Traces in Mooncake's format: one JSON object a line, a request each. Read and checked here, before anything is started."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from akv.errors import AkvError

#: Tokens that one id of `hash_ids` stands for; the last id of a prompt stands for what is left.
TRACE_BLOCK_TOKENS = 512
#: Ids are below this. They are numbered from 0 in published traces, where the largest is some hundred thousand; a replay
#: writes an id into the first tokens of its block, and these hold no more.
MOST_IDS = 4096**2


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace. Fields that this does not name are ignored."""

    #: Milliseconds since the trace's beginning.
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    #: Tokens of the prompt, and of the answer.
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    #: One for each `TRACE_BLOCK_TOKENS` of the prompt that have begun. Equal ids are equal tokens.
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, lt=MOST_IDS)], ...]


class TraceError(AkvError):
    """A trace cannot be replayed. At fault: the file, or whoever chose it. Nothing was started. The text names file and line.

    Attributes: `path`; `line`, counted from 1, or None if it is the file as a whole.
    """

    def __init__(self, path: Path, line: int | None, why: str) -> None:
        self.path = path
        self.line = line
        super().__init__(f"trace {path}{f', line {line}' if line else ''}: {why}")


def read_trace(path: Path, requests: int | None = None) -> tuple[TraceRow, ...]:
    """The first `requests` requests of a trace, or all of them; row i is line i + 1. What lies behind them is not read.

    Raises TraceError for a file that cannot be read, a line that is no request of a trace, or too few of them. Blocks.
    """
    rows: list[TraceRow] = []
    try:
        for row in _rows(path):
            rows.append(row)
            if len(rows) == requests:
                break
    except OSError as error:
        raise TraceError(path, None, f"it cannot be read ({error.strerror})") from error
    if not rows:
        raise TraceError(path, None, "it is empty")
    if requests is not None and len(rows) < requests:
        raise TraceError(path, None, f"it holds {len(rows)} requests, and {requests} are asked for")
    return tuple(rows)


def _rows(path: Path) -> Iterator[TraceRow]:
    decode = msgspec.json.Decoder(TraceRow).decode
    latest = 0.0
    with path.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                row = decode(text)
            except msgspec.ValidationError as error:
                raise TraceError(path, number, f"no request of a trace: {error}") from error
            except msgspec.DecodeError as error:
                raise TraceError(path, number, f"not JSON: {error}") from error
            blocks = -(-row.input_length // TRACE_BLOCK_TOKENS)
            if len(row.hash_ids) != blocks:
                raise TraceError(
                    path,
                    number,
                    f"{len(row.hash_ids)} hash_ids do not fit an input_length of {row.input_length}: "
                    f"one for each {TRACE_BLOCK_TOKENS} tokens makes {blocks}",
                )
            if row.timestamp < latest:
                raise TraceError(path, number, f"timestamp {row.timestamp:g} is before the line above's, {latest:g}")
            latest = row.timestamp
            yield row
