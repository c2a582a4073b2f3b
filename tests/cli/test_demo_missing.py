"""A demo that cannot run says what is missing, all of it, before it starts anything."""

from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from akv import DependencyError
from akv.cli.main import build_app


@pytest.mark.parametrize(
    ("absent", "named"), [({"trio"}, "needs trio:"), ({"torch", "mooncake", "trio"}, "needs torch, mooncake, trio:")]
)
def test_everything_that_is_missing_is_named_at_once(absent: set[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akv.cli.demo.run.find_spec", lambda name: None if name in absent else find_spec(name))
    done = CliRunner().invoke(build_app(), ["demo", "--backend", "trio"])
    assert isinstance(done.exception, DependencyError)
    assert named in str(done.exception)
    assert "akv[demo]" in str(done.exception)
