"""Staging memory: where it lies, how long it lives."""

import ctypes
import gc
import mmap

import pytest
import torch

from akv.device.host_memory import TorchBuffer


@pytest.fixture
def pinned(device: torch.device) -> bool:
    return device.type == "cuda"


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 << 20])
def test_a_buffer_begins_on_a_page_and_has_the_asked_length(nbytes: int, pinned: bool) -> None:
    buffer = TorchBuffer(nbytes, pinned=pinned)
    assert buffer.address % mmap.PAGESIZE == 0
    assert buffer.nbytes == nbytes
    view = buffer.view()
    assert (view.format, view.nbytes, view.readonly) == ("B", nbytes, False)
    assert buffer.tensor.is_pinned() is pinned


def test_the_view_and_the_address_are_the_same_memory(pinned: bool) -> None:
    buffer = TorchBuffer(100, pinned=pinned)
    buffer.view()[7] = 42
    assert ctypes.string_at(buffer.address, 100)[7] == 42
    assert buffer.tensor[7] == 42


def test_the_memory_lives_as_long_as_a_view_of_it(pinned: bool) -> None:
    buffer = TorchBuffer(1 << 20, pinned=pinned)
    view = buffer.view()
    view[:] = b"\x05" * len(view)
    del buffer
    gc.collect()
    assert view.tobytes() == b"\x05" * (1 << 20)


class FakeRuntime:
    """What `torch.cuda.cudart()` gives, for machines without CUDA."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_M6_pinned_memory_is_whole_pages_and_unpinned_when_its_last_view_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = TorchBuffer(mmap.PAGESIZE + 1, pinned=True)
    assert runtime.registered == {buffer.address: 2 * mmap.PAGESIZE}
    view = buffer.view()
    del buffer
    gc.collect()
    assert runtime.registered
    view.release()
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_a_memory_error_that_no_later_kernel_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[str] = []

    def kernel(size: int, device: str) -> None:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(status=2))
    monkeypatch.setattr(torch, "zeros", kernel)
    with pytest.raises(MemoryError, match=r"cannot pin 4096 bytes .*status 2"):
        TorchBuffer(100, pinned=True)
    assert kernels == ["cuda"]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_buffer_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        TorchBuffer(nbytes, pinned=False)


def test_memory_that_is_not_there_is_a_memory_error(pinned: bool) -> None:
    with pytest.raises(MemoryError):
        TorchBuffer(1 << 50, pinned=pinned)
