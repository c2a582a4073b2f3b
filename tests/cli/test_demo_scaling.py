"""How a trace is made smaller: the same beginnings in common, lengths in proportion, nothing alike that was not."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from akv.cli.demo.conversations import common_prefix
from akv.cli.demo.scaling import ID_TOKENS, VOCABULARY, block_tokens, scaled, scaled_lengths
from akv.cli.demo.setting import (
    SEGMENT_BYTES,
    TRACE_KV_BYTES_PER_TOKEN,
    TRACE_TOKENS_PER_BLOCK,
    trace_engine_config,
    trace_segment_bytes,
)
from akv.cli.demo.trace import MOST_IDS, TRACE_BLOCK_TOKENS, TraceRow, read_trace
from akv.cli.demo.trace_job import SCALES

CUT = Path(__file__).parent.parent / "data" / "conversation_trace.jsonl"


@st.composite
def rows(draw: st.DrawFn, ids: st.SearchStrategy[int]) -> TraceRow:
    blocks = draw(st.lists(ids, min_size=1, max_size=6))
    last = draw(st.integers(1, TRACE_BLOCK_TOKENS))
    length = (len(blocks) - 1) * TRACE_BLOCK_TOKENS + last
    return TraceRow(draw(st.integers(0, 10_000)), length, draw(st.integers(0, 2000)), tuple(blocks))


#: Few of them, so that prompts often have a beginning in common; some that are alike in one of the tokens that name them.
few_ids = st.sampled_from([0, 1, 2, VOCABULARY, VOCABULARY + 1, MOST_IDS - 1])
any_ids = st.integers(0, MOST_IDS - 1)
scales = st.sampled_from(SCALES)


@given(rows(few_ids), rows(few_ids), scales)
def test_scaled_prompts_have_exactly_the_scaled_blocks_in_common(one: TraceRow, other: TraceRow, scale: int) -> None:
    size = TRACE_BLOCK_TOKENS // scale
    ours, theirs = scaled(one, scale, 1.0).prompt, scaled(other, scale, 1.0).prompt
    blocks = common_prefix(one.hash_ids, other.hash_ids)
    tokens = common_prefix(ours, theirs)
    assert one.hash_ids == other.hash_ids or ours != theirs
    if blocks < min(len(one.hash_ids), len(other.hash_ids)):
        # So they share these blocks of the trace, and none of the engine's blocks behind them.
        assert blocks * size <= tokens < blocks * size + ID_TOKENS <= blocks * size + TRACE_TOKENS_PER_BLOCK
    else:
        assert tokens == min(len(ours), len(theirs))  # one begins the other


@given(rows(any_ids), scales)
def test_lengths_keep_their_proportion(row: TraceRow, scale: int) -> None:
    request = scaled(row, scale, 1.0)
    assert (len(request.prompt), request.new_tokens) == scaled_lengths(row, scale)
    assert row.input_length <= scale * len(request.prompt) < row.input_length + scale * ID_TOKENS
    assert row.output_length <= scale * request.new_tokens < row.output_length + scale + (not row.output_length)


@given(any_ids, any_ids, scales)
def test_blocks_with_different_ids_differ_however_short_they_are_cut(one: int, other: int, scale: int) -> None:
    size = TRACE_BLOCK_TOKENS // scale
    ours, theirs = block_tokens(one, size), block_tokens(other, size)
    assert (ours[:ID_TOKENS] == theirs[:ID_TOKENS]) is (one == other)
    assert len(ours) == size
    assert all(0 <= token < VOCABULARY for token in ours)


def test_tokens_of_a_block_are_the_same_in_every_process_and_release() -> None:
    assert block_tokens(4099, 6) == (3, 1, 2626, 3133, 3827, 1617)


def test_distinct_prompts_of_the_cut_stay_distinct_and_keep_their_starts() -> None:
    trace = read_trace(CUT)
    requests = [scaled(row, 32, 10.0, trace[0].timestamp) for row in trace]
    assert len({request.prompt for request in requests}) == len({row.hash_ids for row in trace}) > 390
    assert [request.start_s for request in requests[::100]] == [row.timestamp / 10_000 for row in trace[::100]]


def test_starts_count_from_the_first_request() -> None:
    assert scaled(TraceRow(7_500, 1, 1, (0,)), 32, 5.0, 5_000).start_s == 0.5


def test_the_pool_holds_all_pages_of_the_trace() -> None:
    config = trace_engine_config()
    assert config.model.kv_bytes_per_token == TRACE_KV_BYTES_PER_TOKEN
    assert trace_segment_bytes(read_trace(CUT, 1), 32) == SEGMENT_BYTES
    trace = read_trace(CUT)
    for scale in SCALES:
        blocks = {name for row in trace for name in row.hash_ids}
        held = len(blocks) * (TRACE_BLOCK_TOKENS // scale) + sum(scaled_lengths(row, scale)[1] for row in trace)
        assert trace_segment_bytes(trace, scale) > 1.5 * held * TRACE_KV_BYTES_PER_TOKEN
