"""What a pass computes: whole chunks at fixed places, decoding first, within the bounds."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from akv_testing.engine.schedule import PassShape, next_pass

SHAPE = PassShape(chunk_tokens=16, max_tokens=24, max_running=4)


@dataclass
class Request:
    computed: int
    length: int
    generated: int = 0
    drafts: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.length - self.generated


def counts(requests: list[Request], shape: PassShape = SHAPE) -> list[tuple[int, int]]:
    """(position of the request, tokens) of each part."""
    return [(requests.index(request), count) for request, count in next_pass(requests, shape)]


def test_nothing_to_do_is_no_pass() -> None:
    assert counts([]) == []


def test_a_chunk_ends_at_a_multiple_wherever_it_begins() -> None:
    assert counts([Request(0, 100)]) == [(0, 16)]
    assert counts([Request(5, 100)]) == [(0, 11)]
    assert counts([Request(16, 100)]) == [(0, 16)]
    assert counts([Request(96, 100)]) == [(0, 4)]


def test_a_chunk_is_never_cut_to_what_is_left_of_the_pass() -> None:
    assert counts([Request(0, 100), Request(1, 100), Request(10, 100)]) == [(0, 16), (2, 6)]


def test_decoding_requests_are_served_before_prompts() -> None:
    assert counts([Request(0, 100), Request(20, 21), Request(30, 31)]) == [(1, 1), (2, 1), (0, 16)]


def test_drafts_take_room_in_a_pass() -> None:
    shape = PassShape(chunk_tokens=16, max_tokens=24, max_running=2)
    assert counts([Request(30, 31, drafts=7), Request(0, 100)], shape) == [(0, 1), (1, 16)]
    assert counts([Request(30, 31, drafts=8), Request(0, 100)], shape) == [(0, 1)]


def test_only_so_many_run_at_a_time_the_earliest_first() -> None:
    assert counts([Request(i + 1, i + 2) for i in range(6)]) == [(0, 1), (1, 1), (2, 1), (3, 1)]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=8),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(0, 20),
)
def test_every_pass_keeps_its_bounds_and_moves_the_earliest(
    progress: list[tuple[int, int]], chunk: int, running: int, spare: int
) -> None:
    shape = PassShape(chunk_tokens=chunk, max_tokens=chunk + running + spare, max_running=running)
    requests = [Request(computed, computed + waiting) for computed, waiting in progress]
    parts = next_pass(requests, shape)
    assert len(parts) <= running
    assert sum(count for _, count in parts) <= shape.max_tokens
    assert len({id(request) for request, _ in parts}) == len(parts)
    for request, count in parts:
        end = request.computed + count
        assert count > 0
        assert end == request.length or end % chunk == 0
        assert end <= request.length
    decoding = {id(request) for request in requests[:running] if request.length - request.computed == 1}
    assert decoding <= {id(request) for request, _ in parts}
    prompts = [request for request in requests[:running] if request.length - request.computed > 1]
    if prompts:  # the earliest prompt always fits: no number of others starves it
        assert any(request is prompts[0] for request, _ in parts)
