"""How pages are cut into batches that fit into the staging slots (L6's order, D3's first missing key)."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

from akv.values.messages import GroupPages

#: Pages of one layer group that fit into the slots at hand together.
Batch: TypeAlias = GroupPages


def split_batches(groups: Sequence[GroupPages], slots: int) -> list[Batch]:
    """Cut columns of pages into batches of one group and at most `slots` pages, early blocks first.

    The blocks are cut into stretches of `slots`, and each stretch gives one batch per group that has pages in it: a load that
    finds a hole has then moved little of what lies behind it in the other groups, and a save stores whole blocks early, each
    of which counts only once every group's page is there (L2). A batch has one group because a gather or scatter has.

    Raises ValueError for less than one slot (a fault of akv).
    """
    if slots < 1:
        raise ValueError(f"{slots} slots")
    return [batch for stretch in split_stretches(groups, slots) for batch in stretch]


def split_stretches(groups: Sequence[GroupPages], blocks: int) -> list[list[Batch]]:
    """Cut columns of pages at every so many blocks, early ones first: a batch for each group that has pages there."""
    all_blocks = sorted(set().union(*(group.blocks for group in groups)))
    stretches: list[list[Batch]] = []
    starts = [0] * len(groups)
    for at in range(0, len(all_blocks), blocks):
        last = all_blocks[min(at + blocks, len(all_blocks)) - 1]
        stretch: list[Batch] = []
        for index, group in enumerate(groups):
            start = starts[index]
            end = starts[index] = bisect_left(group.blocks, last + 1, start)
            if start < end:
                stretch.append(
                    GroupPages(group.group, group.blocks[start:end], group.pages[start:end], group.hashes[start:end])
                )
        stretches.append(stretch)
    return stretches


def blocks_at_a_time(groups: Sequence[GroupPages], page_bytes: Sequence[int], pages: int, nbytes: int) -> int:
    """How many blocks make a stretch of at most `pages` pages and, on the average of all of them, at most `nbytes` bytes; at
    least one. `page_bytes`: of a page of each layer group.

    On the average, because window groups have pages in few blocks: the others need not come in smaller stretches for them.
    """
    total = sum(len(group.pages) * page_bytes[group.group] for group in groups)
    longest = max(len(group.blocks) for group in groups)
    return max(1, min(pages // len(groups), longest * nbytes // max(1, total)))


def selected(batch: Batch, indices: Sequence[int]) -> Batch:
    """The pages at these places of a batch."""
    return GroupPages(
        batch.group,
        tuple(batch.blocks[index] for index in indices),
        tuple(batch.pages[index] for index in indices),
        tuple(batch.hashes[index] for index in indices),
    )


def slot_offsets(slots: Sequence[int], slot_bytes: int) -> list[int]:
    """Where each slot begins in its staging buffer, in bytes."""
    return [slot * slot_bytes for slot in slots]
