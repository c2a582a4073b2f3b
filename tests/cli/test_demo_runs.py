"""`akv demo` for real: a master, two processes, a real model, on both backends; and a run that must fail."""

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from typer.testing import CliRunner

from akv.cli.demo import command
from akv.cli.demo.jobs import Figures, Turn
from akv.cli.demo.run import run_demo
from akv.cli.demo.setting import engine_config
from akv.cli.main import build_app
from akv_testing.engine import EngineConfig, layout_of

pytestmark = pytest.mark.mooncake

#: The fixture `swap_two_stored_pages`, which conftest.py describes.
Swap = Callable[[str, EngineConfig, tuple[int, ...]], Awaitable[None]]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_Q1_process_b_answers_from_what_process_a_computed(backend: str) -> None:
    options = ["demo", "--json", "--backend", backend, "--conversations", "2", "--turns", "2"]
    done = subprocess.run([sys.executable, "-m", "akv.cli.main", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # exactly one object, and nothing else on standard output
    assert tuple(figures) == Figures.__struct_fields__
    assert (figures["layout"], figures["backend"]) == ("full", backend)
    assert figures["identical_to_local_reuse"] == figures["compared"] > 3
    assert figures["page_mismatches"] == 0 < figures["pages_compared"]
    assert figures["from_pool_tokens"] > 1000
    assert figures["reuse"] >= 0.95
    assert figures["ttft_ms"]["pool_hit"] < figures["ttft_ms"]["cold"]
    page_bytes = layout_of(engine_config()).groups[0].bytes_per_page
    assert figures["bytes_loaded"] == figures["pages_compared"] * page_bytes
    assert figures["bytes_saved"] > 0


@pytest.mark.timeout(180)
def test_Q1_a_planted_fault_is_found_and_exits_with_1(monkeypatch: pytest.MonkeyPatch, swap_two_stored_pages: Swap) -> None:
    async def plant(address: str, answered: tuple[tuple[Turn, ...], ...]) -> None:
        await swap_two_stored_pages(address, engine_config(), answered[0][0].prompt)

    monkeypatch.setattr(command, "run_demo", partial(run_demo, after_saving=plant))
    done = CliRunner().invoke(build_app(), ["demo", "--json", "--conversations", "1", "--turns", "2"])
    assert done.exit_code == 1, done.output
    figures = json.loads(done.stdout)
    assert figures["page_mismatches"] == 4  # both pages, in both turns
    assert figures["identical_to_local_reuse"] < figures["compared"] == 2
