"""Whether settings are complete, well typed and consistent. Pure: where they came from is for `akv.settings` to say."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeGuard, get_args, get_origin

import msgspec

from akv.errors import SettingsError
from akv.plan.keys import SEPARATORS
from akv.values.hidden import HIDDEN
from akv.values.settings import SMALLEST_SEGMENT_BYTES, Settings, StoreSettings

#: Bytes per unit, for sizes written as strings. Binary only: what "GB" means differs from program to program (O5).
BINARY_SUFFIXES = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
#: Bytes of a secret, at most: what blake2b takes as a key.
MOST_SECRET_BYTES = 64


class Refused(Exception):
    """A value is wrong. Whoever knows where it came from makes the SettingsError."""

    def __init__(self, field: str, value: object, why: str, fix: str) -> None:
        self.field = field
        self.value = value
        self.why = why
        self.fix = fix
        super().__init__(field, why)

    def error(self, source: str = "") -> SettingsError:
        """What the operator reads. `source` says where the value was found: a file and line, a variable."""
        why = f"{self.why} (found in {source})" if source else self.why
        return SettingsError(self.field, shown(self.field, self.value), why, self.fix)


def check_settings(source: Settings | Mapping[str, Any]) -> Settings:
    """Return settings that are complete, well typed and consistent, from a mapping (parsed TOML, say) or from a `Settings`.

    Sizes, the fields named `*_bytes`, are integers or strings with a binary suffix ("512MiB"); they come out as integers.
    Raises SettingsError (fault of whoever configured this): the first field that is wrong, by its dotted name, what was found
    there, and what to write instead. Opens, reads and remembers nothing.
    """
    try:
        return checked(source)
    except Refused as refused:
        raise refused.error() from refused.__cause__


def check_staging(settings: Settings, largest_page_bytes: int) -> None:
    """Refuse staging whose shares hold no page: such a loader or saver could never move one.

    Raises SettingsError naming `staging_buffer_bytes` and the least that would do. Takes settings that are checked already.
    """
    try:
        _check_shares(settings, largest_page_bytes)
    except Refused as refused:
        raise refused.error() from None


def check_backlog(settings: Settings, block_bytes: int) -> None:
    """Refuse a backlog that has no room for one block, of `block_bytes` bytes over all full-attention groups: nothing could
    ever be saved.

    Raises SettingsError naming `backlog_bytes` and the least that would do. Takes settings that are checked already.
    """
    if settings.role != "consumer" and settings.backlog_bytes < block_bytes:
        raise Refused(
            "backlog_bytes",
            settings.backlog_bytes,
            f"it has no room for one block of {block_bytes} bytes, so nothing could be saved",
            f"Give at least {block_bytes} bytes; what one pass computes, if its pages are to be saved whole.",
        ).error()


def checked(source: Settings | Mapping[str, Any]) -> Settings:
    """As `check_settings`, for a caller that knows where each value came from: raises Refused, and no SettingsError."""
    settings: Settings = _build(Settings, source, at="")
    _check_keys(settings)
    _check_secrets(settings)
    _check_key_format(settings)
    _check_seconds(settings)
    _check_pool(settings)
    return settings


def checked_store(source: object) -> StoreSettings:
    """The section `store` alone, each field well typed. Raises Refused."""
    store: StoreSettings = _build(StoreSettings, source, at="store")
    return store


def is_section(kind: object) -> TypeGuard[type[msgspec.Struct]]:
    """Whether a field's type is a struct, whose fields are the settings."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def setting_types(kind: type[msgspec.Struct] = Settings, at: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the type of every setting, in the order of the reference; sections come before their fields."""
    for field in msgspec.structs.fields(kind):
        where = _dotted(at, field.name)
        yield where, field.type
        if is_section(field.type):
            yield from setting_types(field.type, where)


def closest(name: str, known: Mapping[str, str]) -> str:
    """What to write instead of an unknown name: the value of the known one that is most alike, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {known[close[0]]!r}?" if close else f"Known are: {', '.join(known.values())}."


def shown(name: str, value: Any) -> Any:
    """The value as it may be printed: nothing named like a secret, a salt or a password is, at any depth (X6)."""
    if any(word in name.lower() for word in ("secret", "salt", "password")):
        # Whether one is set may be known.
        return value if value in ("", None) or isinstance(value, bool) else HIDDEN
    if isinstance(value, Mapping):
        return {key: shown(str(key), inner) for key, inner in value.items()}
    return [shown("", inner) for inner in value] if isinstance(value, list) else value


def _build(kind: type[Any], source: object, *, at: str) -> Any:
    """A checked `kind` from a mapping, or from an instance that nothing has checked. `at` is the dotted name so far."""
    if isinstance(source, kind):
        source = {name: getattr(source, name) for name in kind.__struct_fields__}
    if not isinstance(source, Mapping):
        # What stands for a whole tree may hold its secrets, in whatever form (X6).
        found = source if at else HIDDEN
        raise Refused(at or "settings", found, f"expected names and values, got {_kind_of(source)}", "Give a mapping.")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in source:
        if name not in fields:
            _refuse_unknown(_dotted(at, str(name)))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = _dotted(at, name)
        if name in source:
            values[name] = _value(field, source[name], where)
        elif field.required:
            raise Refused(where, None, "it is required and missing", _fix_for(field))
    return kind(**values)


def _value(field: msgspec.structs.FieldInfo, found: object, where: str) -> object:
    if is_section(field.type):
        return _build(field.type, found, at=where)
    if field.name.endswith("_bytes") and isinstance(found, str):
        found = _size_from_text(found, where)
    try:
        return msgspec.convert(found, type=field.type)
    except msgspec.ValidationError as error:
        why = str(error).replace("`", "")
        raise Refused(where, found, why[0].lower() + why[1:], _fix_for(field)) from error


def _size_from_text(text: str, where: str) -> int:
    parts = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]+)\s*", text, flags=re.ASCII)
    if parts and parts[2] in BINARY_SUFFIXES:
        return int(parts[1]) * BINARY_SUFFIXES[parts[2]]
    if parts and (meant := {name[0].lower(): name for name in BINARY_SUFFIXES}.get(parts[2][0].lower())):
        raise Refused(
            where,
            text,
            f"{parts[2]!r} means a power of 1000 to some programs and of 1024 to others, so no two sizes could be compared",
            f"Write '{parts[1]}{meant}', or the number of bytes.",
        )
    raise Refused(
        where,
        text,
        f"a size is a whole number of bytes, as an integer or with one of {', '.join(BINARY_SUFFIXES)} behind it",
        "Write '512MiB', say, or 536870912.",
    )


def _refuse_unknown(where: str) -> NoReturn:
    # Compared without the path, so that a right name at the wrong level ("segment_bytes") finds its place too.
    known = {_last(name): name for name, _ in setting_types()}
    # Nobody needs the value to find the right name, and it may be a secret under a misspelt one (X6).
    raise Refused(where, HIDDEN, "there is no such setting", closest(_last(where), known))


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _dotted(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _kind_of(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _fix_for(field: msgspec.structs.FieldInfo) -> str:
    """What to write instead, from the field's type and the unit in its name."""
    kind: Any = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    if field.name == "model_key":
        return "Name the weights, 'meta-llama/Llama-3.1-8B-Instruct' say; every server that shares pages uses the same name."
    if get_origin(kind) is Literal:
        return f"Write one of: {', '.join(repr(choice) for choice in get_args(kind))}."
    if field.name.endswith("_bytes"):
        return "Write a number of bytes, or a string with a binary suffix: '512MiB'."
    if field.name.endswith("_s"):
        return f"Write seconds, as {field.default!r} is, or leave it out."
    return f"Write {'true or false' if kind is bool else f'a value such as {field.default!r}'}, or leave it out."


def _check_keys(settings: Settings) -> None:
    """The parts of a page's key: they are percent-encoded from UTF-8, so they must have such an encoding."""
    for name in ("model_key", "namespace", "revision"):
        text: str = getattr(settings, name)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refused(name, text, "it is not valid Unicode text (a lone surrogate)", "Write it anew.") from error
        if text and not text.strip():
            raise Refused(name, text, "it is blank, and it is a part of every key", "Write a readable name.")


def _check_secrets(settings: Settings) -> None:
    for name in ("key_secret", "integrity_secret"):
        text: str = getattr(settings, name)
        fix = "Write random text of at most 64 letters and digits, the same in every server that shares pages."
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            # Without its cause, which would quote the secret.
            raise Refused(name, text, "it is not valid Unicode text (a lone surrogate)", fix) from None
        if size > MOST_SECRET_BYTES:
            raise Refused(name, text, f"it has {size} bytes, and a key of the hash has {MOST_SECRET_BYTES} at most", fix)
    if settings.integrity == "mac" and not settings.integrity_secret:
        raise Refused(
            "integrity_secret",
            "",
            "integrity 'mac' is keyed by it, and anybody can compute codes without a key",
            "Set it, or use integrity 'checksum', which finds accidents only.",
        )
    if settings.integrity != "mac" and settings.integrity_secret:
        raise Refused(
            "integrity_secret",
            settings.integrity_secret,
            f"integrity {settings.integrity!r} uses no secret, so it protects nothing",
            "Use integrity 'mac', or leave it out.",
        )


def _check_key_format(settings: Settings) -> None:
    """TensorRT-LLM's keys have no place for what its servers do not know (K1)."""
    if settings.key_format != "trtllm":
        return
    wanted: dict[str, tuple[Any, str]] = {
        "pin_model_key": (True, "its servers know no fingerprint of a layout"),
        "integrity": ("off", "its servers store pages with nothing behind them"),
        "key_secret": ("", "its servers hash without a key"),
    }
    for name, (value, why) in wanted.items():
        if (found := getattr(settings, name)) != value:
            fix = f"Set {name} to {value!r}, or use key_format 'akv'."
            raise Refused(name, found, f"key_format 'trtllm' spells keys as TensorRT-LLM does, and {why}", fix)
    for name in ("namespace", "model_key", "revision"):
        text: str = getattr(settings, name)
        if any(separator in text for separator in SEPARATORS):
            why = f"with key_format 'trtllm' nothing is escaped, and {', '.join(SEPARATORS)} separate the parts of a key"
            raise Refused(name, text, why, "Use the name that its servers use, without them.")


def _check_seconds(settings: Settings) -> None:
    for field in msgspec.structs.fields(Settings):
        # Those of the client are whole numbers.
        if field.name.endswith("_s") and not math.isfinite(seconds := getattr(settings, field.name)):
            raise Refused(field.name, seconds, "a wait without an end could hold pages for ever", _fix_for(field))


def _check_pool(settings: Settings) -> None:
    store = settings.store
    if settings.pool == "mooncake":
        host, colon, port = store.master_address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise Refused(
                "store.master_address",
                store.master_address,
                "pool 'mooncake' joins a running pool, at its master's host:port",
                "Write the address, '10.0.0.1:50051' say, or name Mooncake's file in MOONCAKE_CONFIG_PATH, "
                "or use pool 'embedded'.",
            )
    elif store.master_address:
        raise Refused(
            "store.master_address",
            store.master_address,
            "pool 'embedded' starts a master of its own",
            "Leave it out, or use pool 'mooncake'.",
        )
    if settings.pool == "embedded" and not store.segment_bytes:
        raise Refused("store.segment_bytes", 0, "an embedded pool has no other memory", "Lend at least 16 MiB, '1GiB' say.")
    if 0 < store.segment_bytes < SMALLEST_SEGMENT_BYTES:
        raise Refused(
            "store.segment_bytes",
            store.segment_bytes,
            f"the store mounts no segment below {SMALLEST_SEGMENT_BYTES} bytes",
            "Lend at least 16 MiB, or 0 for nothing.",
        )
    _check_shares(settings, largest_page_bytes=1)


def _check_shares(settings: Settings, largest_page_bytes: int) -> None:
    sharers = max(settings.loaders, settings.savers)
    least = sharers * largest_page_bytes
    if settings.staging_buffer_bytes < least:
        raise Refused(
            "staging_buffer_bytes",
            settings.staging_buffer_bytes,
            f"{sharers} shares of it hold no page of {largest_page_bytes} bytes each",
            f"Give at least {least} bytes, or fewer loaders and savers.",
        )
