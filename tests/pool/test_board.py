"""What connectors post beside the segment register: who reads it, and when it goes (V2, X5)."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from akv.pool.board import HostBoard, posted_here, posting
from akv.pool.register import read_register, register_directory
from akv.settings import StoreSettings
from akv.values.pressure import Reads
from akv.values.stats import ConnectorStats, PostedStats

STATS = ConnectorStats(model_key="m", namespace="akv1", role="both", reads=Reads(direct_pages=3, staged={"late": 2}))


@pytest.fixture
def store(shm: Path) -> StoreSettings:
    return StoreSettings(shared_memory_dir=str(shm))


def files(store: StoreSettings) -> list[Path]:
    return sorted(register_directory(store).glob("*.stats"))


def test_V2_what_is_posted_stands_until_the_connector_closes_and_only_the_last_of_it(store: StoreSettings) -> None:
    with posting(store) as board, posting(store) as other:
        board.post(STATS)
        other.post(STATS)
        board.post(msgspec.structs.replace(STATS, role="consumer"))
        assert sorted(posted.stats.role for posted in posted_here(store)) == ["both", "consumer"]
        assert {posted.owner_pid for posted in posted_here(store)} == {os.getpid()}
        assert [stat.S_IMODE(path.stat().st_mode) for path in files(store)] == [0o600, 0o600]
        assert read_register(register_directory(store)).orphans == ()
    assert list(register_directory(store).iterdir()) == []


def test_V2_where_nobody_posted_there_is_nothing(store: StoreSettings) -> None:
    assert posted_here(store) == []


def test_V2_what_a_killed_process_left_is_not_shown_and_removed_by_the_next_that_posts(store: StoreSettings) -> None:
    with posting(store) as board:
        board.post(STATS)
        (path,) = files(store)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
            process.kill()
        posted = msgspec.json.decode(path.read_bytes(), type=PostedStats)
        dead = msgspec.structs.replace(posted, owner_pid=process.pid, owner_started=int(started))
        path.write_bytes(msgspec.json.encode(dead))
        assert posted_here(store) == []
        with posting(store) as other:
            other.post(STATS)
            assert path not in files(store)
            assert len(posted_here(store)) == 1


def _linked(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".elsewhere")))


@pytest.mark.parametrize(
    "tell",
    [
        lambda path: path.chmod(0o622),
        lambda path: path.write_bytes(b"{"),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2')),
        lambda path: path.parent.chmod(0o755),
        _linked,
    ],
)
def test_X5_what_others_could_have_written_or_nobody_understands_is_not_shown(
    tell: Callable[[Path], object], store: StoreSettings
) -> None:
    with posting(store) as board:
        board.post(STATS)
        assert len(posted_here(store)) == 1
        tell(files(store)[0])
        assert posted_here(store) == []


def test_V2_a_post_that_ends_after_its_connector_leaves_nothing(store: StoreSettings) -> None:
    board = HostBoard(register_directory(store))
    board.close()
    board.post(STATS)
    assert files(store) == []


def test_X5_nothing_is_posted_where_others_may_enter(store: StoreSettings, shm: Path) -> None:
    register_directory(store).mkdir(mode=0o755)
    with posting(store) as board, pytest.raises(OSError, match="not to be trusted"):
        board.post(STATS)
