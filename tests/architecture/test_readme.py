"""What the README tells people to run, runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str, mark: str = "") -> str:
    found = re.search(rf"{re.escape(mark)}```{language}\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_embedding_example_finds_the_first_requests_blocks(backend: str) -> None:
    example = block("python").replace("anyio.run(main)", f"anyio.run(main, backend={backend!r})")
    assert backend in example
    ran = subprocess.run([sys.executable, "-W", "error", "-"], input=example, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("from the pool: 0\nfrom the pool: 8\n", "")


@pytest.mark.parametrize(("mark", "extra", "last"), [("demo", "demo", "akv demo"), ("tests", "test", "python -P -m pytest")])
def test_the_commands_are_one_paste_that_installs_and_runs(mark: str, extra: str, last: str) -> None:
    *steps, run = block("sh", f"<!-- {mark} -->\n").splitlines()
    assert all(step.endswith(" &&") for step in steps)
    assert any(step.startswith("apt-get") and "libibverbs1" in step for step in steps)
    assert steps[-1] == f".venv/bin/pip install '.[{extra}]' &&"
    assert run == f".venv/bin/{last}"
