"""Taking less of an offer, and which scopes are one (K5, L6, W8)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.values.offers import LookupOutcome, Offer
from akv.values.scope import EMPTY_SCOPE, Scope

OFFER = Offer(request_id="r1", incarnation=3, local_tokens=8, tokens=12, outcome=LookupOutcome.FULL, tokens_per_block=4)


@pytest.mark.parametrize(("at_most", "tokens"), [(100, 12), (12, 12), (11, 8), (4, 4), (3, 0), (0, 0), (-1, 0), (-9, 0)])
def test_L6_an_offer_is_cut_in_whole_blocks(at_most: int, tokens: int) -> None:
    cut = OFFER.at_most(at_most)
    assert cut == Offer(
        request_id="r1", incarnation=3, local_tokens=8, tokens=tokens, outcome=LookupOutcome.FULL, tokens_per_block=4
    )
    assert OFFER.tokens == 12


@given(st.integers(0, 9), st.integers(-5, 100), st.integers(1, 9))
def test_L6_a_cut_is_the_largest_whole_block_part_that_fits(blocks: int, at_most: int, tokens_per_block: int) -> None:
    offer = Offer(
        request_id="r",
        incarnation=0,
        local_tokens=0,
        tokens=blocks * tokens_per_block,
        outcome=LookupOutcome.FULL,
        tokens_per_block=tokens_per_block,
    )
    fitting = [part * tokens_per_block for part in range(blocks + 1) if part * tokens_per_block <= max(0, at_most)]
    assert offer.at_most(at_most).tokens == max(fitting)


#: The same with window groups: behind 4 tokens of it nothing is known to be resumable.
WINDOWED = msgspec.structs.replace(OFFER, tokens=20, ends=(8, 12, 20))


@pytest.mark.parametrize(
    ("at_most", "ends"),
    [
        (100, (8, 12, 20)),
        (20, (8, 12, 20)),
        (19, (8, 12)),
        (16, (8, 12)),
        (12, (8, 12)),
        (11, (8,)),
        (7, ()),
        (0, ()),
        (-1, ()),
    ],
)
def test_W8_with_windows_an_offer_is_cut_to_an_end_that_is_known_to_be_resumable(at_most: int, ends: tuple[int, ...]) -> None:
    cut = WINDOWED.at_most(at_most)
    assert (cut.tokens, cut.ends) == (ends[-1] if ends else 0, ends)
    assert cut == msgspec.structs.replace(WINDOWED, tokens=cut.tokens, ends=ends)


@given(st.sets(st.integers(1, 30)), st.integers(-5, 130), st.integers(-5, 130))
def test_W8_a_cut_of_a_cut_is_the_smaller_cut(ends: set[int], first: int, second: int) -> None:
    known = tuple(4 * end for end in sorted(ends))
    offer = msgspec.structs.replace(OFFER, tokens=known[-1] if known else 0, ends=known)
    assert offer.at_most(first).at_most(second) == offer.at_most(min(first, second))
    assert offer.at_most(first).tokens == max((end for end in known if end <= first), default=0)


def test_K5_the_empty_scope_has_no_salt() -> None:
    assert Scope() == EMPTY_SCOPE
    assert Scope(salt="a") != Scope(salt="b")
