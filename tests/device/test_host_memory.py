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


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_buffer_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        TorchBuffer(nbytes, pinned=False)


def test_memory_that_is_not_there_is_a_memory_error(pinned: bool) -> None:
    with pytest.raises(MemoryError):
        TorchBuffer(1 << 50, pinned=pinned)
