"""What a deployment decides, checked before anything is opened.

This is the one module that reads or sets environment variables, and reads files of settings. `msgspec` constructors check
nothing, so whoever takes settings passes them through `check_settings()`, whatever they were built with.
"""

import difflib
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import msgspec

from akv.errors import SettingsError

_KIB = 1024
_MIB = 1024**2
_GIB = 1024**3
#: The store counts in signed 64-bit integers.
_LARGEST = 2**63 - 1

#: Bytes per unit, for sizes written as strings. Binary only: what "GB" means differs from program to program (O5).
BINARY_SUFFIXES = {"KiB": _KIB, "MiB": _MIB, "GiB": _GIB, "TiB": 1024**4}

#: Bytes. The store mounts nothing smaller.
SMALLEST_SEGMENT_BYTES = 16 * _MIB

#: Seconds. Event loops wake no finer; uvloop returns at once from shorter sleeps, so a poll loop would spin.
SHORTEST_TICK_S = 0.001

Count = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
Size = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
#: The store's client reads these with C's `int`.
ClientCount = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this process joins the pool."""

    #: "host:port" of the pool's master. Required with pool "mooncake"; stays empty with "embedded", which starts its own.
    master_address: str = ""
    #: The name or address under which other processes of the pool reach this one. Loopback serves one machine only.
    local_hostname: Name = "127.0.0.1"
    #: The transport between processes. "rdma" needs registered memory and a device; "tcp" needs neither.
    protocol: Literal["tcp", "rdma"] = "tcp"
    #: RDMA devices, comma separated; empty lets the store choose. Unused with "tcp".
    device_name: str = ""
    #: Where the store's clients find each other. The default asks peers directly and needs no further server.
    metadata_server: Name = "P2PHANDSHAKE"
    #: Bytes of memory that this process lends to the pool. 0 for none, else at least 16 MiB: the store mounts nothing smaller.
    segment_bytes: Size = _GIB
    #: Bytes of the store client's own scratch memory. Pages never pass through it, so little is enough.
    local_buffer_bytes: Size = 16 * _MIB


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the store's client behaves in this whole process: it reads all but `capture_log` from environment variables.

    A variable that the operator set wins over the setting. Connectors of one process must agree on these (O8).
    """

    #: The least severe lines that the store's client writes to standard error (`MC_LOG_LEVEL`). At "INFO" it writes about 15
    #: for each setup.
    log_level: Literal["TRACE", "INFO", "WARNING", "ERROR"] = "ERROR"
    #: Attempts to join the pool (`MC_STORE_CLIENT_SETUP_RETRIES`). When the master refuses, the client's own 20 hold the
    #: interpreter lock for 90 seconds; one attempt takes 4.4.
    setup_retries: ClientCount = 1
    #: Milliseconds that the master may take for one answer (`MC_RPC_TIMEOUT_MS`). The client's own 30,000 outlast every
    #: deadline of akv.
    rpc_timeout_ms: ClientCount = 1500
    #: Seconds, whole, that a peer may take to say that a transfer arrived (`MC_TCP_STATUS_TIMEOUT_SEC`). With the client's own
    #: 30, a frozen peer holds a call for 30 to 62 seconds.
    tcp_status_timeout_s: ClientCount = 3
    #: Seconds, whole, that a transfer may stand still (`MC_TCP_PROGRESS_TIMEOUT_SEC`). The client's own are 30 here too, and
    #: both must be short for a call to end early.
    tcp_progress_timeout_s: ClientCount = 3
    #: Transfer entries that may wait for one peer, over all threads (`MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER`). Every buffer of
    #: a scatter list is one; past the limit calls fail and the peer stays wedged, so it is the largest that the client takes.
    tcp_max_queued_transfers_per_peer: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 65535
    #: Whether the store client's lines on standard error become events of akv, so that they are neither lost nor mixed into
    #: the server's own output.
    capture_log: bool = True


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `open_connector()` takes: one model's cache and how it uses a pool. Frozen; unknown fields are refused by name."""

    #: Names the weights, and stands in every page's key: two models with one name would answer from each other's cache.
    #: Required, and never guessed from a path.
    model_key: Name
    #: The first part of every key. Separates deployments that share a pool; it hides nothing from anybody.
    namespace: Name = "akv1"
    #: The weights' revision, part of every key. Empty if the model key says it all.
    revision: str = ""
    #: True leaves the layout's fingerprint out of the keys. Whoever sets it vouches that equal names have equal layouts.
    pin_model_key: bool = False
    #: "producer" saves, "consumer" loads, "both" does both.
    role: Literal["both", "producer", "consumer"] = "both"
    #: "async": a request waits outside the batch while its pages load, and the others go on computing.
    load_mode: Literal["async"] = "async"
    #: "mooncake" joins a running pool; "embedded" starts a master of its own on loopback, which ends with this process.
    pool: Literal["mooncake", "embedded"] = "mooncake"
    #: How this process joins the pool.
    store: StoreSettings = StoreSettings()
    #: How the store's client behaves in this process.
    client: ClientSettings = ClientSettings()
    #: Bytes of host memory between store and device, for each direction. Shared evenly by the loaders, and by the savers; each
    #: share must hold a page.
    staging_buffer_bytes: Size = _GIB
    #: Loads that move pages at a time. Two, so that one scatters to the device while the other waits for the store.
    loaders: Count = 2
    #: Saves that move pages at a time.
    savers: Count = 1
    #: Keys in a lookup's first probe. Small, so that a prompt which nobody has cached costs one small call.
    probe_head: Count = 64
    #: Keys in each later probe. The store's client converts arguments under the interpreter lock: larger calls stall the loop.
    probe_chunk: Count = 1024
    #: Probe calls of one lookup in flight at a time. Two, so that the store works while the loop reads the answer before.
    probe_concurrency: Count = 2
    #: Tokens of recent requests whose block hashes are kept in memory, so that a conversation's next turn hashes only what is
    #: new. 0 keeps none.
    recent_chains_tokens: Tokens = 2_000_000
    #: Seconds after which a lookup answers a miss.
    lookup_deadline_s: Seconds = 1.0
    #: Seconds from a load's dispatch after which it fails, and its request computes instead.
    load_deadline_s: Seconds = 5.0
    #: Seconds that leaving the connector may take in all. What the store still holds then is kept alive and reported.
    shutdown_deadline_s: Seconds = 10.0
    #: True registers an `atexit` guard that waits for outstanding store calls and, if one never returns, leaves without
    #: finalising. False gives the exit to the application: a thread inside the store then aborts the process (SIGABRT).
    exit_guard: bool = True
    #: Whether blocks that decoding completes are saved too, so that the next turn of a conversation finds them.
    save_generated: bool = True
    #: Seconds before blocks that the pool refused are offered to it again.
    save_backoff_s: Seconds = 0.1
    #: Seconds between two looks at the device's events while any is outstanding. At least 0.001: event loops wake no finer.
    poll_tick_s: Annotated[float, msgspec.Meta(ge=SHORTEST_TICK_S)] = SHORTEST_TICK_S


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


def check_settings(source: Settings | Mapping[str, Any]) -> Settings:
    """Return settings that are complete, well typed and consistent, from a mapping (parsed TOML, say) or from a `Settings`.

    Sizes, the fields named `*_bytes`, are integers or strings with a binary suffix ("512MiB"); they come out as integers.
    Raises SettingsError (fault of whoever configured this): the first field that is wrong, by its dotted name, what was found
    there, and what to write instead. Opens, reads and remembers nothing.
    """
    settings: Settings = _build(Settings, source, at="")
    _check_keys(settings)
    _check_seconds(settings)
    _check_pool(settings)
    return settings


def check_staging(settings: Settings, largest_page_bytes: int) -> None:
    """Refuse staging whose shares hold no page: such a loader or saver could never move one.

    Raises SettingsError naming `staging_buffer_bytes` and the least that would do. Takes settings that are checked already.
    """
    sharers = max(settings.loaders, settings.savers)
    least = sharers * largest_page_bytes
    if settings.staging_buffer_bytes < least:
        raise SettingsError(
            "staging_buffer_bytes",
            settings.staging_buffer_bytes,
            f"{sharers} shares of it hold no page of {largest_page_bytes} bytes each",
            f"Give at least {least} bytes, or fewer loaders and savers.",
        )


def _build(kind: type[Any], source: object, *, at: str) -> Any:
    """A checked `kind` from a mapping, or from an instance that nothing has checked. `at` is the dotted name so far."""
    if isinstance(source, kind):
        source = {name: getattr(source, name) for name in kind.__struct_fields__}
    if not isinstance(source, Mapping):
        raise SettingsError(at or "settings", source, f"expected names and values, got {_kind_of(source)}", "Give a mapping.")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in source:
        if name not in fields:
            _refuse_unknown(_dotted(at, str(name)), source[name])
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = _dotted(at, name)
        if name in source:
            values[name] = _value(field, source[name], where)
        elif field.required:
            raise SettingsError(where, None, "it is required and missing", _fix_for(field))
    return kind(**values)


def _value(field: msgspec.structs.FieldInfo, found: object, where: str) -> object:
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
        return _build(field.type, found, at=where)
    if field.name.endswith("_bytes") and isinstance(found, str):
        found = _size_from_text(found, where)
    try:
        return msgspec.convert(found, type=field.type)
    except msgspec.ValidationError as error:
        why = str(error).replace("`", "")
        raise SettingsError(where, found, why[0].lower() + why[1:], _fix_for(field)) from error


def _size_from_text(text: str, where: str) -> int:
    parts = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]+)\s*", text, flags=re.ASCII)
    if parts and parts[2] in BINARY_SUFFIXES:
        return int(parts[1]) * BINARY_SUFFIXES[parts[2]]
    if parts and (meant := {name[0].lower(): name for name in BINARY_SUFFIXES}.get(parts[2][0].lower())):
        raise SettingsError(
            where,
            text,
            f"{parts[2]!r} means a power of 1000 to some programs and of 1024 to others, so no two sizes could be compared",
            f"Write '{parts[1]}{meant}', or the number of bytes.",
        )
    raise SettingsError(
        where,
        text,
        f"a size is a whole number of bytes, as an integer or with one of {', '.join(BINARY_SUFFIXES)} behind it",
        "Write '512MiB', say, or 536870912.",
    )


def _refuse_unknown(where: str, value: object) -> NoReturn:
    # Compared without the path, so that a right name at the wrong level ("segment_bytes") finds its place too.
    known = {_last(name): name for name in _names(Settings)}
    close = difflib.get_close_matches(_last(where), known, n=1)
    fix = f"Did you mean {known[close[0]]!r}?" if close else f"Known settings: {', '.join(known.values())}."
    raise SettingsError(where, value, "there is no such setting", fix)


def _names(kind: type[Any], at: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        where = _dotted(at, field.name)
        yield where
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _names(field.type, where)


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
            raise SettingsError(name, text, "it is not valid Unicode text (a lone surrogate)", "Write it anew.") from error
        if text and not text.strip():
            raise SettingsError(name, text, "it is blank, and it is a part of every key", "Write a readable name.")


def _check_seconds(settings: Settings) -> None:
    for field in msgspec.structs.fields(Settings):
        # Those of the client are whole numbers.
        if field.name.endswith("_s") and not math.isfinite(seconds := getattr(settings, field.name)):
            raise SettingsError(field.name, seconds, "a wait without an end could hold pages for ever", _fix_for(field))


def _check_pool(settings: Settings) -> None:
    store = settings.store
    if settings.pool == "mooncake":
        host, colon, port = store.master_address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise SettingsError(
                "store.master_address",
                store.master_address,
                "pool 'mooncake' joins a running pool, at its master's host:port",
                "Write the address, '10.0.0.1:50051' say, or use pool 'embedded'.",
            )
    elif store.master_address:
        raise SettingsError(
            "store.master_address",
            store.master_address,
            "pool 'embedded' starts a master of its own",
            "Leave it out, or use pool 'mooncake'.",
        )
    if settings.pool == "embedded" and not store.segment_bytes:
        raise SettingsError(
            "store.segment_bytes", 0, "an embedded pool has no other memory", "Lend at least 16 MiB, '1GiB' say."
        )
    if 0 < store.segment_bytes < SMALLEST_SEGMENT_BYTES:
        raise SettingsError(
            "store.segment_bytes",
            store.segment_bytes,
            f"the store mounts no segment below {SMALLEST_SEGMENT_BYTES} bytes",
            "Lend at least 16 MiB, or 0 for nothing.",
        )
    if settings.staging_buffer_bytes < max(settings.loaders, settings.savers):
        check_staging(settings, largest_page_bytes=1)
