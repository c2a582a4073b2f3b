"""`akv demo` for real: a master, two processes, a real model, on both backends; and a run that must fail."""

import json
import subprocess
import sys
from functools import partial

import anyio
import pytest
from typer.testing import CliRunner

from akv.cli.demo import command
from akv.cli.demo.jobs import Figures, Turn
from akv.cli.demo.run import run_demo
from akv.cli.demo.setting import TOKENS_PER_BLOCK, engine_config, settings
from akv.cli.main import build_app
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import KeySpace
from akv.values.scope import EMPTY_SCOPE
from akv_testing.engine import layout_of

pytestmark = pytest.mark.mooncake


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_Q1_process_b_answers_from_what_process_a_computed(backend: str) -> None:
    options = ["demo", "--json", "--backend", backend]
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
    assert figures["bytes_loaded"] > 0
    assert figures["bytes_saved"] > 0


async def swap_two_stored_pages(address: str, answered: tuple[tuple[Turn, ...], ...]) -> None:
    await anyio.to_thread.run_sync(_swap, address, answered)


def _swap(address: str, answered: tuple[tuple[Turn, ...], ...]) -> None:
    """Give two pages of the first conversation each other's bytes, as no client of akv ever would."""
    from mooncake.store import MooncakeDistributedStore

    config = engine_config()
    chain = Chain(scope_seed(EMPTY_SCOPE), TOKENS_PER_BLOCK)
    chain.append(answered[0][0].prompt)
    keys = KeySpace.of(layout_of(config), settings(address).namespace, config.model.key).keys(0, chain.hashes(2, 4))
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * 1024**2, "tcp", "", address) == 0
    pages = [store.get(key) for key in keys]
    assert pages[0] != pages[1] != b"" != pages[0]
    assert [store.remove(key, True) for key in keys] == [0, 0]
    assert [store.put(key, page) for key, page in zip(keys, reversed(pages), strict=True)] == [0, 0]
    assert store.close() == 0


@pytest.mark.timeout(180)
def test_Q1_a_planted_fault_is_found_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_demo", partial(run_demo, after_saving=swap_two_stored_pages))
    done = CliRunner().invoke(build_app(), ["demo", "--json", "--conversations", "1", "--turns", "2"])
    assert done.exit_code == 1, done.output
    figures = json.loads(done.stdout)
    assert figures["page_mismatches"] == 4  # both pages, in both turns
    assert figures["identical_to_local_reuse"] < figures["compared"] == 2
