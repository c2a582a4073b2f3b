"""Taking less of an offer, and which scopes are one (K5, L6)."""

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


def test_K5_the_empty_scope_has_no_salt() -> None:
    assert Scope() == EMPTY_SCOPE
    assert Scope(salt="a") != Scope(salt="b")
