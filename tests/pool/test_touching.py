"""What is lent is touched by a thread that can be stopped, and no byte changes (R3)."""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from akv.pool import touching
from akv.pool.owners import mapped_at
from akv.pool.shared_memory import make_file
from akv.pool.touching import CHUNK_BYTES, Touching

Events = Callable[..., list[dict[str, Any]]]

SIZE = 3 * CHUNK_BYTES + mmap.PAGESIZE


class Mapped:
    """A file in memory, mapped here."""

    def __init__(self, shm: Path) -> None:
        self.descriptor, _ = make_file("memfd", shm, "a", SIZE)
        self.bytes = mmap.mmap(self.descriptor, SIZE)
        (self.base,) = mapped_at(os.getpid(), os.fstat(self.descriptor))

    @property
    def piece(self) -> tuple[int, int, int]:
        return self.base, SIZE, self.descriptor

    @property
    def allocated(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512


@pytest.fixture
def mapped(shm: Path) -> Iterator[Mapped]:
    made = Mapped(shm)
    yield made
    made.bytes.close()
    os.close(made.descriptor)


def wait_for(touched: Touching) -> None:
    thread = touched._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_R3_every_page_is_made_and_no_byte_changes(mapped: Mapped, events: Events) -> None:
    mapped.bytes[5:8] = b"abc"
    touched = Touching([mapped.piece])
    assert touched.left_bytes == SIZE
    touched.start()
    wait_for(touched)
    assert (touched.left_bytes, mapped.allocated) == (0, SIZE)
    assert mapped.bytes[:] == bytes(5) + b"abc" + bytes(SIZE - 8)
    (told,) = events("akv.segment.touched")
    assert (told["bytes"], told["reason"]) == (SIZE, "")
    touched.start()
    assert len(events("akv.segment.touched")) == 1


def test_R3_it_stops_between_two_pieces_and_goes_on_where_it_was(
    mapped: Mapped, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, gate, calls = threading.Event(), threading.Event(), []

    def slow(address: int, size: int, descriptor: int, offset: int) -> None:
        calls.append((address - mapped.base, size, descriptor, offset))
        inside.set()
        assert gate.wait(10)

    monkeypatch.setattr(touching, "populate", slow)
    touched = Touching([mapped.piece])
    touched.start()
    assert inside.wait(10)
    # It is in the kernel: whoever would unmap the memory has to be told.
    assert not touched.stop(0.01)
    gate.set()
    assert touched.stop(10)
    assert touched.left_bytes == SIZE - CHUNK_BYTES
    assert events("akv.segment.touched") == []
    assert touched.stop(0)
    touched.start()
    wait_for(touched)
    begins = range(0, SIZE, CHUNK_BYTES)
    assert calls == [(at, min(CHUNK_BYTES, SIZE - at), mapped.descriptor, at) for at in begins]


def test_R3_where_memory_ends_it_ends_and_says_so(mapped: Mapped, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(touching, "_MADVISE", none_left)
    touched = Touching([mapped.piece])
    touched.start()
    wait_for(touched)
    (told,) = events("akv.segment.touched")
    assert told["reason"] == os.strerror(errno.ENOMEM)
    assert touched.left_bytes == 0, "nothing is tried again"


def test_R3_an_older_kernel_makes_the_pages_by_another_call(mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(touching, "_MADVISE", unknown)
    mapped.bytes[5:8] = b"abc"
    touched = Touching([mapped.piece])
    touched.start()
    wait_for(touched)
    assert mapped.allocated == SIZE
    assert mapped.bytes[5:8] == b"abc"


def test_R3_the_thread_is_a_daemon_of_the_lowest_priority(mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int, str]] = []

    def look(*arguments: int) -> None:
        thread = threading.current_thread()
        seen.append((thread.daemon, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), thread.name))

    monkeypatch.setattr(touching, "populate", look)
    touched = Touching([mapped.piece])
    touched.start()
    wait_for(touched)
    assert set(seen) == {(True, 19, "akv-touch")}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
