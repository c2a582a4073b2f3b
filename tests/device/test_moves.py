"""Any pages, in any slots: gather then scatter copies pages, and nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from akv.device import moves as copying
from akv.device import open_torch_device
from akv.ports.device import PassEvent
from akv.values.layout import LayerGroup, Layout, Region


@pytest.mark.parametrize(
    ("slots", "gaps", "runs"),
    [
        ([], True, []),
        ([8], True, [(0, 1, 4)]),
        ([0, 4, 8, 20], False, [(0, 3, 4), (3, 4, 4)]),
        ([0, 10, 20, 24, 28], False, [(0, 1, 4), (1, 2, 4), (2, 5, 4)]),
        ([0, 10, 20, 24, 28], True, [(0, 3, 10), (3, 5, 4)]),
        ([0, 0, 2, 6], True, [(0, 1, 4), (1, 2, 4), (2, 4, 4)]),
    ],
)
def test_adjacent_slots_make_one_run(slots: list[int], gaps: bool, runs: list[tuple[int, int, int]]) -> None:
    assert list(copying._runs(slots, 4, gaps=gaps)) == runs


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[int], int, list[int], list[int], list[int], int]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 31, 32, 48]), min_size=1, max_size=4))
    count = draw(st.integers(2, 14))
    order = draw(st.permutations(range(count)))
    some = draw(st.integers(1, count // 2))
    slots = draw(st.permutations(range(count)))[:some]
    return sizes, count, list(order[:some]), list(order[some : 2 * some]), list(slots), draw(st.integers(0, 9))


@settings(deadline=None, max_examples=150)
@given(moves())
def test_gather_then_scatter_is_the_identity_on_other_pages(
    move: tuple[list[int], int, list[int], list[int], list[int], int],
) -> None:
    sizes, count, sources, targets, slots, gap = move
    generator = np.random.default_rng(3)
    layout = build_layout(sizes)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        caches = [torch.from_numpy(generator.integers(0, 256, (count, size), dtype=np.uint8)).to(device) for size in sizes]
        expected = [cache.cpu().numpy().copy() for cache in caches]
        for rows in expected:
            rows[targets] = rows[sources]
        copier = open_torch_device(layout, [caches])
        pitch = sum(sizes) + gap
        buffer = copier.host_buffer(count * pitch)
        stream, offsets = copier.open_stream("s"), [slot * pitch for slot in slots]
        _wait(copier.gather(stream, 0, sources, buffer, offsets, copier.record()))
        _wait(copier.scatter(stream, 0, targets, buffer, offsets, copier.record()))
        assert all((cache.cpu().numpy() == rows).all() for cache, rows in zip(caches, expected, strict=True))


def build_layout(sizes: list[int]) -> Layout:
    regions = tuple(Region(name=str(index), bytes_per_page=size) for index, size in enumerate(sizes))
    return Layout(tokens_per_block=1, groups=(LayerGroup(layers=(0,), dtype="u", kv_heads=1, head_size=1, regions=regions),))


def _wait(event: PassEvent) -> None:
    while not event.query():
        pass
