"""V1 and X6: where events go, what a step says, and what a log can never hold."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest
import structlog

import akv.logging
from akv import observe


@pytest.fixture
def fresh_structlog() -> Iterator[None]:
    """Each test starts from an unconfigured structlog: its configuration belongs to the process."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture
def lines(fresh_structlog: None) -> io.StringIO:
    stream = io.StringIO()
    akv.logging.json(stream, level="debug")
    return stream


def parsed(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_V1_without_configuration_events_go_to_the_logger_akv(
    fresh_structlog: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="akv"):
        observe.emit(observe.LOAD_COMPLETE, request_id="r1", pages=3)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("akv", "DEBUG")
    assert record.getMessage() == "akv.load.complete request_id='r1' pages=3"
    assert record.__dict__["akv_fields"] == {"request_id": "r1", "pages": 3}
    assert capsys.readouterr() == ("", "")


def test_V1_the_library_configures_no_logging_and_prints_only_warnings() -> None:
    script = (
        "import logging, structlog; from akv import observe\n"
        "observe.emit(observe.CONNECTOR_OPEN, pool='embedded')\n"
        "observe.emit(observe.LOAD_FAILED, request_id='r1', reason='missing')\n"
        "assert not structlog.is_configured() and not logging.getLogger().handlers and not logging.getLogger('akv').handlers\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == ""
    assert ran.stderr == "akv.load.failed request_id='r1' reason='missing'\n"


def test_V1_a_structlog_that_the_application_configured_is_used(
    fresh_structlog: None, caplog: pytest.LogCaptureFixture
) -> None:
    structlog.configure()
    with structlog.testing.capture_logs() as captured:
        observe.emit(observe.LOAD_FAILED, request_id="r1", reason="missing")
    assert captured == [{"event": "akv.load.failed", "log_level": "warning", "request_id": "r1", "reason": "missing"}]
    assert not caplog.records


def test_V1_json_by_one_call(lines: io.StringIO) -> None:
    observe.emit(observe.SAVE_COMPLETE, request_id="r1", blocks=2)
    (line,) = parsed(lines)
    timestamp = line.pop("timestamp")
    assert isinstance(timestamp, str)
    assert timestamp.endswith("Z")
    assert line == {"event": "akv.save.complete", "level": "debug", "request_id": "r1", "blocks": 2}


def test_V1_json_goes_to_stderr_and_leaves_out_what_is_below_its_level(
    fresh_structlog: None, capsys: pytest.CaptureFixture[str]
) -> None:
    akv.logging.json(level="warning")
    observe.emit(observe.CONNECTOR_OPEN, pool="embedded")
    observe.emit(observe.LOAD_FAILED, reason="missing")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [json.loads(line)["event"] for line in printed.err.splitlines()] == ["akv.load.failed"]


def test_V1_json_refuses_an_unknown_level(fresh_structlog: None) -> None:
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        akv.logging.json(level="loud")
    assert not structlog.is_configured()


def fail_with_a_prompt_in_a_local() -> None:
    prompt = "the-text-of-" + "a-prompt"
    raise RuntimeError(f"failed on {len(prompt)} characters")


def test_X6_tracebacks_hold_no_local_variables(lines: io.StringIO) -> None:
    try:
        fail_with_a_prompt_in_a_local()
    except RuntimeError as error:
        observe.emit(observe.CONNECTOR_BROKEN, error=error, reason="a crash")
    assert "the-text-of-a-prompt" not in lines.getvalue()
    assert "fail_with_a_prompt_in_a_local" in lines.getvalue()


def test_an_error_reaches_the_standard_logger_with_its_traceback(
    fresh_structlog: None, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("a crash")
    observe.emit(observe.CONNECTOR_BROKEN, error=error, reason="a crash")
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_X6_a_secret_id_is_stable_in_a_process_and_tells_nothing_elsewhere() -> None:
    here = observe.secret_id("tenant-a")
    assert here == observe.secret_id("tenant-a") != observe.secret_id("tenant-b")
    assert "tenant" not in here
    assert observe.secret_id(None) == observe.secret_id("")
    assert observe.secret_id("\ud800")
    there = subprocess.run(
        [sys.executable, "-c", "from akv import observe; print(observe.secret_id('tenant-a'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() != here


def test_a_step_says_begin_and_end_with_outcome_and_duration(lines: io.StringIO) -> None:
    clock = Clock()
    with observe.step(observe.POOL_OPEN, clock=clock, pool="embedded") as more:
        clock.now += 2.5
        more["client_version"] = "0.3"
    begin, end = parsed(lines)
    assert (begin["event"], begin["level"], begin["phase"], begin["pool"]) == ("akv.pool.open", "debug", "begin", "embedded")
    assert (end["event"], end["level"], end["phase"], end["outcome"]) == ("akv.pool.open", "info", "end", "ok")
    assert (end["duration_s"], end["pool"], end["client_version"]) == (2.5, "embedded", "0.3")


def test_a_step_that_raises_ends_as_an_error_and_lets_it_pass(lines: io.StringIO) -> None:
    with pytest.raises(RuntimeError), observe.step(observe.POOL_OPEN, clock=Clock()):
        raise RuntimeError
    end = parsed(lines)[1]
    assert (end["outcome"], end["level"]) == ("error", "warning")


@pytest.mark.anyio
async def test_a_cancelled_step_ends_as_cancelled(lines: io.StringIO) -> None:
    with anyio.CancelScope() as scope, observe.step(observe.POOL_OPEN):
        scope.cancel()
        await anyio.lowlevel.checkpoint()
    end = parsed(lines)[1]
    assert (end["outcome"], end["level"]) == ("cancelled", "info")


def test_the_catalogue_is_well_formed() -> None:
    for name, event in observe.CATALOGUE.items():
        assert event.name == name
        assert name.startswith("akv.")
        assert event.level in observe.LEVELS
        assert event.meaning.endswith(".")
        assert len(set(event.fields)) == len(event.fields)
        assert "key" not in event.fields or event.level == "debug", "X6: page keys at debug level only"
        assert not {"salt", "token_ids", "prompt", "tokens_list"} & set(event.fields)
        if "phase" in event.fields:
            assert event.fields[-3:] == observe.STEP_FIELDS
