"""How columns of pages become batches that fit into the slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.batching import blocks_at_a_time, selected, slot_offsets, split_batches, split_stretches
from akv.values.messages import GroupPages


def column(group: int, blocks: list[int]) -> GroupPages:
    """Pages and hashes that tell where they belong."""
    return GroupPages(
        group,
        tuple(blocks),
        tuple(1000 * group + block for block in blocks),
        tuple(bytes([group, block]) * 8 for block in blocks),
    )


COLUMNS = st.lists(st.sets(st.integers(0, 30)), max_size=4).map(
    lambda groups: [column(index, sorted(blocks)) for index, blocks in enumerate(groups)]
)


def test_D3_early_blocks_of_every_group_come_before_late_ones_of_any() -> None:
    batches = split_batches([column(0, [3, 4, 5, 6, 7]), column(1, [3, 4, 5, 6, 7])], 2)
    assert [(batch.group, batch.blocks) for batch in batches] == [
        (0, (3, 4)),
        (1, (3, 4)),
        (0, (5, 6)),
        (1, (5, 6)),
        (0, (7,)),
        (1, (7,)),
    ]


def test_D3_a_group_without_pages_in_a_stretch_has_no_batch_there() -> None:
    batches = split_batches([column(0, [0, 1, 2, 3]), column(1, [3]), column(2, [])], 2)
    assert [(batch.group, batch.blocks) for batch in batches] == [(0, (0, 1)), (0, (2, 3)), (1, (3,))]


def test_R6_a_stretch_has_a_batch_for_each_group_that_has_pages_in_it() -> None:
    stretches = split_stretches([column(0, [0, 1, 2, 3]), column(1, [2, 3, 9])], 3)
    assert [[(batch.group, batch.blocks) for batch in stretch] for stretch in stretches] == [
        [(0, (0, 1, 2)), (1, (2,))],
        [(0, (3,)), (1, (3, 9))],
    ]


def test_R6_a_stretch_has_so_many_blocks_that_it_is_neither_too_many_pages_nor_too_many_bytes() -> None:
    many, few = column(0, list(range(30))), column(1, list(range(27, 30)))
    assert blocks_at_a_time([many], [10], 12, 1000) == 12
    assert blocks_at_a_time([many], [10], 12, 70) == 7
    assert blocks_at_a_time([many], [10], 12, 5) == 1
    assert blocks_at_a_time([many], [10], 0, 1000) == 1
    # Two groups have half as many blocks in as many pages; bytes are counted where pages are.
    assert blocks_at_a_time([many, few], [10, 100], 12, 1000) == 6
    assert blocks_at_a_time([many, few], [10, 100], 60, 200) == 30 * 200 // 600


def test_R1_selected_pages_keep_their_block_and_hash() -> None:
    assert selected(column(1, [4, 5, 6]), [0, 2]) == column(1, [4, 6])
    assert selected(column(1, [4, 5, 6]), []) == column(1, [])


def test_D3_nothing_to_move_is_no_batch() -> None:
    assert split_batches([], 4) == split_batches([column(0, [])], 4) == []


@given(COLUMNS, st.integers(1, 40))
def test_D3_batches_hold_every_page_once_within_the_slots_early_blocks_first(columns: list[GroupPages], slots: int) -> None:
    batches = split_batches(columns, slots)
    for batch in batches:
        assert 1 <= len(batch.blocks) <= slots
        assert batch == column(batch.group, list(batch.blocks))
    for whole in columns:
        assert tuple(block for batch in batches if batch.group == whole.group for block in batch.blocks) == whole.blocks
    ordinals = sorted({block for whole in columns for block in whole.blocks})
    stretches = [{ordinals.index(block) // slots for block in batch.blocks} for batch in batches]
    assert all(len(stretch) == 1 for stretch in stretches)
    order = [(min(stretch), batch.group) for stretch, batch in zip(stretches, batches, strict=True)]
    assert order == sorted(set(order))


@pytest.mark.parametrize("slots", [0, -1])
def test_D3_less_than_one_slot_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots"):
        split_batches([column(0, [1])], slots)


def test_slot_offsets_are_in_bytes() -> None:
    assert slot_offsets([2, 0, 5], 4096) == [8192, 0, 20480]
