"""Snapshots of pages at a point of the execution stream: through device slots, or straight to the host."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from akv.device import moves, open_torch_device, torch_copier
from akv.device.torch_copier import TorchCopier
from akv.errors import DeviceError, EngineContractError, NotOpenError
from akv.ports.device import DeviceSlots, PassEvent
from akv.values.layout import LayerGroup, Layout, Region

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]
Noise = Callable[[int], np.ndarray]

#: Bytes of a page's two regions.
REGIONS = [48, 33]
PAGE = sum(REGIONS)


def wait(event: PassEvent) -> None:
    while not event.query():
        pass


class Engine:
    """Twelve pages of two regions each, and a copier of them."""

    def __init__(self, layout_for: LayoutFor, noise: Noise, device: torch.device) -> None:
        self.caches = [torch.from_numpy(noise(12 * size)).view(12, size).to(device) for size in REGIONS]
        self.copier: TorchCopier = open_torch_device(layout_for([REGIONS]), [self.caches])
        self.stream = self.copier.open_stream("ring")

    def page(self, index: int) -> bytes:
        return b"".join(cache[index].cpu().numpy().tobytes() for cache in self.caches)

    def ways(self, slots: Sequence[int], pitch: int = PAGE) -> list[DeviceSlots | None]:
        buffer = self.copier.device_buffer(12 * pitch)
        assert (buffer is None) == self.caches[0].is_cpu
        return [None] if buffer is None else [None, DeviceSlots(buffer, [slot * pitch for slot in slots])]


@pytest.fixture
def engine(layout_for: LayoutFor, noise: Noise, device: torch.device) -> Engine:
    return Engine(layout_for, noise, device)


#: Pages, host slots, device slots, bytes from slot to slot. Adjacent slots, gaps, the same order and others.
MOVES = {
    "all adjacent": ([3, 4, 5], [0, 1, 2], [0, 1, 2], PAGE),
    "adjacent on one side": ([3, 4, 5, 7], [0, 1, 2, 3], [0, 2, 3, 7], PAGE),
    "adjacent on the other": ([3, 4, 5, 7], [0, 2, 3, 7], [4, 5, 6, 7], PAGE),
    "no order": ([9, 0, 11, 2, 3], [6, 1, 2, 9, 0], [3, 8, 0, 1, 7], PAGE),
    "slots wider than a page": ([9, 0, 11, 2, 3], [6, 1, 2, 3, 0], [3, 8, 0, 1, 2], PAGE + 15),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("scratch_pages", [1, 2, 100])
def test_S3_every_page_arrives_in_its_slot_and_no_other_byte_changes(
    move: str, scratch_pages: int, layout_for: LayoutFor, noise: Noise, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_copier, "SCRATCH_BYTES", scratch_pages * PAGE)
    engine = Engine(layout_for, noise, device)
    pages, slots, places, pitch = MOVES[move]
    was = [engine.page(index) for index in range(12)]
    for via in engine.ways(places, pitch):
        buffer = engine.copier.host_buffer(10 * pitch)
        host = np.frombuffer(buffer.view(), dtype=np.uint8)
        host[:] = noise(host.size)
        expected = host.copy()
        for page, slot in zip(pages, slots, strict=True):
            expected[slot * pitch : slot * pitch + PAGE] = np.frombuffer(was[page], dtype=np.uint8)
        wait(engine.copier.snapshot(engine.stream, 0, pages, buffer, [slot * pitch for slot in slots], via))
        assert (host == expected).all()
        assert [engine.page(index) for index in range(12)] == was


def test_M5_on_a_cpu_it_has_happened_when_it_returns(layout_for: LayoutFor, noise: Noise) -> None:
    engine = Engine(layout_for, noise, torch.device("cpu"))
    buffer, was = engine.copier.host_buffer(PAGE), engine.page(3)
    event = engine.copier.snapshot(engine.stream, 0, [3], buffer, [0], None)
    engine.caches[0].zero_()
    assert event.query()
    assert buffer.view().tobytes() == was
    assert engine.copier.device_buffer(100) is None


def test_L6_what_it_refuses(engine: Engine) -> None:
    buffer = engine.copier.host_buffer(2 * PAGE)
    buffer.view()[:] = bytes(2 * PAGE)
    for via in engine.ways([0, 1]):
        for pages, offsets, error, text in [
            ([0, 12], [0, PAGE], EngineContractError, "no page 12"),
            ([0, -1], [0, PAGE], EngineContractError, "no page -1"),
            ([0, 1], [0, PAGE - 1], ValueError, "overlap"),
            ([0, 1], [0, PAGE + 1], ValueError, "does not fit"),
            ([0, 1], [0], ValueError, "2 pages and 1 offsets"),
        ]:
            with pytest.raises(error, match=text):
                engine.copier.snapshot(engine.stream, 0, pages, buffer, offsets, via)
    with pytest.raises(TypeError):
        engine.copier.snapshot(engine.stream, 0, [0], buffer, [0], DeviceSlots(buffer, [0]))
    with pytest.raises(TypeError):
        engine.copier.snapshot(engine.stream, 0, [0], object(), [0], None)  # type: ignore[arg-type]
    wait(engine.copier.record())
    assert not any(buffer.view())


def failing_at_the_second(exchange: Callable[..., None]) -> Callable[..., None]:
    pieces = count(1)

    def failing(*args: Any, **keywords: Any) -> None:
        if next(pieces) == 2:
            raise RuntimeError("out of memory")
        exchange(*args, **keywords)

    return failing


def test_M6_a_failure_half_way_is_a_device_error_and_leaves_nothing_queued(
    layout_for: LayoutFor, noise: Noise, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_copier, "SCRATCH_BYTES", PAGE)
    engine = Engine(layout_for, noise, device)
    buffer, exchange = engine.copier.host_buffer(8 * PAGE), moves.exchange_pages
    for via in engine.ways([0, 2, 5]):
        monkeypatch.setattr(moves, "exchange_pages", failing_at_the_second(exchange))
        with pytest.raises(DeviceError, match="'ring': out of memory"):
            engine.copier.snapshot(engine.stream, 0, [3, 1, 0], buffer, [0, 2 * PAGE, 5 * PAGE], via)
        monkeypatch.setattr(moves, "exchange_pages", exchange)
        assert engine.copier.record().query(), "what was queued has ended"
        wait(engine.copier.snapshot(engine.stream, 0, [3, 1, 0], buffer, [0, 2 * PAGE, 5 * PAGE], via))
        assert buffer.view()[5 * PAGE : 6 * PAGE].tobytes() == engine.page(0)


def test_after_close_it_says_so(engine: Engine) -> None:
    buffer = engine.copier.host_buffer(PAGE)
    engine.copier.close()
    with pytest.raises(NotOpenError):
        engine.copier.snapshot(engine.stream, 0, [0], buffer, [0], None)
    with pytest.raises(NotOpenError):
        engine.copier.device_buffer(PAGE)


def test_a_layout_with_windows_has_its_scratch_from_the_start(device: torch.device) -> None:
    for window in (0, 64):
        group = LayerGroup(
            layers=(0,),
            attention="sliding_window" if window else "full",
            window_tokens=window,
            dtype="uint8",
            kv_heads=1,
            head_size=1,
            regions=(Region(name="k", bytes_per_page=24),),
        )
        layout = Layout(tokens_per_block=16, groups=(group,))
        copier = open_torch_device(layout, [[torch.zeros(4, 24, dtype=torch.uint8, device=device)]])
        assert (copier._snapshot_scratch is not None) == (window > 0 and device.type == "cuda")
        copier.close()
        assert copier._snapshot_scratch is None
