"""What every setting is: its unit, its meaning and its bounds, from the structs themselves. Needs none of the extra `cli`."""

import re
import textwrap
from collections.abc import Iterator
from inspect import getsource
from typing import Any

import msgspec

from akv.cli.config.sharing import key_parts
from akv.settings import ExplainedSettings
from akv.settings_checks import BINARY_SUFFIXES, is_section, setting_types, shown
from akv.values.settings import ClientSettings, Settings, StoreSettings

#: The structs of the tree, by the section that each is.
SECTIONS: dict[str, type[msgspec.Struct]] = {"": Settings, "store": StoreSettings, "client": ClientSettings}
#: Ends of names that say a unit.
_UNITS = {"_bytes": "bytes", "_s": "seconds", "_ms": "milliseconds", "_tokens": "tokens"}


def comments(kind: type) -> dict[str, str]:
    """Each field's `#:` comment. Empty where Python was installed without sources: settings work there too."""
    try:
        source = getsource(kind)
    except OSError:
        return {}
    found: dict[str, str] = {}
    said: list[str] = []
    for line in textwrap.dedent(source).splitlines():
        if comment := re.fullmatch(r"\s*#: ?(.*)", line):
            said.append(comment[1])
        elif field := re.match(r"    (\w+): ", line):
            found[field[1]], said = " ".join(said), []
    return found


def unit_of(name: str) -> str | None:
    """The unit that a setting's name says, or None for a name, a choice or a plain count."""
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), None)


def explanation(explained: ExplainedSettings) -> dict[str, Any]:
    """Every setting with its value, source, unit and description; the key space that they lead to; and what was ignored."""
    said = dict(_descriptions())
    return {
        "settings": [
            {
                "name": name,
                "value": shown(name, explained.value(name)),
                "source": explained.sources[name],
                "unit": unit_of(name),
                "description": said.get(name, ""),
            }
            for name, kind in setting_types()
            if not is_section(kind)
        ],
        "key_space": key_space(explained.settings),
        "notes": list(explained.notes),
    }


def key_space(settings: Settings) -> dict[str, Any]:
    """The key of every page, part by part, as far as settings decide it; what stands in <> the layout or the request adds."""
    parts = key_parts(settings)
    by_name = {part.name: part.spelt for part in parts}
    model = by_name["model"] + by_name["layout"] + by_name["revision"]
    return {
        "namespace": by_name["namespace"].rstrip("/"),
        "model": model,
        "prefix": f"{by_name['namespace']}{model}/",
        "key": "".join(part.spelt for part in parts),
        "parts": [part._asdict() for part in parts],
    }


def schema() -> dict[str, Any]:
    """The JSON schema of akv's file, with descriptions, and units as `x-unit`. Sizes may be strings with a binary suffix."""
    tree = msgspec.json.schema(Settings)
    said = dict(_descriptions())
    for section, kind in SECTIONS.items():
        definition = tree["$defs"][kind.__name__]
        for field, told in definition["properties"].items():
            name = f"{section}.{field}" if section else field
            if field.endswith("_bytes"):
                told = _size_or_text(told)  # noqa: PLW2901 - replaced in its place below
            told["description"] = said.get(name, "")
            if unit := unit_of(field):
                told["x-unit"] = unit
            definition["properties"][field] = told
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "akv settings", **tree}


def _size_or_text(told: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "string", "pattern": rf"^\s*[0-9]+\s*({'|'.join(BINARY_SUFFIXES)})\s*$"}
    default = {"default": told.pop("default")} if "default" in told else {}
    return {"anyOf": [told, text], **default}


def _descriptions() -> Iterator[tuple[str, str]]:
    for section, kind in SECTIONS.items():
        for field, said in comments(kind).items():
            yield f"{section}.{field}" if section else field, said
