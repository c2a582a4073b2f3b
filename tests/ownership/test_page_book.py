"""Which pages are in the connector's hands, and those in quarantine: named once, released once (D2, D6, M3)."""

import pytest

from akv.ownership.page_book import PageBook
from akv.values.messages import GroupPages, PagesPerGroup, PagesReleased

R = ("r", 1)
OTHER = ("other", 2)


def released(pages: PagesPerGroup, who: tuple[str, int] = R) -> PagesReleased:
    return PagesReleased(request_id=who[0], incarnation=who[1], pages=pages)


def columns(group: int, *pages: int) -> GroupPages:
    """Pages of blocks 10, 11, and so on."""
    return GroupPages(group, tuple(range(10, 10 + len(pages))), pages, (b"h" * 16,) * len(pages))


@pytest.fixture
def book() -> PageBook:
    return PageBook(2)


def test_D2_pages_in_quarantine_are_named_once_in_the_groups_of_the_layout(book: PageBook) -> None:
    book.quarantine(R, ((5, 3), ()))
    book.quarantine(R, ((), (3,)))
    assert book.tell(R) == ((3, 5), (3,))
    assert book.tell(R) == ()
    book.quarantine(R, ((7,), ()))
    assert book.tell(R) == ((7,), ()), "what came later is named by the next"


def test_D2_what_is_not_in_quarantine_is_not_named(book: PageBook) -> None:
    book.quarantine(R, ())
    assert book.tell(R) == ()
    book.quarantine(OTHER, ((1,), ()))
    assert book.tell(R) == ()
    assert book.quarantined == {(0, 1): 1}


def test_D2_a_named_page_is_released_to_the_engine_once(book: PageBook) -> None:
    book.quarantine(R, ((1, 2), (3,)))
    book.tell(R)
    assert book.release(released(((1,), ()))) == released(((1,), ()))
    assert book.quarantined == {(0, 2): 1, (1, 3): 1}
    assert book.release(released(((2,), (3,)))) == released(((2,), (3,)))
    assert book.quarantined == {}
    with pytest.raises(KeyError):
        book.release(released(((2,), ())))


def test_D2_a_page_released_before_it_was_named_is_never_spoken_of(book: PageBook) -> None:
    book.quarantine(R, ((1, 2), ()))
    assert book.release(released(((1,), ()))) is None
    assert book.tell(R) == ((2,), ())
    assert book.release(released(((2,), ()))) == released(((2,), ()))
    assert (book.tell(R), book.quarantined) == ((), {})


def test_D2_a_release_names_only_what_was_named(book: PageBook) -> None:
    book.quarantine(R, ((1,), ()))
    book.tell(R)
    book.quarantine(R, ((2,), ()))
    assert book.release(released(((2, 1), ()))) == released(((1,), ()))


def test_D2_a_page_that_two_calls_touch_is_released_with_the_later(book: PageBook) -> None:
    """As of a block that was saved, and asked for again (S8)."""
    book.quarantine(R, ((1, 1, 2), ()))
    assert book.tell(R) == ((1, 2), ())
    assert book.quarantined == {(0, 1): 1, (0, 2): 1}
    assert book.release(released(((1, 2), ()))) == released(((2,), ()))
    assert book.is_filled(0, 1), "the other call touches it still"
    assert book.release(released(((1,), ()))) == released(((1,), ()))
    assert not book.is_filled(0, 1)


def test_D2_a_call_on_a_named_page_that_comes_later_holds_it_and_is_not_named_again(book: PageBook) -> None:
    book.quarantine(R, ((1,), ()))
    book.tell(R)
    book.quarantine(R, ((1,), ()))
    assert book.tell(R) == ()
    assert book.release(released(((1,), ()))) is None
    assert book.release(released(((1,), ()))) == released(((1,), ()))


def test_D2_two_incarnations_that_share_a_page_name_and_release_it_each(book: PageBook) -> None:
    book.quarantine(R, ((1,), ()))
    book.quarantine(OTHER, ((1,), ()))
    assert (book.tell(R), book.tell(OTHER)) == (((1,), ()), ((1,), ()))
    assert book.quarantined == {(0, 1): 2}
    assert book.release(released(((1,), ()))) == released(((1,), ()))
    assert book.is_filled(0, 1)
    assert book.release(released(((1,), ()), OTHER)) == released(((1,), ()), OTHER)
    assert not book.is_filled(0, 1)


def test_D2_in_use_names_block_group_page_and_who(book: PageBook) -> None:
    asked = [columns(0, 1, 2, 3), columns(1, 1, 2, 3)]
    assert book.in_use(asked) is None
    book.quarantine(R, ((), (3,)))
    assert book.in_use(asked) == (12, 1, 3, "a store call that was given up still touches")
    book.pin([columns(1, 2)])
    assert book.in_use(asked) == (11, 1, 2, "a save reads")
    book.lend([columns(0, 2)])
    assert book.in_use(asked) == (11, 0, 2, "another load fills")
    book.returned([columns(0, 2)])
    book.unpin([columns(1, 2)])
    book.release(released(((), (3,))))
    assert book.in_use(asked) is None


def test_S1_a_page_is_filled_while_a_load_or_a_given_up_call_may_write_it(book: PageBook) -> None:
    book.lend([columns(1, 4)])
    assert (book.is_filled(1, 4), book.is_filled(0, 4)) == (True, False)
    book.returned([columns(1, 4)])
    assert not book.is_filled(1, 4)
    book.pin([columns(1, 4)])
    assert not book.is_filled(1, 4), "a save reads it only"
    book.quarantine(R, ((), (4,)))
    assert (book.is_filled(1, 4), book.is_filled(0, 4)) == (True, False)


def test_S7_a_page_is_pinned_until_every_save_that_reads_it_ended(book: PageBook) -> None:
    book.pin([columns(0, 1, 2)])
    book.pin([columns(0, 2)])
    assert book.saving == {(0, 1): 1, (0, 2): 2}
    book.unpin([columns(0, 1, 2)])
    assert book.saving == {(0, 2): 1}
    book.unpin([columns(0, 2)])
    assert book.saving == {}


def test_D2_a_page_that_comes_into_quarantine_again_is_named_again(book: PageBook) -> None:
    book.quarantine(R, ((1, 2), ()))
    book.tell(R)
    book.release(released(((1,), ())))
    book.quarantine(R, ((1,), ()))
    assert book.tell(R) == ((1,), ())
    assert book.release(released(((1,), ()))) == released(((1,), ()))
