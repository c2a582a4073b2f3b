"""`akv bench engine`: its verdict, what counts as a step beside loads, and a run at a small shape, which is not judged."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from akv.cli.bench.engine.beside import Window, sorted_steps
from akv.cli.bench.engine.figures import (
    LEAST_OF_PINNED_COPY,
    LEAST_OF_SDPA,
    MOST_AT_ONCE_S,
    AtOnceFigures,
    BesideFigures,
    EngineFigures,
    PromptFigures,
    Times,
    missed,
    times,
)
from akv.cli.main import UNUSABLE, main


def prompts(tokens: int, **changed: float) -> PromptFigures:
    figures = PromptFigures(
        tokens=tokens,
        cold=1000.0,
        local_hit=20.0,
        cold_with_saving=1030.0,
        saved_after=500.0,
        saved_bytes=1,
        saved_bytes_per_s=1.0,
        pool_hit=20.0 + {8_000: 40.0, 32_000: 130.0, 96_000: 330.0}.get(tokens, 1e6),
        staged_hit=900.0,
        loaded_bytes=1,
        loaded_bytes_per_s=LEAST_OF_PINNED_COPY * 50e9,
    )
    return msgspec.structs.replace(figures, **changed)


ALONE = Times(median=10.0, p99=20.0, most=99.0, count=100)
BESIDE = Times(median=10.5, p99=24.0, most=99.0, count=100)
GOOD = EngineFigures(
    device="a GPU",
    shape="llama-8b",
    tokens_per_block=64,
    rounds=2,
    # A length that there is no bound for is not judged.
    prompts=(prompts(500), prompts(8_000), prompts(32_000), prompts(96_000)),
    beside=BesideFigures(tokens=96_000, loads=5, alone=ALONE, beside=BESIDE),
    at_once=AtOnceFigures(requests=8, tokens=32_000, seconds=MOST_AT_ONCE_S, first_tokens=ALONE),
    pinned_copy_bytes_per_s=50e9,
    sdpa_flops=100.0,
    engine_flops=100 * LEAST_OF_SDPA,
    not_in_place=0,
)


def test_what_is_just_within_the_bounds_holds() -> None:
    assert missed(GOOD) == ()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"prompts": (prompts(8_000, pool_hit=60.1),)}, "8,000 tokens: a hit from the pool takes 40.1 ms beyond a local one"),
        ({"prompts": (prompts(32_000, pool_hit=150.1),)}, "32,000 tokens: a hit from the pool takes 130.1 ms"),
        ({"prompts": (prompts(96_000, pool_hit=350.1),)}, "96,000 tokens: a hit from the pool takes 330.1 ms"),
        (
            {"prompts": (prompts(500, cold_with_saving=1031.0),)},
            "500 tokens: a cold request that is saved takes 1031.0 ms, 3.1% more",
        ),
        ({"prompts": (prompts(500, loaded_bytes_per_s=42e9),)}, "500 tokens are loaded at 42.0 GB/s, 0.84 of a copy"),
        ({"beside": {"median": 10.6}}, "a step beside loads takes 10.60 ms at the median, 6.0% more"),
        ({"beside": {"p99": 24.2}}, "a step beside loads takes 24.20 ms at the 99th percentile, 21.0% more"),
        ({"at_once": {"seconds": 1.01}}, "8 loads of 32,000 tokens at once take 1.01 s"),
        ({"engine_flops": 39.0}, "the engine's attention runs at 0.39 of SDPA's own speed"),
        ({"not_in_place": 2}, "2 loads read pages through the store's client"),
    ],
)
def test_what_is_beyond_a_bound_is_said(bad: dict[str, Any], said: str) -> None:
    if isinstance(bad.get("beside"), dict):
        beside = msgspec.structs.replace(BESIDE, **bad["beside"])
        bad = {"beside": msgspec.structs.replace(GOOD.beside, beside=beside)}
    if "at_once" in bad:
        bad = {"at_once": msgspec.structs.replace(GOOD.at_once, **bad["at_once"])}
    (sentence,) = missed(msgspec.structs.replace(GOOD, **bad))
    assert sentence.startswith(said)


def test_of_loads_at_once_only_those_are_judged_that_there_is_a_bound_for() -> None:
    others = msgspec.structs.replace(GOOD.at_once, tokens=400, seconds=5.0)
    assert missed(msgspec.structs.replace(GOOD, at_once=others)) == ()


def test_a_step_counts_beside_a_load_if_it_overlaps_it_and_for_nothing_if_it_computes_that_request_too() -> None:
    # Ten steps do not count. Then a token each second; a load is asked at 12.5, has its pages at 14.5, its token at 16.5.
    steps = sorted_steps([float(at) for at in range(21)], [Window(12.5, 14.5, 16.5)])
    # 10-11 and 11-12 alone, 12-13 to 14-15 beside, 15-16 and 16-17 with its prompt, the last three alone.
    assert (len(steps.alone), len(steps.beside)) == (5, 3)


def test_times_are_in_milliseconds() -> None:
    assert times([0.001, 0.003, 0.002]).p99 == pytest.approx(2.98)
    assert times([0.25, 0.75, 0.5]).median == 500.0
    assert times([0.5]) == Times(median=500.0, p99=500.0, most=500.0, count=1)


@pytest.mark.mooncake
@pytest.mark.timeout(180)
@pytest.mark.parametrize("windows", [False, True], ids=["full attention", "windows"])
def test_a_run_at_a_small_shape_reads_what_it_stored_in_place(windows: bool) -> None:
    command = [sys.executable, "-m", "akv.cli.main", "bench", "engine", "--device", "cpu", "--rounds", "1", "--json"]
    command += ["--tokens", "100,300", *(["--windows"] if windows else [])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert [each["tokens"] for each in figures["prompts"]] == [100, 300]
    for each in figures["prompts"]:
        blocks = each["tokens"] // 16
        if not windows:
            assert each["saved_bytes"] == blocks * 16 * 256
            assert each["loaded_bytes"] == blocks * 16 * 256
        assert each["local_hit"] > 0
        assert each["staged_hit"] > 0
    assert figures["at_once"]["requests"] == 8
    assert figures["beside"]["beside"]["count"] > 0
    assert figures["not_in_place"] == 0
    assert figures["missed"] == []


def test_lengths_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("8k", "8000,1"):
        monkeypatch.setattr(sys, "argv", ["akv", "bench", "engine", "--device", "cpu", "--tokens", text])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == UNUSABLE
