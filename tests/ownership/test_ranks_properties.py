"""In whatever order the ranks of a server report, the same comes of it (D1, D2, S2)."""

from collections import defaultdict

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from akv.ownership.ranks import RankLedger
from akv.values.messages import (
    BadPage,
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    PagesUnread,
    PassReport,
    SaveOrder,
    SaveResult,
    Withdrawal,
)

WORLD, BLOCKS = 3, range(4)
COLUMNS = GroupPages(0, tuple(BLOCKS), (10, 11, 12, 13), tuple(bytes([block]) * 16 for block in BLOCKS))
LOADS = [LoadOrder(load_id=n, request_id="r", incarnation=n, groups=(COLUMNS,)) for n in (1, 2)]
SAVES = [SaveOrder(save_id=n, request_id="r", incarnation=n - 2, groups=(COLUMNS,)) for n in (3, 4)]

bad_pages = st.builds(BadPage, st.just(0), st.sampled_from(COLUMNS.hashes), st.booleans())
quarantined = st.lists(st.sampled_from(COLUMNS.pages), max_size=3).map(lambda pages: (tuple(pages),) if pages else ())


@st.composite
def load_ends(draw: st.DrawFn, order: LoadOrder) -> PassReport:
    state = draw(st.sampled_from(LoadState))
    failed = state is LoadState.FAILED
    end = LoadResult(
        load_id=order.load_id,
        request_id="r",
        incarnation=order.incarnation,
        state=state,
        pages=4 if state is LoadState.LOADED else 0,
        bytes=draw(st.integers(0, 9)) if state is LoadState.LOADED else 0,
        direct_pages=draw(st.integers(0, 4)),
        staged=draw(st.dictionaries(st.sampled_from("ab"), st.integers(1, 4))),
        failed_key=draw(st.sampled_from("kl")) if failed else "",
        reason=draw(st.sampled_from("xy")) if failed else "",
        bad_pages=tuple(draw(st.lists(bad_pages, max_size=3))) if failed else (),
        quarantined=() if state is LoadState.LOADED else draw(quarantined),
    )
    return PassReport(loads=(end,))


@st.composite
def save_ends(draw: st.DrawFn, order: SaveOrder) -> PassReport:
    lists: dict[str, list[int]] = defaultdict(list)
    for block in BLOCKS:
        lists[draw(st.sampled_from("srd"))].append(block)
    end = SaveResult(
        save_id=order.save_id,
        request_id="r",
        incarnation=order.incarnation,
        stored=tuple(lists["s"]),
        refused=tuple(lists["r"]),
        dropped=tuple(lists["d"]),
        bytes=draw(st.integers(0, 9)),
        reason=draw(st.sampled_from("xy")) if lists["r"] else "",
    )
    return PassReport(saves=(end,))


unread_ends = quarantined.map(
    lambda pages: PassReport(unread=(PagesUnread(request_id="r", incarnation=1, quarantined=pages),))
)
every_rank = st.tuples(*(st.tuples(*map(load_ends, LOADS), *map(save_ends, SAVES), unread_ends) for _ in range(WORLD))).map(
    lambda ranks: [(rank, report) for rank, reports in enumerate(ranks) for report in reports]
)


def outcome(reports: list[tuple[int, PassReport]]) -> tuple[PassReport, dict[int, set[int]]]:
    """All that is told if these reports come in this order, by number; and the pages in quarantine by incarnation, each of
    which is named once.
    """
    ledger = RankLedger(WORLD)
    for order in LOADS:
        ledger.load_sent(order)
    ledger.saves_sent(SAVES)
    assert ledger.withdrawn(Withdrawal(request_id="r", incarnation=1)) is None
    told = [ledger.reported(rank, report) for rank, report in reports]
    loads = sorted((load for report in told for load in report.loads), key=lambda load: load.load_id)
    saves = sorted((save for report in told for save in report.saves), key=lambda save: save.save_id)
    unread = [message for report in told for message in report.unread]
    assert ledger.active == 0
    named: dict[int, list[int]] = defaultdict(list)
    tables = [(load.incarnation, load.quarantined) for load in loads]
    tables += [(message.incarnation, message.quarantined) for message in unread]
    for incarnation, table in tables:
        for pages in table:
            named[incarnation].extend(pages)
    assert all(len(pages) == len(set(pages)) for pages in named.values())
    # Which of two ends names a page of both is the first one's.
    bare = PassReport(
        loads=tuple(msgspec.structs.replace(load, failed_key="", reason="", quarantined=()) for load in loads),
        saves=tuple(msgspec.structs.replace(save, reason="") for save in saves),
        unread=tuple(msgspec.structs.replace(message, quarantined=()) for message in unread),
    )
    return bare, {incarnation: set(pages) for incarnation, pages in named.items()}


@given(reports=every_rank, data=st.data())
def test_D1_D2_S2_every_order_of_arrival_ends_each_load_and_save_once_and_alike(
    reports: list[tuple[int, PassReport]], data: st.DataObject
) -> None:
    told, named = outcome(reports)
    assert [load.load_id for load in told.loads] == [1, 2]
    assert [save.save_id for save in told.saves] == [3, 4]
    assert len(told.unread) == 1
    assert outcome(data.draw(st.permutations(reports))) == (told, named)
