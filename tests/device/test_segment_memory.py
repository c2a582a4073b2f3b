"""Segments of other processes as memory that pages are copied from: right bytes, errors and no crash, and nothing written."""

import fcntl
import gc
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from akv.device import open_torch_device, segment_memory
from akv.device.sharing import shared
from akv.device.torch_copier import TorchCopier
from akv.errors import DeviceError
from akv.values.layout import Layout

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]
Noise = Callable[[int], Any]

PAGES, SIZES = 40, [4096, 48, 8192]
PAGE_BYTES = sum(SIZES)


class File:
    """An open segment file, and its bytes."""

    def __init__(self, data: bytes, descriptor: int, *, sealed: bool = False) -> None:
        self.data = data
        self.sealed = sealed
        self.descriptor = descriptor
        os.pwrite(descriptor, data, 0)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def fileno(self) -> int:
        return self.descriptor

    def owner_lives(self) -> bool:
        return True

    def unchanged(self) -> bool:
        return True


@pytest.fixture(params=["sealed", "plain"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def file(kind: str, noise: Noise, tmp_path: Path) -> File:
    """A segment of `PAGES` pages and a bit: in a memory file that nobody can shorten, or in one that anybody may."""
    if kind == "plain":
        return File(noise(PAGES * PAGE_BYTES + 100).tobytes(), os.open(tmp_path / "segment", os.O_RDWR | os.O_CREAT, 0o600))
    descriptor = os.memfd_create("segment", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    made = File(noise(PAGES * PAGE_BYTES + 100).tobytes(), descriptor, sealed=True)
    fcntl.fcntl(made.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return made


@pytest.fixture
def caches(device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(PAGES, size, dtype=torch.uint8, device=device) for size in SIZES]


@pytest.fixture
def copier(caches: list[torch.Tensor], layout_for: LayoutFor) -> TorchCopier:
    return open_torch_device(layout_for([SIZES]), [caches])


def page_of(caches: list[torch.Tensor], page: int) -> bytes:
    return b"".join(cache[page].cpu().numpy().tobytes() for cache in caches)


def copied(copier: TorchCopier, memory: Any, pages: Sequence[int], offsets: Sequence[int]) -> None:
    event = copier.scatter(copier.open_stream("load"), 0, pages, memory, offsets, copier.record())
    while not event.query():
        pass


def test_R1_pages_come_from_wherever_they_lie_in_the_segment(
    copier: TorchCopier, file: File, caches: list[torch.Tensor]
) -> None:
    memory = copier.map_segment(file)
    pages = [7, 3, 30, 31, 0]
    offsets = [100, 5 * PAGE_BYTES, 9 * PAGE_BYTES, 10 * PAGE_BYTES, 39 * PAGE_BYTES + 100]
    copied(copier, memory, pages, offsets)
    for page, offset in zip(pages, offsets, strict=True):
        assert page_of(caches, page) == file.data[offset : offset + PAGE_BYTES]
    assert not any(caches[0][8].tolist())


def test_R3_a_segment_that_is_shortened_fails_the_copy_and_does_not_end_the_process(
    copier: TorchCopier, file: File, kind: str, device: torch.device, caches: list[torch.Tensor]
) -> None:
    memory = copier.map_segment(file)
    if kind == "sealed":
        with pytest.raises(PermissionError):
            os.ftruncate(file.descriptor, 0)
        return
    os.ftruncate(file.descriptor, 2 * PAGE_BYTES + 5)
    copied(copier, memory, [1], [PAGE_BYTES])
    if device.type == "cpu":
        assert page_of(caches, 1) == file.data[PAGE_BYTES : 2 * PAGE_BYTES]
        for offset in (2 * PAGE_BYTES, 20 * PAGE_BYTES):
            with pytest.raises(DeviceError, match="shortened"):
                copied(copier, memory, [2], [offset])


def test_R2_nothing_is_written_into_a_segment(copier: TorchCopier, file: File) -> None:
    memory = copier.map_segment(file)
    assert memory.view().readonly
    stream, fence = copier.open_stream("save"), copier.record()
    with pytest.raises(TypeError):
        copier.gather(stream, 0, [1], memory, [0], fence)
    with pytest.raises(TypeError):
        copier.snapshot(stream, 0, [1], memory, [0], None)
    assert os.pread(file.descriptor, file.nbytes, 0) == file.data


def test_R3_a_segment_is_mapped_once_for_all_connectors_of_a_process(
    copier: TorchCopier, file: File, caches: list[torch.Tensor], layout_for: LayoutFor
) -> None:
    other = open_torch_device(layout_for([SIZES]), [caches])
    memory = copier.map_segment(file)
    assert other.map_segment(file) is memory
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None, "and not for longer than somebody has it"


def test_R1_a_page_of_more_pieces_than_one_read_takes(file: File, layout_for: LayoutFor) -> None:
    parts = [torch.zeros(2, 4, dtype=torch.uint8) for _ in range(2500)]
    copier = open_torch_device(layout_for([[4] * 2500]), [parts])
    copied(copier, copier.map_segment(file), [1], [77])
    assert page_of(parts, 1) == file.data[77 : 77 + 10_000]


def test_a_file_that_is_none_of_this_device_is_refused(copier: TorchCopier) -> None:
    with pytest.raises(TypeError, match="another device"):
        copier.map_segment(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [0, 1])
def test_R6_pages_that_follow_each_other_in_both_memories_arrive_like_others(
    file: File, layout_for: LayoutFor, apart: int
) -> None:
    whole = torch.zeros(9, 2, 512, dtype=torch.uint8)
    copier = open_torch_device(layout_for([[512, 512]]), [[whole[:, 0], whole[:, 1]]])
    pages, offsets = [2, 3, 4, 8, 0], [at * (1024 + apart) for at in (5, 6, 7, 8, 9)]
    copied(copier, copier.map_segment(file), pages, offsets)
    for page, offset in zip(pages, offsets, strict=True):
        assert whole[page].numpy().tobytes() == file.data[offset : offset + 1024]
    assert not whole[[1, 5, 6, 7]].any()


@pytest.mark.parametrize("long_copy", [1, 64 << 10], ids=["long", "short"])
def test_R6_many_pages_are_shared_by_two_threads_and_arrive_like_few(
    copier: TorchCopier,
    file: File,
    device: torch.device,
    caches: list[torch.Tensor],
    long_copy: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[int] = []

    def counted(work: Callable[[Any], None], some: Sequence[Any]) -> None:
        parts.append(len(some))
        shared(work, some)

    monkeypatch.setattr(segment_memory, "shared", counted)
    monkeypatch.setattr(segment_memory, "cores", lambda: 2)
    monkeypatch.setattr(segment_memory, "_SHARED_COPY", 20 * PAGE_BYTES)
    monkeypatch.setattr(segment_memory, "_SHARED_PIECE", 4 * PAGE_BYTES)
    monkeypatch.setattr(segment_memory, "_LONG_COPY", long_copy)
    memory = copier.map_segment(file)
    copied(copier, memory, range(19), [at * PAGE_BYTES for at in range(19)])
    assert parts == []
    # Adjacent in the segment and apart in it, in any order of pages.
    pages = [3 * at % 29 for at in range(29)]
    offsets = [at * PAGE_BYTES + (at // 10) * 7 for at in range(29)]
    copied(copier, memory, pages, offsets)
    for page, offset in zip(pages, offsets, strict=True):
        assert page_of(caches, page) == file.data[offset : offset + PAGE_BYTES]
    assert parts == ([] if device.type == "cuda" else [8])


def test_R3_what_a_copy_reads_outlives_the_one_who_mapped_it(
    copier: TorchCopier, file: File, caches: list[torch.Tensor]
) -> None:
    view = copier.map_segment(file).view()
    gc.collect()
    assert np.frombuffer(view, dtype=np.uint8).tobytes() == file.data
