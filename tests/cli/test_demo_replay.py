"""How a trace is replayed and compared, without processes and without a pool."""

from functools import partial
from typing import Any, cast

import anyio
import msgspec
import pytest
from rich.console import Console

from akv.cli.demo.jobs import Replayed, TraceFigures, TraceSeconds, TraceTimes
from akv.cli.demo.pagebook import PageBook, block_names
from akv.cli.demo.replay import Replay
from akv.cli.demo.report import show_trace, trace_verdict
from akv.cli.demo.scaling import ReplayedRequest, scaled
from akv.cli.demo.setting import trace_engine_config
from akv.cli.demo.trace import TraceRow
from akv.cli.demo.tracing import TraceComparison
from akv_testing.engine import Engine, Result, open_engine


class TimedEngine:
    """Answers each request after as many seconds as it has new tokens."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, str]] = []

    async def generate(self, request_id: str, prompt: tuple[int, ...], *, max_new_tokens: int, **options: object) -> Result:
        assert options == {"reads_pool": True, "keep_pages": True}
        self.starts.append((anyio.current_time(), request_id))
        await anyio.sleep(max_new_tokens)
        return result_of(request_id=request_id)


@pytest.mark.anyio
async def test_requests_start_in_order_and_when_their_time_has_come() -> None:
    began = anyio.current_time()
    engine, answers = TimedEngine(), list[str]()
    replay = Replay(cast(Engine, engine), reads_pool=True, answered=lambda _, result: answers.append(result.request_id))
    # Ten at once, one while they run, one after them.
    await replay.run([ReplayedRequest(at, (1,), 10 - at) for at in [0] * 10 + [5, 9]])
    assert [name for _, name in engine.starts] == [f"r{n}" for n in range(12)]
    assert [round(at - began, 6) for at, _ in engine.starts] == [0] * 10 + [5, 9]
    assert replay.peak_in_flight == 12
    assert replay.seconds == pytest.approx(10)
    assert sorted(answers) == sorted(f"r{n}" for n in range(12))


@pytest.mark.anyio
async def test_requests_that_do_not_overlap_are_one_at_a_time() -> None:
    replay = Replay(cast(Engine, TimedEngine()), reads_pool=True, answered=lambda request, result: None)
    await replay.run([ReplayedRequest(at, (1,), 1) for at in (0, 2, 4)])
    assert replay.peak_in_flight == 1


def test_Q1_a_page_of_the_replaying_engine_follows_from_its_prefix_alone() -> None:
    # Else two requests that compute a block at the same time could give two values, and nobody knows which one is stored.
    config = trace_engine_config()
    assert config.chunk_tokens == config.tokens_per_block
    # They end behind the first tokens of a block, which a resumed request computes by themselves and the answer completes.
    shared = tuple(range(37))
    prompts = ((*shared, 51, 52, 53), (*shared, 61, 62, 63))
    one, other = (scaled(TraceRow(0, 512 * 39 + 40, 640, ids), 32, 1.0) for ids in prompts)

    async def replayed(*, local_reuse: bool) -> PageBook:
        book = PageBook()
        async with open_engine(config) as engine:
            for number, request in enumerate((one, other, one)):
                result = await engine.generate(
                    f"r{number}",
                    request.prompt,
                    max_new_tokens=request.new_tokens,
                    local_reuse=local_reuse,
                    keep_pages=True,
                )
                assert result.local_tokens == (0, 37 * 16, 39 * 16)[number] * local_reuse
                book.note(request.prompt + result.tokens[:-1], config.tokens_per_block, result.page_digests)
        return book

    cold, resumed = (anyio.run(partial(replayed, local_reuse=local_reuse)) for local_reuse in (False, True))
    assert cold.pages == resumed.pages
    assert cold.contradictions == resumed.contradictions == 0


def test_Q1_a_book_keeps_the_first_note_and_counts_contradictions() -> None:
    book = PageBook()
    book.note((1, 2, 3, 4, 5), 2, [[b"a", b"b"], [b"c", b"d"]])
    book.note((1, 2, 3, 4), 2, [[b"a", b"x"], [b"c", b"d"]])
    assert book.contradictions == 1
    first, second = block_names((1, 2, 3, 4), 2)
    assert book.pages == {first: (b"a", b"c"), second: (b"b", b"d")}
    assert book.known_blocks([first, second, "other"]) == 2
    assert book.known_blocks(["other", first]) == 0
    assert book.differing(second, (b"b", b"d")) == 0
    assert book.differing(second, (b"x", b"d")) == 1
    assert book.differing("other", (b"b", b"d")) == 2
    assert msgspec.json.decode(msgspec.json.encode(book), type=PageBook) == book


def result_of(**fields: Any) -> Result:
    given: dict[str, Any] = {
        "request_id": "r0",
        "tokens": (7, 8),
        "prompt_tokens": 9,
        "local_tokens": 0,
        "from_pool_tokens": 0,
        "ttft_s": 0.5,
        "queue_s": 0.0,
        "lookup_s": 0.0,
        "load_s": 0.0,
    }
    return Result(**(given | fields))


def compared(prompt: tuple[int, ...], *results: Result) -> TraceComparison:
    """Against a process A that computed tokens 1 to 8 in blocks of two, whose pages are b"0" to b"3", and answered 7, 8."""
    book = PageBook()
    book.note(range(1, 9), 2, [[b"0", b"1", b"2", b"3"]])
    replayed = Replayed(book=book, answers={"r0": (7, 8)}, bytes_saved=0, ttft_ms=0.0, seconds=0.0)
    comparison = TraceComparison(replayed, 2)
    for result in results:
        comparison.add(prompt, result)
    return comparison


def test_Q2_reusable_is_what_was_saved_beyond_the_local_match_but_one_token() -> None:
    prompt = tuple(range(1, 9))
    digests = ((b"0", b"1", b"2", b"3"),)
    comparison = compared(prompt, *(result_of(local_tokens=n, page_digests=digests) for n in (0, 2, 6)))
    # Four blocks are stored, and the last one would leave nothing to compute (L1).
    assert comparison.reusable_tokens == 6 + 4 + 0
    assert comparison.local_tokens == 8
    # Longer than what is stored, and different from its second block on.
    assert compared((*prompt, 9, 9), result_of(page_digests=digests)).reusable_tokens == 8
    assert compared((1, 2, 9, 9, 5, 6), result_of(page_digests=digests)).reusable_tokens == 2


def test_Q1_only_pages_from_the_pool_are_compared_each_with_its_own() -> None:
    good = result_of(local_tokens=2, from_pool_tokens=4, page_digests=((b"local", b"1", b"2", b"own"),))
    swapped = result_of(local_tokens=2, from_pool_tokens=4, page_digests=((b"0", b"2", b"1", b"3"),))
    assert (compared(tuple(range(1, 9)), good).pages_compared, compared(tuple(range(1, 9)), good).page_mismatches) == (2, 0)
    both = compared(tuple(range(1, 9)), good, swapped)
    assert (both.pages_compared, both.page_mismatches) == (4, 2)
    assert both.pool_hits == [0.5, 0.5]


def test_Q1_other_answers_and_failed_loads_are_counted() -> None:
    other = result_of(tokens=(7, 9), load_failure="missing", page_digests=((),))
    unknown = result_of(request_id="r1", page_digests=((),))
    comparison = compared((1,), result_of(page_digests=((),)), other, unknown)
    assert (comparison.requests, comparison.answer_mismatches, comparison.failed_loads) == (3, 2, 1)


GOOD = TraceFigures(
    layout="full",
    backend="trio",
    scale=32,
    speed=10.0,
    requests=20,
    peak_in_flight=11,
    prompt_tokens=9000,
    local_tokens=120,
    reusable_tokens=8000,
    from_pool_tokens=8000,
    reuse=1.0,
    failed_loads=0,
    answers_compared=20,
    answer_mismatches=0,
    pages_compared=500,
    page_mismatches=0,
    reference_contradictions=0,
    bytes_saved=1024**2,
    bytes_loaded=2 * 1024**2,
    ttft_ms=TraceTimes(computed=900.0, pool_hit=45.0),
    replay_s=TraceSeconds(process_a=14.0, process_b=7.5),
)


@pytest.mark.parametrize(
    ("change", "fails", "sentence"),
    [
        ({}, False, "all of what process A computed"),
        ({"from_pool_tokens": 7000}, False, "some of it was not there"),
        ({"page_mismatches": 1}, True, "FAILED: what came"),
        ({"answer_mismatches": 1}, True, "FAILED: what came"),
        ({"reference_contradictions": 1}, True, "FAILED: process A"),
        ({"pages_compared": 0}, True, "FAILED: nothing came"),
    ],
)
def test_Q1_a_replay_fails_if_anything_differs_or_nothing_was_compared(
    change: dict[str, int], fails: bool, sentence: str
) -> None:
    figures = msgspec.structs.replace(GOOD, **change)
    assert figures.differs is fails
    assert sentence in trace_verdict(figures)


def test_the_table_of_a_replay_shows_every_figure() -> None:
    console = Console(record=True, width=140)
    show_trace(GOOD, console)
    text = console.export_text()
    for figure in (
        "1 : 32",
        " 11 ",
        "0 of 20",
        "0 of 500",
        "8,000 of 8,000",
        "900.0 ms",
        "45.0 ms",
        "100.0%",
        "2.0 MiB",
        "7.5 s",
    ):
        assert figure in text
