"""`akv demo` for real: a master, two processes, a real model, on both backends; and a run that must fail."""

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from akv.cli.demo import command
from akv.cli.demo.jobs import Figures, Turn
from akv.cli.demo.run import run_demo
from akv.cli.demo.setting import TOKENS_PER_BLOCK, DemoLayout, engine_config
from akv.cli.main import build_app
from akv_testing.engine import layout_of

pytestmark = pytest.mark.mooncake

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]

#: The fixture `swap_two_stored_pages`, which conftest.py describes.
Swap = Callable[..., Awaitable[None]]


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
    assert figures["outcomes"] == {"full": 4}
    assert figures["page_mismatches"] == 0 < figures["pages_compared"]
    assert figures["from_pool_tokens"] > 1000
    assert figures["reuse"] >= 0.95
    assert figures["ttft_ms"]["pool_hit"] < figures["ttft_ms"]["cold"]
    page_bytes = layout_of(engine_config(DemoLayout.FULL)).groups[0].bytes_per_page
    assert figures["bytes_loaded"] == figures["pages_compared"] * page_bytes
    assert figures["bytes_saved"] > 0


@pytest.mark.timeout(180)
def test_Q1_a_planted_fault_is_found_and_exits_with_1(monkeypatch: pytest.MonkeyPatch, swap_two_stored_pages: Swap) -> None:
    async def plant(address: str, answered: tuple[tuple[Turn, ...], ...]) -> None:
        await swap_two_stored_pages(address, engine_config(DemoLayout.FULL), answered[0][0].prompt)

    monkeypatch.setattr(command, "run_demo", partial(run_demo, after_saving=plant))
    done = CliRunner().invoke(build_app(), ["demo", "--json", "--conversations", "1", "--turns", "2"])
    assert done.exit_code == 1, done.output
    figures = json.loads(done.stdout)
    assert figures["page_mismatches"] == 4  # both pages, in both turns
    assert figures["identical_to_local_reuse"] < figures["compared"] == 2


@pytest.mark.timeout(180)
@pytest.mark.parametrize("device", DEVICES)
def test_Q1_windows_give_the_bits_of_local_reuse_at_every_end_that_a_lookup_finds(device: str) -> None:
    options = ["demo", "--json", "--device", device, "--layout", "sliding", "--conversations", "2", "--turns", "2"]
    done = subprocess.run([sys.executable, "-m", "akv.cli.main", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["layout"], figures["device"]) == ("sliding", device)
    # Each conversation: two prompts again, and three that leave it (W7).
    assert figures["outcomes"] == {"full": 4, "window_miss": 2, "rewound": 2, "recovered": 2}
    assert figures["requests"] == 10
    assert figures["identical_to_local_reuse"] == figures["compared"] == 8
    assert figures["page_mismatches"] == 0 < figures["pages_compared"]
    assert figures["bytes_loaded"] > 0
    # On a GPU bits depend on what is computed together, and process B saves nothing that it computed anew.
    assert (figures["bytes_saved"] > 0) == (device == "cpu")


@pytest.mark.timeout(180)
def test_Q1_a_planted_fault_in_a_window_is_found(monkeypatch: pytest.MonkeyPatch, swap_two_stored_pages: Swap) -> None:
    config = engine_config(DemoLayout.SLIDING)

    async def plant(address: str, answered: tuple[tuple[Turn, ...], ...]) -> None:
        prompt = answered[0][0].prompt
        # The last two that every request with this prompt reads: it has to compute a token.
        end = (len(prompt) - 1) // TOKENS_PER_BLOCK
        await swap_two_stored_pages(address, config, prompt, group=2, first_block=end - 2)

    monkeypatch.setattr(command, "run_demo", partial(run_demo, after_saving=plant))
    arguments = ["demo", "--json", "--layout", "sliding", "--conversations", "1", "--turns", "1"]
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 1, done.output
    figures = json.loads(done.stdout)
    assert figures["page_mismatches"] == 2
    assert figures["identical_to_local_reuse"] < figures["compared"] == 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", ["drafter", "sliding-drafter"])
def test_Q1_P1_beside_a_drafter_the_pool_gives_what_local_reuse_does(layout: str) -> None:
    options = ["demo", "--json", "--layout", layout, "--conversations", "1", "--turns", "2"]
    done = subprocess.run([sys.executable, "-m", "akv.cli.main", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["layout"] == layout
    assert figures["identical_to_local_reuse"] == figures["compared"] > 1
    assert figures["page_mismatches"] == 0 < figures["pages_compared"]
    assert figures["drafts_accepted"] > 0 < figures["drafts_rejected"]
    # What process B computed behind a hit it saved, and loaded again: at least ten blocks in each layer group.
    assert figures["own_pages_compared"] >= 10 * len(engine_config(DemoLayout(layout)).groups)
    assert figures["bytes_saved"] > 0
    assert figures["reuse"] == 1.0 or layout == "sliding-drafter"


@pytest.mark.timeout(180)
def test_Q1_a_planted_fault_in_a_drafters_pages_is_found(monkeypatch: pytest.MonkeyPatch, swap_two_stored_pages: Swap) -> None:
    async def plant(address: str, answered: tuple[tuple[Turn, ...], ...]) -> None:
        await swap_two_stored_pages(address, engine_config(DemoLayout.SLIDING_DRAFTER), answered[0][0].prompt, group=3)

    monkeypatch.setattr(command, "run_demo", partial(run_demo, after_saving=plant))
    done = CliRunner().invoke(
        build_app(), ["demo", "--json", "--layout", "sliding-drafter", "--conversations", "1", "--turns", "1"]
    )
    assert done.exit_code == 1, done.output
    # Both pages, for the prompt and for the one that goes on where it ended, each without drafts and with them.
    assert json.loads(done.stdout)["page_mismatches"] == 8
