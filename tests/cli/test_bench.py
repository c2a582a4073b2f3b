"""`akv bench`: it measures what it says. Its figures gate nothing; that they can be had does."""

import json
import subprocess
import sys

import pytest

from akv.cli.bench.lookup import LookupFigures

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
