"""Files in memory: who can open and shrink them, and how much room there is."""

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from akv.errors import PoolError
from akv.plan.segments import Room
from akv.pool import shared_memory
from akv.pool.shared_memory import SegmentFile, allocate, check_in_memory, make_file, rooms

SIZE = 1 << 16


@pytest.mark.parametrize("kind", ["memfd", "file"])
@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_R3_only_this_user_opens_it_whatever_the_mask(kind: SegmentFile, umask: int, shm: Path) -> None:
    before = os.umask(umask)
    try:
        descriptor, path = make_file(kind, shm, "a1", SIZE)
    finally:
        os.umask(before)
    found = Path(path).stat()
    assert (stat.S_IMODE(found.st_mode), found.st_size, found.st_uid) == (0o600, SIZE, os.geteuid())
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_R3_nobody_shrinks_or_grows_a_file_without_a_name_and_it_goes_with_its_owner(shm: Path) -> None:
    descriptor, path = make_file("memfd", shm, "a1", SIZE)
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.truncate(path, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert list(shm.iterdir()) == []
    os.close(descriptor)
    assert not Path(path).exists()


def test_R3_a_file_without_a_name_is_never_executable_where_the_kernel_knows_of_that(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 0x20 is F_SEAL_EXEC, 0x8 MFD_NOEXEC_SEAL.
    knows = _accepts(0x8)
    descriptor, _ = make_file("memfd", shm, "a1", SIZE)
    assert bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & 0x20) == knows
    os.close(descriptor)
    create = os.memfd_create
    asked = []

    def older(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & 0x8:
            raise OSError(errno.EINVAL, "no such flag")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", older)
    descriptor, path = make_file("memfd", shm, "a1", SIZE)
    assert len(asked) == 2
    with pytest.raises(PermissionError):
        os.truncate(path, 0)
    os.close(descriptor)


def test_R3_a_file_without_a_name_that_cannot_be_made_is_an_error(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        make_file("memfd", shm, "a1", SIZE)


def _accepts(flag: int) -> bool:
    try:
        os.close(os.memfd_create("akv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flag))
    except OSError:
        return False
    return True


def test_R3_a_named_file_takes_no_name_that_is_there(shm: Path) -> None:
    (shm / "a1.segment").symlink_to(shm / "victim")
    with pytest.raises(FileExistsError):
        make_file("file", shm, "a1", SIZE)
    assert not (shm / "victim").exists()


def test_R3_memory_is_taken_and_no_byte_changes(shm: Path) -> None:
    descriptor, path = make_file("file", shm, "a1", SIZE)
    os.pwrite(descriptor, b"abc", 5)
    allocate(descriptor, SIZE)
    assert Path(path).stat().st_blocks * 512 == SIZE
    assert Path(path).read_bytes() == bytes(5) + b"abc" + bytes(SIZE - 8)
    room = shared_memory.shared_memory(shm)
    assert room is not None
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        os.posix_fallocate(descriptor, 0, room.total_bytes + (1 << 20))
    os.close(descriptor)


def test_R3_a_directory_on_a_disk_is_no_shared_memory(shm: Path) -> None:
    check_in_memory(shm)
    with pytest.raises(PoolError, match=r"type 'proc' .*is no memory.*tmpfs.*'memfd'"):
        check_in_memory(Path("/proc"))


def test_O4_only_a_named_file_needs_room_in_shared_memory(shm: Path) -> None:
    places = {kind: [room.what for room in rooms(kind, shm)] for kind in ("memfd", "file")}
    assert "the machine's memory" in places["memfd"]
    assert set(places["file"]) - set(places["memfd"]) == {f"shared memory at {shm}"}
    assert shared_memory.shared_memory(shm / "nowhere") is None


def test_O4_the_limit_of_a_container_counts_what_can_be_dropped_as_free(tmp_path: Path) -> None:
    def write(**files: object) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".", 1)).write_text(f"{text}\n")

    assert shared_memory._control_groups(tmp_path) == []
    write(memory_max="max", memory_current=700)
    assert shared_memory._control_groups(tmp_path) == []
    write(memory_max=1000)
    assert shared_memory._control_groups(tmp_path) == [Room("the container's memory limit", 300, 1000)]
    write(memory_stat="anon 1\ninactive_file 50\nactive_file 7")
    assert shared_memory._control_groups(tmp_path) == [Room("the container's memory limit", 350, 1000)]
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1\n")
    assert len(shared_memory._control_groups(tmp_path)) == 1, "version 1 spells no limit as a number"
