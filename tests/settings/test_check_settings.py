"""Settings: what is accepted, and that every mistake is one SettingsError with field, value and fix."""

import math
from typing import Any

import msgspec
import pytest

from akv.errors import SettingsError
from akv.settings import (
    SMALLEST_SEGMENT_BYTES,
    ClientSettings,
    Settings,
    StoreSettings,
    check_backlog,
    check_settings,
    check_staging,
)
from akv.settings_checks import shown

#: The least that is valid.
LEAST: dict[str, Any] = {"model_key": "a-model", "pool": "embedded"}
JOINING: dict[str, Any] = {"model_key": "a-model", "store": {"master_address": "10.0.0.1:50051"}}


def refused(source: Any) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        check_settings(source)
    return caught.value


def test_the_least_settings_get_the_documented_defaults() -> None:
    settings = check_settings(LEAST)
    assert settings == Settings(model_key="a-model", pool="embedded")
    assert settings.staging_buffer_bytes == 1024**3
    assert (settings.loaders, settings.probe_chunk) == (2, 512)
    assert (settings.lookup_deadline_s, settings.load_deadline_s) == (1.0, 5.0)


def test_settings_are_frozen() -> None:
    settings = check_settings(LEAST)
    with pytest.raises(AttributeError):
        settings.loaders = 3  # type: ignore[misc]


def test_checking_twice_changes_nothing() -> None:
    settings = check_settings(JOINING)
    assert check_settings(settings) == settings


def test_a_mapping_may_hold_a_store_settings_instance() -> None:
    settings = check_settings({"model_key": "m", "store": StoreSettings(master_address="master.example:50051")})
    assert settings.store.master_address == "master.example:50051"


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65536), ("512MiB", 512 * 1024**2), ("2 GiB", 2 * 1024**3), ("1TiB", 1024**4), (1 << 20, 1 << 20)],
)
def test_O5_sizes_are_integers_or_carry_binary_suffixes(text: str | int, size: int) -> None:
    assert check_settings({**LEAST, "staging_buffer_bytes": text}).staging_buffer_bytes == size


@pytest.mark.parametrize("text", ["4GB", "4gb", "4G", "4 Gb", "4gib"])
@pytest.mark.parametrize("field", ["staging_buffer_bytes", "store.segment_bytes"])
def test_O5_decimal_looking_sizes_are_refused_with_the_reason(field: str, text: str) -> None:
    nested = field.startswith("store.")
    error = refused({**LEAST, "store": {"segment_bytes": text}} if nested else {**LEAST, "staging_buffer_bytes": text})
    assert (error.field, error.value) == (field, text)
    assert "1000" in str(error)
    assert "1024" in str(error)
    assert "'4GiB'" in error.fix


@pytest.mark.parametrize("text", ["", "many", "1.5GiB", "-1GiB", "1024", "1GiB extra", "\u0664GiB", "1PB"])
def test_O5_other_size_strings_are_refused(text: str) -> None:
    error = refused({**LEAST, "staging_buffer_bytes": text})
    assert (error.field, error.value) == ("staging_buffer_bytes", text)
    assert "512MiB" in error.fix


@pytest.mark.parametrize(
    ("written", "field", "meant"),
    [
        ({"modelkey": "m"}, "modelkey", "model_key"),
        ({"loader": 2}, "loader", "loaders"),
        ({"segment_bytes": 1}, "segment_bytes", "store.segment_bytes"),
        ({"store": {"master_adress": "a:1"}}, "store.master_adress", "store.master_address"),
        ({"store": {"loaders": 2}}, "store.loaders", "loaders"),
    ],
)
def test_O5_unknown_settings_are_refused_by_name_with_the_closest_known_one(
    written: dict[str, Any], field: str, meant: str
) -> None:
    error = refused({**LEAST, **written})
    assert error.field == field
    assert repr(meant) in error.fix


def test_O5_an_unknown_setting_like_no_other_gets_the_list() -> None:
    error = refused({**LEAST, "xyzzy": 1})
    assert error.field == "xyzzy"
    assert "Did you mean" not in error.fix
    assert "store.master_address" in error.fix


def test_a_name_that_is_no_string_is_unknown() -> None:
    assert refused({**LEAST, 5: 1}).field == "5"


@pytest.mark.parametrize("source", [{}, {"pool": "embedded"}])
def test_K4_a_missing_model_key_is_refused(source: dict[str, Any]) -> None:
    error = refused(source)
    assert (error.field, error.value) == ("model_key", None)
    assert "required" in str(error)
    assert "weights" in error.fix


#: Dotted field and a value that its type or its bounds refuse.
ILL_TYPED: list[tuple[str, Any]] = [
    ("model_key", 7),
    ("model_key", ""),
    ("model_key", "  "),
    ("model_key", "\ud800"),
    ("namespace", ""),
    ("namespace", " "),
    ("namespace", "\udfff"),
    ("revision", None),
    ("revision", "\ud800"),
    ("revision", "\n"),
    ("pin_model_key", "yes"),
    ("key_format", "sglang"),
    ("key_secret", 5),
    ("key_secret", "k" * 65),
    ("key_secret", "\u00e9" * 33),
    ("key_secret", "\ud800"),
    ("require_salt", "yes"),
    ("integrity", "crc"),
    ("integrity_secret", None),
    ("integrity_secret", "unused without a mac"),
    ("role", "reader"),
    ("on_failure", "ignore"),
    ("load_mode", "sync"),
    ("read_path", "direct"),
    ("stats_interval_s", -1),
    ("local_reuse_backoff", "on"),
    ("pool", "redis"),
    ("store", 5),
    ("store", None),
    ("store.master_address", 50051),
    ("store.local_hostname", ""),
    ("store.protocol", "udp"),
    ("store.device_name", 1),
    ("store.metadata_server", ""),
    ("store.segment_bytes", -1),
    ("store.segment_bytes", 1.5),
    ("store.segment_bytes", 10**30),
    ("store.segment_memory", "tmpfs"),
    ("store.segment_file_bytes", 2**25 - 1),
    ("store.shared_memory_dir", ""),
    ("store.local_buffer_bytes", -1),
    ("staging_buffer_bytes", True),
    ("staging_buffer_bytes", 0),
    ("staging_buffer_bytes", 1),
    ("loaders", 0),
    ("loaders", 2**63),
    ("loaders", True),
    ("loaders", "2"),
    ("max_parked_loads", 0),
    ("savers", 0),
    ("probe_head", 0),
    ("probe_chunk", -5),
    ("probe_concurrency", 0),
    ("recent_chains_tokens", -1),
    ("recent_chains_tokens", "2MiB"),
    ("client", "loud"),
    ("client.log_level", "error"),
    ("client.setup_retries", 0),
    ("client.rpc_timeout_ms", 1500.5),
    ("client.rpc_timeout_ms", 2**31),
    ("client.tcp_status_timeout_s", 0),
    ("client.tcp_progress_timeout_s", 0.5),
    ("client.tcp_max_queued_transfers_per_peer", 65536),
    ("client.capture_log", "yes"),
    ("lookup_deadline_s", 0),
    ("lookup_deadline_s", "1s"),
    ("load_deadline_s", -1.0),
    ("load_deadline_s", math.inf),
    ("lease_s", 0),
    ("lease_s", math.inf),
    ("max_load_attempts", 0),
    ("negative_ttl_s", 0),
    ("negative_ttl_s", math.inf),
    ("quarantine_max_bytes", "1GB"),
    ("shutdown_deadline_s", math.nan),
    ("exit_guard", 1),
    ("rewind_tokens", -1),
    ("window_fallback", 1),
    ("window_first", "yes"),
    ("snapshot_slots", -1),
    ("snapshot_slots", 2**31),
    ("snapshot_wait_ms", 0.5),
    ("snapshot_wait_ms", -1),
    ("lookup_grace_ms", 0.5),
    ("lookup_grace_ms", -1),
    ("snapshot_device_bytes", "1MB"),
    ("resave_min_tokens", -1),
    ("save_generated", "no"),
    ("save_hold_max_s", 0.0),
    ("save_backoff_s", 0.0),
    ("backlog_bytes", "1GB"),
    ("backlog_passes", 0),
    ("poll_tick_s", 0.0005),
    ("poll_tick_s", math.inf),
]


@pytest.mark.parametrize(("field", "value"), ILL_TYPED)
def test_each_ill_typed_setting_is_one_error_with_field_value_and_fix(field: str, value: Any) -> None:
    outer, _, inner = field.partition(".")
    error = refused({**LEAST, outer: {inner: value} if inner else value})
    assert error.field == field
    assert error.value is value or error.value == shown(field, value)
    assert error.fix
    assert field in str(error)
    assert error.fix in str(error)


def test_the_table_of_ill_typed_settings_covers_every_setting() -> None:
    covered = {field for field, _ in ILL_TYPED}
    outer = {field.name for field in msgspec.structs.fields(Settings)}
    inner = {f"store.{name}" for name in StoreSettings.__struct_fields__}
    inner |= {f"client.{name}" for name in ClientSettings.__struct_fields__}
    assert outer | inner == covered


TRTLLM: dict[str, Any] = {**LEAST, "key_format": "trtllm", "pin_model_key": True}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("pin_model_key", {"pin_model_key": False}),
        ("integrity", {"integrity": "checksum"}),
        ("integrity", {"integrity": "mac", "integrity_secret": "hunter2"}),
        ("key_secret", {"key_secret": "hunter2"}),
        ("model_key", {"model_key": "org/m"}),
        ("model_key", {"model_key": "m~1"}),
        ("namespace", {"namespace": "a@b"}),
        ("revision", {"revision": "a/b"}),
    ],
)
def test_K1_what_trtllms_keys_have_no_place_for_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    check_settings(TRTLLM)
    check_settings({**LEAST, **changes, "pin_model_key": True})
    error = refused({**TRTLLM, **changes})
    assert error.field == field
    assert "trtllm" in str(error)
    assert "hunter2" not in str(error)


def test_S11_a_mac_needs_a_secret_and_nothing_else_takes_one() -> None:
    check_settings({**LEAST, "integrity": "mac", "integrity_secret": "k" * 64})
    for changes in ({"integrity": "mac"}, {"integrity": "mac", "integrity_secret": ""}):
        assert refused({**LEAST, **changes}).field == "integrity_secret"
    for kind in ("off", "checksum"):
        error = refused({**LEAST, "integrity": kind, "integrity_secret": "hunter2"})
        assert (error.field, error.value) == ("integrity_secret", "(hidden)")
        assert "hunter2" not in str(error)


def test_X6_settings_print_whether_a_secret_is_set_and_not_what_it_is() -> None:
    settings = check_settings({**LEAST, "key_secret": "hunter2", "integrity": "mac", "integrity_secret": "hunter3"})
    printed = f"{settings!r} {settings.__rich_repr__()}"
    assert "hunter" not in printed
    assert "key_secret=(hidden)" in printed
    assert "key_secret=''" in repr(check_settings(LEAST))
    assert "model_key='a-model'" in printed


def test_a_settings_object_built_with_wrong_values_is_refused_too() -> None:
    assert refused(Settings(model_key="m", pool="embedded", loaders=0)).field == "loaders"
    assert refused(Settings(model_key="m", pool="embedded", role="reader")).field == "role"  # type: ignore[arg-type]
    assert refused(Settings(model_key="m", store=StoreSettings(segment_bytes=-1))).field == "store.segment_bytes"
    assert refused(Settings(model_key="m", store={"x": 1})).field == "store.x"  # type: ignore[arg-type]


def test_a_settings_object_with_a_size_as_text_comes_out_as_bytes() -> None:
    unchecked = Settings(model_key="m", pool="embedded", staging_buffer_bytes="1MiB")  # type: ignore[arg-type]
    assert check_settings(unchecked).staging_buffer_bytes == 1024**2


@pytest.mark.parametrize(
    ("source", "kind"), [(None, "nothing"), (5, "int"), ("model_key", "str"), ([("model_key", "m")], "list")]
)
def test_what_is_no_mapping_is_refused(source: Any, kind: str) -> None:
    error = refused(source)
    assert error.field == "settings"
    assert f"got {kind}" in str(error)


@pytest.mark.parametrize("address", ["", "master", "master:", ":50051", "master:0", "master:65536", "master:port", "a:\u0665"])
def test_a_pool_to_join_needs_its_masters_address(address: str) -> None:
    error = refused({"model_key": "m", "store": {"master_address": address}})
    assert (error.field, error.value) == ("store.master_address", address)
    assert "embedded" in error.fix


@pytest.mark.parametrize("address", ["127.0.0.1:50051", "master.example:1", "[::1]:65535"])
def test_an_address_is_host_and_port(address: str) -> None:
    assert check_settings({"model_key": "m", "store": {"master_address": address}}).store.master_address == address


def test_an_embedded_pool_takes_no_address() -> None:
    error = refused({**LEAST, "store": {"master_address": "127.0.0.1:50051"}})
    assert error.field == "store.master_address"
    assert "mooncake" in error.fix


def test_a_segment_is_nothing_or_as_large_as_the_store_mounts() -> None:
    def with_segment(size: int) -> dict[str, Any]:
        return {"model_key": "m", "store": {"master_address": "a:1", "segment_bytes": size}}

    assert check_settings(with_segment(0)).store.segment_bytes == 0
    assert check_settings(with_segment(SMALLEST_SEGMENT_BYTES)).store.segment_bytes == SMALLEST_SEGMENT_BYTES
    assert refused(with_segment(SMALLEST_SEGMENT_BYTES - 1)).field == "store.segment_bytes"


def test_an_embedded_pool_needs_a_segment() -> None:
    assert refused({**LEAST, "store": {"segment_bytes": 0}}).field == "store.segment_bytes"


def test_staging_holds_a_page_for_each_loader_and_each_saver() -> None:
    settings = check_settings({**LEAST, "staging_buffer_bytes": 3 * 4096, "loaders": 2, "savers": 3})
    check_staging(settings, 4096)
    with pytest.raises(SettingsError, match="at least 12291 bytes") as caught:
        check_staging(settings, 4097)
    assert (caught.value.field, caught.value.value) == ("staging_buffer_bytes", 12288)


def test_S6_the_backlog_holds_a_block_where_anything_is_saved() -> None:
    settings = check_settings({**LEAST, "backlog_bytes": "4KiB"})
    check_backlog(settings, 4096)
    with pytest.raises(SettingsError, match="at least 4097 bytes") as caught:
        check_backlog(settings, 4097)
    assert (caught.value.field, caught.value.value) == ("backlog_bytes", 4096)
    check_backlog(check_settings({**LEAST, "backlog_bytes": "4KiB", "role": "consumer"}), 4097)
    assert refused({**LEAST, "backlog_bytes": 0}).field == "backlog_bytes"


def test_unread_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AKV_MODEL_KEY", "from-the-environment")
    monkeypatch.setenv("MODEL_KEY", "from-the-environment")
    assert refused({}).field == "model_key"


@pytest.mark.parametrize("name", ["AKV_STORE__PASSWORD", "key_secret", "Salt"])
def test_X6_a_value_named_like_a_secret_is_not_printed(name: str) -> None:
    assert "hunter2" not in str(shown(name, "hunter2"))
    assert shown("model_key", "hunter2") == "hunter2"


@pytest.mark.parametrize(
    "written",
    [
        {**LEAST, "key_secert": "hunter2"},
        {**LEAST, "integrity_secrte": "hunter2"},
        {**LEAST, "mac_key": "hunter2"},
        {**LEAST, "store": {"key_secert": "hunter2"}},
        ({"key_secret": "hunter2"},),
        [("key_secret", "hunter2")],
        "key_secret = 'hunter2'",
    ],
)
def test_X6_a_secret_in_the_wrong_place_is_not_quoted(written: Any) -> None:
    error = refused(written)
    assert "hunter2" not in str(error)
    assert "hunter2" not in repr(error.value)


@pytest.mark.parametrize("value", ["", None, True, False])
def test_X6_whether_a_secret_is_set_is_printed(value: Any) -> None:
    assert shown("require_salt", value) is value
