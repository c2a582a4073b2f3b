"""What is under way to the pool, in bytes and passes, and what was dropped for want of room (S6)."""

from akv.ownership.backlog import SaveBacklog
from akv.plan.backlog import BacklogBounds
from akv.values.messages import GroupPages, SaveOrder

PAGE_BYTES = (10, 1)


def order(save_id: int, *blocks: int, window: bool = False, probe_first: bool = False) -> SaveOrder:
    hashes = tuple(bytes([block]) * 16 for block in blocks)
    groups = (1,) if window else (0, 1)
    return SaveOrder(
        save_id=save_id,
        request_id=f"r{save_id}",
        incarnation=save_id,
        groups=tuple(GroupPages(group, blocks, blocks, hashes) for group in groups),
        window=window,
        probe_first=probe_first,
    )


def test_S6_bytes_and_passes_are_under_way_until_the_last_save_of_each_ended() -> None:
    backlog = SaveBacklog(PAGE_BYTES, BacklogBounds(1000, 10))
    backlog.admit([order(1, 0), order(2, 0, 1)], {}, is_pass=True)
    backlog.admit([order(3, 0)], {}, is_pass=True)
    assert backlog.under_way == (11 + 22 + 11, 2)
    backlog.ended(1)
    assert backlog.under_way == (33, 2), "its pass has another save"
    backlog.ended(2)
    backlog.ended(2)
    assert backlog.under_way == (11, 1)
    backlog.ended(3)
    backlog.ended(99)
    assert backlog.under_way == (0, 0)


def test_S6_what_the_end_of_a_request_hands_over_is_no_pass() -> None:
    backlog = SaveBacklog(PAGE_BYTES, BacklogBounds(1000, 1))
    for save_id in (1, 2, 3):
        backlog.admit([order(save_id, 0)], {}, is_pass=False)
    assert backlog.under_way == (33, 0)


def test_S6_blocks_that_were_dropped_are_counted_and_window_pages_and_known_blocks_are_not() -> None:
    backlog = SaveBacklog(PAGE_BYTES, BacklogBounds(22, 10))
    fit = backlog.admit([order(1, 0, 1, 2), order(2, 3, window=True), order(3, 0, 1, probe_first=True)], {}, is_pass=True)
    assert [(kept.save_id, kept.groups[0].blocks) for kept in fit.kept] == [(1, (0, 1))]
    assert [dropped.save_id for dropped in fit.dropped] == [1, 2, 3]
    assert backlog.refused_blocks == 1
