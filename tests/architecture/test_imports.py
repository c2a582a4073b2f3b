"""The import contracts of pyproject.toml hold, and importing akv stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def test_imports_go_down_only() -> None:
    checked = run_python("-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 broken" in checked.stdout


@pytest.mark.parametrize("module", ["akv", "akv.logging"])
def test_importing_akv_loads_neither_torch_nor_mooncake_nor_trio(module: str) -> None:
    loaded = run_python("-c", f"import sys, {module}; print(sorted({{'torch', 'mooncake', 'trio'}} & set(sys.modules)))")
    assert (loaded.stdout.strip(), loaded.stderr) == ("[]", "")


def test_every_public_name_is_there_and_listed_once() -> None:
    listed = run_python("-c", "import akv; print(*akv.__all__); [getattr(akv, name) for name in akv.__all__]")
    assert listed.returncode == 0, listed.stderr
    names = listed.stdout.split()
    assert len(names) == len(set(names)) > 0
