"""The segment register: what is used of it, what is removed, and what is left alone (X5, O3, R3)."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from akv.errors import PoolError
from akv.pool import register
from akv.pool.owners import Liveness, liveness, mapped_at, this_process
from akv.pool.register import (
    CheckedEntries,
    EntryFault,
    SegmentRefused,
    lent_segments,
    open_register,
    open_segment,
    publish,
    read_register,
    register_directory,
    remove_stale,
    withdraw,
)
from akv.pool.shared_memory import SegmentFile, make_file
from akv.settings import StoreSettings
from akv.values.segments import SegmentEntry

SIZE = 3 * mmap.PAGESIZE


class Lender:
    """Lends as a client of the store would have it mapped: a file of this process, mapped once, registered."""

    def __init__(self, directory: Path) -> None:
        self.store = StoreSettings(shared_memory_dir=str(directory))
        self.directory = register_directory(self.store)
        open_register(self.directory)
        self._kept: list[mmap.mmap] = []
        self._descriptors: list[int] = []

    def lend(self, segment_id: str = "a1", kind: SegmentFile = "file") -> SegmentEntry:
        descriptor, path = make_file(kind, self.directory, segment_id, SIZE)
        self._descriptors.append(descriptor)
        self._kept.append(mmap.mmap(descriptor, SIZE))
        (base,) = mapped_at(os.getpid(), os.fstat(descriptor))
        owner = this_process()
        entry = SegmentEntry(
            segment_id=segment_id,
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
        publish(self.directory, entry)
        return entry

    def rewrite(self, entry: SegmentEntry, **fields: Any) -> SegmentEntry:
        changed = msgspec.structs.replace(entry, **fields)
        publish(self.directory, changed)
        return changed

    def path_of(self, segment_id: str = "a1") -> Path:
        return self.directory / f"{segment_id}.json"

    def close(self) -> None:
        for kept in self._kept:
            kept.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


@pytest.fixture
def lender(shm: Path) -> Iterator[Lender]:
    made = Lender(shm)
    yield made
    made.close()


@pytest.fixture
def dead() -> dict[str, int]:
    """A process that ended: its id and when it started."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        entry = Path(f"/proc/{process.pid}/stat").read_text()
        process.kill()
    return {"owner_pid": process.pid, "owner_started": int(entry.rpartition(")")[2].split()[19])}


@pytest.mark.parametrize("kind", ["file", "memfd"])
def test_X5_what_a_living_process_of_this_user_lends_is_used_and_opened_for_reading_alone(
    kind: SegmentFile, lender: Lender
) -> None:
    entry = lender.lend(kind=kind)
    assert lent_segments(lender.store) == [entry]
    descriptor = open_segment(entry)
    assert os.fstat(descriptor).st_size == SIZE
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    os.close(descriptor)


def test_O3_several_segments_of_one_process_stand_side_by_side(lender: Lender) -> None:
    entries = [lender.lend("a1"), lender.lend("a2", "memfd"), lender.lend("a3")]
    assert lent_segments(lender.store) == entries
    withdraw(lender.directory, "a1")
    withdraw(lender.directory, "a1")
    assert lent_segments(lender.store) == entries[1:]
    assert not Path(entries[0].path).exists()


def _linked(lender: Lender, entry: SegmentEntry) -> None:
    target = lender.path_of().rename(lender.directory.parent / "elsewhere")
    lender.path_of().symlink_to(target)


def _second_name(lender: Lender, entry: SegmentEntry) -> None:
    os.link(lender.path_of(), lender.directory.parent / "second")


def _pipe(lender: Lender, entry: SegmentEntry) -> None:
    lender.path_of().unlink()
    os.mkfifo(lender.path_of(), 0o600)


def _segment_linked(lender: Lender, entry: SegmentEntry) -> None:
    target = Path(entry.path).rename(lender.directory.parent / "elsewhere")
    Path(entry.path).symlink_to(target)


def _elsewhere(lender: Lender, entry: SegmentEntry) -> None:
    copy = lender.directory.parent / "copy"
    copy.write_bytes(bytes(SIZE))
    copy.chmod(0o600)
    lender.rewrite(entry, path=str(copy))


def _exchanged(lender: Lender, entry: SegmentEntry) -> None:
    # As a restarted owner would have it: the same name, another file.
    Path(entry.path).unlink()
    Path(entry.path).write_bytes(bytes(SIZE))
    Path(entry.path).chmod(0o600)


LIES: dict[str, tuple[EntryFault, Callable[[Lender, SegmentEntry], object]]] = {
    "a link": (EntryFault.LINK, _linked),
    "two names": (EntryFault.LINK, _second_name),
    "a pipe": (EntryFault.LINK, _pipe),
    "the group may write": (EntryFault.WRITABLE_BY_OTHERS, lambda lender, _: lender.path_of().chmod(0o620)),
    "all may write": (EntryFault.WRITABLE_BY_OTHERS, lambda lender, _: lender.path_of().chmod(0o602)),
    "another user's": (EntryFault.FOREIGN, lambda lender, entry: lender.rewrite(entry, uid=entry.uid + 1)),
    "no JSON": (EntryFault.MALFORMED, lambda lender, _: lender.path_of().write_bytes(b'{"version": 1')),
    "no text": (EntryFault.MALFORMED, lambda lender, _: lender.path_of().write_bytes(b"\xff\xfe")),
    "no entry": (EntryFault.MALFORMED, lambda lender, _: lender.path_of().write_bytes(b'{"version": 1}')),
    "a version that is not ours": (EntryFault.VERSION, lambda lender, entry: lender.rewrite(entry, version=2)),
    "another id": (
        EntryFault.MALFORMED,
        lambda lender, entry: lender.path_of().write_bytes(
            msgspec.json.encode(msgspec.structs.replace(entry, segment_id="b"))
        ),
    ),
    "a size below one": (EntryFault.MALFORMED, lambda lender, entry: lender.rewrite(entry, size=0)),
    "an owner in another container": (
        EntryFault.OWNER_UNKNOWN,
        lambda lender, entry: lender.rewrite(entry, pid_namespace=entry.pid_namespace + 1),
    ),
    "a file elsewhere": (EntryFault.PATH, _elsewhere),
    "a descriptor of another process": (
        EntryFault.PATH,
        lambda lender, entry: lender.rewrite(entry, path=f"/proc/{os.getppid()}/fd/1"),
    ),
    "a path that only begins well": (
        EntryFault.PATH,
        lambda lender, entry: lender.rewrite(entry, path=f"/proc/{entry.owner_pid}/fd/../../1/fd/1"),
    ),
    "a segment that is a link": (EntryFault.LINK, _segment_linked),
    "a segment with two names": (
        EntryFault.LINK,
        lambda lender, entry: os.link(entry.path, lender.directory.parent / "second"),
    ),
    "a segment that others may read": (EntryFault.SEGMENT_READABLE_BY_OTHERS, lambda _, entry: Path(entry.path).chmod(0o640)),
    "no segment": (EntryFault.SEGMENT_MISSING, lambda _, entry: Path(entry.path).unlink()),
    "too large a size": (EntryFault.SIZE, lambda lender, entry: lender.rewrite(entry, size=SIZE + mmap.PAGESIZE)),
    "too small a size": (EntryFault.SIZE, lambda lender, entry: lender.rewrite(entry, size=SIZE - mmap.PAGESIZE)),
    "a segment that was truncated": (EntryFault.SIZE, lambda _, entry: os.truncate(entry.path, SIZE - 1)),
    "another base": (EntryFault.BASE, lambda lender, entry: lender.rewrite(entry, base=entry.base + mmap.PAGESIZE)),
    "a file that the owner does not have": (EntryFault.BASE, _exchanged),
}


@pytest.mark.parametrize("lie", LIES)
def test_X5_an_entry_that_lies_or_that_others_could_have_written_is_refused_and_left_alone(lie: str, lender: Lender) -> None:
    fault, tell = LIES[lie]
    honest = lender.lend("b2", "memfd")
    tell(lender, lender.lend("a1"))
    found = read_register(lender.directory)
    assert [(one.path, one.fault) for one in found.refused] == [(str(lender.path_of()), fault)]
    assert (found.usable, found.stale, found.claims) == ((honest,), (), ())
    assert lent_segments(lender.store) == [honest]
    remove_stale(lender.directory, found)
    assert os.path.lexists(lender.path_of())


@pytest.mark.parametrize("lie", LIES)
def test_X5_a_reader_that_found_an_entry_good_does_not_use_what_became_of_it(lie: str, lender: Lender) -> None:
    fault, tell = LIES[lie]
    entry, checked = lender.lend("a1"), CheckedEntries()
    assert lent_segments(lender.store, checked) == [entry]
    tell(lender, entry)
    found = read_register(lender.directory, checked)
    # What the entry's own file says is seen at once, what became of the segment when it is opened.
    if found.usable:
        with pytest.raises(SegmentRefused, match=fault.value):
            open_segment(entry)
    else:
        assert [one.fault for one in found.refused] == [fault]


def test_R3_what_an_owner_has_mapped_is_looked_at_once_and_whether_it_lives_each_time(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def counted(pid: int, file: os.stat_result) -> list[int]:
        looks.append(pid)
        return mapped_at(pid, file)

    monkeypatch.setattr(register, "mapped_at", counted)
    entry, checked = lender.lend(), CheckedEntries()
    for _ in range(3):
        assert lent_segments(lender.store, checked) == [entry]
    assert len(looks) == 1
    assert lent_segments(lender.store) == [entry], "another reader looks for itself"
    assert len(looks) == 2
    # Written again, it is another entry, whatever it says.
    lender.rewrite(entry)
    assert lent_segments(lender.store, checked) == [entry]
    assert len(looks) == 3
    monkeypatch.setattr(register, "liveness", lambda _: Liveness.UNKNOWN)
    assert lent_segments(lender.store, checked) == []
    monkeypatch.undo()
    assert lent_segments(lender.store, checked) == [entry]
    monkeypatch.setattr(register, "liveness", lambda _: Liveness.DEAD)
    found = read_register(lender.directory, checked)
    assert (found.usable, found.stale) == ((), (entry,))


def test_X5_files_of_another_user_are_refused(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = lender.lend()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SegmentRefused, match="foreign"):
        open_segment(entry)
    with pytest.raises(SegmentRefused, match="foreign"):
        register.read_trusted(lender.path_of())
    with pytest.raises(SegmentRefused, match="foreign"):
        register._read_entry(lender.path_of())
    assert [one.fault for one in read_register(lender.directory).refused] == [EntryFault.FOREIGN]


def test_X5_what_a_later_version_adds_is_tolerated(lender: Lender) -> None:
    entry = lender.lend()
    told = json.loads(lender.path_of().read_bytes())
    lender.path_of().write_text(json.dumps({**told, "numa_node": 1}))
    assert lent_segments(lender.store) == [entry]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_X5_a_directory_that_others_may_enter_is_not_used(mode: int, lender: Lender) -> None:
    lender.lend()
    lender.directory.chmod(mode)
    assert lent_segments(lender.store) == []
    with pytest.raises(PoolError, match=r"not to be trusted \(writable_by_others\).*0700.*store\.shared_memory_dir"):
        open_register(lender.directory)


def test_X5_a_directory_behind_a_link_is_not_used(lender: Lender) -> None:
    lender.lend()
    moved = lender.directory.rename(lender.directory.with_name("moved"))
    lender.directory.symlink_to(moved)
    assert read_register(lender.directory).refused[0].fault is EntryFault.LINK
    assert lent_segments(lender.store) == []
    with pytest.raises(PoolError, match="no link"):
        open_register(lender.directory)


def test_where_there_is_no_register_nothing_is_lent(shm: Path) -> None:
    assert lent_segments(StoreSettings(shared_memory_dir=str(shm / "nowhere"))) == []
    with pytest.raises(PoolError, match="cannot be made.*store.segment_memory to 'private'"):
        open_register(shm / "nowhere" / "akv-0")


@pytest.mark.parametrize("missing", [{"base": 0}, {"endpoint": ""}, {"base": 0, "endpoint": ""}])
def test_R3_a_claim_is_neither_used_nor_removed(missing: dict[str, Any], lender: Lender) -> None:
    claim = lender.rewrite(lender.lend(), **missing)
    found = read_register(lender.directory)
    assert (found.usable, found.claims, found.stale, found.refused) == ((), (claim,), (), ())


def test_O3_an_owner_is_a_process_and_its_start_and_its_boot(lender: Lender, dead: dict[str, int]) -> None:
    entry = lender.lend()
    assert liveness(entry) is Liveness.ALIVE
    assert liveness(msgspec.structs.replace(entry, **dead)) is Liveness.DEAD
    # The id was used again.
    assert liveness(msgspec.structs.replace(entry, owner_started=entry.owner_started - 1)) is Liveness.DEAD
    assert liveness(msgspec.structs.replace(entry, boot_id="another")) is Liveness.DEAD
    assert liveness(msgspec.structs.replace(entry, pid_namespace=1, **dead)) is Liveness.UNKNOWN


def test_O3_an_owner_that_nobody_has_waited_for_is_dead(lender: Lender) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        entry = msgspec.structs.replace(lender.lend(), owner_pid=process.pid, owner_started=started)
        assert liveness(entry) is Liveness.ALIVE
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert liveness(entry) is Liveness.DEAD
    finally:
        process.communicate()


def test_O3_what_the_dead_left_is_removed_and_nothing_else(lender: Lender, dead: dict[str, int]) -> None:
    alive, elsewhere = lender.lend("a1"), lender.rewrite(lender.lend("a2"), pid_namespace=1, **dead)
    stale = lender.rewrite(lender.lend("a3"), **dead)
    claim = lender.rewrite(lender.lend("a4"), base=0, **dead)
    orphan, fresh, old = (lender.directory / name for name in ("a5.segment", ".a6.1.partial", ".a7.1.partial"))
    for path in (orphan, fresh, old):
        path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(old, (0, 0))
    found = read_register(lender.directory)
    assert (found.usable, found.stale) == ((alive,), (stale, claim))
    assert [(one.path, one.fault) for one in found.refused] == [(str(lender.path_of("a2")), EntryFault.OWNER_UNKNOWN)]
    assert found.orphans == (str(orphan), str(old))
    freed = remove_stale(lender.directory, found)
    assert freed == 2 * mmap.PAGESIZE
    left = {path.name for path in lender.directory.iterdir()}
    assert left == {"a1.json", "a1.segment", "a2.json", Path(elsewhere.path).name, fresh.name}
    assert remove_stale(lender.directory, found) == 0


def test_X5_an_entry_cannot_have_a_file_outside_the_register_removed(lender: Lender, dead: dict[str, int]) -> None:
    bystander = lender.directory.parent / "bystander"
    bystander.write_bytes(b"x")
    lender.rewrite(lender.lend(), path=str(bystander), **dead)
    remove_stale(lender.directory, read_register(lender.directory))
    assert bystander.exists()
    assert list(lender.directory.iterdir()) == []


def test_O3_an_entry_is_written_whole_or_not_at_all(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = lender.lend()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        publish(lender.directory, msgspec.structs.replace(entry, base=1))
    assert lent_segments(lender.store) == [entry]
    assert not list(lender.directory.glob("*.partial")) + list(lender.directory.glob(".*"))
