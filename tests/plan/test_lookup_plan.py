"""Which blocks are asked for, in which portions, and what the answers amount to (L1, L2, L3, W7)."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import EngineContractError
from akv.plan.lookup import LookupRange, lookup_range, offer_of, prefix_length, probe_batches
from akv.values.offers import LookupOutcome


@pytest.mark.parametrize(
    ("tokens", "local_tokens", "expected"),
    [
        (33, 0, LookupRange(0, 1, 32)),
        (32, 0, LookupOutcome.SKIPPED),
        (65, 32, LookupRange(1, 2, 32)),
        (64, 32, LookupOutcome.SKIPPED),
        (64, 64, LookupOutcome.SKIPPED),
        (100, 31, LookupOutcome.UNALIGNED),
        (100, 99, LookupOutcome.UNALIGNED),
        (10_015, 0, LookupRange(0, 312, 32)),
        (9_984, 0, LookupRange(0, 311, 32)),
        (1, 0, LookupOutcome.SKIPPED),
        (0, 0, LookupOutcome.SKIPPED),
    ],
)
def test_L1_the_range_of_a_lookup(tokens: int, local_tokens: int, expected: LookupRange | LookupOutcome) -> None:
    assert lookup_range(tokens, local_tokens, 32) == expected


@pytest.mark.parametrize(
    ("tokens", "local_tokens", "lookahead", "expected"),
    [
        (33, 0, 1, LookupRange(0, 1, 32)),
        (66, 0, 3, LookupRange(0, 1, 32)),
        (67, 0, 3, LookupRange(0, 2, 32)),
        (66, 32, 3, LookupOutcome.SKIPPED),
        # A local match beyond the chain.
        (66, 64, 3, LookupOutcome.SKIPPED),
        (66, 65, 3, LookupOutcome.UNALIGNED),
        (2, 0, 3, LookupOutcome.SKIPPED),
    ],
)
def test_K2_the_range_of_a_lookup_ends_with_the_chain(
    tokens: int, local_tokens: int, lookahead: int, expected: LookupRange | LookupOutcome
) -> None:
    assert lookup_range(tokens, local_tokens, 32, lookahead=lookahead) == expected


@given(st.integers(0, 60), st.data(), st.integers(1, 9))
def test_L1_an_offer_starts_at_the_local_match_and_leaves_a_token_to_compute(
    tokens: int, data: st.DataObject, tokens_per_block: int
) -> None:
    local = data.draw(st.integers(0, tokens))
    offerable = [
        block
        for block in range(tokens)
        if block * tokens_per_block >= local and (block + 1) * tokens_per_block <= tokens - 1 and local % tokens_per_block == 0
    ]
    asked = lookup_range(tokens, local, tokens_per_block)
    if isinstance(asked, LookupRange):
        assert list(range(asked.first, asked.last)) == offerable
        assert asked.first * tokens_per_block == local
    else:
        assert offerable == []
        assert asked is (LookupOutcome.UNALIGNED if local % tokens_per_block else LookupOutcome.SKIPPED)


@pytest.mark.parametrize(("tokens", "local_tokens"), [(10, 11), (10, -1), (-1, 0)])
def test_L1_an_impossible_local_match_is_the_engines_fault_and_names_the_request(tokens: int, local_tokens: int) -> None:
    with pytest.raises(EngineContractError, match=f"'r1': a local match of {local_tokens} tokens in a sequence of {tokens}"):
        lookup_range(tokens, local_tokens, 4, request_id="r1")


def test_L3_a_cold_prompt_costs_one_small_call_and_then_chunks_follow() -> None:
    assert list(probe_batches(2, 14, groups=2, head=4, chunk=10)) == [range(2, 4), range(4, 9), range(9, 14)]


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 5), st.integers(1, 70), st.integers(1, 100))
def test_L3_portions_cover_the_range_once_in_order_within_their_bounds(
    first: int, blocks: int, groups: int, head: int, chunk: int
) -> None:
    portions = list(probe_batches(first, first + blocks, groups, head, chunk))
    assert [block for portion in portions for block in portion] == list(range(first, first + blocks))
    for index, portion in enumerate(portions):
        bound = chunk if index else head
        assert len(portion) == 1 or len(portion) * groups <= bound
        if index < len(portions) - 1:
            assert (len(portion) + 1) * groups > bound


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2)))
def test_L2_a_block_counts_only_if_all_its_pages_are_there(answers: list[list[bool]]) -> None:
    length = prefix_length(answers)
    assert all(all(block) for block in answers[:length])
    assert length == len(answers) or not all(answers[length])


def test_L2_nothing_is_read_past_the_first_hole() -> None:
    def answers() -> Iterator[tuple[bool, ...]]:
        yield (True, True)
        yield (True, False)
        pytest.fail("read past the hole")

    assert prefix_length(answers()) == 1


def test_W7_an_offer_is_what_was_found_and_a_miss_where_nothing_was() -> None:
    asked = LookupRange(3, 7, 32)
    assert offer_of(asked, 0) == (0, LookupOutcome.FULL_ATTENTION_MISS)
    assert offer_of(asked, 1) == (32, LookupOutcome.FULL)
    assert offer_of(asked, 4) == (128, LookupOutcome.FULL)


@pytest.mark.parametrize("found", [-1, 5])
def test_W7_blocks_that_were_not_asked_for_are_never_offered(found: int) -> None:
    with pytest.raises(ValueError, match=f"{found} blocks found of the 4 asked for"):
        offer_of(LookupRange(3, 7, 32), found)
