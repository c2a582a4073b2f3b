"""Where settings come from: the order of the sources, what each may spell, and that every mistake names its place."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import akv
from akv.errors import SettingsError
from akv.settings import DEFAULT, Settings, explain_settings, read_settings
from akv.settings_checks import is_section, setting_types
from akv.settings_sources import layer_of_mapping, layer_of_variables, merge, variable_of
from akv.values.hidden import HIDDEN

NAMES = [name for name, kind in setting_types() if not is_section(kind)]
LEAST = {"AKV_MODEL_KEY": "m", "AKV_POOL": "embedded"}
TOML = """\
model_key = "from-file"
loaders = 3

[store]
master_address = "10.0.0.1:50051"
segment_bytes = "2GiB"
"""


def refused(*args: Any, **kwargs: Any) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        explain_settings(*args, **kwargs)
    return caught.value


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "akv.toml"
    path.write_text(TOML, encoding="utf-8")
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "10.0.0.9:1", "global_segment_size": "4gb"}), encoding="utf-8")
    return path


def test_reading_is_public() -> None:
    assert akv.read_settings is read_settings
    assert akv.explain_settings is explain_settings


@pytest.mark.parametrize("suffix", [".toml", ".json", ".JSON"])
def test_a_file_is_toml_or_json_by_its_suffix(tmp_path: Path, suffix: str) -> None:
    tree = {"model_key": "m", "store": {"master_address": "a:1", "segment_bytes": "2GiB"}}
    path = tmp_path / f"settings{suffix}"
    path.write_text(TOML if suffix == ".toml" else json.dumps(tree), encoding="utf-8")
    settings = read_settings(path, environ={})
    assert settings.store.segment_bytes == 2 * 1024**3
    assert read_settings(environ={"AKV_CONFIG": str(path)}) == settings == read_settings(str(path), environ={})


def test_the_processes_environment_is_read_if_no_other_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AKV_") or name == "MOONCAKE_CONFIG_PATH"]:
        monkeypatch.delenv(name)
    for name, value in LEAST.items():
        monkeypatch.setenv(name, value)
    assert read_settings() == Settings(model_key="m", pool="embedded")
    assert refused(environ={}).field == "model_key"


def test_O5_each_source_wins_over_the_ones_before_it(toml: Path, mooncake: Path) -> None:
    sources: list[tuple[Path | None, dict[str, str], dict[str, Any]]] = [
        (None, {"AKV_MODEL_KEY": "m", "AKV_STORE__MASTER_ADDRESS": "d:1"}, {}),
        (None, {"AKV_MODEL_KEY": "m", "MOONCAKE_CONFIG_PATH": str(mooncake)}, {}),
        (toml, {"MOONCAKE_CONFIG_PATH": str(mooncake)}, {}),
        (toml, {"MOONCAKE_CONFIG_PATH": str(mooncake), "AKV_STORE__SEGMENT_BYTES": "3GiB"}, {}),
        (
            toml,
            {"MOONCAKE_CONFIG_PATH": str(mooncake), "AKV_STORE__SEGMENT_BYTES": "3GiB"},
            {"store": {"segment_bytes": 5 * 1024**3}},
        ),
    ]
    explained = [explain_settings(path, environ=environ, overrides=overrides) for path, environ, overrides in sources]
    assert [one.settings.store.segment_bytes >> 30 for one in explained] == [1, 4, 2, 3, 5]
    found = [one.sources["store.segment_bytes"] for one in explained]
    assert found[0] == DEFAULT
    assert found[1] == f"global_segment_size of {mooncake}, line 1 (MOONCAKE_CONFIG_PATH)"
    assert found[2:] == [f"{toml}, line 6", "the variable AKV_STORE__SEGMENT_BYTES", "argument"]
    # What one source does not say is left as the sources before it have it.
    assert [one.settings.store.master_address for one in explained[1:3]] == ["10.0.0.9:1", "10.0.0.1:50051"]
    assert all(earlier.settings != later.settings for earlier, later in pairwise(explained))


def test_every_setting_has_a_source(toml: Path) -> None:
    explained = explain_settings(toml, environ={})
    assert list(explained.sources) == NAMES
    assert explained.sources["model_key"] == f"{toml}, line 1"
    assert explained.sources["poll_tick_s"] == DEFAULT
    assert (explained.value("store.segment_bytes"), explained.value("loaders")) == (2 * 1024**3, 3)


def test_a_path_given_wins_over_the_variable(toml: Path, tmp_path: Path) -> None:
    assert read_settings(toml, environ={"AKV_CONFIG": str(tmp_path / "absent.toml")}).model_key == "from-file"


@pytest.mark.parametrize("variable", ["AKV_CONFIG", "MOONCAKE_CONFIG_PATH"])
def test_an_empty_variable_names_no_file(variable: str) -> None:
    assert read_settings(environ={**LEAST, variable: ""}, overrides={}).model_key == "m"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("AKV_PIN_MODEL_KEY", "true", "pin_model_key", True),
        ("AKV_EXIT_GUARD", "0", "exit_guard", False),
        ("AKV_EXIT_GUARD", "False", "exit_guard", False),
        ("AKV_LOADERS", "4", "loaders", 4),
        ("AKV_LOOKUP_DEADLINE_S", "2", "lookup_deadline_s", 2.0),
        ("AKV_SAVE_BACKOFF_S", "2.5e-1", "save_backoff_s", 0.25),
        ("AKV_STAGING_BUFFER_BYTES", "64MiB", "staging_buffer_bytes", 64 * 1024**2),
        ("AKV_STAGING_BUFFER_BYTES", "1048576", "staging_buffer_bytes", 1024**2),
        ("AKV_REVISION", "12", "revision", "12"),
        ("AKV_ROLE", "consumer", "role", "consumer"),
        ("AKV_CLIENT__TCP_STATUS_TIMEOUT_S", "7", "client.tcp_status_timeout_s", 7),
        ("AKV_CLIENT__CAPTURE_LOG", "false", "client.capture_log", False),
    ],
)
def test_variables_are_read_as_the_settings_type(variable: str, text: str, name: str, value: object) -> None:
    found = explain_settings(environ={**LEAST, variable: text}).value(name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("variable", "text", "field", "fix"),
    [
        ("AKV_LOADERS", "0", "loaders", "such as 2"),
        ("AKV_LOADERS", "two", "loaders", "such as 2"),
        ("AKV_LOADERS", "", "loaders", "such as 2"),
        ("AKV_EXIT_GUARD", "yes", "exit_guard", "true or false"),
        ("AKV_LOAD_DEADLINE_S", "inf", "load_deadline_s", "seconds"),
        ("AKV_STAGING_BUFFER_BYTES", "4GB", "staging_buffer_bytes", "'4GiB'"),
        ("AKV_STORE__SEGMENT_BYTES", "1048576", "store.segment_bytes", "16 MiB"),
        ("AKV_ROLE", "reader", "role", "'producer'"),
    ],
)
def test_O5_what_a_variable_cannot_mean_is_refused_by_the_settings_name_and_the_variables(
    variable: str, text: str, field: str, fix: str
) -> None:
    error = refused(environ={**LEAST, variable: text})
    assert error.field == field
    assert str(error.value) == text
    assert f"the variable {variable}" in str(error)
    assert fix in error.fix


@pytest.mark.parametrize(
    ("variable", "close"),
    [
        ("AKV_LOADER", "AKV_LOADERS"),
        ("AKV_STORE_MASTER_ADDRESS", "AKV_STORE__MASTER_ADDRESS"),
        ("AKV_CONFIGS", "AKV_"),
        ("AKV_QQ", "AKV_MODEL_KEY"),
        ("AKV_KEY_SECERT", "AKV_KEY_SECRET"),
    ],
)
def test_O5_X6_an_unknown_variable_is_refused_with_the_closest_known_one_and_its_value_not_quoted(
    variable: str, close: str
) -> None:
    error = refused(environ={**LEAST, variable: "hunter2"})
    assert (error.field, error.value) == (variable, HIDDEN)
    assert close in error.fix
    assert "hunter2" not in str(error)


def test_O5_a_variable_of_a_section_is_refused_with_those_of_its_fields() -> None:
    error = refused(environ={**LEAST, "AKV_STORE": "x"})
    assert (error.field, error.value) == ("AKV_STORE", "x")
    assert "AKV_STORE__SEGMENT_BYTES" in error.fix


def test_other_programs_variables_are_none_of_akvs() -> None:
    assert read_settings(environ={**LEAST, "MC_LOG_LEVEL": "x", "akv_loaders": "x", "AKVX": "x"}).loaders == 2


@given(st.dictionaries(st.sampled_from(NAMES), st.text(alphabet=st.characters(codec="utf-8"), max_size=8)))
def test_any_text_in_any_variable_gives_settings_or_one_error(texts: dict[str, str]) -> None:
    environ = {**LEAST, **{variable_of(name): text for name, text in texts.items()}}
    settings: Settings | str
    try:
        settings = read_settings(environ=environ)
    except SettingsError as error:
        settings = error.fix
    assert settings


def test_every_setting_has_a_variable_of_its_own() -> None:
    variables = {variable_of(name): "1" for name in NAMES}
    assert len(variables) == len(NAMES)
    assert set(layer_of_variables(variables)) == set(NAMES)


@pytest.mark.parametrize("given_as", [{"store": {"segment_bytes": 0}}, {"store.segment_bytes": 0}])
def test_arguments_are_nested_or_dotted(toml: Path, given_as: dict[str, Any]) -> None:
    assert read_settings(toml, environ={}, overrides=given_as).store.segment_bytes == 0


def test_arguments_may_hold_a_sections_struct() -> None:
    store = akv.StoreSettings(master_address="a:1")
    assert read_settings(environ={}, overrides={"model_key": "m", "store": store}).store == store


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"store": 5}, "store"),
        ({"client": None}, "client"),
        ({"store": {"segment_bytes": 2**30}, "store.segment_bytes": 2**30}, "store.segment_bytes"),
        ({"loaders": 0}, "loaders"),
        ({"store": {"nonsense": 0}}, "store.nonsense"),
        ({"nonsense": 0}, "nonsense"),
    ],
)
def test_O5_a_wrong_argument_is_refused_as_one(overrides: dict[str, Any], field: str) -> None:
    error = refused(environ=LEAST, overrides=overrides)
    assert error.field == field
    assert "found in argument" in str(error)


def test_O5_a_mistake_in_a_file_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "akv.toml"
    path.write_text(TOML.replace("2GiB", "2GB"), encoding="utf-8")
    error = refused(path, environ={})
    assert (error.field, error.value) == ("store.segment_bytes", "2GB")
    assert f"found in {path}, line 6" in str(error)
    path.write_text(TOML + "segment = 1\n", encoding="utf-8")
    error = refused(path, environ={})
    assert error.field == "store.segment"
    assert f"{path}, line 7" in str(error)


def test_a_line_is_left_out_where_two_could_be_meant(tmp_path: Path) -> None:
    path = tmp_path / "akv.toml"
    path.write_text("# loaders = 3\nloaders = 0\nmodel_key = 'm'\n", encoding="utf-8")
    assert f"found in {path})" in str(refused(path, environ={}))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.toml", b"loaders = \n", "line 1"),
        ("a.toml", b"loaders = 1\nloaders = 2\n", "line 2"),
        ("a.json", b'{"loaders": 1,\n}', "line 2"),
        ("a.json", b'{"loaders": 1, "loaders": 2}', "twice"),
        ("a.json", b"[]", "no names and values"),
        ("a.json", b"[" * 100_000, "cannot be parsed"),
        ("a.toml", b'model_key = "\xff"', "UTF-8"),
        ("a.yaml", b"loaders: 1", "TOML and JSON"),
        ("settings", b"", "TOML and JSON"),
    ],
)
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_file_that_cannot_be_read_as_settings_is_one_error(
    tmp_path: Path, name: str, content: bytes, why: str, by_variable: bool
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = refused(environ={"AKV_CONFIG": str(path)}) if by_variable else refused(path, environ={})
    assert (error.field, error.value) == ("AKV_CONFIG" if by_variable else "path", str(path))
    assert why in str(error)
    assert error.fix


def test_an_empty_path_given_is_a_mistake() -> None:
    assert refused("", environ={}).field == "path"


@pytest.mark.parametrize("name", ["absent.toml", "folder.toml"])
def test_a_file_that_cannot_be_opened_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    error = refused(tmp_path / name, environ={})
    assert error.field == "path"
    assert "cannot be read" in str(error)


def test_X6_values_named_like_secrets_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "akv.json"
    tree = {"auth": {"key_secret": "s3cret", "list": [{"salt": "s3cret"}]}}
    path.write_text(json.dumps(tree), encoding="utf-8")
    errors = [
        refused(environ={"AKV_KEY_SECRETS": "s3cret"}),
        refused(environ=LEAST | {"AKV_KEY_SECRET": "s3cret" * 11}),
        refused(environ=LEAST | {"AKV_INTEGRITY_SECRET": "s3cret"}),
        refused(environ=LEAST, overrides={"key_secret": "s3cret\ud800"}),
        refused(environ=LEAST, overrides={"integrity_secret": ["s3cret"]}),
        refused(environ=LEAST, overrides={"salt": "s3cret"}),
        refused(path, environ={}),
    ]
    for error in errors:
        assert "s3cret" not in f"{error} {error.value} {error.__cause__!r} {error.__context__!r}"
        assert "(hidden)" in str(error)


def test_the_order_of_layers_decides_setting_by_setting() -> None:
    first = layer_of_mapping({"loaders": 1, "savers": 1}, lambda _: "first")
    second = layer_of_mapping({"savers": 2, "store": {}}, lambda _: "second")
    assert merge([first, second]) == ({"loaders": 1, "savers": 2}, {"loaders": "first", "savers": "second"})
