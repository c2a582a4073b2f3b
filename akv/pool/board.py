"""What the connectors of this user on this machine say of themselves: one small file each, beside the segment register.

A file is written anew every `stats_interval_s`, and removed with its connector. What a killed process leaves, the next one
that posts removes. The directory, and who may write there, is the register's (X5).
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from akv.errors import PoolError
from akv.pool.owners import Liveness, liveness, this_process
from akv.pool.register import SegmentRefused, check_directory, open_register, read_trusted, register_directory, write_whole
from akv.settings import StoreSettings
from akv.values.stats import STATS_VERSION, ConnectorStats, PostedStats

_SUFFIX = ".stats"


class HostBoard:
    """Implements `akv.ports.board.StatBoard`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / f"{secrets.token_hex(16)}{_SUFFIX}"
        self._closed = False

    def post(self, stats: ConnectorStats) -> None:
        """As the port says."""
        owner = this_process()
        posted = PostedStats(
            owner_pid=owner.pid,
            owner_started=owner.started,
            pid_namespace=owner.pid_namespace,
            boot_id=owner.boot_id,
            stats=stats,
        )
        if not self._path.exists():
            try:
                open_register(self._directory)
            except PoolError as error:
                raise OSError(str(error)) from error
            _sweep(self._directory)
        write_whole(self._path, msgspec.json.encode(posted))
        if self._closed:
            # The connector was closed while this call was given up.
            self._remove()

    def close(self) -> None:
        """Take down what was posted."""
        self._closed = True
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


@contextmanager
def posting(store: StoreSettings) -> Iterator[HostBoard]:
    """A place for one connector, for the length of the block."""
    board = HostBoard(register_directory(store))
    try:
        yield board
    finally:
        board.close()


def posted_here(store: StoreSettings) -> list[PostedStats]:
    """What running connectors of this user posted on this machine, in order of their processes. Changes nothing."""
    found = [posted for _, posted in _read(register_directory(store)) if liveness(posted) is Liveness.ALIVE]
    return sorted(found, key=lambda posted: posted.owner_pid)


def _sweep(directory: Path) -> None:
    for path, posted in _read(directory):
        if liveness(posted) is Liveness.DEAD:
            path.unlink(missing_ok=True)


def _read(directory: Path) -> Iterator[tuple[Path, PostedStats]]:
    """What can be read and trusted: a file of another version is another's business, and one that is gone nobody's."""
    with suppress(SegmentRefused):
        check_directory(directory)
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            with suppress(SegmentRefused, msgspec.DecodeError, UnicodeDecodeError):
                posted = msgspec.json.decode(read_trusted(path), type=PostedStats)
                if posted.version == STATS_VERSION:
                    yield path, posted
