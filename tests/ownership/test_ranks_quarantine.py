"""Pages in quarantine on some ranks of a server: out of use until the last rank released them, told once (D2, D6)."""

from akv.ownership.ranks import RankLedger
from akv.values.messages import (
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

NOTHING = PassReport()
PAGES = GroupPages(0, (0, 1, 2), (10, 11, 12), (b"a" * 16, b"b" * 16, b"c" * 16))


def waiting(world: int = 2) -> RankLedger:
    """A load and a save of one incarnation are outstanding, and it was withdrawn."""
    ledger = RankLedger(world)
    ledger.load_sent(LoadOrder(load_id=1, request_id="r", incarnation=7, groups=(PAGES,)))
    ledger.saves_sent([SaveOrder(save_id=2, request_id="r", incarnation=7, groups=(PAGES,))])
    assert ledger.withdrawn(Withdrawal(request_id="r", incarnation=7)) is None
    return ledger


def cancelled(*quarantined: tuple[int, ...]) -> PassReport:
    result = LoadResult(load_id=1, request_id="r", incarnation=7, state=LoadState.CANCELLED, quarantined=quarantined)
    return PassReport(loads=(result,))


def unread(*quarantined: tuple[int, ...]) -> PassReport:
    return PassReport(unread=(PagesUnread(request_id="r", incarnation=7, quarantined=quarantined),))


def released(*pages: tuple[int, ...], incarnation: int = 7) -> PassReport:
    return PassReport(released=(PagesReleased(request_id="r", incarnation=incarnation, pages=pages),))


def kept(ledger: RankLedger) -> PagesPerGroup:
    """What is in quarantine, and nothing else once the rest has ended."""
    return tuple(columns.pages for columns in ledger.quarantined)


def test_D2_an_end_names_each_page_once_that_is_in_quarantine_on_any_rank() -> None:
    ledger = waiting(3)
    ledger.reported(0, cancelled((10, 11), ()))
    ledger.reported(1, cancelled())
    # Two calls of one rank may touch a page.
    assert ledger.reported(2, cancelled((11, 11), (31,))) == cancelled((10, 11), (31,))
    assert kept(ledger) == ((10, 11), (31,))


def test_D2_a_page_leaves_when_the_last_call_of_the_last_rank_returned_and_is_told_once() -> None:
    ledger = waiting()
    ledger.reported(0, cancelled((10, 11), ()))
    ledger.reported(1, cancelled((11, 11), (31,)))
    assert ledger.reported(1, released((11,), ())) == NOTHING
    assert ledger.reported(0, released((10, 11), ())) == released((10,), ())
    assert kept(ledger) == ((11,), (31,))
    assert ledger.reported(1, released((11,), (31,))) == released((11,), (31,))
    assert kept(ledger) == ()
    assert not ledger._quarantine._kept, "an incarnation left a trace"


def test_D2_an_end_without_pages_in_quarantine_leaves_no_trace() -> None:
    ledger = waiting()
    ledger.reported(0, cancelled((), ()))
    assert ledger.reported(1, cancelled((), ())) == cancelled()
    assert not ledger._quarantine._kept


def test_D2_a_rank_releases_only_what_it_keeps_back_itself() -> None:
    ledger = waiting()
    ledger.reported(0, cancelled((10,)))
    ledger.reported(1, cancelled((11,)))
    # Said twice, and of pages that the other rank's calls still touch.
    assert ledger.reported(1, released((10, 11))) == released((11,))
    assert ledger.reported(1, released((10, 11))) == NOTHING
    assert kept(ledger) == ((10,),)


def test_D2_a_release_of_what_no_end_named_is_not_told() -> None:
    ledger = waiting()
    assert ledger.reported(0, released((10,))) == NOTHING
    ledger.reported(0, cancelled((10,)))
    assert ledger.reported(0, released((10,), incarnation=8)) == NOTHING
    assert kept(ledger) == ((10,),)


def test_D2_a_page_that_a_rank_released_before_the_last_one_reported_is_not_named() -> None:
    ledger = waiting()
    ledger.reported(0, cancelled((10, 11), ()))
    assert ledger.reported(0, released((10,), ())) == NOTHING
    assert kept(ledger) == ((11,),)
    assert ledger.reported(1, cancelled()) == cancelled((11,), ())
    # Nor does another end name it.
    ledger.reported(0, unread((11,), ()))
    assert ledger.reported(1, unread()) == unread()
    assert ledger.reported(0, released((11,), ())) == NOTHING
    assert ledger.reported(0, released((11,), ())) == released((11,), ())


def test_D2_nor_is_one_that_is_released_in_the_report_that_names_it() -> None:
    ledger = waiting()
    ledger.reported(0, cancelled())
    assert ledger.reported(1, PassReport(loads=cancelled((10,)).loads, released=released((10,)).released)) == cancelled()
    ledger.reported(0, unread())
    assert ledger.reported(1, PassReport(unread=unread((11,)).unread, released=released((11,)).released)) == unread()
    assert kept(ledger) == ()


def test_D6_a_page_that_one_end_named_is_not_named_by_another_and_waits_for_both() -> None:
    ledger = waiting()
    ledger.reported(0, cancelled((10,)))
    assert ledger.reported(1, cancelled()) == cancelled((10,))
    ledger.reported(0, unread())
    assert ledger.reported(1, unread((10, 12))) == unread((12,))
    assert ledger.reported(0, released((10,))) == NOTHING
    assert ledger.reported(1, released((10, 12))) == released((10, 12))


def test_D6_a_page_that_was_released_may_be_named_again() -> None:
    ledger = waiting()
    ledger.reported(0, cancelled((10, 11)))
    ledger.reported(1, cancelled())
    assert ledger.reported(0, released((10,))) == released((10,))
    ledger.reported(0, unread())
    assert ledger.reported(1, unread((10,))) == unread((10,))
    assert ledger.reported(1, released((10,))) == released((10,))
    assert kept(ledger) == ((11,),)


def test_M3_pages_in_quarantine_are_touched_when_nothing_is_outstanding_any_more() -> None:
    ledger = waiting()
    for rank in range(2):
        ledger.reported(rank, cancelled((11,), ()))
        ledger.reported(rank, unread((), (31,)))
        ledger.reported(rank, PassReport(saves=(SaveResult(save_id=2, request_id="r", incarnation=7, dropped=(0, 1, 2)),)))
    assert (ledger.active, ledger.touched) == (0, [])
    assert ledger.quarantined == [GroupPages(0, (), (11,), ()), GroupPages(1, (), (31,), ())]
    assert ledger.touched_pages(3) == ((11,), (31,), ())
