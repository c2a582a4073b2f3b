"""`akv demo --trace` at the door: what is read, and what is refused before anything is started."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from akv.cli.demo import command
from akv.cli.demo.trace import MOST_IDS, TraceError, TraceRow, read_trace
from akv.cli.demo.trace_job import open_trace
from akv.cli.main import build_app
from akv.errors import SettingsError

CUT = Path(__file__).parent.parent / "data" / "conversation_trace.jsonl"
GOOD_LINE: dict[str, Any] = {"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}


def write(path: Path, *lines: str | dict[str, Any]) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_a_trace_is_read_as_far_as_asked_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD_LINE | {"turn": 3}, GOOD_LINE, "not JSON")
    assert read_trace(file, 2) == (TraceRow(5, 600, 9, (0, 1)),) * 2


def test_the_cut_is_a_trace_of_400_requests() -> None:
    rows = read_trace(CUT)
    assert len(rows) == 400
    assert CUT.stat().st_size < 200_000


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "Expected `object`"),
        ({"timestamp": 5, "input_length": 600, "output_length": 9}, "`hash_ids`"),
        (GOOD_LINE | {"timestamp": -1}, "$.timestamp"),
        ('{"timestamp": 1e999, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}', "out of range"),
        ('{"timestamp": "\\ud800", "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}', "line 2"),
        (GOOD_LINE | {"timestamp": 4}, "timestamp 4 is before the line above's, 5"),
        (GOOD_LINE | {"input_length": -600}, "$.input_length"),
        (GOOD_LINE | {"input_length": 0, "hash_ids": []}, "$.input_length"),
        (GOOD_LINE | {"input_length": 600.5}, "$.input_length"),
        (GOOD_LINE | {"output_length": -9}, "$.output_length"),
        (GOOD_LINE | {"hash_ids": [0]}, "1 hash_ids do not fit an input_length of 600: one for each 512 tokens makes 2"),
        (GOOD_LINE | {"hash_ids": [0, 1, 2]}, "3 hash_ids do not fit"),
        (GOOD_LINE | {"hash_ids": [0, -1]}, "$.hash_ids["),
        (GOOD_LINE | {"hash_ids": [0, MOST_IDS]}, "$.hash_ids["),
        (GOOD_LINE | {"hash_ids": ["0", "1"]}, "$.hash_ids["),
    ],
)
def test_a_bad_line_is_refused_with_file_line_and_reason(tmp_path: Path, bad: str | dict[str, Any], why: str) -> None:
    file = write(tmp_path, GOOD_LINE, bad)
    with pytest.raises(TraceError) as refused:
        read_trace(file)
    assert str(refused.value).startswith(f"trace {file}, line 2: ")
    assert why in str(refused.value)
    assert (refused.value.path, refused.value.line) == (file, 2)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="line 1: not JSON"):
        read_trace(file)


def test_a_file_that_is_empty_absent_or_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="it is empty"):
        read_trace(write(tmp_path))
    with pytest.raises(TraceError, match="it holds 2 requests, and 3 are asked for"):
        read_trace(write(tmp_path, GOOD_LINE, GOOD_LINE), 3)
    with pytest.raises(TraceError, match="cannot be read .No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="cannot be read .Is a directory"):
        read_trace(tmp_path)


def test_a_request_larger_than_the_model_is_refused_with_its_line(tmp_path: Path) -> None:
    long = {"timestamp": 9, "input_length": 512 * 1024, "output_length": 1, "hash_ids": list(range(1024))}
    file = write(tmp_path, GOOD_LINE, long)
    with pytest.raises(TraceError, match=r"line 2: at a scale of 32 the request has 16,385 tokens, .*takes 16,384"):
        open_trace(file, None, 32, 1.0)
    assert len(open_trace(file, 1, 32, 1.0).rows) == 1


@pytest.mark.parametrize(
    ("scale", "speed"), [(0, 1.0), (-1, 1.0), (3, 1.0), (64, 1.0), (32, 0.0), (32, -1.0), (32, float("nan"))]
)
def test_scales_and_speeds_that_cannot_be_are_refused(scale: int, speed: float) -> None:
    with pytest.raises(SettingsError, match="--s"):
        open_trace(CUT, 1, scale, speed)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--requests", "3"], "--requests"),
        (["--scale", "32"], "--scale"),
        (["--speed", "2"], "--speed"),
        (["--trace", str(CUT), "--turns", "2"], "--turns"),
        (["--trace", str(CUT), "--conversations", "3"], "--conversations"),
        (["--trace", str(CUT), "--layout", "sliding"], "--layout"),
        (["--trace", str(CUT), "--device", "cuda"], "--device"),
        (["--trace", str(CUT), "--requests", "0"], "--requests"),
    ],
)
def test_options_of_the_other_demo_are_refused(options: list[str], why: str) -> None:
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(build_app(), ["demo", *options])
    assert done.exit_code == 2
    assert why in done.output


def test_nothing_is_started_for_a_trace_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(command, "run_trace", started.append)
    done = CliRunner().invoke(build_app(), ["demo", "--trace", str(CUT), "--requests", "401"])
    assert isinstance(done.exception, TraceError)  # what `main()` prints, with status 2
    assert "holds 400 requests, and 401" in str(done.exception)
    assert not started
