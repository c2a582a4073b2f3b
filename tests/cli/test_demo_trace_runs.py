"""`akv demo --trace` for real: many requests at a time in two processes, on both backends; and a run that must fail."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from akv.cli.demo import command
from akv.cli.demo.jobs import Replayed, TraceFigures
from akv.cli.demo.run import run_trace
from akv.cli.demo.scaling import scaled
from akv.cli.demo.setting import TRACE_TOKENS_PER_BLOCK, settings, trace_engine_config
from akv.cli.demo.trace import read_trace
from akv.cli.main import build_app
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import KeySpace
from akv.values.scope import EMPTY_SCOPE
from akv_testing.engine import layout_of

pytestmark = pytest.mark.mooncake

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


async def swap_two_stored_pages(address: str, replayed: Replayed) -> None:
    await anyio.to_thread.run_sync(_swap, address)


def _swap(address: str) -> None:
    """Give two pages that only the first request of the trace has each other's bytes, as no client of akv ever would."""
    from mooncake.store import MooncakeDistributedStore

    config = trace_engine_config()
    chain = Chain(scope_seed(EMPTY_SCOPE), TRACE_TOKENS_PER_BLOCK)
    chain.append(scaled(read_trace(CUT, 1)[0], 32, 1.0).prompt)
    key_space = KeySpace.of(layout_of(config), settings(address).namespace, config.model.key)
    keys = key_space.keys(0, chain.hashes(2, 4))
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * 1024**2, "tcp", "", address) == 0
    pages = [store.get(key) for key in keys]
    assert pages[0] != pages[1] != b"" != pages[0]
    assert [store.remove(key, True) for key in keys] == [0, 0]
    assert [store.put(key, page) for key, page in zip(keys, reversed(pages), strict=True)] == [0, 0]
    assert store.close() == 0


@pytest.mark.timeout(180)
def test_Q1_a_planted_fault_is_found_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_trace", partial(run_trace, after_saving=swap_two_stored_pages))
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
