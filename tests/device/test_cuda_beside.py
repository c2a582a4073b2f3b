"""What loads and saves cost the kernels beside them: a step that streams weights, as decoding does, while pages move."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from akv.device import open_torch_device
from akv.values.layout import Layout

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]
#: Queues copies, and returns the event of their end.
Work = Callable[[], Any]

REGIONS, REGION_BYTES, PAGES = 64, 32 << 10, 250
#: How much longer a step may take beside akv's copies than beside plain ones: with copy engines alone, and with kernels.
MOST_BESIDE = {"evenly apart": 1.03, "anyhow": 1.08}


@pytest.fixture
def step() -> Iterator[Callable[[], float]]:
    """Milliseconds of one step of 128 products of a few rows with 32 MiB of weights, as one CUDA graph."""
    rows = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(128)]
    products = rows @ weights[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            torch.mm(rows, weight, out=products)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def replayed() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    for _ in range(3):
        replayed()
    yield replayed
    torch.cuda.synchronize()


@contextmanager
def going_on(work: Work) -> Iterator[None]:
    """The work over and over, on a thread of its own."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            ended = work()
            while not ended.query() and not stop.wait(0.0005):
                pass

    thread = threading.Thread(target=loop)
    thread.start()
    stop.wait(0.05)
    yield
    stop.set()
    thread.join()
    torch.cuda.synchronize()


class Copies:
    """Loads and saves of the same pages, and plain copies of as many bytes."""

    def __init__(self, layout: Layout, regions: Sequence[torch.Tensor]) -> None:
        self._copier = open_torch_device(layout, [regions])
        self._stream = self._copier.open_stream("s")
        assert self._stream.cuda is not None
        self._cuda = self._stream.cuda
        page = REGIONS * REGION_BYTES
        self._order = np.random.default_rng(4).permutation(2 * PAGES)[:PAGES].tolist()
        self._offsets = [page * index for index in range(PAGES)]
        self._slots = self._copier.host_buffer(PAGES * page)
        self._bulk = torch.empty(PAGES * page, dtype=torch.uint8, device="cuda")

    def load(self) -> Any:
        self._copier.scatter(self._stream, 0, self._order, self._slots, self._offsets, self._copier.record())
        return self._cuda.record_event()

    def save(self) -> Any:
        self._copier.gather(self._stream, 0, self._order, self._slots, self._offsets, self._copier.record())
        return self._cuda.record_event()

    def plain_load(self) -> Any:
        with torch.cuda.stream(self._cuda):
            self._bulk.copy_(self._slots.tensor, non_blocking=True)
        return self._cuda.record_event()

    def plain_save(self) -> Any:
        with torch.cuda.stream(self._cuda):
            self._slots.tensor.copy_(self._bulk, non_blocking=True)
        return self._cuda.record_event()


def test_a_step_beside_loads_and_saves_takes_little_longer_than_beside_plain_copies(
    step: Callable[[], float], layout_for: LayoutFor, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = torch.zeros(REGIONS, 2 * PAGES, REGION_BYTES, dtype=torch.uint8, device="cuda").unbind(0)
    layout = layout_for([[REGION_BYTES] * REGIONS])
    evenly, anyhow = Copies(layout, layers), Copies(layout, layers[::-1])
    ways: dict[str, Work] = {
        "a plain copy to the device": evenly.plain_load,
        "loads, layers evenly apart": evenly.load,
        "loads, layers anyhow": anyhow.load,
        "a plain copy to the host": evenly.plain_save,
        "saves, layers evenly apart": evenly.save,
        "saves, layers anyhow": anyhow.save,
    }
    alone = median(step() for _ in range(100))
    beside: dict[str, float] = {}
    for name, work in ways.items():
        work().synchronize()
        with going_on(work):
            beside[name] = median(step() for _ in range(150)) / alone
    with capsys.disabled():
        sys.stdout.write(f"\n    a step takes {alone:.2f} ms alone, and of that beside")
        for name, longer in beside.items():
            sys.stdout.write(f"\n      {name}: {longer:.3f}")
    for lie, most in MOST_BESIDE.items():
        assert beside[f"loads, layers {lie}"] <= most * beside["a plain copy to the device"]
        assert beside[f"saves, layers {lie}"] <= most * beside["a plain copy to the host"]
