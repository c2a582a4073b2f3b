"""The reference pages say what the code says. Run as a script, with akv installed, this file writes them anew."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import pytest

from akv import observe
from akv.cli.config.describe import comments
from akv.plan.lifecycle import diagram
from akv.settings import ClientSettings, Settings, StoreSettings

SECTIONS = (StoreSettings, ClientSettings)
DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference"
FLOW = DOCS / "discussion" / "request-flow.md"

SETTINGS_HEAD = """\
# Settings

What `akv.open_connector()` takes as its first argument: an `akv.Settings`, or a mapping with the same names (a parsed TOML
file, say). Everything is checked before anything is opened; the first mistake raises one `SettingsError` that names the field,
what was found there, and what to write instead. Unknown names are refused with the closest known one.

`akv.read_settings()` reads them from files and environment variables. A setting's variable is its name in capitals:
`AKV_LOADERS`, and `AKV_STORE__MASTER_ADDRESS` in a section. [How to configure akv](../how-to/configure.md) says which source
wins.

Sizes, the settings named `*_bytes`, are integers in bytes, or strings with a binary suffix: `"512MiB"`; KiB, MiB, GiB and TiB
are known. GB and its like are refused, because what they mean differs from program to program. Settings named `*_s` are in
seconds.
"""

EVENTS_HEAD = """\
# Events

What akv says about itself. Names and fields are stable. The library configures no logging: events go to structlog if the
application configured it, and otherwise to the standard library's logger `akv`, so that by default only warnings and errors
are printed, on stderr. `akv.logging.json()` is one call that writes every event as a JSON line.

Units are in the names of the fields (`_s`: seconds, `bytes`: bytes). An event whose fields end in `phase`, `outcome` and
`duration_s` is a step: it is emitted when the step begins (phase `begin`, level debug) and when it ends (phase `end`, outcome
`ok`, `error` or `cancelled`; an error raises the level to warning at least).

No event holds prompt text, token values or salts. Page keys stand in events of level debug only.
"""


def type_of(annotated: Any) -> str:
    plain, notes = (get_args(annotated)[0], get_args(annotated)[1:]) if get_origin(annotated) is Annotated else (annotated, ())
    if get_origin(plain) is Literal:
        return " or ".join(f'`"{choice}"`' for choice in get_args(plain))
    words = [plain.__name__]
    for note in notes:
        words += [f">= {note.ge:g}"] if note.ge is not None else []
        words += [f"> {note.gt:g}"] if note.gt is not None else []
        words += ["not empty"] if note.min_length else []
    return " ".join(words)


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    size, suffixes = field.default, iter(("KiB", "MiB", "GiB", "TiB"))
    if field.name.endswith("_bytes"):
        suffix = ""
        while size and size % 1024 == 0:
            size, suffix = size // 1024, next(suffixes)
        return f"`{field.default}` ({size} {suffix})" if suffix else f"`{size}`"
    return f"`{field.default!r}`".replace("'", '"').replace("True", "true").replace("False", "false")


def rows(kind: type, at: str) -> Iterator[str]:
    said = comments(kind)
    for field in msgspec.structs.fields(kind):
        if field.type not in SECTIONS:
            yield f"| `{at}{field.name}` | {type_of(field.type)} | {default_of(field)} | {said[field.name]} |"


def settings_page() -> str:
    head = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    parts = [SETTINGS_HEAD, "## The connector", "", *head, *rows(Settings, ""), ""]
    parts += ["## The store", "", *head, *rows(StoreSettings, "store."), ""]
    return "\n".join([*parts, "## The store's client", "", *head, *rows(ClientSettings, "client."), ""])


def events_page() -> str:
    head = [EVENTS_HEAD, "| event | level | fields | meaning |", "|---|---|---|---|"]
    body = [
        f"| `{event.name}` | {event.level} | {', '.join(f'`{field}`' for field in event.fields)} | {event.meaning} |"
        for event in observe.CATALOGUE.values()
    ]
    return "\n".join([*head, *body, ""])


def flow_page() -> str:
    """The page as it is, with the diagram between its marks drawn anew."""
    head, _, rest = FLOW.read_text(encoding="utf-8").partition("<!-- lifecycle -->\n")
    _, end, tail = rest.partition("<!-- end of lifecycle -->\n")
    return f"{head}<!-- lifecycle -->\n```mermaid\n{diagram()}\n```\n{end}{tail}"


PAGES: dict[str, Callable[[], str]] = {"settings.md": settings_page, "events.md": events_page}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name]()


def test_the_diagram_of_a_requests_life_is_the_table() -> None:
    assert FLOW.read_text(encoding="utf-8") == flow_page()
    assert "    preempting --> open: pages free\n" in flow_page()


@pytest.mark.parametrize("kind", [Settings, *SECTIONS])
def test_every_setting_says_why_it_is_there(kind: type) -> None:
    said = comments(kind)
    for name in kind.__annotations__:
        assert said[name].endswith("."), name
        assert not name.endswith("_s") or said[name].startswith("Seconds"), name
        assert not name.endswith("_bytes") or said[name].startswith("Bytes"), name


if __name__ == "__main__":
    for page, render in PAGES.items():
        (REFERENCE / page).write_text(render(), encoding="utf-8")
    FLOW.write_text(flow_page(), encoding="utf-8")
