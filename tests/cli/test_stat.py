"""`akv stat`: which way pages came to the connectors of this machine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import msgspec
import pytest
import typer
from typer.testing import CliRunner

from akv.cli.stat.command import add_stat
from akv.cli.stat.pool import Share, ask_master
from akv.cli.stat.report import Report, lines, look
from akv.errors import PoolError
from akv.pool import open_pool
from akv.pool.board import posting
from akv.settings import Settings, StoreSettings
from akv.values.pressure import Reads
from akv.values.segments import SegmentEntry
from akv.values.stats import ConnectorStats
from akv_testing.master import running_master
from akv_testing.processes import command_of


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


GIB = 1 << 30


def lent(pid: int, size: int = GIB) -> SegmentEntry:
    fields: dict[str, Any] = {"owner_started": 1, "pid_namespace": 1, "boot_id": "b", "uid": 0, "base": 4096, "path": "/p"}
    return SegmentEntry(
        segment_id=f"{pid}", owner_pid=pid, endpoint=f"10.0.0.1:{15000 + pid}", size=size, name=f"10.0.0.1:{pid}", **fields
    )


def test_O3_it_shows_who_lends_and_joins_the_register_with_the_master() -> None:
    assert lines(Report((lent(7),), (), Reads())) == ["lent       1.00 GiB by process 7 as 10.0.0.1:15007"]
    pool = (Share("10.0.0.1:7", GIB // 2, GIB), Share("10.0.0.2:9", 0, GIB))
    assert lines(Report((lent(7),), (), Reads(), pool)) == [
        "pool       10.0.0.1:7: 512.0 MiB of 1.00 GiB used, process 7 on this machine",
        "pool       10.0.0.2:9: 0.0 MiB of 1.00 GiB used, not in this register",
        "lent       1.00 GiB by process 7 as 10.0.0.1:15007",
    ]


@pytest.mark.parametrize(
    ("report", "trouble"),
    [
        (Report((lent(7), lent(8)), (), Reads()), ""),
        # Several segments of one process are one share.
        (Report((lent(7, GIB // 2), lent(7, GIB // 2), lent(8)), (), Reads()), ""),
        (Report((lent(7), lent(8, 2 * GIB)), (), Reads()), "processes lend unequally, from 1.00 GiB to 2.00 GiB"),
        (
            Report((lent(7),), (), Reads(), (Share("10.0.0.1:7", 0, GIB), Share("10.0.0.2:9", 0, 3 * GIB))),
            "processes lend unequally, from 1.00 GiB to 3.00 GiB",
        ),
        (
            Report((lent(7), lent(8)), (), Reads(), (Share("10.0.0.1:7", 0, GIB),)),
            "process 8 lends 1.00 GiB to another pool, or this master has forgotten it",
        ),
        (Report((), (), Reads(), None, 2), "2 segments of processes that have died are left: run akv doctor"),
    ],
)
def test_O3_uneven_segments_dead_owners_and_segments_that_no_master_knows_are_flagged(report: Report, trouble: str) -> None:
    assert report.troubles == ([trouble] if trouble else [])
    assert [line for line in lines(report) if line.startswith("trouble")] == ([f"trouble    {trouble}"] if trouble else [])


@pytest.mark.mooncake
def test_O3_a_real_master_says_what_each_process_has_in_the_pool(store: StoreSettings) -> None:
    with running_master() as (address, pid):
        (port,) = [word.partition("=")[2] for word in command_of(pid) if word.startswith("--metrics_port=")]
        url = f"http://127.0.0.1:{port}"
        lending = msgspec.structs.replace(store, master_address=address, segment_bytes=32 << 20, segment_file_bytes=16 << 20)

        async def look_around() -> tuple[Report, Any]:
            async with open_pool(Settings(model_key="m", store=lending)):
                return look(store, ask_master(url)), run("--metrics", url)

        report, done = anyio.run(look_around)
        assert report.pool == (Share(report.lent[0].name, 0, 32 << 20),)
        assert [entry.size for entry in report.lent] == [16 << 20] * 2
        assert report.troubles == []
        assert f"32.0 MiB used, process {os.getpid()} on this machine" in done.output
        with pytest.raises(PoolError, match=f"{address}.*--metrics_port"):
            ask_master(f"http://{address}")
    with pytest.raises(PoolError, match="takes the URL"):
        ask_master("127.0.0.1:9003")
