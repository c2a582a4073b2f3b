"""Segments of this host as files that are opened for reading, and what becomes of them meanwhile (X5, R3)."""

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from akv.errors import SegmentNotReady, SegmentUnusable
from akv.pool import RegisteredSegments, register
from akv.pool.owners import OwnerWatch, mapped_at, this_process
from akv.pool.register import open_register, publish, register_directory, withdraw
from akv.pool.shared_memory import SegmentFile, make_file
from akv.settings import StoreSettings
from akv.values.segments import SegmentEntry

SIZE = 3 * mmap.PAGESIZE


class Lent:
    """A segment that this process lends."""

    def __init__(self, directory: Path, kind: SegmentFile) -> None:
        store = StoreSettings(shared_memory_dir=str(directory))
        self.register = register_directory(store)
        open_register(self.register)
        self.descriptor, path = make_file(kind, self.register, "a1", SIZE)
        self._mapping = mmap.mmap(self.descriptor, SIZE)
        (base,) = mapped_at(os.getpid(), os.fstat(self.descriptor))
        owner = this_process()
        self.entry = SegmentEntry(
            segment_id="a1",
            owner_pid=owner.pid,
            owner_started=owner.started,
            pid_namespace=owner.pid_namespace,
            boot_id=owner.boot_id,
            uid=os.geteuid(),
            endpoint="127.0.0.1:1",
            base=base,
            size=SIZE,
            path=path,
        )
        publish(self.register, self.entry)
        self.segments = RegisteredSegments(store)

    def allocate(self) -> None:
        """As its owner does in the background."""
        self._mapping[:] = b"\x55" * SIZE


@pytest.fixture
def lent(shm: Path) -> Callable[[SegmentFile], Lent]:
    return lambda kind: Lent(shm, kind)


def test_R3_one_reader_asks_once_what_an_owner_has_mapped(
    lent: Callable[[SegmentFile], Lent], monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = lent("memfd")
    assert segment.segments.entries() == [segment.entry]
    monkeypatch.setattr(register, "mapped_at", lambda *_: pytest.fail("it was asked"))
    assert segment.segments.entries() == [segment.entry]


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_R3_a_registered_segment_can_be_opened_and_read_and_writes_into_it_change_nothing(
    kind: SegmentFile, lent: Callable[[SegmentFile], Lent]
) -> None:
    segment = lent(kind)
    segment.allocate()
    (entry,) = segment.segments.entries()
    file = segment.segments.open(entry)
    assert (file.nbytes, file.sealed, file.owner_lives(), file.unchanged()) == (SIZE, kind == "memfd", True, True)
    assert os.pread(file.fileno(), 2, 0) == b"\x55\x55"
    segment.allocate()
    assert file.unchanged()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(file.fileno(), b"x")


def test_R3_a_file_that_somebody_may_shorten_is_not_read_before_it_is_allocated(lent: Callable[[SegmentFile], Lent]) -> None:
    segment = lent("file")
    with pytest.raises(SegmentNotReady):
        segment.segments.open(segment.entry)


@pytest.mark.parametrize("lengths", [[0], [0, SIZE], [2 * mmap.PAGESIZE, SIZE], [2 * SIZE]])
def test_R3_a_file_whose_length_somebody_changed_is_changed_though_it_has_its_length_again(
    lengths: list[int], lent: Callable[[SegmentFile], Lent]
) -> None:
    segment = lent("file")
    segment.allocate()
    file = segment.segments.open(segment.entry)
    for length in lengths:
        os.truncate(segment.entry.path, length)
    assert not file.unchanged()


def test_R3_a_file_that_was_removed_is_changed(lent: Callable[[SegmentFile], Lent]) -> None:
    segment = lent("file")
    segment.allocate()
    file = segment.segments.open(segment.entry)
    Path(segment.entry.path).unlink()
    assert not file.unchanged()


@pytest.mark.parametrize("lie", [{"base": mmap.PAGESIZE}, {"size": SIZE - 1}, {"owner_pid": 1}])
def test_X5_R4_an_entry_that_lies_is_refused_when_its_file_is_opened(
    lie: dict[str, int], lent: Callable[[SegmentFile], Lent]
) -> None:
    segment = lent("memfd")
    with pytest.raises(SegmentUnusable, match="not what the register says"):
        segment.segments.open(msgspec.structs.replace(segment.entry, **lie))


def test_R4_an_owner_that_is_another_process_by_now_does_not_live(lent: Callable[[SegmentFile], Lent]) -> None:
    segment = lent("memfd")
    entry = msgspec.structs.replace(segment.entry, owner_started=segment.entry.owner_started + 1)
    assert not segment.segments.open(entry).owner_lives()


def test_R3_an_owner_that_ended_after_its_file_was_opened_does_not_live_though_nobody_waited_for_it(
    lent: Callable[[SegmentFile], Lent],
) -> None:
    segment = lent("memfd")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = int(Path(f"/proc/{other.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        watch = OwnerWatch(msgspec.structs.replace(segment.entry, owner_pid=other.pid, owner_started=started))
        assert watch.lives()
        other.kill()
        # Ends and is not reaped.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert not watch.lives()


def test_R4_a_segment_that_its_owner_lends_no_more_is_nobody_s(lent: Callable[[SegmentFile], Lent]) -> None:
    segment = lent("memfd")
    file = segment.segments.open(segment.entry)
    assert file.owner_lives()
    withdraw(segment.register, segment.entry.segment_id)
    assert not file.owner_lives(), "the process goes on, and may lend other memory at these addresses"
