"""`akv config`: one error or none, every setting explained, and a schema that names what the reference names."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from akv.cli import main as entry
from akv.cli.config import describe, sharing
from akv.cli.config.command import add_config
from akv.plan.keys import KeySpace
from akv.settings import explain_settings
from akv.settings_checks import is_section, setting_types
from akv_testing import tiny_layout

NAMES = [name for name, kind in setting_types() if not is_section(kind)]
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
LEAST = {"AKV_MODEL_KEY": "org/a-model", "AKV_POOL": "embedded"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("AKV_CONFIG", "MOONCAKE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    add_config(app)
    return lambda *options, **environ: CliRunner().invoke(app, ["config", *options], env=environ)


def in_schema(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each setting of a schema by its dotted name, found by following its references."""

    def follow(definition: dict[str, Any], at: str) -> None:
        for field, told in definition["properties"].items():
            if "$ref" in told:
                follow(schema["$defs"][told["$ref"].rpartition("/")[2]], f"{at}{field}.")
            else:
                found[f"{at}{field}"] = told

    found: dict[str, dict[str, Any]] = {}
    follow(schema["$defs"][schema["$ref"].rpartition("/")[2]], "")
    return found


def test_check_accepts_what_a_server_would_start_with(run: Any) -> None:
    done = run("check", **LEAST)
    assert done.exit_code == 0, done.output
    assert "'org/a-model'" in done.output


def test_check_tells_what_has_no_effect(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "a:1", "tenant_id": "t"}', encoding="utf-8")
    done = run("check", AKV_MODEL_KEY="m", MOONCAKE_CONFIG_PATH=str(path))
    assert done.exit_code == 0, done.output
    assert f"note: Fields of {path} that mean nothing to akv: tenant_id." in done.output


def test_check_exits_with_2_and_the_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "akv.toml"
    path.write_text('model_key = "m"\npool = "embedded"\nloaders = 0\nsavers = 0\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["akv", "config", "check", str(path)])
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert f"akv: setting 'loaders' is 0: expected int >= 1 (found in {path}, line 3)" in said.err


def test_explain_and_schema_and_the_reference_name_the_same_settings(run: Any) -> None:
    explained = json.loads(run("explain", "--json", **LEAST).stdout)
    schema = in_schema(json.loads(run("schema").stdout))
    rows = re.findall(r"^\| `([a-z_.]+)` \|.*\| (.+) \|$", REFERENCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [setting["name"] for setting in explained["settings"]] == list(schema) == NAMES
    # One meaning in all three.
    said = {setting["name"]: setting["description"] for setting in explained["settings"]}
    assert said == {name: told["description"] for name, told in schema.items()} == dict(rows)
    assert all(said.values())
    units = {setting["name"]: setting["unit"] for setting in explained["settings"]}
    assert units == {name: told.get("x-unit") for name, told in schema.items()}
    assert (units["store.segment_bytes"], units["client.rpc_timeout_ms"]) == ("bytes", "milliseconds")
    assert (units["poll_tick_s"], units["recent_chains_tokens"], units["loaders"]) == ("seconds", "tokens", None)


def test_the_schemas_defaults_are_the_settings_own(run: Any) -> None:
    schema = in_schema(json.loads(run("schema").stdout))
    explained = explain_settings(environ=LEAST)
    for name, told in schema.items():
        if name not in {"model_key", "pool"}:
            assert told["default"] == explained.value(name), name
    assert "default" not in schema["model_key"]


def test_O5_the_schema_takes_sizes_as_numbers_and_with_binary_suffixes(run: Any) -> None:
    schema = json.loads(run("schema").stdout)
    assert schema["$defs"]["Settings"]["required"] == ["model_key"]
    assert all(definition["additionalProperties"] is False for definition in schema["$defs"].values())
    number, text = in_schema(schema)["store.segment_bytes"]["anyOf"]
    assert (number["type"], number["minimum"], text["type"]) == ("integer", 0, "string")
    for size, good in (("512MiB", True), ("2 GiB", True), ("4GB", False), ("4", False), ("1.5GiB", False)):
        assert bool(re.search(text["pattern"], size)) is good


def test_explain_tells_value_and_source_of_each_setting(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "akv.toml"
    path.write_text('staging_buffer_bytes = "64MiB"\n', encoding="utf-8")
    told = json.loads(run("explain", str(path), "--json", **LEAST, AKV_LOADERS="3").stdout)
    found = {setting["name"]: (setting["value"], setting["source"]) for setting in told["settings"]}
    assert found["staging_buffer_bytes"] == (64 * 1024**2, f"{path}, line 1")
    assert found["loaders"] == (3, "the variable AKV_LOADERS")
    assert found["savers"] == (1, "default")
    assert told["notes"] == []


def test_explains_table_shows_brackets_and_wide_names_as_they_are(run: Any) -> None:
    done = run("explain", **{**LEAST, "AKV_MODEL_KEY": "m[bold]:x:", "COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert '"m[bold]:x:"' in done.output
    for name in NAMES:
        assert name in done.output
    assert "akv1/m%5Bbold%5D%3Ax%3A~<layout>/" in done.output


@pytest.mark.parametrize(("pin", "revision"), [(False, ""), (True, ""), (False, "r 1"), (True, "r 1")])
def test_K4_the_key_space_explained_is_the_one_that_keys_get(pin: bool, revision: str) -> None:
    overrides = {"model_key": "org/m~1", "pool": "embedded", "pin_model_key": pin, "revision": revision, "namespace": "a b"}
    settings = explain_settings(environ={}, overrides=overrides).settings
    space = KeySpace.of(tiny_layout(), settings.namespace, settings.model_key, revision, pin).space
    pattern = re.escape(describe.key_space(settings)["prefix"]).replace(re.escape(sharing.FINGERPRINT), "[0-9a-f]{16}")
    assert re.fullmatch(pattern, f"{space}/")


def test_X6_values_named_like_secrets_are_never_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = explain_settings(environ=LEAST)
    explained.sources["key_secret"] = "default"
    monkeypatch.setattr(describe, "setting_types", lambda: [("key_secret", str)])
    monkeypatch.setattr(type(explained), "value", lambda *_: "s3cret")
    (setting,) = describe.explanation(explained)["settings"]
    assert setting["value"] == "(hidden)"


def test_descriptions_are_left_out_where_there_are_no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(_kind: type) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(describe, "getsource", no_source)
    assert [setting["name"] for setting in describe.explanation(explain_settings(environ=LEAST))["settings"]] == NAMES


@pytest.mark.parametrize("command", ["check", "explain", "schema"])
def test_config_needs_neither_torch_nor_a_store(command: str) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'mooncake', 'trio'): sys.modules[name] = None\n"
        f"sys.argv = ['akv', 'config', {command!r}]\n"
        "from akv.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=LEAST, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_sections_described_are_all_sections() -> None:
    kinds = {name: kind for name, kind in setting_types() if is_section(kind)}
    assert {name: kind for name, kind in describe.SECTIONS.items() if name} == kinds
    assert all(issubclass(kind, msgspec.Struct) for kind in describe.SECTIONS.values())
