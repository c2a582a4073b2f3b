"""From texts and variables to layers of settings, each value with the place where it was found. Pure; `akv.settings` reads.

A layer holds what one source says, by dotted name. Nothing here checks a value's type or bounds: a value that a source cannot
spell is left as it is, and `akv.settings_checks` refuses it with the same words whatever it came from.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from akv.settings_checks import BINARY_SUFFIXES, Refused, closest, is_section, setting_types
from akv.values.hidden import HIDDEN

#: What every environment variable of akv begins with.
PREFIX = "AKV_"
#: The one variable that is no setting: the path of akv's own file.
CONFIG_VARIABLE = "AKV_CONFIG"
#: Mooncake's own: the path of a file which existing deployments have already.
MOONCAKE_VARIABLE = "MOONCAKE_CONFIG_PATH"

#: The fields of Mooncake's file that say how a process joins the pool, and what they are called here.
MOONCAKE_FIELDS = {
    "master_server_address": "store.master_address",
    "local_hostname": "store.local_hostname",
    "protocol": "store.protocol",
    "device_name": "store.device_name",
    "metadata_server": "store.metadata_server",
    "global_segment_size": "store.segment_bytes",
    "local_buffer_size": "store.local_buffer_bytes",
}
#: Bytes per unit there, by its first letter.
_MOONCAKE_SCALES = {"": 1} | {suffix[0].lower(): scale for suffix, scale in BINARY_SUFFIXES.items()}


class Found(NamedTuple):
    """A value, and where it was found, in words for the operator."""

    value: object
    source: str


Layer = dict[str, Found]


def merge(layers: Iterable[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """One nested mapping, in which later layers win, and the source of each value in it by dotted name."""
    sections = _sections()
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for name, found in layer.items():
            section, dot, field = name.partition(".")
            if dot and section in sections:
                tree.setdefault(section, {})[field] = found.value
            else:
                tree[name] = found.value
            sources[name] = found.source
    return tree, sources


def layer_of_mapping(tree: Mapping[str, Any], source: Callable[[str], str]) -> Layer:
    """What a mapping says: sections as mappings or as structs, or single settings by dotted name.

    `source` names the place of a setting by its dotted name. Raises SettingsError for a section that is none, and for a
    setting that is given twice.
    """
    sections = _sections()
    layer: Layer = {}
    for name, value in tree.items():
        pairs = {str(name): value}
        if name in sections:
            if isinstance(value, msgspec.Struct):
                value = msgspec.structs.asdict(value)  # noqa: PLW2901 - the same section, spelt as a mapping
            if not isinstance(value, Mapping):
                fix = f"Give its settings one by one: {', '.join(_fields_of(name))}."
                raise Refused(name, value, "it is a section, and holds settings", fix).error(source(name))
            pairs = {f"{name}.{field}": inner for field, inner in value.items()}
        for where, inner in pairs.items():
            if where in layer:
                raise Refused(where, inner, "it is given twice", "Give it once.").error(source(where))
            layer[where] = Found(inner, source(where))
    return layer


def layer_of_text(text: str, path: str) -> Layer:
    """What akv's own file says, TOML or JSON by the end of its name.

    Raises SettingsError as `layer_of_mapping` does; ValueError, whose text says where, if the text cannot be parsed.
    """
    tree = json.loads(text, object_pairs_hook=_once) if path.lower().endswith(".json") else tomllib.loads(text)
    if not isinstance(tree, dict):
        raise ValueError("it holds no names and values at its top")  # noqa: TRY004 - a text is wrong, as where it is no JSON
    return layer_of_mapping(tree, lambda name: f"{path}{_line_of(text, name)}")


def layer_of_variables(environ: Mapping[str, str]) -> Layer:
    """What the `AKV_` variables say. Raises SettingsError for one that akv does not know: a typo would go unnoticed."""
    known = {variable_of(name): (name, kind) for name, kind in setting_types()}
    layer: Layer = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name, kind = known.get(variable, ("", None))
        if not name:
            fix = closest(variable, {other: other for other, (_, kind) in known.items() if not is_section(kind)})
            # As of unknown settings the value is not shown: a secret under a misspelt name is one all the same (X6).
            raise Refused(variable, HIDDEN, "akv knows no such variable", f"{fix} Else unset it.").error()
        if is_section(kind):
            fix = f"Set its fields one by one: {', '.join(variable_of(field) for field in _fields_of(name))}."
            raise Refused(variable, environ[variable], "it names a section of settings", fix).error()
        layer[name] = Found(_typed(environ[variable], kind), f"the variable {variable}")
    return layer


def variable_of(name: str) -> str:
    """The variable of a setting: `AKV_STORE__MASTER_ADDRESS` for "store.master_address"."""
    return PREFIX + name.upper().replace(".", "__")


def layer_of_mooncake(text: str, path: str) -> tuple[Layer, tuple[str, ...]]:
    """What a file of Mooncake's own says about the store, read as its readers read it; and the fields that say nothing to akv.

    Empty and null fields count as left out. Raises SettingsError for a size that is none, naming the setting that it stands
    for; ValueError if the text is no JSON object.
    """
    config = json.loads(text)
    if not isinstance(config, dict):
        raise ValueError("it holds no names and values at its top")  # noqa: TRY004 - a text is wrong, as where it is no JSON
    layer: Layer = {}
    for field, name in MOONCAKE_FIELDS.items():
        value = config.get(field)
        if field == "global_segment_size" and value is None and config.get("mode") == "standalone-store":
            # Where another process owns the memory, those deployments lend none from the servers.
            value = 0
        if value is None or value == "":
            continue
        source = f"{field} of {path}{_line_of(text, field)} ({MOONCAKE_VARIABLE})"
        if field.endswith("_size"):
            value = _mooncake_size(value, name, source)
        elif field == "protocol" and isinstance(value, str):
            value = value.strip().lower()
        layer[name] = Found(value, source)
    return layer, tuple(sorted(set(config) - set(MOONCAKE_FIELDS) - {"mode"}))


def _mooncake_size(value: object, name: str, source: str) -> int:
    """Bytes. Every reader of these files takes "GB" as 1024**3, and fractions ("3.125GB") too."""
    if isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    parts = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)(?:i?b)?\s*", str(value).lower(), flags=re.ASCII)
    if isinstance(value, str) and parts and math.isfinite(number := float(parts[1])):
        return int(number * _MOONCAKE_SCALES[parts[2]])
    fix = "Write a number of bytes, or '4GB', which means 4 * 1024**3 in such a file."
    raise Refused(name, value, "no reader of such a file takes it for a size", fix).error(source)


def _typed(text: str, kind: Any) -> object:
    """The text as the field's type if it spells one; else the text, which the checks then refuse or read as a size."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if bare is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text)
    if bare in (int, float):
        try:
            return bare(text)
        except ValueError:
            return text
    return text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names differ, as TOML has it: of two values one would be silently ignored."""
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise ValueError(f"the name {name!r} stands twice in one object")
        seen[name] = value
    return seen


def _line_of(text: str, name: str) -> str:
    """Words for the line, if exactly one place of the file looks as if it gave the name a value: neither parser tells."""
    last = re.escape(name.rpartition(".")[2])
    found = list(re.finditer(rf"""(?<![\w-])["']?{last}["']?\s*[=:]""", text))
    return f", line {text.count(chr(10), 0, found[0].start()) + 1}" if len(found) == 1 else ""


def _sections() -> set[str]:
    return {name for name, kind in setting_types() if is_section(kind)}


def _fields_of(section: str) -> list[str]:
    return [name for name, _ in setting_types() if name.startswith(f"{section}.")]
