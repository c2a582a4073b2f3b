"""What a reader of the register remembers of entries that it found good is no reason to use what became of them (X5, R3)."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen
from typing import TypeAlias

import pytest

from akv.pool import owners, register
from akv.pool.owners import image_of, this_process
from akv.pool.register import CheckedEntries, EntryFault, lent_segments, read_register, register_directory, write_whole
from akv.settings import StoreSettings

Run: TypeAlias = Callable[..., AbstractContextManager["Popen[str]"]]

#: Arguments: the register and the kind of file. Lends a segment; told to go on, executes another program in its place.
LENDER = """
import mmap, os, sys
from pathlib import Path
from akv.pool.owners import mapped_at, this_process
from akv.pool.register import open_register, publish
from akv.pool.shared_memory import make_file
from akv.values.segments import SegmentEntry

directory, size, owner = Path(sys.argv[1]), 3 * mmap.PAGESIZE, this_process()
open_register(directory)
descriptor, path = make_file(sys.argv[2], directory, "a1", size)
kept = mmap.mmap(descriptor, size)
(base,) = mapped_at(os.getpid(), os.fstat(descriptor))
publish(directory, SegmentEntry(
    segment_id="a1", owner_pid=owner.pid, owner_started=owner.started, pid_namespace=owner.pid_namespace,
    boot_id=owner.boot_id, uid=os.geteuid(), endpoint="127.0.0.1:1", base=base, size=size, path=path,
))
print("lent", flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", "import sys; print('another', flush=True); sys.stdin.read()"])
"""


@pytest.mark.parametrize(("kind", "fault"), [("file", EntryFault.BASE), ("memfd", EntryFault.SEGMENT_MISSING)])
def test_X5_R3_an_owner_that_executed_another_program_lends_nothing_any_more(
    kind: str, fault: EntryFault, shm: Path, lender: Run
) -> None:
    store, checked = StoreSettings(shared_memory_dir=str(shm)), CheckedEntries()
    directory = register_directory(store)
    with lender(LENDER, str(directory), kind) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        (entry,) = lent_segments(store, checked)
        assert lent_segments(store, checked) == [entry]
        owner.stdin.write("go on\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "another\n"
        # Its id and its start are as they were, and so is the entry's file.
        found = read_register(directory, checked)
        assert (found.usable, [one.fault for one in found.refused]) == ((), [fault])


CHANGES: dict[str, tuple[EntryFault, Callable[[Path], object]]] = {
    "its rights": (EntryFault.WRITABLE_BY_OTHERS, lambda path: path.chmod(0o622)),
    "its names": (EntryFault.LINK, lambda path: path.with_name("another").hardlink_to(path)),
    "its length": (EntryFault.MALFORMED, lambda path: path.write_bytes(b"{}")),
    "its file": (EntryFault.MALFORMED, lambda path: write_whole(path, bytes(path.stat().st_size))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_X5_what_became_of_an_entry_is_noticed_where_the_clock_of_files_stood_still(
    change: str, shm: Path, lender: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, make = CHANGES[change]
    store, checked = StoreSettings(shared_memory_dir=str(shm)), CheckedEntries()
    directory = register_directory(store)
    look = Path.lstat

    def at_noon(path: Path) -> os.stat_result:
        return os.stat_result(tuple(look(path)), {"st_ctime_ns": 43_200_000_000_000})

    with lender(LENDER, str(directory), "memfd"):
        monkeypatch.setattr(Path, "lstat", at_noon)
        (entry,) = lent_segments(store, checked)
        assert lent_segments(store, checked) == [entry]
        make(directory / "a1.json")
        found = read_register(directory, checked)
        monkeypatch.undo()
    assert (found.usable, [one.fault for one in found.refused]) == ((), [fault])


def test_X5_an_entry_whose_file_was_written_again_is_read_again(shm: Path, lender: Run) -> None:
    store, checked = StoreSettings(shared_memory_dir=str(shm)), CheckedEntries()
    path = register_directory(store) / "a1.json"
    with lender(LENDER, str(path.parent), "memfd"):
        assert len(lent_segments(store, checked)) == 1
        # As long as it was, and in the same file. Some kernels' clocks of files stand still for milliseconds.
        stamp = path.lstat().st_ctime_ns
        while path.lstat().st_ctime_ns == stamp:
            path.write_bytes(bytes(path.stat().st_size))
        assert lent_segments(store, checked) == []


def test_R3_where_an_owners_memory_cannot_be_told_what_it_has_mapped_is_looked_at_each_time(
    shm: Path, lender: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, checked = StoreSettings(shared_memory_dir=str(shm)), CheckedEntries()
    monkeypatch.setattr(register, "image_of", lambda _: 0)
    with lender(LENDER, str(register_directory(store)), "memfd"):
        (entry,) = lent_segments(store, checked)
        monkeypatch.setattr(register, "mapped_at", lambda *_: [entry.base])
        assert lent_segments(store, checked) == [entry]
        monkeypatch.setattr(register, "mapped_at", lambda *_: [entry.base + entry.size])
        assert lent_segments(store, checked) == []


def test_O3_a_process_is_told_its_namespace_where_proc_is_that_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a container with the machine's /proc: there its id is another process, which it may not look into.
    for name in ("self/ns", "sys/kernel/random", str(os.getpid())):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot\n")
    (tmp_path / str(os.getpid()) / "stat").write_text(Path("/proc/self/stat").read_text())
    monkeypatch.setattr(owners, "_PROC", tmp_path)
    owners._here.cache_clear()
    try:
        found = this_process()
    finally:
        owners._here.cache_clear()
    assert (found.pid_namespace, found.boot_id) == ((tmp_path / "self/ns/pid").stat().st_ino, "boot")


def test_O3_the_memory_of_a_process_that_is_gone_is_none(lender: Run) -> None:
    assert image_of(os.getpid()) == image_of(os.getpid()) != 0
    with lender("print(); import sys; sys.stdin.read()") as process:
        assert image_of(process.pid) not in (0, image_of(os.getpid()))
    assert image_of(process.pid) == 0
