"""One server of several ranks: what their reports come to together (D1, D2, L2, L8, S2, S7)."""

from collections.abc import Iterable
from itertools import permutations
from typing import Any

import pytest

from akv.ownership.ranks import RankLedger
from akv.values.messages import (
    BadPage,
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    PagesPerGroup,
    PagesReleased,
    PagesUnread,
    PassReport,
    SaveOrder,
    SaveResult,
    Withdrawal,
)

LOADED, FAILED, CANCELLED = LoadState.LOADED, LoadState.FAILED, LoadState.CANCELLED
NOTHING = PassReport()
HASHES = tuple(bytes([block]) * 16 for block in range(8))


def columns(group: int, blocks: Iterable[int], first_page: int = 10) -> GroupPages:
    some = tuple(blocks)
    return GroupPages(group, some, tuple(first_page + block for block in some), tuple(HASHES[block] for block in some))


def load(number: int = 1, incarnation: int = 7, first_page: int = 10) -> LoadOrder:
    return LoadOrder(
        load_id=number,
        request_id="r",
        incarnation=incarnation,
        groups=(columns(0, range(4), first_page), columns(1, [2, 3], 30)),
    )


def save(number: int = 2, blocks: Iterable[int] = range(4), first_page: int = 10, *, snapshot: bool = False) -> SaveOrder:
    groups = (columns(0, blocks, first_page), columns(1, blocks, first_page + 20))
    return SaveOrder(save_id=number, request_id="r", incarnation=7, groups=groups, window=snapshot, snapshot=snapshot)


def loaded(state: LoadState = LOADED, number: int = 1, **more: Any) -> PassReport:
    return PassReport(loads=(LoadResult(load_id=number, request_id="r", incarnation=7, state=state, **more),))


def saved(number: int = 2, **more: Any) -> PassReport:
    return PassReport(saves=(SaveResult(save_id=number, request_id="r", incarnation=7, **more),))


def unread(quarantined: PagesPerGroup = ()) -> PassReport:
    return PassReport(unread=(PagesUnread(request_id="r", incarnation=7, quarantined=quarantined),))


def released(*pages: tuple[int, ...]) -> PassReport:
    return PassReport(released=(PagesReleased(request_id="r", incarnation=7, pages=pages),))


def withdrawal() -> Withdrawal:
    return Withdrawal(request_id="r", incarnation=7)


def of_two(*, loads: Iterable[LoadOrder] = (), saves: Iterable[SaveOrder] = ()) -> RankLedger:
    ledger = RankLedger(2)
    for order in loads:
        ledger.load_sent(order)
    ledger.saves_sent(saves)
    return ledger


def merged_load(*reports: PassReport) -> LoadResult:
    """What a load comes to whose ranks say this, the first of them rank 0, in this order."""
    ledger = RankLedger(len(reports))
    ledger.load_sent(load())
    told = [ledger.reported(rank, report) for rank, report in enumerate(reports)]
    assert told[:-1] == [NOTHING] * (len(reports) - 1)
    assert told[-1] == PassReport(loads=told[-1].loads)
    (result,) = told[-1].loads
    return result


# -- loads


@pytest.mark.parametrize(
    ("states", "merged"),
    [
        ([LOADED], LOADED),
        ([LOADED, LOADED], LOADED),
        ([LOADED, CANCELLED], CANCELLED),
        ([CANCELLED, LOADED], CANCELLED),
        ([CANCELLED, CANCELLED], CANCELLED),
        ([FAILED, LOADED], FAILED),
        ([LOADED, FAILED], FAILED),
        ([CANCELLED, FAILED, LOADED], FAILED),
        ([LOADED, LOADED, CANCELLED, LOADED], CANCELLED),
    ],
)
def test_D2_a_load_ends_as_the_rank_did_that_did_worst_by_it(states: list[LoadState], merged: LoadState) -> None:
    result = merged_load(*map(loaded, states))
    assert (result.load_id, result.request_id, result.incarnation) == (1, "r", 7)
    assert result.state is merged


def test_R1_what_arrived_is_the_sum_over_the_ranks() -> None:
    one = loaded(pages=6, bytes=60, direct_pages=4, direct_bytes=40, staged={"cold": 2}, staged_bytes={"cold": 20})
    other = loaded(pages=6, bytes=90, staged={"away": 5, "cold": 1}, staged_bytes={"away": 75, "cold": 15})
    result = merged_load(one, other)
    assert (result.pages, result.bytes, result.direct_pages, result.direct_bytes) == (12, 150, 4, 40)
    assert (result.staged, result.staged_bytes) == ({"away": 5, "cold": 3}, {"away": 75, "cold": 35})
    assert list(result.staged) == ["away", "cold"]


@pytest.mark.parametrize("state", [FAILED, CANCELLED])
def test_D2_nothing_arrived_of_a_load_that_some_rank_did_not_load_however_far_the_ranks_got(state: LoadState) -> None:
    part: dict[str, Any] = {"direct_pages": 4, "direct_bytes": 40, "staged": {"cold": 2}, "staged_bytes": {"cold": 20}}
    result = merged_load(loaded(pages=6, bytes=60, **part), loaded(state, **part))
    assert (result.pages, result.bytes) == (0, 0)
    assert (result.direct_pages, result.direct_bytes) == (8, 80)
    assert (result.staged, result.staged_bytes) == ({"cold": 4}, {"cold": 40})


def test_D2_the_rank_that_said_first_that_it_failed_names_key_and_reason() -> None:
    ledger = RankLedger(4)
    ledger.load_sent(load())
    ledger.reported(2, loaded(CANCELLED))
    ledger.reported(3, loaded(FAILED, failed_key="k3", reason="gone"))
    ledger.reported(0, loaded(FAILED, failed_key="k0", reason="late"))
    (result,) = ledger.reported(1, loaded()).loads
    assert (result.failed_key, result.reason) == ("k3", "gone")


def test_L8_a_page_is_bad_once_and_stays_bad_if_the_pool_named_the_shard_of_any_rank() -> None:
    one, two, three = (BadPage(0, HASHES[block], named=block == 1) for block in range(3))
    of_window = BadPage(1, HASHES[0], named=False)
    named = BadPage(0, HASHES[0], named=True)
    result = merged_load(loaded(FAILED, bad_pages=(one, two)), loaded(), loaded(FAILED, bad_pages=(three, of_window, named)))
    assert result.bad_pages == (named, two, three, of_window)
    # In the order of the ranks, whichever reports first.
    ledger = of_two(loads=[load()])
    ledger.reported(1, loaded(FAILED, bad_pages=(one,)))
    assert ledger.reported(0, loaded(FAILED, bad_pages=(two,))).loads[0].bad_pages == (two, one)
    # Nor does a rank that could have put it take it back.
    assert merged_load(loaded(FAILED, bad_pages=(named,)), loaded(FAILED, bad_pages=(one,))).bad_pages == (named,)


# -- saves


@pytest.mark.parametrize("order_of_ranks", list(permutations(range(3))))
def test_S2_each_block_ends_as_the_rank_ended_it_that_did_worst_by_it(order_of_ranks: tuple[int, ...]) -> None:
    parts = [
        saved(stored=(0, 1, 2), dropped=(3,), bytes=5),
        saved(stored=(0, 3), refused=(2,), dropped=(1,), bytes=6, reason="full"),
        saved(stored=(0, 1), dropped=(2,), refused=(3,), bytes=7, reason="full"),
    ]
    ledger = RankLedger(3)
    ledger.saves_sent([save()])
    told = [ledger.reported(rank, parts[rank]) for rank in order_of_ranks]
    assert told == [NOTHING, NOTHING, saved(stored=(0,), refused=(2, 3), dropped=(1,), bytes=18, reason="full")]


def test_S2_the_first_rank_that_gives_a_reason_gives_it_and_blocks_of_other_saves_are_not_named() -> None:
    ledger = of_two(saves=[save(blocks=[0, 1])])
    ledger.reported(1, saved(refused=(1, 6), dropped=(7,), reason="full"))
    assert ledger.reported(0, saved(refused=(0,), reason="gone")) == saved(refused=(0, 1), reason="full")


def test_S2_a_block_is_stored_that_every_rank_stored_in_the_groups_in_which_it_has_pages() -> None:
    order = SaveOrder(save_id=2, request_id="r", incarnation=7, groups=(columns(0, [3, 4]), columns(1, [1, 3])))
    ledger = of_two(saves=[order])
    # A rank that writes none of these shards names no block.
    ledger.reported(0, saved())
    assert ledger.reported(1, saved(stored=(1, 3, 4), bytes=9)) == saved(stored=(1, 3, 4), bytes=9)


# -- the order of ends, and what is not outstanding


def test_D1_ends_are_told_in_the_order_in_which_the_last_rank_reported_them() -> None:
    ledger = of_two(loads=[load(1), load(3), load(5)], saves=[save(2), save(4)])
    first = PassReport(
        loads=loaded(number=5).loads + loaded(number=1).loads, saves=saved(4, stored=(0,)).saves + saved(2, stored=(0,)).saves
    )
    assert ledger.reported(0, first) == NOTHING
    assert ledger.reported(0, loaded(number=3)) == NOTHING
    told = ledger.reported(
        1, PassReport(loads=loaded(number=1).loads + loaded(number=5).loads, saves=saved(2).saves + saved(4).saves)
    )
    assert [result.load_id for result in told.loads] == [1, 5]
    assert [result.save_id for result in told.saves] == [2, 4]
    assert ledger.active == 1


@pytest.mark.parametrize("rank", [-1, 2])
def test_D1_a_rank_that_the_server_does_not_have_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} reports to a server of 2 ranks"):
        RankLedger(2).reported(rank, NOTHING)


def test_D1_a_number_that_is_outstanding_is_not_given_twice() -> None:
    ledger = of_two(loads=[load(1)], saves=[save(2)])
    with pytest.raises(AssertionError, match="load 1 is outstanding"):
        ledger.load_sent(load(1))
    with pytest.raises(AssertionError, match="save 2 is outstanding"):
        ledger.saves_sent([save(2)])


def test_D2_what_a_rank_says_twice_counts_once_and_what_nobody_waits_for_changes_nothing() -> None:
    ledger = of_two(loads=[load(1)], saves=[save(2)])
    assert ledger.withdrawn(withdrawal()) is None
    both = PassReport(loads=loaded().loads * 2, saves=saved(bytes=3).saves * 2, unread=unread().unread * 2)
    assert ledger.reported(0, both) == NOTHING
    assert ledger.reported(0, both) == NOTHING
    told = ledger.reported(1, both)
    assert (len(told.loads), len(told.saves), len(told.unread)) == (1, 1, 1)
    assert told.saves[0].bytes == 6
    assert ledger.active == 0
    assert ledger.reported(0, both) == ledger.reported(1, both) == NOTHING


def test_D2_a_load_that_ended_may_be_told_again_under_its_number() -> None:
    ledger = of_two(loads=[load(1)])
    ledger.reported(0, loaded())
    ledger.reported(1, loaded())
    ledger.load_sent(load(1))
    assert ledger.active == 1


# -- withdrawals


def test_S7_an_incarnation_of_which_nothing_is_outstanding_is_unread_at_once() -> None:
    ledger = of_two(loads=[load(1, incarnation=8)])
    assert ledger.withdrawn(withdrawal()) == PagesUnread(request_id="r", incarnation=7)
    assert ledger.active == 1


@pytest.mark.parametrize("orders", [{"loads": [load()]}, {"saves": [save()]}, {"saves": [save(snapshot=True)]}])
def test_S7_pages_are_unread_when_the_last_rank_says_so(orders: dict[str, Any]) -> None:
    ledger = of_two(**orders)
    assert ledger.withdrawn(withdrawal()) is None
    assert ledger.active == 2
    assert ledger.reported(1, unread()) == NOTHING
    assert ledger.reported(0, unread()) == unread()
    assert ledger.active == 1
    # The order itself ends on its own.
    assert ledger.reported(0, unread()) == NOTHING


def test_S7_an_incarnation_that_ended_on_every_rank_but_one_is_outstanding() -> None:
    ledger = of_two(loads=[load()], saves=[save()])
    ledger.reported(0, loaded())
    ledger.reported(1, loaded())
    ledger.reported(0, saved())
    assert ledger.withdrawn(withdrawal()) is None
    ledger.reported(1, saved())
    # Ended since, but a rank that was asked has not answered: it is waited for, also by who withdraws a second time.
    assert ledger.reported(0, unread()) == NOTHING
    assert ledger.withdrawn(withdrawal()) is None
    assert ledger.reported(1, unread()) == unread()
    assert ledger.withdrawn(withdrawal()) == PagesUnread(request_id="r", incarnation=7)


# -- what ranks may touch


def test_M1_touched_are_the_pages_of_loads_and_of_saves_that_read_them_live() -> None:
    window = save(6, first_page=60, snapshot=True)
    ledger = of_two(loads=[load()], saves=[save(2, first_page=40), window])
    assert ledger.touched == [*load().groups, *save(2, first_page=40).groups]
    assert ledger.touched_pages(3) == ((10, 11, 12, 13, 40, 41, 42, 43), (32, 33, 60, 61, 62, 63), ())
    ledger.reported(0, loaded())
    ledger.reported(0, saved())
    assert ledger.touched_pages(2) == ((10, 11, 12, 13, 40, 41, 42, 43), (32, 33, 60, 61, 62, 63))
    ledger.reported(1, loaded())
    ledger.reported(1, saved())
    assert ledger.touched == []
    assert ledger.touched_pages(2) == ()


def test_M8_a_lost_ledger_waits_for_nothing_and_hears_nothing() -> None:
    ledger = of_two(loads=[load()], saves=[save()])
    ledger.withdrawn(withdrawal())
    ledger.reported(0, loaded(FAILED, quarantined=((10,), ())))
    ledger.lost()
    assert (ledger.active, ledger.touched, ledger.quarantined, ledger.touched_pages(2)) == (0, [], [], ())
    late = PassReport(loads=loaded().loads, saves=saved().saves, unread=unread().unread, released=released((10,), ()).released)
    assert ledger.reported(0, late) == ledger.reported(1, late) == NOTHING
    assert ledger.withdrawn(withdrawal()) == PagesUnread(request_id="r", incarnation=7)


def test_M8_for_a_rank_that_has_ended_is_answered_what_it_has_not_said_itself() -> None:
    ledger = of_two(loads=[load()], saves=[save()])
    assert ledger.withdrawn(withdrawal()) is None
    ledger.reported(0, loaded())
    ledger.reported(0, saved(stored=(0, 1, 2, 3)))
    ledger.reported(0, unread())
    # What it said before it ended stands.
    ledger.reported(1, loaded(CANCELLED))
    rest = ledger.unanswered(1)
    assert (rest.loads, [one.save_id for one in rest.saves], len(rest.unread)) == ((), [2], 1)
    ended = ledger.reported(1, rest)
    assert [(one.refused, one.stored, one.reason) for one in ended.saves] == [((0, 1, 2, 3), (), "rank_ended")]
    assert len(ended.unread) == 1
    assert ledger.active == 0
    assert ledger.unanswered(1) == NOTHING
    ledger.load_sent(load(number=9))
    assert [(one.load_id, one.state, one.reason) for one in ledger.unanswered(1).loads] == [(9, FAILED, "rank_ended")]
