"""`akv stat`: which way pages came to the connectors of this machine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from akv.cli.stat.command import add_stat
from akv.cli.stat.report import Report, lines
from akv.pool.board import posting
from akv.settings import StoreSettings
from akv.values.pressure import Reads
from akv.values.segments import SegmentEntry
from akv.values.stats import ConnectorStats


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreSettings]:
    """The register of this test alone."""
    with TemporaryDirectory(prefix="akv-test-", dir="/dev/shm") as shm:
        for name in [name for name in os.environ if name.startswith("AKV_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AKV_STORE__SHARED_MEMORY_DIR", shm)
        yield StoreSettings(shared_memory_dir=shm)


def run(*options: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    add_stat(app)
    return CliRunner().invoke(app, ["stat", *options])


def stats(model_key: str, **reads: Any) -> ConnectorStats:
    return ConnectorStats(model_key=model_key, namespace="akv1", role="both", reads=Reads(**reads))


FIRST = stats(
    "one",
    direct_pages=12,
    direct_bytes=3 << 30,
    staged={"late": 1, "not_shared": 20},
    staged_bytes={"late": 1 << 20, "not_shared": 5 << 20},
    segments=2,
    segment_bytes=4 << 30,
)
SECOND = stats("two", direct_pages=1, direct_bytes=1 << 20, staged={"late": 2}, staged_bytes={"late": 2 << 20})


def test_R1_it_shows_pages_and_bytes_of_each_connector_by_path_and_the_sums(store: StoreSettings) -> None:
    with posting(store) as one, posting(store) as two:
        one.post(FIRST)
        two.post(SECOND)
        done = run()
    assert done.exit_code == 0, done.output
    said = done.output.splitlines()
    at = said.index(f"connector  process {os.getpid()}: one in akv1, role both")
    assert said[at + 1 : at + 5] == [
        "  direct   12 pages, 3.00 GiB",
        "  staged   20 pages, 5.0 MiB: not_shared",
        "  staged   1 pages, 1.0 MiB: late",
        "  mapped   2 segments, 4.00 GiB",
    ]
    assert said[-5:] == [
        "all        2 connectors",
        "  direct   13 pages, 3.00 GiB",
        "  staged   20 pages, 5.0 MiB: not_shared",
        "  staged   3 pages, 3.0 MiB: late",
        "  mapped   2 segments, 4.00 GiB",
    ]


def test_as_json_it_says_the_same(store: StoreSettings) -> None:
    with posting(store) as one:
        one.post(SECOND)
        told = json.loads(run("--json").output)
    assert [posted["stats"]["model_key"] for posted in told["connectors"]] == ["two"]
    assert (told["reads"]["direct_pages"], told["reads"]["staged_bytes"], told["lent"]) == (1, {"late": 2 << 20}, [])


def test_where_nobody_runs_it_says_so(store: StoreSettings) -> None:
    done = run()
    assert done.exit_code == 0
    assert done.output.startswith("no process of this user")
    assert list(Path(store.shared_memory_dir).iterdir()) == [], "looking changes nothing"


def test_O3_it_shows_who_lends() -> None:
    fields: dict[str, Any] = {"owner_started": 1, "pid_namespace": 1, "boot_id": "b", "uid": 0, "base": 4096, "path": "/p"}
    entry = SegmentEntry(segment_id="a", owner_pid=7, endpoint="10.0.0.1:15000", size=1 << 30, **fields)
    assert lines(Report((entry,), (), Reads())) == ["lent       1.00 GiB by process 7 as 10.0.0.1:15000"]
