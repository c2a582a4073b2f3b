"""`akv bench`: it measures what it says. What a lookup takes gates nothing, what a soak leaves behind does."""

import json
import subprocess
import sys

import pytest

from akv.cli.bench.lookup import LookupFigures
from akv.cli.bench.soak import SoakFigures

pytestmark = pytest.mark.mooncake


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
def test_L3_a_cold_lookup_asks_once_and_a_warm_one_for_every_key(backend: str) -> None:
    command = ["-m", "akv.cli.main", "bench", "lookup", "--tokens", "10000", "--lookups", "2", "--json", "--backend", backend]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert tuple(figures) == LookupFigures.__struct_fields__
    assert (figures["backend"], figures["keys"], figures["lookups"]) == (backend, 2 * 312, 2)
    assert (figures["cold_calls"], figures["cold_keys"]) == (1, 64)
    assert min(figures["raw_call_ms"], figures["warm_first_ms"], figures["idle"]["most"]) > 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("backend", "options"), [("asyncio", ["--host-pages"]), ("uvloop", []), ("trio", [])], ids=["asyncio", "uvloop", "trio"]
)
def test_D6_M6_requests_with_random_cancels_on_a_real_store_leave_everything_as_it_was(
    backend: str, options: list[str]
) -> None:
    command = ["-m", "akv.cli.main", "bench", "soak", "--requests", "300", "--json", "--backend", backend, *options]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    figures = json.loads(done.stdout)
    # A short run says nothing of memory: three hundred requests fill caches rather than hold anything.
    assert [failure for failure in figures["failures"] if "resident" not in failure] == [], done.stderr
    assert done.returncode == (1 if figures["failures"] else 0)
    assert tuple(figures) == SoakFigures.__struct_fields__
    assert sum(figures["ended"].get(how, 0) for how in ("ended", "cut short", "load failed")) == figures["requests"] == 300
    assert min(figures["cut_short"].values()) > 0
    assert figures["pages_compared"] > 100
    assert figures["page_mismatches"] == 0
