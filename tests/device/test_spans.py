"""Regions as rows of one tensor: what kernels on CUDA do, done here to the memory of a CPU, moves what it should."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from akv.device.caches import GroupCache, placed_regions, take_caches
from akv.device.moves import in_slot_order, indices, move_directly
from akv.device.spans import spans_of
from akv.values.layout import LayerGroup, Layout, Region

#: Bytes of a region's page, and bytes between two of its pages.
REGION = st.tuples(st.sampled_from([1, 3, 8, 16, 16, 16, 48, 64]), st.sampled_from([0, 0, 0, 5, 16]))


def group_of(
    regions: list[tuple[int, int]], count: int, fill: np.ndarray | None = None
) -> tuple[GroupCache, list[torch.Tensor]]:
    """A group's cache as on CUDA, and the memory of its regions with what lies between their pages."""
    memory = [torch.zeros(count, size + gap, dtype=torch.uint8) for size, gap in regions]
    for whole in memory:
        if fill is not None:
            whole.copy_(torch.from_numpy(np.resize(fill, whole.shape)))
    sizes = [size for size, _ in regions]
    named = tuple(Region(name=str(index), bytes_per_page=size) for index, size in enumerate(sizes))
    layout = Layout(tokens_per_block=1, groups=(LayerGroup(layers=(0,), dtype="u", kv_heads=1, head_size=1, regions=named),))
    groups, _ = take_caches(layout, [[whole[:, :size] for whole, size in zip(memory, sizes, strict=True)]])
    assert groups[0].spans == (), "a CPU copies small pieces"
    return groups[0]._replace(spans=spans_of(placed_regions(groups[0]), sum(sizes), torch.device("cpu"))), memory


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, list[int], list[int], int]:
    regions, count = draw(st.lists(REGION, min_size=1, max_size=6)), draw(st.integers(1, 9))
    some = draw(st.integers(1, count))
    pages, slots = (list(draw(st.permutations(range(count))))[:some] for _ in range(2))
    return regions, count, pages, slots, draw(st.sampled_from([0, 0, 1, 16]))


@settings(deadline=None, max_examples=200)
@given(moves(), st.booleans())
def test_every_page_moves_both_ways_and_no_other_byte_changes(
    move: tuple[list[tuple[int, int]], int, list[int], list[int], int], deterministic: bool
) -> None:
    regions, count, pages, slots, gap = move
    cache, memory = group_of(regions, count, np.random.default_rng(5).integers(0, 256, 4096, dtype=np.uint8))
    pitch = cache.bytes_per_page + gap
    table = torch.full((count * pitch,), 9, dtype=torch.uint8)
    expected = table.numpy().copy()
    stored = {
        page: b"".join(whole[page, :size].numpy().tobytes() for whole, (size, _) in zip(memory, regions, strict=True))
        for page in pages
    }
    for page, slot in zip(pages, slots, strict=True):
        expected[slot * pitch : slot * pitch + cache.bytes_per_page] = np.frombuffer(stored[page], dtype=np.uint8)
    index, offsets = in_slot_order(0, cache, pages, table.numel(), [slot * pitch for slot in slots], to_host=True)
    before = [whole.clone() for whole in memory]
    move_directly(cache, indices(cache, index), offsets, table, to_host=True)
    assert (table.numpy() == expected).all()
    assert all(bool(whole.eq(was).all()) for whole, was in zip(memory, before, strict=True))
    # Back into empty pages: what the table holds arrives where it came from, and nothing between the pages is touched.
    wanted = [torch.full_like(whole, 7) for whole in memory]
    for whole, was, want, (size, _) in zip(memory, before, wanted, regions, strict=True):
        whole.fill_(7)
        want[pages, :size] = was[pages, :size]
    torch.use_deterministic_algorithms(deterministic)
    try:
        move_directly(cache, indices(cache, index), offsets, table, to_host=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(whole.eq(want).all()) for whole, want in zip(memory, wanted, strict=True))


@pytest.mark.parametrize(
    ("sizes", "spans"),
    [([64] * 48, [(0, 48)]), ([64, 64, 16, 16, 64], [(0, 2), (2, 4), (4, 5)]), ([32], [(0, 1)])],
    ids=["layers alike", "three runs of sizes", "one region"],
)
def test_regions_of_one_size_are_moved_by_one_kernel(sizes: list[int], spans: list[tuple[int, int]]) -> None:
    cache, _ = group_of([(size, 0) for size in sizes], 4)
    assert [(span.first, span.last) for span in cache.spans] == spans
    assert {span.word for span in cache.spans} == {16}


def test_regions_that_alternate_in_one_tensor_share_rows() -> None:
    whole = torch.zeros(5, 2, 32, dtype=torch.uint8)
    named = tuple(Region(name=name, bytes_per_page=32) for name in "kv")
    layout = Layout(tokens_per_block=1, groups=(LayerGroup(layers=(0,), dtype="u", kv_heads=1, head_size=1, regions=named),))
    groups, _ = take_caches(layout, [[whole[:, 0], whole[:, 1]]])
    (span,) = spans_of(placed_regions(groups[0]), 64, torch.device("cpu"))
    assert (span.rows.shape, span.rows.stride(), span.rows.data_ptr()) == ((10, 2), (2, 1), whole.data_ptr())
    assert (span.begins.tolist(), span.pitches.tolist()) == ([0, 1], [2, 2])
