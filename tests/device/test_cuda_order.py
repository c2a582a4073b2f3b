"""What only CUDA can show: copies are ordered on the device, and the host waits for none of them."""

import gc
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from akv.device import open_torch_device, torch_copier
from akv.device.host_memory import TorchBuffer, pin
from akv.errors import SettingsError
from akv.ports.device import DeviceSlots
from akv.values.layout import Layout

pytestmark = pytest.mark.cuda

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]

#: Cycles of a kernel that keeps the execution stream busy for about 0.2 s.
BUSY = 400_000_000


def busy(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]


@pytest.fixture
def execution() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("scratch_pages", [1, 100])
def test_M4_copies_wait_for_their_fence_on_the_device_and_not_on_the_host(
    scratch_pages: int, execution: torch.cuda.Stream, layout_for: LayoutFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_copier, "SCRATCH_BYTES", scratch_pages * 64)
    cache = torch.zeros(200, 64, dtype=torch.uint8, device="cuda")
    ones = torch.ones_like(cache)
    copier = open_torch_device(layout_for([[64]]), [[cache]], execution)
    stream, buffer = copier.open_stream("s"), copier.host_buffer(100 * 64)
    offsets = [64 * index for index in range(100)]
    # Once beforehand: CUDA loads a kernel when it is first used, and waits for the device then.
    copier.gather(stream, 0, list(range(100)), buffer, offsets, copier.record())
    for pages in (range(100), range(100, 200)):
        torch.cuda.synchronize()
        buffer.view()[:] = bytes(6400)
        cache.zero_()
        torch.cuda.synchronize()
        busy(execution)
        with torch.cuda.stream(execution):
            cache.copy_(ones)
        began = time.perf_counter()
        event = copier.gather(stream, 0, list(pages), buffer, offsets, copier.record())
        issued = time.perf_counter() - began
        assert not event.query()
        assert not any(buffer.view())
        while not event.query():
            pass
        assert buffer.view().tobytes() == b"\x01" * 6400
        assert issued < 0.1


def test_M4_a_load_waits_for_the_last_kernel_of_the_former_owner_and_the_next_forward_for_the_load(
    execution: torch.cuda.Stream, layout_for: LayoutFor
) -> None:
    cache = torch.zeros(4, 64, dtype=torch.uint8, device="cuda")
    threes = torch.full_like(cache, 3)
    seen = torch.zeros_like(cache)
    copier = open_torch_device(layout_for([[64]]), [[cache]], execution)
    stream, buffer = copier.open_stream("s"), copier.host_buffer(128)
    buffer.view()[:] = b"\x07" * 128
    copier.scatter(stream, 0, [0, 2], buffer, [0, 64], copier.record())  # loads the kernels, which waits for the device
    torch.cuda.synchronize()
    busy(execution)
    with torch.cuda.stream(execution):
        cache.copy_(threes)
    loaded = copier.scatter(stream, 0, [0, 2], buffer, [0, 64], copier.record())
    copier.execution_waits_for(loaded)
    with torch.cuda.stream(execution):
        seen.copy_(cache)
    assert not loaded.query()
    execution.synchronize()
    assert loaded.query()
    assert seen[:, 0].tolist() == [7, 3, 7, 3]


@pytest.mark.parametrize("through", [False, True])
def test_M5_a_snapshot_is_taken_between_two_kernels_and_the_host_waits_for_none(
    through: bool, execution: torch.cuda.Stream, layout_for: LayoutFor
) -> None:
    cache = torch.zeros(200, 64, dtype=torch.uint8, device="cuda")
    ones, twos = torch.ones_like(cache), torch.full_like(cache, 2)
    copier = open_torch_device(layout_for([[64]]), [[cache]], execution)
    stream, buffer, slots = copier.open_stream("ring"), copier.host_buffer(6400), copier.device_buffer(6400)
    offsets, pages = [64 * index for index in range(100)], list(range(0, 200, 2))
    assert slots is not None
    via = DeviceSlots(slots, offsets) if through else None
    for _ in range(2):  # Once beforehand: CUDA loads a kernel when it is first used, and waits for the device then.
        torch.cuda.synchronize()
        buffer.view()[:] = bytes(6400)
        busy(execution)
        with torch.cuda.stream(execution):
            cache.copy_(ones)
        began = time.perf_counter()
        event = copier.snapshot(stream, 0, pages, buffer, offsets, via)
        issued = time.perf_counter() - began
        with torch.cuda.stream(execution):
            cache.copy_(twos)
        waiting = not event.query() and not any(buffer.view())
        while not event.query():
            pass
        assert buffer.view().tobytes() == b"\x01" * 6400
        torch.cuda.synchronize()
        assert cache.eq(2).all()
    assert waiting
    assert issued < 0.1


def test_S3_the_way_to_the_host_does_not_hold_the_execution_stream(
    execution: torch.cuda.Stream, layout_for: LayoutFor
) -> None:
    cache = torch.ones(16, 64, dtype=torch.uint8, device="cuda")
    copier = open_torch_device(layout_for([[64]]), [[cache]], execution)
    stream, buffer, slots = copier.open_stream("ring"), copier.host_buffer(64), copier.device_buffer(64)
    assert slots is not None
    copier.snapshot(stream, 0, [3], buffer, [0], DeviceSlots(slots, [0]))
    torch.cuda.synchronize()
    assert stream.cuda is not None
    busy(stream.cuda)
    event = copier.snapshot(stream, 0, [3], buffer, [0], DeviceSlots(slots, [0]))
    execution.synchronize()
    assert not event.query()
    torch.cuda.synchronize()
    assert event.query()


def test_S3_device_memory_that_is_not_there_is_a_memory_error(layout_for: LayoutFor) -> None:
    copier = open_torch_device(layout_for([[64]]), [[torch.zeros(4, 64, dtype=torch.uint8, device="cuda")]])
    with pytest.raises(MemoryError, match="no room"):
        copier.device_buffer(1 << 45)
    with pytest.raises(ValueError, match="at least one byte"):
        copier.device_buffer(0)


def test_without_a_stream_the_current_one_is_the_execution_stream(execution: torch.cuda.Stream, layout_for: LayoutFor) -> None:
    cache = torch.zeros(4, 64, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(execution):
        copier = open_torch_device(layout_for([[64]]), [[cache]])
    busy(execution)
    assert not copier.record().query()


def test_a_copy_keeps_the_memory_that_it_writes(execution: torch.cuda.Stream, layout_for: LayoutFor) -> None:
    cache = torch.ones(4, 64, dtype=torch.uint8, device="cuda")
    copier = open_torch_device(layout_for([[64]]), [[cache]], execution)
    stream, buffer = copier.open_stream("s"), copier.host_buffer(64)
    torch.cuda.synchronize()
    busy(execution)
    event = copier.gather(stream, 0, [1], buffer, [0], copier.record())
    memory = buffer.tensor.data_ptr()
    del buffer
    gc.collect()
    assert copier.host_buffer(64).address != memory
    while not event.query():
        pass


def test_memory_that_cannot_be_pinned_breaks_no_later_kernel() -> None:
    buffer = TorchBuffer(1 << 20, pinned=True)
    with pytest.raises(MemoryError, match="cannot pin"):
        pin(buffer._array, 1 << 20)  # is pinned already
    assert torch.zeros(4, device="cuda").add_(1).sum().item() == 4


def test_what_is_no_stream_of_the_device_is_refused(layout_for: LayoutFor) -> None:
    cache = torch.zeros(4, 64, dtype=torch.uint8, device="cuda")
    with pytest.raises(SettingsError, match="no stream of cuda:0"):
        open_torch_device(layout_for([[64]]), [[cache]], stream=object())


def test_caches_on_two_devices_are_refused(layout_for: LayoutFor) -> None:
    caches = [[torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 64, dtype=torch.uint8, device="cuda")]]
    with pytest.raises(SettingsError, match="is on cpu"):
        open_torch_device(layout_for([[64, 64]]), caches)


def test_under_deterministic_algorithms_a_load_writes_its_pages_and_copies_no_cache(layout_for: LayoutFor) -> None:
    """Torch's own way there to fill rows that lie apart copies all rows to and fro, over what kernels write meanwhile."""
    kv = torch.zeros(4096, 2, 20 << 10, dtype=torch.uint8, device="cuda")
    regions = [kv[:, 0, : 16 << 10], kv[:, 1, : 16 << 10]]
    copier = open_torch_device(layout_for([[16 << 10] * 2]), [regions])
    stream, buffer = copier.open_stream("s"), copier.host_buffer(3 * (32 << 10))
    buffer.view()[:] = b"\x05" * buffer.nbytes
    offsets = [(32 << 10) * slot for slot in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.use_deterministic_algorithms(True)
    try:
        event = copier.scatter(stream, 0, [7, 4000, 11], buffer, offsets, copier.record())
        copier.gather(stream, 0, [7, 4000, 11], buffer, offsets, event)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < kv.numel() // 8
    for region in regions:
        assert sorted(region.eq(5).all(dim=1).nonzero().flatten().tolist()) == [7, 11, 4000]
    assert not kv[[0, 8, 12, 4095]].any()
    assert not kv[:, :, 16 << 10 :].any()
