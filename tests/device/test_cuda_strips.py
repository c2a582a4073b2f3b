"""Pages that copy engines move, where the layers' caches lie evenly apart: every byte, in order, and the host stays free."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from akv.device import open_torch_device, strips
from akv.device.torch_copier import TorchCopier
from akv.ports.device import PassEvent
from akv.values.layout import Layout

pytestmark = pytest.mark.cuda

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]
Noise = Callable[[int], Any]

PAGES = 12


def wait(event: PassEvent) -> None:
    while not event.query():
        pass


def evenly(whole: torch.Tensor) -> list[torch.Tensor]:
    return list(whole.view(4, -1)[:, : PAGES * 48].view(4, PAGES, 48).unbind(0))


def alternating(whole: torch.Tensor) -> list[torch.Tensor]:
    layers = whole.view(2, -1)[:, : PAGES * 64].view(2, PAGES, 2, 32)
    return [layers[layer, :, kind] for layer in range(2) for kind in range(2)]


def padded(whole: torch.Tensor) -> list[torch.Tensor]:
    return [part[:, 5:36] for part in whole.view(4, -1)[:, : PAGES * 64].view(4, PAGES, 64).unbind(0)]


def two_sizes(whole: torch.Tensor) -> list[torch.Tensor]:
    parts = whole.view(4, -1)
    return [parts[index, : PAGES * size].view(PAGES, size) for index, size in enumerate((48, 48, 16, 16))]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "LEAST_ROW", 1)
    monkeypatch.setattr(strips, "LEAST_COPY", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [evenly, alternating, padded, two_sizes])
def test_every_byte_of_the_pages_moves_and_no_other(
    shape: Callable[[torch.Tensor], list[torch.Tensor]], layout_for: LayoutFor, noise: Noise
) -> None:
    whole = torch.from_numpy(noise(4096)).to("cuda")
    regions = shape(whole)
    copier: TorchCopier = open_torch_device(layout_for([[region.shape[1] for region in regions]]), [regions])
    assert 1 <= len(copier._groups[0].strips) <= 2
    size = copier._groups[0].bytes_per_page
    stream, buffer = copier.open_stream("s"), copier.host_buffer(9 * size)
    host = np.frombuffer(buffer.view(), dtype=np.uint8)
    host[:] = noise(host.size)
    expected, pages, slots = host.copy(), [7, 0, 11, 3], [5, 0, 2, 7]
    for page, slot in zip(pages, slots, strict=True):
        expected[slot * size : (slot + 1) * size] = torch.cat([region[page] for region in regions]).cpu().numpy()
    was = whole.clone()
    wait(copier.gather(stream, 0, pages, buffer, [slot * size for slot in slots], copier.record()))
    assert (host == expected).all()
    assert torch.equal(whole, was)
    others = [1, 4, 8, 9]
    for region in shape(was):
        region[others] = region[pages].clone()
    wait(copier.scatter(stream, 0, others, buffer, [slot * size for slot in slots], copier.record()))
    assert torch.equal(whole, was)
    # Straight to the host at one point of the execution stream, without device slots: the same copies there.
    host[:] = 0
    wait(copier.snapshot(stream, 0, [4, 1], buffer, [3 * size, 0], None))
    assert (host[:size] == torch.cat([region[1] for region in regions]).cpu().numpy()).all()
    assert (host[3 * size : 4 * size] == torch.cat([region[4] for region in regions]).cpu().numpy()).all()


def test_M4_they_wait_for_their_fence_on_the_device_and_not_on_the_host(layout_for: LayoutFor) -> None:
    execution = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    whole = torch.zeros(8, 64, 64 << 10, dtype=torch.uint8, device="cuda")
    copier = open_torch_device(layout_for([[64 << 10] * 8]), [list(whole.unbind(0))], execution)
    assert copier._groups[0].strips
    stream, buffer = copier.open_stream("s"), copier.host_buffer(40 * (512 << 10))
    buffer.view()[:] = b"\x07" * buffer.nbytes
    offsets = [(512 << 10) * index for index in range(40)]
    for _ in range(2):  # Once beforehand: CUDA loads a kernel when it is first used, and waits for the device then.
        torch.cuda.synchronize()
        with torch.cuda.stream(execution):
            torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
            whole.fill_(3)
        began = time.perf_counter()
        loaded = copier.scatter(stream, 0, list(range(40)), buffer, offsets, copier.record())
        issued = time.perf_counter() - began
        assert not loaded.query()
        wait(loaded)
        assert whole[:, :40].eq(7).all()
        assert whole[:, 40:].eq(3).all()
    assert issued < 0.1


def test_layers_of_separate_allocations_go_through_the_scratch_though_they_lie_evenly_apart(layout_for: LayoutFor) -> None:
    """CUDA refuses a copy that reaches from one allocation into another."""
    regions = [torch.full((256, 64 << 10), index, dtype=torch.uint8, device="cuda") for index in range(16)]
    copier = open_torch_device(layout_for([[64 << 10] * 16]), [regions])
    assert copier._groups[0].strips == ()
    buffer = copier.host_buffer(1 << 20)
    wait(copier.gather(copier.open_stream("s"), 0, [200], buffer, [0], copier.record()))
    assert np.frombuffer(buffer.view(), dtype=np.uint8)[:: 64 << 10].tolist() == list(range(16))


#: Moves pages in memory that torch maps piece by piece, and says by how many strips.
MAPPED_IN_PIECES = """
import torch

from akv.device import open_torch_device
from akv.values.layout import LayerGroup, Layout, Region

regions = tuple(Region(name=str(index), bytes_per_page=64 << 10) for index in range(8))
layout = Layout(tokens_per_block=1, groups=(LayerGroup(layers=(0,), dtype="u", kv_heads=1, head_size=1, regions=regions),))
whole = torch.randint(0, 256, (8, 512, 64 << 10), dtype=torch.uint8, device="cuda")
copier = open_torch_device(layout, [list(whole.unbind(0))])
buffer, stream, was = copier.host_buffer(2 << 19), copier.open_stream("s"), whole.clone()
copier.gather(stream, 0, [500, 3], buffer, [0, 1 << 19], copier.record())
copier.scatter(stream, 0, [7, 511], buffer, [0, 1 << 19], copier.record())
torch.cuda.synchronize()
was[:, [7, 511]] = was[:, [500, 3]]
assert torch.equal(was, whole)
print(len(copier._groups[0].strips))
"""


def test_memory_that_torch_maps_piece_by_piece_is_copied_right_whichever_way_the_driver_takes() -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", MAPPED_IN_PIECES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip() in {"0", "1"}) == (0, True), done.stderr


def test_layers_that_lie_anyhow_go_through_the_scratch(layout_for: LayoutFor) -> None:
    whole = torch.zeros(8, 4, 64 << 10, dtype=torch.uint8, device="cuda")
    upwards = open_torch_device(layout_for([[64 << 10] * 8]), [list(whole.unbind(0))])
    downwards = open_torch_device(layout_for([[64 << 10] * 8]), [list(reversed(whole.unbind(0)))])
    assert (len(upwards._groups[0].strips), len(downwards._groups[0].strips)) == (1, 0)
