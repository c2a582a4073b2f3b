"""Files of existing Mooncake deployments: read as they are, meaning what they mean to their own readers."""

import json
from pathlib import Path
from typing import Any

import pytest

from akv.errors import SettingsError
from akv.settings import ExplainedSettings, explain_settings

#: As vLLM's guide has it.
VLLM = {
    "mode": "embedded",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
    "global_segment_size": "80GB",
    "local_buffer_size": "4GB",
    "protocol": "rdma",
    "device_name": "",
}
#: As Mooncake's own documentation has it.
MOONCAKE = {
    "local_hostname": "node1",
    "metadata_server": "http://master:8080/metadata",
    "global_segment_size": 3355443200,
    "local_buffer_size": 1073741824,
    "protocol": "RDMA",
    "device_name": "mlx5_0,mlx5_1",
    "master_server_address": "master:8081",
    "enable_ssd_offload": True,
    "ssd_offload_path": "/nvme/mooncake_offload",
    "tenant_id": "default",
    "client_http_port": 9300,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mooncake.config"  # JSON whatever its name, as for its own readers


def explained(path: Path, config: Any, **variables: str) -> ExplainedSettings:
    path.write_text(config if isinstance(config, str) else json.dumps(config, indent=1), encoding="utf-8")
    return explain_settings(environ={"AKV_MODEL_KEY": "m", "MOONCAKE_CONFIG_PATH": str(path), **variables})


def test_vllms_file_is_read_as_it_is(path: Path) -> None:
    told = explained(path, VLLM)
    store = told.settings.store
    assert (store.master_address, store.metadata_server, store.protocol) == ("127.0.0.1:50051", "P2PHANDSHAKE", "rdma")
    assert (store.segment_bytes, store.local_buffer_bytes) == (80 * 1024**3, 4 * 1024**3)
    assert (store.device_name, store.local_hostname) == ("", "127.0.0.1")
    assert told.sources["store.device_name"] == told.sources["store.local_hostname"] == "default"
    assert told.notes == ()


def test_mooncakes_own_file_is_read_and_what_means_nothing_here_is_reported(path: Path) -> None:
    told = explained(path, MOONCAKE)
    store = told.settings.store
    assert (store.local_hostname, store.device_name, store.protocol) == ("node1", "mlx5_0,mlx5_1", "rdma")
    assert (store.segment_bytes, store.local_buffer_bytes) == (3355443200, 1073741824)
    assert store.metadata_server == "http://master:8080/metadata"
    (note,) = told.notes
    assert note.endswith("client_http_port, enable_ssd_offload, ssd_offload_path, tenant_id.")
    assert "/nvme" not in note  # names only: an unknown field may hold anything


@pytest.mark.parametrize(
    ("size", "meant"),
    [
        ("4gb", 4 * 1024**3),
        ("4GB", 4 * 1024**3),
        ("3.125GB", 3355443200),
        (" 16 Gb ", 16 * 1024**3),
        ("1.5tb", 3 * 1024**4 // 2),
        ("512m", 512 * 1024**2),
        ("2G", 2 * 1024**3),
        ("4GiB", 4 * 1024**3),
        ("65536kb", 64 * 1024**2),
        ("33554432b", 32 * 1024**2),
        ("33554432", 32 * 1024**2),
        (33554432, 32 * 1024**2),
        (33554432.0, 32 * 1024**2),
        (0, 0),
        ("0", 0),
    ],
)
def test_O5_sizes_mean_what_the_files_own_readers_take_them_for(path: Path, size: object, meant: int) -> None:
    assert explained(path, {**VLLM, "global_segment_size": size}).settings.store.segment_bytes == meant


@pytest.mark.parametrize("size", ["GB", "four", "-4GB", "1,5GB", "1.2.3GB", "4PB", True, [4], {"gb": 4}, -1, "9" * 400])
@pytest.mark.parametrize(
    ("field", "setting"), [("global_segment_size", "store.segment_bytes"), ("local_buffer_size", "store.local_buffer_bytes")]
)
def test_a_size_that_is_none_is_refused_by_setting_file_and_field(path: Path, field: str, setting: str, size: object) -> None:
    with pytest.raises(SettingsError) as caught:
        explained(path, {**VLLM, field: size})
    assert caught.value.field == setting
    assert f"{field} of {path}" in str(caught.value)
    assert caught.value.fix


def test_a_server_beside_a_standalone_store_lends_nothing(path: Path) -> None:
    config = {**VLLM, "mode": "standalone-store"}
    assert explained(path, {**config, "global_segment_size": 0}).settings.store.segment_bytes == 0
    del config["global_segment_size"]
    assert explained(path, config).settings.store.segment_bytes == 0


@pytest.mark.parametrize("left_out", [None, ""])
def test_empty_fields_leave_akvs_own_defaults(path: Path, left_out: str | None) -> None:
    told = explained(path, {**dict.fromkeys(MOONCAKE, left_out), "master_server_address": "a:1"})
    bare = explain_settings(environ={}, overrides={"model_key": "m", "store.master_address": "a:1"})
    assert told.settings.store == bare.settings.store


@pytest.mark.parametrize(
    ("field", "value", "setting"),
    [
        ("protocol", "ascend", "store.protocol"),
        ("protocol", 5, "store.protocol"),
        ("master_server_address", "no-port", "store.master_address"),
        ("device_name", {"0": "mlx5_0"}, "store.device_name"),
        ("local_hostname", 5, "store.local_hostname"),
        ("metadata_server", [], "store.metadata_server"),
    ],
)
def test_what_akv_cannot_do_is_refused_with_the_files_own_field(path: Path, field: str, value: object, setting: str) -> None:
    config = {**MOONCAKE, field: value}
    with pytest.raises(SettingsError) as caught:
        explained(path, config)
    assert caught.value.field == setting
    assert f"{field} of {path}, line {list(config).index(field) + 2} (MOONCAKE_CONFIG_PATH)" in str(caught.value)


def test_a_line_is_that_of_the_whole_name(path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        explained(path, {"x_protocol": "tcp", "master_server_address": "a:1", "protocol": "ascend"})
    assert "line 4" in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "model_key = 'm'", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_one_error(path: Path, content: str) -> None:
    with pytest.raises(SettingsError) as caught:
        explained(path, content)
    assert (caught.value.field, caught.value.value) == ("MOONCAKE_CONFIG_PATH", str(path))


def test_a_file_that_is_missing_is_one_error(path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        explain_settings(environ={"AKV_MODEL_KEY": "m", "MOONCAKE_CONFIG_PATH": str(path)})
    assert (caught.value.field, caught.value.value) == ("MOONCAKE_CONFIG_PATH", str(path))


def test_an_embedded_pool_joins_no_other_so_the_file_is_not_read(path: Path) -> None:
    told = explained(path, "{", AKV_POOL="embedded")
    assert told.settings.store.master_address == ""
    assert "MOONCAKE_CONFIG_PATH is not read" in told.notes[0]


@pytest.mark.mooncake
@pytest.mark.parametrize(
    "size", ["4gb", "3.125GB", " 16 Gb ", "1.5tb", "512m", "2G", "65536kb", "33554432b", "33554432", 33554432]
)
def test_sizes_are_those_that_mooncake_itself_reads(path: Path, size: object) -> None:
    from mooncake.mooncake_config import MooncakeConfig

    store = explained(path, {**MOONCAKE, "global_segment_size": size, "local_buffer_size": size}).settings.store
    theirs = MooncakeConfig.from_file(str(path))
    assert (store.segment_bytes, store.local_buffer_bytes) == (theirs.global_segment_size, theirs.local_buffer_size)
    assert (store.protocol, store.device_name) == (theirs.protocol, theirs.device_name)
    assert (store.master_address, store.local_hostname) == (theirs.master_server_address, theirs.local_hostname)
