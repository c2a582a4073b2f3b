"""Pages from another process's memory to scattered pages on the GPU: right bytes, and at the speed of a plain pinned copy."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from akv.device import open_torch_device
from akv.device.torch_copier import TorchCopier
from akv.pool import RegisteredSegments
from akv.ports.device import HostBuffer, PassEvent
from akv.ports.segments import SegmentFile
from akv.settings import StoreSettings
from akv.values.layout import Layout

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]

#: What a copy of pages must reach of a plain copy between pinned memory and the device, in the same run.
LEAST_SHARE = 0.85

#: Arguments: a directory and a size. It lends a segment of that many bytes, each eight of them another number, until its input
#: ends: as `akv.pool` lends one to a store, without the store.
LENDER = """
import mmap, os, sys
from pathlib import Path

import numpy as np

from akv.pool.owners import mapped_at, this_process
from akv.pool.register import open_register, publish, register_directory
from akv.pool.shared_memory import make_file
from akv.settings import StoreSettings
from akv.values.segments import SegmentEntry

directory, size = register_directory(StoreSettings(shared_memory_dir=sys.argv[1])), int(sys.argv[2])
open_register(directory)
descriptor, path = make_file("memfd", directory, "lent", size)
mapping = mmap.mmap(descriptor, size)
np.frombuffer(mapping, dtype=np.uint64)[:] = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
owner = this_process()
entry = SegmentEntry(
    segment_id="lent", owner_pid=owner.pid, owner_started=owner.started, pid_namespace=owner.pid_namespace,
    boot_id=owner.boot_id, uid=os.geteuid(), endpoint="127.0.0.1:1", base=mapped_at(os.getpid(), os.fstat(descriptor))[0],
    size=size, path=path,
)
publish(directory, entry)
print("lent", flush=True)
sys.stdin.read()
"""


def lent_bytes(offset: int, nbytes: int) -> np.ndarray:
    """What lies in the segment: whole numbers."""
    numbers = np.arange(offset // 8, (offset + nbytes) // 8, dtype=np.uint64)
    return (numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


@contextmanager
def lending(directory: Path, size: int) -> "Iterator[tuple[SegmentFile, subprocess.Popen[str]]]":
    """Another process's segment, opened by way of the register, and the process."""
    command = [sys.executable, "-c", LENDER, str(directory), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "lent\n"
            segments = RegisteredSegments(StoreSettings(shared_memory_dir=str(directory)))
            (entry,) = segments.entries()
            yield segments.open(entry), process
        finally:
            process.kill()


def wait(event: PassEvent) -> None:
    deadline = time.monotonic() + 30
    while not event.query():
        assert time.monotonic() < deadline


class Cache:
    """Pages of equal regions, and a copier of them."""

    def __init__(self, layout_for: LayoutFor, regions: int, region_bytes: int, pages: int, *, evenly: bool = False) -> None:
        """`evenly`: the regions lie evenly apart, in one piece of memory."""
        whole = torch.zeros(regions, pages, region_bytes, dtype=torch.uint8, device="cuda")
        self.regions = list(whole.unbind(0) if evenly else (whole[region].clone() for region in reversed(range(regions))))
        self.page_bytes = regions * region_bytes
        self.copier: TorchCopier = open_torch_device(layout_for([[region_bytes] * regions]), [self.regions])

    def page(self, index: int) -> np.ndarray:
        return np.concatenate([region[index].cpu().numpy() for region in self.regions])


@pytest.mark.parametrize(("region_bytes", "count"), [(8 << 10, 150), (32 << 10, 40)], ids=["kernels", "copy engines"])
def test_R1_R3_pages_of_another_process_arrive_in_scattered_pages_and_its_memory_stays(
    region_bytes: int, count: int, layout_for: LayoutFor, tmp_path: Path
) -> None:
    cache = Cache(layout_for, 48, region_bytes, 2 * count, evenly=True)
    assert bool(cache.copier._groups[0].strips) == (region_bytes >= 32 << 10)
    size = (count + 10) * cache.page_bytes
    with lending(tmp_path, size) as (file, process):
        memory = cache.copier.map_segment(file)
        assert memory.view().readonly
        generator = np.random.default_rng(1)
        pages = generator.permutation(2 * count)[:count].tolist()
        # Values lie anywhere: a few bytes apart, and in no order.
        offsets = (generator.permutation(count) * (cache.page_bytes + 64)).tolist()
        stream = cache.copier.open_stream("load")
        wait(cache.copier.scatter(stream, 0, pages, memory, offsets, cache.copier.record()))
        for page, offset in zip(pages, offsets, strict=True):
            assert (cache.page(page) == lent_bytes(offset, cache.page_bytes)).all()
        assert not any(cache.page(page).any() for page in sorted(set(range(2 * count)) - set(pages))[:20])
        assert (np.frombuffer(memory.view(), dtype=np.uint8) == lent_bytes(0, size)).all(), "nothing is written into it"
        # Its owner is gone, the memory is not: a copy that runs meanwhile reads what lay there, and ends.
        process.kill()
        process.wait()
        assert not file.owner_lives()
        wait(cache.copier.scatter(stream, 0, pages[:5], memory, offsets[5:10], cache.copier.record()))
        assert (cache.page(pages[0]) == lent_bytes(offsets[5], cache.page_bytes)).all()


@pytest.mark.parametrize("aligned", [8, 24])
def test_R3_values_that_begin_at_no_multiple_of_a_wide_word_arrive_too(
    aligned: int, layout_for: LayoutFor, tmp_path: Path
) -> None:
    cache = Cache(layout_for, 3, 4096, 40)
    with lending(tmp_path, 41 * cache.page_bytes) as (file, _):
        memory = cache.copier.map_segment(file)
        offsets = [aligned + index * (cache.page_bytes + aligned) for index in range(20)]
        wait(cache.copier.scatter(cache.copier.open_stream("s"), 0, list(range(20)), memory, offsets, cache.copier.record()))
        for page, offset in enumerate(offsets):
            assert (cache.page(page) == lent_bytes(offset, cache.page_bytes)).all()


#: Regions and bytes of a page in each: 64 buffers as 32 layers with keys and values apart have them, and 48 larger ones.
SHAPES = [pytest.param(64, 32 << 10, id="64 x 32 KiB"), pytest.param(48, 128 << 10, id="48 x 128 KiB")]


@pytest.mark.parametrize("evenly", [True, False], ids=["evenly apart", "anyhow"])
@pytest.mark.parametrize(("regions", "region_bytes"), SHAPES)
def test_pages_move_at_the_speed_of_a_plain_pinned_copy(
    regions: int, region_bytes: int, evenly: bool, layout_for: LayoutFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = (768 << 20) // (regions * region_bytes)
    cache = Cache(layout_for, regions, region_bytes, 2 * pages, evenly=evenly)
    copier, nbytes = cache.copier, pages * cache.page_bytes
    stream, slots = copier.open_stream("s"), copier.host_buffer(nbytes)
    generator = np.random.default_rng(2)
    order = generator.permutation(2 * pages)[:pages].tolist()
    adjacent = [cache.page_bytes * index for index in range(pages)]
    scattered = [adjacent[index] for index in generator.permutation(pages).tolist()]
    bulk = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    with lending(tmp_path, nbytes + pages * 4096) as (file, _):
        segment = copier.map_segment(file)
        apart = [offset + 4096 * index for index, offset in enumerate(adjacent)]

        def scatter(buffer: HostBuffer, offsets: list[int]) -> Callable[[], object]:
            return lambda: copier.scatter(stream, 0, order, buffer, offsets, copier.record())

        ways: dict[str, Callable[[], object]] = {
            "plain to the device": lambda: bulk.copy_(slots.tensor, non_blocking=True),
            "from slots": scatter(slots, adjacent),
            "from slots in no order": scatter(slots, scattered),
            "from a segment": scatter(segment, adjacent),
            "from a segment, apart": scatter(segment, apart),
            "plain to the host": lambda: slots.tensor.copy_(bulk, non_blocking=True),
            "to slots": lambda: copier.gather(stream, 0, order, slots, adjacent, copier.record()),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(6):  # in turn: the machine's speed changes, ratios of one round do not
            for name, work in ways.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                work()
                issued = time.perf_counter() - began
                torch.cuda.synchronize()
                seconds[name].append((time.perf_counter() - began, issued))
    best = {name: min(took[1:]) for name, took in seconds.items()}
    plain = {
        name: best["plain to the host" if name in {"to slots", "plain to the host"} else "plain to the device"]
        for name in ways
    }
    with capsys.disabled():
        lie = "evenly apart" if evenly else "anyhow"
        sys.stdout.write(f"\n    pages of {regions} x {region_bytes >> 10} KiB, {nbytes >> 20} MiB, layers lie {lie}:")
        for name, (took, issued) in best.items():
            share = plain[name][0] / took
            sys.stdout.write(
                f"\n      {name}: {nbytes / took / 1e9:.1f} GB/s, {share:.2f} of plain, {1000 * issued:.1f} ms of host"
            )
    assert min(plain[name][0] / took for name, (took, _) in best.items()) >= LEAST_SHARE
