"""The variables of the store's client: set from settings, never over the operator's own, the same for all connectors."""

import os
from collections.abc import Iterator

import pytest

from akv import settings as module
from akv.errors import SettingsError
from akv.settings import CLIENT_VARIABLES, ClientSettings, prepare_client_environment

DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "1500",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been prepared, and afterwards as it was before."""
    before = {name: os.environ.pop(name) for name in CLIENT_VARIABLES.values() if name in os.environ}
    monkeypatch.setattr(module, "_agreed", {})
    yield
    for name in CLIENT_VARIABLES.values():
        os.environ.pop(name, None)
    os.environ.update(before)


def test_the_defaults_are_put_in_force() -> None:
    assert prepare_client_environment(ClientSettings()) == DEFAULTS
    assert {name: os.environ[name] for name in DEFAULTS} == DEFAULTS


def test_every_client_setting_but_the_capture_has_a_variable() -> None:
    assert set(ClientSettings.__struct_fields__) - set(CLIENT_VARIABLES) == {"capture_log"}


@pytest.mark.parametrize("own", ["30000", ""])
def test_the_operators_own_variable_is_left_alone(own: str) -> None:
    os.environ["MC_RPC_TIMEOUT_MS"] = own
    assert prepare_client_environment(ClientSettings()) == {**DEFAULTS, "MC_RPC_TIMEOUT_MS": own}
    # ... and connectors need not agree on a setting that has no effect.
    assert prepare_client_environment(ClientSettings(rpc_timeout_ms=2000))["MC_RPC_TIMEOUT_MS"] == own


def test_preparing_again_changes_nothing() -> None:
    first = prepare_client_environment(ClientSettings(log_level="WARNING"))
    assert prepare_client_environment(ClientSettings(log_level="WARNING")) == first


@pytest.mark.parametrize(
    ("other", "field", "value", "earlier"),
    [
        (ClientSettings(rpc_timeout_ms=2000), "client.rpc_timeout_ms", 2000, "1500"),
        (ClientSettings(log_level="INFO"), "client.log_level", "INFO", "'ERROR'"),
        (ClientSettings(capture_log=False), "client.capture_log", False, "True"),
    ],
)
def test_O8_a_second_connector_with_other_client_settings_is_refused(
    other: ClientSettings, field: str, value: object, earlier: str
) -> None:
    prepare_client_environment(ClientSettings())
    with pytest.raises(SettingsError) as caught:
        prepare_client_environment(other)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert earlier in str(caught.value)
    assert {name: os.environ[name] for name in DEFAULTS} == DEFAULTS


def test_O8_a_refused_connector_sets_nothing() -> None:
    prepare_client_environment(ClientSettings())
    del os.environ["MC_LOG_LEVEL"]
    with pytest.raises(SettingsError):
        prepare_client_environment(ClientSettings(log_level="TRACE", rpc_timeout_ms=7))
    assert "MC_LOG_LEVEL" not in os.environ


def test_a_variable_changed_after_akv_set_it_is_the_operators_own() -> None:
    prepare_client_environment(ClientSettings())
    os.environ["MC_RPC_TIMEOUT_MS"] = "9"
    assert prepare_client_environment(ClientSettings(rpc_timeout_ms=2000))["MC_RPC_TIMEOUT_MS"] == "9"
