"""Copies the same pages in three ways, in turn, and looks that akv's arrive as they were."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from akv.cli.bench.snapshot.figures import Run, SnapshotFigures, missed, ratio, way
from akv.device import open_torch_device
from akv.device.torch_copier import TorchCopier
from akv.errors import DependencyError
from akv.ports.device import DeviceSlots
from akv.values.layout import LayerGroup, Layout, Region

#: Cycles for which the stream is kept busy beforehand, about 15 ms: by then what is measured has been queued, and the stream
#: works through it without waiting for the host.
BUSY_CYCLES = 30_000_000
#: Runs that load kernels and touch memory, and do not count.
_WARM_UPS = 2


def bench_snapshot(device: str, pages: int, buffers: int, buffer_bytes: int, runs: int) -> SnapshotFigures:
    """Measure. `device`: "cuda", "cpu", or "" for CUDA where there is one. Blocks.

    Raises DependencyError if it is asked for CUDA and there is none, RuntimeError if a page did not arrive as it was.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DependencyError("torch sees no CUDA device here: without --device, or with --device cpu, host time is measured")
    scene = _Scene(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), pages, buffers, buffer_bytes)
    ways = (scene.snapshot, scene.bulk, scene.copies)
    measured: tuple[list[Run], ...] = ([], [], [])
    for number in range(_WARM_UPS + runs):
        for copy, some in zip(ways, measured, strict=True):
            run = scene.timed(copy)
            if number >= _WARM_UPS:
                some.append(run)
    scene.compare()
    snapshot, bulk, copies = measured
    over = ratio(bulk, snapshot), ratio(copies, snapshot)
    return SnapshotFigures(
        device=torch.cuda.get_device_name() if scene.cuda else "cpu",
        torch=str(torch.__version__),
        pages=pages,
        buffers=buffers,
        buffer_bytes=buffer_bytes,
        runs=runs,
        snapshot=way(snapshot),
        bulk=way(bulk),
        copies=way(copies),
        bulk_over_snapshot=over[0],
        copies_over_snapshot=over[1],
        missed=missed(*over, way(snapshot).host_ms),
    )


class _Scene:
    """Twice as many pages as are copied, so that these lie apart, and slots for them on the device and on the host."""

    def __init__(self, device: torch.device, pages: int, buffers: int, buffer_bytes: int) -> None:
        self.cuda = device.type == "cuda"
        self._page_bytes = buffers * buffer_bytes
        self._caches = [
            torch.randint(0, 256, (2 * pages, buffer_bytes), dtype=torch.uint8, device=device) for _ in range(buffers)
        ]
        self._pages: list[int] = np.random.default_rng(0).permutation(2 * pages)[:pages].tolist()
        self._copier: TorchCopier = open_torch_device(_layout(buffers, buffer_bytes), [self._caches])
        self._offsets = [self._page_bytes * index for index in range(pages)]
        slots = self._copier.device_buffer(pages * self._page_bytes)
        self._via = None if slots is None else DeviceSlots(slots, self._offsets)
        self._stream = self._copier.open_stream("ring")
        self._host = self._copier.host_buffer(pages * self._page_bytes)
        self._plain = self._copier.host_buffer(pages * self._page_bytes)
        self._piece = torch.randint(0, 256, (pages * self._page_bytes,), dtype=torch.uint8, device=device)

    def snapshot(self) -> None:
        """As the connector does it at the end of a pass."""
        self._copier.snapshot(self._stream, 0, self._pages, self._host, self._offsets, self._via)

    def bulk(self) -> None:
        """One copy of as many bytes."""
        self._plain.tensor.copy_(self._piece, non_blocking=True)

    def copies(self) -> None:
        """One copy for each buffer of each page."""
        for page, offset in zip(self._pages, self._offsets, strict=True):
            slot = self._plain.tensor[offset : offset + self._page_bytes]
            for cache, part in zip(self._caches, slot.view(len(self._caches), -1), strict=True):
                part.copy_(cache[page], non_blocking=True)

    def timed(self, copy: Callable[[], None]) -> Run:
        """Host time of one call, and how long the execution stream took from what came before to what comes next."""
        if not self.cuda:
            began = time.perf_counter()
            copy()
            return Run(None, 1000 * (time.perf_counter() - began))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # as above
        start.record()
        began = time.perf_counter()
        copy()
        host_ms = 1000 * (time.perf_counter() - began)
        end.record()
        torch.cuda.synchronize()
        return Run(start.elapsed_time(end), host_ms)

    def compare(self) -> None:
        """Raises RuntimeError if a page in its slot is not the page."""
        arrived = np.frombuffer(self._host.view(), dtype=np.uint8).reshape(len(self._pages), len(self._caches), -1)
        for number, cache in enumerate(self._caches):
            if not (cache[self._pages].cpu().numpy() == arrived[:, number]).all():
                raise RuntimeError(f"pages did not arrive as they were in buffer {number}: nothing was measured")


def _layout(buffers: int, buffer_bytes: int) -> Layout:
    regions: Sequence[Region] = [Region(name=f"{index}", bytes_per_page=buffer_bytes) for index in range(buffers)]
    group = LayerGroup(
        layers=tuple(range(buffers)),
        attention="sliding_window",
        window_tokens=1024,
        dtype="uint8",
        kv_heads=1,
        head_size=1,
        regions=tuple(regions),
    )
    return Layout(tokens_per_block=32, groups=(group,))
