"""What `akv demo` is made of, without its processes."""

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from akv.cli.demo.conversations import aside, common_prefix, ending_at, forks, questions, reusable_tokens
from akv.cli.demo.jobs import Figures, Job, TimesToFirstToken, Turn
from akv.cli.demo.report import show, verdict
from akv.cli.demo.serving import Comparison, Drafting, reads_alone
from akv.cli.demo.setting import TOKENS_PER_BLOCK, DemoLayout, engine_config
from akv_testing.engine import Result
from akv_testing.engine.text import conversation

GOOD = Figures(
    layout="full",
    backend="trio",
    device="cpu",
    requests=9,
    prompt_tokens=1000,
    reusable_tokens=960,
    from_pool_tokens=960,
    reuse=1.0,
    compared=9,
    identical_to_local_reuse=9,
    outcomes={"full": 5, "rewound": 4},
    pages_compared=30,
    page_mismatches=0,
    own_pages_compared=7,
    drafts_accepted=21,
    drafts_rejected=43,
    bytes_saved=1,
    bytes_loaded=2,
    ttft_ms=TimesToFirstToken(cold=100.0, pool_hit=20.0, local_hit=19.0),
)

tokens = st.lists(st.integers(0, 1), max_size=20).map(tuple)


def test_Q2_conversations_are_real_text_and_never_alike() -> None:
    asked = [questions(number, 3) for number in range(24)]
    assert all(len(set(turns)) == 3 for turns in asked)
    assert len({turns[0] for turns in asked}) == 24
    assert all(len(turns[0].encode()) > 1800 for turns in asked)


def test_W1_prompts_end_at_every_place_of_a_block() -> None:
    told: list[tuple[str, tuple[int, ...]]] = []
    residues = set()
    for number, question in enumerate(questions(3, 40)):
        cut = ending_at(told, question, number % 32, 32)
        assert question.startswith(cut)
        assert len(question.encode()) - len(cut.encode()) < 64  # a character that is no byte may have to go, too
        residues.add(len(conversation(told, cut)) % 32)
        told.append((cut, (1, 2, 3)))
    assert residues == set(range(32))


def test_W7_forks_leave_a_conversation_where_no_turn_of_it_ended() -> None:
    first = Turn(tuple(range(1000)), tuple(range(1000, 1012)))
    second = Turn((*first.prompt, *first.answer, *range(2000, 2600)), (1, 2))
    middle, near, far = forks([first, second], 7, 128)
    assert common_prefix(middle, first.prompt) == 506
    assert common_prefix(near, second.prompt) == 1012 + 64
    assert common_prefix(far, second.prompt) == 1012 + 300
    assert len({*forks([first, second], 7, 128), *forks([first, second], 8, 128)}) == 6
    assert forks([first], 7, 128) == [middle]


def test_P1_an_aside_goes_on_where_a_prompt_ended_for_longer_than_a_window() -> None:
    turn = Turn(tuple(range(1000)), (7, 8))
    windows = max(group.window_tokens for group in engine_config(DemoLayout.SLIDING_DRAFTER).groups)
    assert common_prefix(aside(turn, 3), turn.prompt) == len(turn.prompt)
    assert len(aside(turn, 3)) > len(turn.prompt) + windows
    assert aside(turn, 3)[1000:1002] != turn.answer


def test_Q1_pages_that_process_b_saved_are_told_apart_and_compared_like_all_others() -> None:
    config = engine_config(DemoLayout.DRAFTER)
    first, again, local = result(2), result(5), result(5, local=True)
    comparison = Comparison(config.groups)
    comparison.add(first, result(2, local=True), first, 160, Drafting(again, local))
    assert (comparison.pages_compared, comparison.own_pages_compared, comparison.page_mismatches) == (2 + 5, 3, 0)
    assert comparison.identical == comparison.compared == 1
    damaged = msgspec.structs.replace(again, page_digests=((*again.page_digests[0][:4], b"other"),))
    comparison.add(first, result(2, local=True), first, 160, Drafting(damaged, local))
    assert comparison.page_mismatches == 1


def result(blocks: int, *, local: bool = False) -> Result:
    """A request that found so many blocks, in the pool or locally."""
    found = blocks * TOKENS_PER_BLOCK
    return Result(
        request_id="r",
        tokens=(1, 2),
        prompt_tokens=200,
        local_tokens=found if local else 0,
        from_pool_tokens=0 if local else found,
        ttft_s=1.0,
        queue_s=0.0,
        lookup_s=0.0,
        load_s=0.0,
        logits=torch.zeros(2, 3),
        page_digests=(tuple(bytes([block]) for block in range(5)),),
    )


@given(tokens, st.lists(tokens, max_size=4), st.integers(1, 5), st.integers(0, 4))
def test_Q2_reusable_tokens_equal_a_naive_count(
    prompt: tuple[int, ...], stored: list[tuple[int, ...]], tokens_per_block: int, local_blocks: int
) -> None:
    def is_stored(block: int) -> bool:
        end = (block + 1) * tokens_per_block
        return any(sequence[:end] == prompt[:end] for sequence in stored)

    # A block counts if it lies beyond the local match, is stored, and leaves one token to compute (L1).
    naive = [b for b in range(local_blocks, len(prompt)) if (b + 1) * tokens_per_block < len(prompt) and is_stored(b)]
    assert reusable_tokens(prompt, stored, local_blocks * tokens_per_block, tokens_per_block) == tokens_per_block * len(naive)


def test_Q2_beside_a_drafter_a_block_counts_with_the_token_behind_it() -> None:
    assert reusable_tokens((1, 2, 3, 4, 5), [(1, 2, 3, 4)], 0, 2, lookahead=1) == 2
    assert reusable_tokens((1, 2, 3, 4, 5), [(1, 2, 3, 4, 5)], 0, 2, lookahead=1) == 4


@given(tokens, tokens)
def test_Q2_a_common_prefix_is_common_and_as_long_as_can_be(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"own_pages_compared": 0, "layout": "drafter"}, "FAILED: nothing of what process B had saved"),
        ({}, "5.0 times sooner"),
        ({"identical_to_local_reuse": 8}, "FAILED: what came"),
        ({"page_mismatches": 1}, "FAILED: what came"),
        ({"compared": 0, "identical_to_local_reuse": 0}, "FAILED: nothing came"),
        ({"pages_compared": 0}, "FAILED: nothing came"),
    ],
)
def test_Q1_a_run_fails_if_anything_differs_or_nothing_was_compared(change: dict[str, Any], sentence: str) -> None:
    figures = msgspec.structs.replace(GOOD, **change)
    assert figures.differs is bool(change)
    assert sentence in verdict(figures)


def test_the_table_shows_every_figure() -> None:
    console = Console(record=True, width=120)
    show(GOOD, console)
    text = console.export_text()
    for figure in ("9 of 9", "0 of 30", "960 of 960", "100.0 ms", "20.0 ms", "19.0 ms", "100.0%", "5 full, 4 rewound"):
        assert figure in text
    assert "drafts" not in text


def test_the_table_shows_drafts_where_there_is_a_drafter() -> None:
    console = Console(record=True, width=120)
    show(msgspec.structs.replace(GOOD, layout="sliding-drafter"), console)
    text = console.export_text()
    assert "21, 43" in text
    assert "7 compared" in text


@pytest.mark.parametrize(
    ("layout", "device", "alone"),
    [
        (DemoLayout.FULL, "cpu", False),
        (DemoLayout.FULL, "cuda", False),
        (DemoLayout.SLIDING, "cpu", False),
        (DemoLayout.SLIDING, "cuda", True),
        (DemoLayout.DRAFTER, "cpu", True),
    ],
)
def test_process_b_saves_nothing_that_the_reference_would_rightly_compute_otherwise(
    layout: DemoLayout, device: str, alone: bool
) -> None:
    assert reads_alone(Job(backend="asyncio", master_address="", segment_bytes=0, layout=layout, device=device)) is alone
