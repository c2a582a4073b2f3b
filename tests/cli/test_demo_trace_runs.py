"""`akv demo --trace` for real: many requests at a time in two processes, on both backends; and a run that must fail."""

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from akv.cli.demo import command
from akv.cli.demo.jobs import Replayed, TraceFigures
from akv.cli.demo.run import run_trace
from akv.cli.demo.scaling import scaled
from akv.cli.demo.setting import TRACE_TOKENS_PER_BLOCK, trace_engine_config
from akv.cli.demo.trace import read_trace
from akv.cli.main import build_app
from akv_testing.engine import EngineConfig

pytestmark = pytest.mark.mooncake

#: The fixture `swap_two_stored_pages`, which conftest.py describes.
Swap = Callable[[str, EngineConfig, tuple[int, ...]], Awaitable[None]]

CUT = Path(__file__).parent.parent / "data" / "conversation_trace.jsonl"
OPTIONS = ["demo", "--json", "--trace", str(CUT), "--requests"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_Q1_process_b_replays_from_what_process_a_computed(backend: str) -> None:
    command = [sys.executable, "-m", "akv.cli.main", *OPTIONS, "20", "--backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # exactly one object, and nothing else on standard output
    assert tuple(figures) == TraceFigures.__struct_fields__
    assert (figures["backend"], figures["requests"], figures["answers_compared"]) == (backend, 20, 20)
    assert figures["page_mismatches"] == figures["answer_mismatches"] == figures["reference_contradictions"] == 0
    # Each block that is not the last of its prompt came from the pool at least once.
    assert figures["pages_compared"] >= 540
    assert figures["reuse"] == 1.0
    assert figures["failed_loads"] == 0
    assert figures["from_pool_tokens"] == figures["reusable_tokens"] == TRACE_TOKENS_PER_BLOCK * figures["pages_compared"]
    assert figures["bytes_loaded"] == 1024 * figures["from_pool_tokens"]
    assert figures["bytes_saved"] > 0
    assert figures["peak_in_flight"] >= 8
    assert min(figures["ttft_ms"].values()) > 0


@pytest.mark.timeout(180)
def test_Q1_a_planted_fault_is_found_and_exits_with_1(monkeypatch: pytest.MonkeyPatch, swap_two_stored_pages: Swap) -> None:
    async def plant(address: str, _: Replayed) -> None:
        # Of pages that only the first request of the trace has.
        await swap_two_stored_pages(address, trace_engine_config(), scaled(read_trace(CUT, 1)[0], 32, 1.0).prompt)

    monkeypatch.setattr(command, "run_trace", partial(run_trace, after_saving=plant))
    done = CliRunner().invoke(build_app(), [*OPTIONS, "4"])
    assert done.exit_code == 1, done.output
    figures = json.loads(done.stdout)
    assert figures["page_mismatches"] == 2
    assert figures["reuse"] == 1.0


@pytest.mark.timeout(180)
def test_Q1_a_run_that_could_compare_nothing_exits_with_1(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [0]}\n')
    done = CliRunner().invoke(build_app(), ["demo", "--json", "--trace", str(file)])
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["pages_compared"] == 0
