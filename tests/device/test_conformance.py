"""The torch device keeps what `DeviceCopier` promises, on every device of this machine."""

import time
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from akv.device import open_torch_device
from akv.ports.device import PassEvent
from akv.values.layout import LayerGroup, Layout, Region
from akv_testing.conformance.device import DeviceConformance, DeviceKit

#: Cycles that every write waits for on CUDA, about 10 ms: long enough that a copy which does not wait for it reads too early.
CYCLES = 20_000_000


class TorchKit:
    """An engine in float16: keys and values interleaved in one group, in one region in the next, apart in the third."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        kv = torch.zeros(12, 2, 5, 7, dtype=torch.float16, device=device)
        latent, keys, values = (torch.zeros(9, 3, dtype=torch.float16, device=device) for _ in range(3))
        self._caches = [[kv[:, 0], kv[:, 1]], [latent], [keys, values]]
        self.host_groups = frozenset({0, 1} if device.type == "cpu" else ())
        if self._stream is not None:
            torch.cuda.synchronize()
        self.layout = Layout(
            tokens_per_block=7,
            groups=(_group(0, 70, 70), _group(1, 6), _group(2, 6, 6)),
        )
        self.device = open_torch_device(self.layout, self._caches, self._stream)

    def write(self, group: int, page: int, content: bytes) -> None:
        with self._engine():  # in which the content lives too: memory of another stream could be used again too early
            parts = torch.frombuffer(bytearray(content), dtype=torch.float16).to(self._caches[0][0].device)
            if self._stream is not None:
                torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            for cache in self._caches[group]:
                size = cache[page].numel()
                cache[page].copy_(parts[:size].view(cache[page].shape))
                parts = parts[size:]

    def read(self, group: int, page: int) -> bytes:
        with self._engine():
            parts = [cache[page].flatten().view(torch.uint8).cpu().numpy().tobytes() for cache in self._caches[group]]
        return b"".join(parts)

    def wait(self, event: PassEvent) -> None:
        deadline = time.monotonic() + 10
        while not event.query():
            assert time.monotonic() < deadline, "the event does not come"

    def _engine(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _group(index: int, *sizes: int) -> LayerGroup:
    return LayerGroup(
        layers=(index,),
        dtype="float16",
        kv_heads=1,
        head_size=1,
        regions=tuple(Region(name=f"{index}.{part}", bytes_per_page=size) for part, size in enumerate(sizes)),
    )


class TestTorchDevice(DeviceConformance):
    @pytest.fixture
    def kit(self, device: torch.device) -> DeviceKit:
        return TorchKit(device)
