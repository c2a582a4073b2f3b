"""What a deployment decides, read from wherever it was written, and checked before anything is opened.

This is the one module that reads or sets environment variables, and reads files of settings. The structs stand in
`akv/values/settings.py`, what is refused in `akv/settings_checks.py`, how each source spells a value in
`akv/settings_sources.py`.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from akv.errors import SettingsError
from akv.settings_checks import (
    Refused,
    check_backlog,
    check_settings,
    check_staging,
    checked,
    checked_store,
    is_section,
    setting_types,
)
from akv.settings_sources import (
    CONFIG_VARIABLE,
    MOONCAKE_VARIABLE,
    Layer,
    layer_of_mapping,
    layer_of_mooncake,
    layer_of_text,
    layer_of_variables,
    merge,
)
from akv.values.settings import SMALLEST_SEGMENT_BYTES, ClientSettings, Settings, StoreSettings

__all__ = [
    "CLIENT_VARIABLES",
    "SMALLEST_SEGMENT_BYTES",
    "ClientSettings",
    "ExplainedSettings",
    "Settings",
    "StoreSettings",
    "check_backlog",
    "check_settings",
    "check_staging",
    "explain_settings",
    "prepare_client_environment",
    "read_settings",
    "read_store_settings",
]

#: Where a setting's value comes from that nobody gave.
DEFAULT = "default"


class ExplainedSettings(msgspec.Struct, frozen=True):
    """Settings, and where each of them was found."""

    settings: Settings
    #: By dotted name, for every setting: "default", a file and line, a variable, or "argument".
    sources: dict[str, str]
    #: What was read and has no effect, one sentence each.
    notes: tuple[str, ...]

    def value(self, name: str) -> Any:
        """The value of the setting of that dotted name."""
        value: Any = self.settings
        for part in name.split("."):
            value = getattr(value, part)
        return value


def read_settings(
    path: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from where deployments write them, checked. A later source wins, setting by setting:

    1. the defaults,
    2. the JSON file of Mooncake's own that MOONCAKE_CONFIG_PATH names: it fills `store.*`, unless the pool is embedded,
    3. akv's file, TOML or JSON by its suffix: `path`, else what AKV_CONFIG names, else none,
    4. the AKV_ variables, "__" before a field of a section: AKV_MODEL_KEY, AKV_STORE__MASTER_ADDRESS,
    5. `overrides`: nested as in a file, or by dotted name.

    What was written for akv wins over what was written for every user of the store. An empty AKV_CONFIG or
    MOONCAKE_CONFIG_PATH counts as unset. `environ` stands in for the process's environment; `{}` is none.

    Raises SettingsError (fault of whoever configured this): one error, which names the field, the value, where it was found
    and what to write instead. Reads each file once and remembers nothing.
    """
    return explain_settings(path, environ=environ, overrides=overrides).settings


def explain_settings(
    path: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ExplainedSettings:
    """As `read_settings`, with the source of every value and what was ignored."""
    environ = os.environ if environ is None else environ
    layers = [
        _own_file(path, environ),
        layer_of_variables(environ),
        layer_of_mapping(overrides or {}, lambda _: "argument"),
    ]
    foreign, notes = _foreign_file(environ, pool=merge(layers)[0].get("pool"))
    tree, sources = merge([foreign, *layers])
    try:
        settings = checked(tree)
    except Refused as refused:
        raise refused.error(sources.get(refused.field, "")) from refused.__cause__
    names = [name for name, kind in setting_types() if not is_section(kind)]
    return ExplainedSettings(settings, {name: sources.get(name, DEFAULT) for name in names}, notes)


def read_store_settings(path: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> StoreSettings:
    """The section `store` as `read_settings` would find it, for commands that open no connector and so know no model.

    Raises SettingsError as it does, but for what only a whole tree can show to be wrong.
    """
    environ = os.environ if environ is None else environ
    layers = [_own_file(path, environ), layer_of_variables(environ)]
    foreign, _ = _foreign_file(environ, pool=merge(layers)[0].get("pool"))
    tree, sources = merge([foreign, *layers])
    try:
        return checked_store(tree.get("store", {}))
    except Refused as refused:
        raise refused.error(sources.get(refused.field, "")) from refused.__cause__


def _own_file(path: str | Path | None, environ: Mapping[str, str]) -> Layer:
    field = "path" if path is not None else CONFIG_VARIABLE
    path = str(path) if path is not None else environ.get(CONFIG_VARIABLE, "")
    if not path and field == CONFIG_VARIABLE:
        return {}
    if not path.lower().endswith((".toml", ".json")):
        raise SettingsError(
            field, path, "akv reads TOML and JSON, and tells them apart by the suffix", "Name it *.toml or *.json."
        )
    text = _text_of(path, field)
    try:
        return layer_of_text(text, path)
    except (ValueError, RecursionError) as error:
        raise SettingsError(field, path, f"the file cannot be parsed: {error}", "Mend the file there.") from error


def _foreign_file(environ: Mapping[str, str], *, pool: object) -> tuple[Layer, tuple[str, ...]]:
    """Mooncake's own file, if there is one and it can matter, and what of it has no effect."""
    path = environ.get(MOONCAKE_VARIABLE, "")
    if not path:
        return {}, ()
    if pool == "embedded":
        return {}, (f"{MOONCAKE_VARIABLE} is not read: an embedded pool joins no other.",)
    text = _text_of(path, MOONCAKE_VARIABLE)
    try:
        layer, ignored = layer_of_mooncake(text, path)
    except (ValueError, RecursionError) as error:
        raise SettingsError(MOONCAKE_VARIABLE, path, f"the file cannot be parsed: {error}", "Mend the file there.") from error
    return layer, ((f"Fields of {path} that mean nothing to akv: {', '.join(ignored)}.",) if ignored else ())


def _text_of(path: str, field: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(field, path, f"the file is not UTF-8 text: {error.reason}", "Save it as UTF-8.") from error
    except OSError as error:
        why = f"the file cannot be read: {error.strerror or error}"
        raise SettingsError(field, path, why, "Give the path of a file that this user may read.") from error


#: The variable of each client setting. The store's client reads them at its first setup, once for the process.
CLIENT_VARIABLES = {
    "log_level": "MC_LOG_LEVEL",
    "setup_retries": "MC_STORE_CLIENT_SETUP_RETRIES",
    "rpc_timeout_ms": "MC_RPC_TIMEOUT_MS",
    "tcp_status_timeout_s": "MC_TCP_STATUS_TIMEOUT_SEC",
    "tcp_progress_timeout_s": "MC_TCP_PROGRESS_TIMEOUT_SEC",
    "tcp_max_queued_transfers_per_peer": "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
}

#: What akv itself put in force for this process, by field. A global, because the variables are.
_agreed: dict[str, Any] = {}
#: Two loops in two threads may open connectors at the same time.
_agreeing = threading.Lock()


def prepare_client_environment(client: ClientSettings) -> dict[str, str]:
    """Set the variables that the store's client reads, and return what is now in force, by variable.

    A variable that is set already, by whoever started this process, is left as it is, and the setting behind it has no effect.
    Call it before the first client's setup; calling it again with the same settings changes nothing. Raises SettingsError
    (fault of whoever configured this process), and sets nothing, when an earlier call in this process set another value: the
    store's clients of one process share these variables (O8).
    """
    wanted: dict[str, Any] = {name: getattr(client, name) for name in client.__struct_fields__}
    with _agreeing:
        for name, value in wanted.items():
            variable = CLIENT_VARIABLES.get(name)
            # Somebody changed the variable after akv had set it: that is the operator's own value from then on.
            overruled = variable is not None and os.environ.get(variable) != str(_agreed.get(name))
            if name in _agreed and value != _agreed[name] and not overruled:
                raise SettingsError(
                    f"client.{name}",
                    value,
                    f"an earlier connector of this process runs with {_agreed[name]!r}, and the store's clients share it",
                    f"Give every connector of this process the same value: {_agreed[name]!r} here, or {value!r} there.",
                )
        for name, value in wanted.items():
            variable = CLIENT_VARIABLES.get(name)
            if variable is None or variable not in os.environ:
                _agreed[name] = value
                if variable is not None:
                    os.environ[variable] = str(value)
        return {variable: os.environ[variable] for variable in CLIENT_VARIABLES.values()}
