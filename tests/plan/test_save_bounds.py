"""How far KV may be published, and which passes cannot be true (S1, S12)."""

import operator
from typing import SupportsIndex

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import EngineContractError
from akv.plan.save_bounds import check_scheduled, closing_blocks, savable_blocks, whole_number

COUNT = st.integers(0, 40)


@pytest.mark.parametrize(
    ("computed_before", "honoured", "scheduled", "blocks"),
    [(0, 0, 31, 0), (0, 0, 32, 1), (31, 0, 1, 1), (32, 32, 0, 2), (0, 64, 31, 2), (0, 64, 32, 3), (100, 0, 28, 4)],
)
def test_S1_table(computed_before: int, honoured: int, scheduled: int, blocks: int) -> None:
    assert savable_blocks(computed_before, honoured, scheduled, 32) == blocks


@given(COUNT, COUNT, COUNT, st.integers(1, 9))
def test_S1_only_blocks_whose_every_token_is_computed_are_savable(
    computed_before: int, honoured: int, scheduled: int, tokens_per_block: int
) -> None:
    has_kv = {*range(computed_before), *range(computed_before, computed_before + honoured)}
    has_kv |= set(range(len(has_kv), len(has_kv) + scheduled))
    savable = [
        block for block in range(200) if has_kv.issuperset(range(block * tokens_per_block, (block + 1) * tokens_per_block))
    ]
    assert savable == list(range(savable_blocks(computed_before, honoured, scheduled, tokens_per_block)))


@pytest.mark.parametrize(("computed", "blocks"), [(0, 0), (31, 0), (32, 1), (63, 1), (64, 2)])
def test_S12_a_sequence_closes_at_its_whole_computed_blocks(computed: int, blocks: int) -> None:
    assert closing_blocks(computed, 32) == blocks


@pytest.mark.parametrize("numbers", [(0, 0, 0), (0, 10, 0), (9, 1, 3), (10, 0, 0)])
def test_S1_a_pass_counts_tokens_from_0(numbers: tuple[int, int, int]) -> None:
    check_scheduled("r1", *numbers)


@pytest.mark.parametrize(
    ("numbers", "why"),
    [((-1, 1, 0), "computed_before = -1"), ((0, -2, 0), "with tokens = -2"), ((0, 1, -3), "draft_tokens = -3")],
)
def test_S1_a_pass_that_cannot_be_true_is_refused_by_request_and_number(numbers: tuple[int, int, int], why: str) -> None:
    with pytest.raises(EngineContractError, match=f"'r1': .*{why}"):
        check_scheduled("r1", *numbers)


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, np.int64(7), np.int32(-7)])
def test_S1_numbers_of_an_engine_become_plain_ones(number: SupportsIndex) -> None:
    plain = whole_number("r1", "tokens", number)
    assert (type(plain), plain) == (int, operator.index(number))


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (True, "not a bool"),
        (1.0, "not a float"),
        ("1", "not a str"),
        (None, "not a NoneType"),
        (2**63, "int64"),
        (-(2**63), "int64"),
    ],
)
def test_S1_what_is_no_number_of_64_bits_is_refused_by_name(number: object, why: str) -> None:
    with pytest.raises(EngineContractError, match=f"'r1': tokens is .*{why}"):
        whole_number("r1", "tokens", number)
