"""Copies between caches and host buffers: every byte that should move does, and no other byte changes."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from akv.device import moves, open_torch_device, torch_copier
from akv.device.streams import TorchEvent
from akv.device.torch_copier import TorchCopier
from akv.errors import DeviceError, EngineContractError, NotOpenError
from akv.ports.device import DeviceCopier, PassEvent
from akv.values.layout import Layout
from akv_testing import tiny_layout

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]
Noise = Callable[[int], np.ndarray]


def wait(event: PassEvent) -> None:
    while not event.query():
        pass


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of the memory that the tensor is a view of, gaps included."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu().numpy().copy()


def page_of(caches: Sequence[torch.Tensor], page: int) -> bytes:
    return b"".join(cache[page].detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for cache in caches)


def filled(noise: Noise, device: torch.device, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(noise(size)).view(dtype).view(shape).to(device)


DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 3, 13, 16, 100, 1024])
def test_gather_and_scatter_move_every_bit_of_any_dtype(
    dtype: torch.dtype, elements: int, device: torch.device, layout_for: LayoutFor, noise: Noise
) -> None:
    caches = [filled(noise, device, 9, elements, dtype=dtype), filled(noise, device, 9, 2, elements, dtype=dtype)]
    sizes = [elements * dtype.itemsize, 2 * elements * dtype.itemsize]
    copier = open_torch_device(layout_for([sizes]), [caches])
    stream, page = copier.open_stream("s"), sum(sizes)
    buffer = copier.host_buffer(4 * page)
    before = [page_of(caches, index) for index in range(9)]
    wait(copier.gather(stream, 0, [7, 0, 3], buffer, [0, page, 3 * page], copier.record()))
    for source, slot in ((7, 0), (0, 1), (3, 3)):
        assert buffer.view()[slot * page : (slot + 1) * page].tobytes() == before[source]
    wait(copier.scatter(stream, 0, [8, 1], buffer, [3 * page, 0], copier.record()))
    after = [page_of(caches, index) for index in range(9)]
    assert after[8] == before[3]
    assert after[1] == before[7]
    assert [after[i] for i in (0, 2, 3, 4, 5, 6, 7)] == [before[i] for i in (0, 2, 3, 4, 5, 6, 7)]


Scene = tuple[Layout, list[list[torch.Tensor]]]


def sliced(layout_for: LayoutFor, noise: Noise, device: torch.device) -> Scene:
    kv = filled(noise, device, 12, 2, 5, 4, dtype=torch.bfloat16)
    return layout_for([[40, 40]]), [[kv[:, 0], kv[:, 1]]]


def padded(layout_for: LayoutFor, noise: Noise, device: torch.device) -> Scene:
    pool = filled(noise, device, 12, 100)
    return layout_for([[33, 48]]), [[pool[:, :33], pool[:, 40:88]]]


def leading_offset(layout_for: LayoutFor, noise: Noise, device: torch.device) -> Scene:
    flat = filled(noise, device, 3 + 12 * 32)
    return layout_for([[32]]), [[flat[3:].view(12, 32)]]


def unequal_groups(layout_for: LayoutFor, noise: Noise, device: torch.device) -> Scene:
    caches = [[filled(noise, device, 12, 16), filled(noise, device, 12, 64)], [filled(noise, device, 7, 5)]]
    return layout_for([[16, 64], [5]]), caches


SCENES = [sliced, padded, leading_offset, unequal_groups]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
@pytest.mark.parametrize("scratch_pages", [1, 2, 100])
def test_no_byte_outside_the_named_pages_and_slots_changes(
    scene: Callable[[LayoutFor, Noise, torch.device], Scene],
    scratch_pages: int,
    device: torch.device,
    layout_for: LayoutFor,
    noise: Noise,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, caches = scene(layout_for, noise, device)
    monkeypatch.setattr(torch_copier, "SCRATCH_BYTES", scratch_pages * layout.largest_page_bytes)
    copier = open_torch_device(layout, caches)
    stream, slot = copier.open_stream("s"), layout.largest_page_bytes
    buffer = copier.host_buffer(8 * slot)
    host = np.frombuffer(buffer.view(), dtype=np.uint8)
    for group, tensors in enumerate(caches):
        size = layout.groups[group].bytes_per_page
        host[:] = noise(host.size)
        whole, expected = [as_bytes(tensor) for tensor in tensors], host.copy()
        pages, slots = [5, 0, 6, 2], [6, 1, 2, 3]
        for page, at in zip(pages, slots, strict=True):
            expected[at * slot : at * slot + size] = np.frombuffer(page_of(tensors, page), dtype=np.uint8)
        wait(copier.gather(stream, group, pages, buffer, [at * slot for at in slots], copier.record()))
        assert (host == expected).all()
        assert all((as_bytes(tensor) == was).all() for tensor, was in zip(tensors, whole, strict=True))
        # Back into the same pages: whatever scatter writes, pages, gaps and neighbours hold what they held.
        wait(copier.scatter(stream, group, pages, buffer, [at * slot for at in slots], copier.record()))
        assert all((as_bytes(tensor) == was).all() for tensor, was in zip(tensors, whole, strict=True))
        # And into others, which then hold it, while everything else is as before: torch's own indexing says what to expect.
        rows = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor[pages] = tensor[[1, 4, 3, 5]]
        whole = [as_bytes(tensor) for tensor in tensors]
        for tensor, row in zip(tensors, rows, strict=True):
            tensor.copy_(row)
        wait(copier.gather(stream, group, [1, 4, 3, 5], buffer, [at * slot for at in slots], copier.record()))
        wait(copier.scatter(stream, group, pages, buffer, [at * slot for at in slots], copier.record()))
        assert all((as_bytes(tensor) == was).all() for tensor, was in zip(tensors, whole, strict=True))


class Calls(TorchFunctionMode):
    """The torch functions that this thread calls, and the elements of their `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = (kwargs or {}).get("out")
        self.seen.append((getattr(func, "__name__", str(func)), 0 if out is None else out.numel()))
        return func(*args, **(kwargs or {}))


def test_many_pages_go_in_few_copies(device: torch.device, layout_for: LayoutFor, noise: Noise) -> None:
    caches = [filled(noise, device, 4096, 256) for _ in range(2)]
    copier = open_torch_device(layout_for([[256, 256]]), [caches])
    buffer, stream = copier.host_buffer(2048 * 512), copier.open_stream("s")
    pages = np.random.default_rng(1).permutation(4096)[:2048].tolist()
    with Calls() as calls:
        wait(copier.gather(stream, 0, pages, buffer, [512 * index for index in range(2048)], copier.record()))
    assert len(calls.seen) < 60
    host = np.frombuffer(buffer.view(), dtype=np.uint8).reshape(2048, 512)
    assert (host[:, :256] == caches[0].cpu().numpy()[pages]).all()
    assert (host[:, 256:] == caches[1].cpu().numpy()[pages]).all()


@pytest.mark.parametrize("sizes", [[600_016, 48], [40_001]], ids=["wide words", "single bytes"])
def test_on_a_cpu_no_copy_is_large_enough_to_be_split_among_threads(
    sizes: list[int], layout_for: LayoutFor, noise: Noise
) -> None:
    caches = [filled(noise, torch.device("cpu"), 6, size) for size in sizes]
    copier = open_torch_device(layout_for([sizes]), [caches])
    page = sum(sizes)
    buffer, stream = copier.host_buffer(6 * page), copier.open_stream("s")
    expected = [page_of(caches, index) for index in (5, 1, 2, 0)]
    with Calls() as calls:
        copier.gather(stream, 0, [5, 1, 2, 0], buffer, [0, page, 2 * page, 4 * page], copier.record())
    assert [buffer.view()[slot * page : (slot + 1) * page].tobytes() for slot in (0, 1, 2, 4)] == expected
    assert 0 < max(size for name, size in calls.seen if name == "index_select") < 32_768
    copier.scatter(stream, 0, [3, 4], buffer, [page, 4 * page], copier.record())
    assert [page_of(caches, index) for index in (3, 4)] == expected[1::2]


def test_no_pages_is_a_copy_that_ends(device: torch.device, layout_for: LayoutFor, noise: Noise) -> None:
    cache = filled(noise, device, 4, 24)
    copier = open_torch_device(layout_for([[24]]), [[cache]])
    stream, buffer = copier.open_stream("s"), copier.host_buffer(24)
    was = as_bytes(cache), buffer.view().tobytes()
    wait(copier.gather(stream, 0, [], buffer, [], copier.record()))
    wait(copier.scatter(stream, 0, [], buffer, [], copier.record()))
    assert ((as_bytes(cache) == was[0]).all(), buffer.view().tobytes()) == (True, was[1])


WRONG = [
    pytest.param("gather", [0, 4], [0, 24], EngineContractError, "no page 4", id="page past the end"),
    pytest.param("scatter", [0, -1], [0, 24], EngineContractError, "no page -1", id="no page"),
    pytest.param("scatter", [1, 1], [0, 24], EngineContractError, "one page", id="page twice"),
    pytest.param("gather", [0, 1], [0, 73], ValueError, "does not fit at 73", id="slot past the end"),
    pytest.param("scatter", [0, 1], [0, -24], ValueError, "does not fit at -24", id="slot before the begin"),
    pytest.param("gather", [0, 1], [0], ValueError, "2 pages and 1 offsets", id="lengths differ"),
    pytest.param("gather", [0, 1], [0, 23], ValueError, "overlap", id="slots overlap"),
]


@pytest.mark.parametrize(("method", "pages", "offsets", "error", "text"), WRONG)
def test_wrong_indices_are_refused_before_anything_is_copied(
    method: str,
    pages: list[int],
    offsets: list[int],
    error: type[Exception],
    text: str,
    device: torch.device,
    layout_for: LayoutFor,
    noise: Noise,
) -> None:
    cache = filled(noise, device, 4, 24)
    copier = open_torch_device(layout_for([[24]]), [[cache]])
    stream, buffer = copier.open_stream("s"), copier.host_buffer(96)
    buffer.view()[:] = bytes(range(96))
    was = as_bytes(cache)
    with pytest.raises(error, match=text):
        getattr(copier, method)(stream, 0, pages, buffer, offsets, copier.record())
    assert (as_bytes(cache) == was).all()
    assert buffer.view().tobytes() == bytes(range(96))


def test_slots_may_overlap_where_they_are_only_read(device: torch.device, layout_for: LayoutFor, noise: Noise) -> None:
    cache = filled(noise, device, 4, 24)
    copier = open_torch_device(layout_for([[24]]), [[cache]])
    stream, buffer = copier.open_stream("s"), copier.host_buffer(96)
    buffer.view()[:] = bytes(range(96))
    wait(copier.scatter(stream, 0, [0, 1, 2], buffer, [0, 0, 12], copier.record()))
    assert [page_of([cache], page) for page in range(3)] == [bytes(range(24)), bytes(range(24)), bytes(range(12, 36))]


def test_a_page_may_be_read_into_two_slots(device: torch.device, layout_for: LayoutFor, noise: Noise) -> None:
    cache = filled(noise, device, 4, 24)
    copier = open_torch_device(layout_for([[24]]), [[cache]])
    stream, buffer = copier.open_stream("s"), copier.host_buffer(48)
    wait(copier.gather(stream, 0, [2, 2], buffer, [0, 24], copier.record()))
    assert buffer.view().tobytes() == page_of([cache], 2) * 2


def test_what_belongs_to_another_device_is_refused(layout_for: LayoutFor, noise: Noise) -> None:
    copier = open_torch_device(layout_for([[24]]), [[filled(noise, torch.device("cpu"), 4, 24)]])
    stream, buffer, after = copier.open_stream("s"), copier.host_buffer(24), copier.record()
    stranger = object()
    with pytest.raises(TypeError):
        copier.gather(stream, 0, [0], stranger, [0], after)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        copier.gather(stranger, 0, [0], buffer, [0], after)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        copier.gather(stream, 0, [0], buffer, [0], stranger)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        copier.execution_waits_for(stranger)  # type: ignore[arg-type]


def test_M6_a_failure_half_way_is_a_device_error_that_leaves_the_stream_usable(
    device: torch.device, layout_for: LayoutFor, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(noise, device, 4, 24)
    monkeypatch.setattr(torch_copier, "SCRATCH_BYTES", 24)
    copier = open_torch_device(layout_for([[24]]), [[cache]])
    stream, buffer = copier.open_stream("loader-0"), copier.host_buffer(96)
    exchange, pieces = moves.exchange_pages, iter([1, 2, 3])

    def failing(*args: Any, **keywords: Any) -> None:
        if next(pieces) == 2:
            raise RuntimeError("out of memory")
        exchange(*args, **keywords)

    monkeypatch.setattr(moves, "exchange_pages", failing)
    with pytest.raises(DeviceError, match="'loader-0': out of memory") as failed:
        copier.gather(stream, 0, [3, 1, 0], buffer, [0, 24, 72], copier.record())
    assert isinstance(failed.value.__cause__, RuntimeError)
    wait(copier.gather(stream, 0, [2], buffer, [24], copier.record()))
    assert buffer.view()[24:48].tobytes() == page_of([cache], 2)


def test_an_event_of_failed_work_raises_a_device_error_with_its_cause() -> None:
    class Failed:
        def query(self) -> bool:
            raise RuntimeError("illegal memory access")

    with pytest.raises(DeviceError, match="illegal memory access") as failed:
        TorchEvent(Failed()).query()  # type: ignore[arg-type]  # no CPU can make a failed CUDA event
    assert isinstance(failed.value.__cause__, RuntimeError)


@pytest.fixture
def strange_application(device: torch.device) -> Iterator[None]:
    """An application that has changed every default of torch that a copy could depend on."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("made", ["grad", "plain", "inference", "inference, single bytes"])
@pytest.mark.usefixtures("strange_application")
def test_the_modes_and_defaults_of_the_application_do_not_matter(
    mode: str, made: str, device: torch.device, layout_for: LayoutFor
) -> None:
    dtype = torch.uint8 if "bytes" in made else torch.float32
    with torch.inference_mode(made.startswith("inference")):
        cache = torch.arange(12, device=device, dtype=dtype).view(4, 3).requires_grad_(made == "grad")
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "grad"):
        copier = open_torch_device(layout_for([[3 * dtype.itemsize]]), [[cache]])
        stream, buffer = copier.open_stream("s"), copier.host_buffer(24)
        wait(copier.gather(stream, 0, [3, 1], buffer, [0, 12], copier.record()))
        wait(copier.scatter(stream, 0, [0, 2], buffer, [0, 12], copier.record()))
    assert cache.detach().cpu().tolist() == [[9, 10, 11], [3, 4, 5], [3, 4, 5], [9, 10, 11]]
    assert cache.grad_fn is None


def test_threads_with_a_stream_each_copy_at_the_same_time(device: torch.device, layout_for: LayoutFor, noise: Noise) -> None:
    caches = [filled(noise, device, 64, 1000) for _ in range(3)]
    copier = open_torch_device(layout_for([[1000] * 3]), [caches])
    expected = [cache.cpu().numpy().copy() for cache in caches]
    for rows in expected:
        rows[1::2] = rows[0::2]
    failures: list[BaseException] = []

    def work(part: int) -> None:
        try:
            stream, buffer = copier.open_stream(f"s{part}"), copier.host_buffer(2 * 3000)
            for page in range(part * 16, part * 16 + 16, 4):
                copier.gather(stream, 0, [page, page + 2], buffer, [3000, 0], copier.record())
                wait(copier.scatter(stream, 0, [page + 1, page + 3], buffer, [3000, 0], copier.record()))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all((cache.cpu().numpy() == rows).all() for cache, rows in zip(caches, expected, strict=True))


def test_after_close_every_method_says_so_and_closing_again_does_nothing(
    device: torch.device, layout_for: LayoutFor, noise: Noise
) -> None:
    cache = filled(noise, device, 4, 24)
    copier: DeviceCopier = open_torch_device(layout_for([[24]]), [[cache]])
    stream, buffer, event = copier.open_stream("s"), copier.host_buffer(24), copier.record()
    copier.close()
    copier.close()
    for call in (
        lambda: copier.gather(stream, 0, [0], buffer, [0], event),
        lambda: copier.scatter(stream, 0, [0], buffer, [0], event),
        lambda: copier.host_buffer(1),
        lambda: copier.open_stream("t"),
        copier.record,
        lambda: copier.execution_waits_for(event),
    ):
        with pytest.raises(NotOpenError):
            call()
    assert copier.page_counts == (4,)
    assert event.query()


def test_M6_a_closed_device_holds_no_cache(device: torch.device, layout_for: LayoutFor, noise: Noise) -> None:
    cache = filled(noise, device, 4, 24)
    gone = weakref.ref(cache.untyped_storage())
    copier: TorchCopier = open_torch_device(layout_for([[24]]), [[cache]])
    stream = copier.open_stream("s")
    copier.close()
    assert stream.scratch is None
    del cache
    gc.collect()
    assert gone() is None


def test_M6_a_device_that_fails_at_an_event_says_so_in_akvs_words() -> None:
    class Failed:
        def record_event(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    copier = open_torch_device(tiny_layout(regions=1), [[torch.zeros(2, 8, dtype=torch.uint8)]])
    copier._execution = Failed()  # type: ignore[assignment]
    with pytest.raises(DeviceError, match="illegal memory access"):
        copier.record()
    copier.close()
