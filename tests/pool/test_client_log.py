"""The store client's lines become events; standard error stays as it was, whatever happens to the process (X6)."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from akv.pool import client_log
from akv.pool.client_log import ClientLog

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Events = Callable[..., list[dict[str, Any]]]

HEAD = ["Log file created at: 2026/11/30 03:20:36", "Running on machine: vm", "Log line format: [IWEF]mmdd ..."]
KEY = "akv1/meta-llama%2FLlama/w1r0/lg0/t32b2048/2cbd989e68a1d62fe8bebc04262e3dd9"


def line(text: str, severity: str = "E", source: str = "real_client.cpp:5106") -> str:
    return f"{severity}1130 03:20:36.858152 21421 {source}] {text}"


@pytest.mark.parametrize(("letter", "severity"), [("I", "info"), ("W", "warning"), ("E", "error"), ("F", "fatal")], ids=str)
def test_X6_a_line_is_told_with_its_severity_and_place(letter: str, severity: str, events: Events) -> None:
    client_log._tell([*HEAD, line("it went wrong", letter)])
    where = {"severity": severity, "source": "real_client.cpp:5106"}
    assert events("akv.pool.client_log") == [where | {"lines": 1, "text": "it went wrong"}]
    assert events("akv.pool.client_line") == [where | {"text": "it went wrong"}]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"Query failed for key '{KEY}': RPC_FAIL", "Query failed for key '<key>': RPC_FAIL"),
        (f"key={KEY}, and [{KEY}]", "<key>, and [<key>]"),
        ("other program's 2cbd989e68a1d62fe8bebc04262e3dd9", "other program's <key>"),
        ("Failed to open segment for endpoint='10.0.0.1:16775'", "Failed to open segment for endpoint='10.0.0.1:16775'"),
    ],
)
def test_X6_keys_are_told_at_level_debug_only(text: str, told: str, events: Events, caplog: pytest.LogCaptureFixture) -> None:
    client_log._tell([line(text)])
    assert [event["text"] for event in events("akv.pool.client_log")] == [told]
    assert [event["text"] for event in events("akv.pool.client_line")] == [text]
    levels = {record.__dict__["akv_event"]: record.levelname for record in caplog.records}
    assert levels == {"akv.pool.client_log": "INFO", "akv.pool.client_line": "DEBUG"}


def test_lines_of_one_place_are_one_event_and_a_flood_is_cut(events: Events) -> None:
    client_log._tell([line(f"no. {number}", source=f"a.cpp:{number % 2}") for number in range(1000)])
    assert [(event["source"], event["lines"], event["text"]) for event in events("akv.pool.client_log")] == [
        ("a.cpp:0", 500, "no. 0"),
        ("a.cpp:1", 500, "no. 1"),
    ]
    assert len(events("akv.pool.client_line")) == client_log._MOST_LINES


def test_lines_of_many_places_are_all_counted(events: Events) -> None:
    client_log._tell([line("x", source=f"a.cpp:{number}") for number in range(20)] + ["what belongs to no line"])
    counts = [event["lines"] for event in events("akv.pool.client_log")]
    assert (len(counts), sum(counts)) == (client_log._MOST_SOURCES, 21)


def test_what_is_not_captured_is_not_read(events: Events) -> None:
    log = ClientLog()
    log.read()
    assert not log.is_captured
    assert events("akv.pool.client_log") == []


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ClientLog]:
    """A log whose glog is the test: it writes to files in `tmp_path`."""
    made = ClientLog()
    made._folder, made._pid = tmp_path, os.getpid()
    yield made
    made._forget()


def test_a_line_is_told_once_it_is_whole_and_its_file_lies_nowhere(log: ClientLog, tmp_path: Path, events: Events) -> None:
    with (tmp_path / "1").open("wb", buffering=0) as file:
        file.write("\n".join([*HEAD, line("first"), line("second")]).encode())
        log.read()
        assert list(tmp_path.iterdir()) == []
        log.read()
        assert [event["text"] for event in events("akv.pool.client_line")] == ["first"]
        file.write(b", which goes on\n")
        log.read()
    assert [event["text"] for event in events("akv.pool.client_line")] == ["first", "second, which goes on"]


def test_a_file_that_glog_begins_anew_is_followed(log: ClientLog, tmp_path: Path, events: Events) -> None:
    for name in ("1", "2"):
        (tmp_path / name).write_text(line(f"in file {name}") + "\n")
        log.read()
    assert [event["text"] for event in events("akv.pool.client_line")] == ["in file 1", "in file 2"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_listed_again_only_where_its_time_cannot_vouch_for_it(
    log: ClientLog, tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appears(name: str, *, at: float) -> None:
        (tmp_path / name).write_text(line(f"in file {name}") + "\n")
        os.utime(tmp_path, (at, at))

    def told() -> list[str]:
        log.read()
        return [event["text"] for event in events("akv.pool.client_line")]

    old = time.time() - 60
    os.utime(tmp_path, (old, old))
    assert told() == []
    appears("1", at=old)  # As nothing does: that it is not found is how one sees that nobody looked.
    assert told() == []
    os.utime(tmp_path, (old + 1, old + 1))
    assert told() == ["in file 1"]
    now = time.time()
    os.utime(tmp_path, (now, now))
    told()
    appears("2", at=now)  # In the same tick of the clock.
    assert told()[-1] == "in file 2"


def test_what_was_read_takes_no_room(log: ClientLog, tmp_path: Path, events: Events) -> None:
    with (tmp_path / "1").open("wb", buffering=0) as file:
        for _ in range(3):
            file.write((line("x" * 1000) + "\n").encode() * 2000)
            log.read()
        assert os.fstat(file.fileno()).st_blocks * 512 < 1 << 20
    assert [event["lines"] for event in events("akv.pool.client_log")] == [2000] * 3


PRELUDE = """
import logging, os, sys, tempfile
import anyio
from akv.pool import open_pool
from akv.pool.client_log import CLIENT_LOG
from akv.settings import ClientSettings, Settings, StoreSettings
address, tempfile.tempdir = sys.argv[1:3]
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(levelname)s %(message)s")

def settings(**client):
    store = StoreSettings(master_address=address, segment_bytes=16 << 20)
    return Settings(model_key="m", store=store, client=ClientSettings(log_level="INFO", **client))

def run(main):
    anyio.run(main)

def glog_lines(pool):
    # Refused by the client, with a line of level ERROR that names the key.
    pool._client.batch_put_from(["akv1/a/key"], [0], [0])
    pool.probe(["a"])
"""


# On a master of their own: a segment that a killed process lent stands among the living for ten seconds.
def captured(run: Run, script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return run(PRELUDE + script, *map(str, arguments))


@pytest.mark.mooncake
def test_X6_the_clients_lines_are_events_and_standard_error_is_untouched(
    own_master: tuple[str, int], tmp_path: Path, run_script: Run
) -> None:
    script = """
async def main():
    before = os.fstat(2), os.listdir("/proc/self/fd")
    async with open_pool(settings()) as pool:
        glog_lines(pool)
        print("same", os.fstat(2) == before[0], CLIENT_LOG.is_captured)
    print("same", os.fstat(2) == before[0], CLIENT_LOG.is_captured)
run(main)
"""
    ended = captured(run_script, script, own_master[0], tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("INFO akv.pool.client_log severity='info'") > 3, "what setup said"
    assert "DEBUG akv.pool.client_line severity='error' source='client_service.cpp" in ended.stdout
    assert "INFO akv.pool.client_log severity='error' source='client_service.cpp" in ended.stdout
    assert [row for row in ended.stdout.splitlines() if "akv1/a/key" in row and not row.startswith("DEBUG")] == []
    assert ended.stdout.count("same True True\n") == ended.stdout.count("same True False\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mooncake
def test_X6_without_capture_the_lines_go_where_they_went(own_master: tuple[str, int], tmp_path: Path, run_script: Run) -> None:
    script = """
async def main():
    async with open_pool(settings(capture_log=False)) as pool:
        glog_lines(pool)
run(main)
"""
    ended = captured(run_script, script, own_master[0], tmp_path)
    assert ended.returncode == 0
    assert "akv.pool.client_log" not in ended.stdout
    assert "tcp_transport.cpp" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mooncake
def test_X6_a_directory_that_the_operator_gave_the_client_is_left_to_it(
    own_master: tuple[str, int], tmp_path: Path, run_script: Run
) -> None:
    script = """
os.environ["MC_LOG_DIR"] = sys.argv[3]
async def main():
    async with open_pool(settings()) as pool:
        print("captured", CLIENT_LOG.is_captured)
run(main)
"""
    own = tmp_path / "own"
    own.mkdir()
    ended = captured(run_script, script, own_master[0], tmp_path, own)
    assert (ended.returncode, "captured False\n" in ended.stdout) == (0, True), ended.stderr
    assert list(own.iterdir()) != []
    assert list(tmp_path.iterdir()) == [own]


@pytest.mark.mooncake
def test_X6_capturing_ends_with_the_last_pool_and_begins_again(
    own_master: tuple[str, int], tmp_path: Path, run_script: Run
) -> None:
    script = """
async def main():
    for turn in range(2):
        async with open_pool(settings()) as pool:
            async with open_pool(settings()) as other:
                pass
            print("held", CLIENT_LOG.is_captured)
            glog_lines(pool)
        files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        print("left", [file for file in files if "akv-client-log" in file], CLIENT_LOG.is_captured)
run(main)
"""
    ended = captured(run_script, script, own_master[0], tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("held True\n") == 2
    assert ended.stdout.count("left [] False\n") == 2
    assert ended.stdout.count("severity='error' source='client_service.cpp") == 4, "an event and a line in each turn"


@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("ending", "status", "left"),
    [("os._exit(5)", 5, True), ("os.kill(os.getpid(), 9)", -9, True), ("os.abort()", -6, True), ("sys.exit(5)", 5, False)],
)
def test_X6_however_a_process_ends_its_own_last_words_arrive_and_no_line_lies_around(
    ending: str, status: int, left: bool, own_master: tuple[str, int], tmp_path: Path, run_script: Run
) -> None:
    script = """
import faulthandler
faulthandler.enable()
async def main():
    async with open_pool(settings()) as pool:
        glog_lines(pool)
        os.write(2, b"last words\\\\n")
        ENDING
run(main)
""".replace("ENDING", ending).replace("\\\\n", "\\n")
    ended = captured(run_script, script, own_master[0], tmp_path)
    assert ended.returncode == status
    assert ended.stderr.startswith("last words\n")
    assert ("Fatal Python error: Aborted" in ended.stderr) == (status == -6)
    assert [path.is_dir() and list(path.iterdir()) for path in tmp_path.iterdir()] == ([[]] if left else [])


@pytest.mark.mooncake
def test_X6_children_write_to_standard_error_as_ever(own_master: tuple[str, int], tmp_path: Path, run_script: Run) -> None:
    script = """
import subprocess
async def main():
    async with open_pool(settings()) as pool:
        pool._client.batch_put_from(["akv1/a/key"], [0], [0])
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            CLIENT_LOG.read()
            sys.stdout.flush()
            os.write(2, b"forked ")
            os._exit(0)
        os.waitpid(child, 0)
        subprocess.run(["sh", "-c", "printf executed >&2"])
        pool.probe(["a"])
        print("still", CLIENT_LOG.is_captured)
run(main)
"""
    ended = captured(run_script, script, own_master[0], tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "forked executed")
    assert ended.stdout.count("severity='error' source='client_service.cpp") == 2, "told by the parent alone"
    assert "still True\n" in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mooncake
def test_X6_a_store_that_is_left_open_has_its_last_lines_told(
    own_master: tuple[str, int], tmp_path: Path, run_script: Run
) -> None:
    script = """
import signal
async def main():
    async with open_pool(settings()) as pool:
        os.kill(int(sys.argv[3]), signal.SIGKILL)
        while pool.probe(["a"])[0].code == 0:
            pass
    print("left open", CLIENT_LOG.is_captured)
run(main)
"""
    ended = captured(run_script, script, own_master[0], tmp_path, own_master[1])
    assert (ended.returncode, ended.stderr) == (0, "")
    told = ended.stdout.partition("left open True\n")
    assert "akv.connector.unclean_exit" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_O7_a_folder_that_is_gone_fails_no_store_call(tmp_path: Path) -> None:
    log = ClientLog()
    log._folder = tmp_path / "cleared-away"
    log._pid = os.getpid()
    log.read()
    assert log._file < 0
