"""How many slots the snapshot ring has (S3, S4; the defaults' table)."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.ring import closing_pages, ring_slots
from akv.plan.window import closing_window, finishing_window
from akv.values.layout import LayerGroup, Region

T = 32
FULL = LayerGroup(layers=(0,), dtype="bfloat16", kv_heads=4, head_size=64, regions=(Region(name="k", bytes_per_page=100),))


def window(tokens: int, sinks: int = 0) -> LayerGroup:
    return msgspec.structs.replace(FULL, attention="sliding_window", window_tokens=tokens, sink_tokens=sinks)


def pages(blocks: list[range]) -> int:
    return sum(len(some) for some in blocks)


@pytest.mark.parametrize("asked", [0, 1, 1000])
def test_S4_without_windows_there_is_no_ring(asked: int) -> None:
    assert ring_slots([FULL, FULL], 1024, T, asked) == 0


@pytest.mark.parametrize(
    ("groups", "rewind", "slots"),
    [
        # 64 blocks each, as in W4's table: two closing passes are fewer than the least.
        ([window(1000)], 1024, 256),
        # 96 blocks each, and 2 of sinks.
        ([window(2048, sinks=40), FULL, window(2048)], 1024, 2 * (98 + 96)),
        # The rewind counts as one block at least, since a repeated prompt resumes one earlier (W3).
        ([window(10_241)], 0, 2 * 321),
        ([window(10_242)], 0, 2 * 322),
        # Windows shorter than a block.
        ([window(1)] * 200, 0, 400),
    ],
)
def test_S4_by_default_two_closing_passes_and_at_least_256(groups: list[LayerGroup], rewind: int, slots: int) -> None:
    assert ring_slots(groups, rewind, T, 0) == slots


@pytest.mark.parametrize("asked", [1, 255, 5000])
def test_S4_what_is_asked_for_is_taken(asked: int) -> None:
    assert ring_slots([window(1000)], 1024, T, asked) == asked


SHAPES = st.tuples(st.integers(1, 70), st.integers(0, 20), st.integers(1, 9))
TOKENS = st.integers(0, 300)


@given(SHAPES, TOKENS, TOKENS, TOKENS, TOKENS, st.integers(0, 3), st.none() | st.integers(0, 60))
def test_W3_no_end_lists_more_pages_than_are_counted(
    shape: tuple[int, int, int],
    tokens: int,
    before: int,
    rewind: int,
    retention: int,
    lookahead: int,
    resumed_at: int | None,
) -> None:
    most = closing_pages([FULL, window(*shape[:2])], rewind, shape[2])
    chain_length = max(0, tokens - lookahead) // shape[2]
    held: dict[str, Any] = {"rewind_tokens": rewind, "retention_tokens": retention, "resumed_at": resumed_at}
    assert pages(closing_window(tokens, chain_length, min(before, tokens), *shape, **held)) <= most
    assert pages(finishing_window(tokens, *shape, **held)) <= most


@given(SHAPES, st.integers(0, 100))
def test_W3_a_long_prompt_that_is_computed_at_once_lists_as_many(shape: tuple[int, int, int], rewind: int) -> None:
    """Whole blocks of prompt, so that the end before the last is included; the count is no more than is needed."""
    blocks = 40 + 100 + 70 + 20
    listed = closing_window(blocks * shape[2], blocks, 0, *shape, rewind_tokens=rewind, retention_tokens=0, resumed_at=None)
    assert pages(listed) == closing_pages([window(*shape[:2])], rewind, shape[2])
