"""What the adapter asks of SGLang's installation and configuration, and what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from akv.engines import sglang
from akv.engines.sglang.extra_config import is_v1, settings_of
from akv.engines.sglang.host_pages import HostPages
from akv.engines.sglang.interface import check_version
from akv.errors import DependencyError, EngineContractError, SettingsError
from akv_testing.engines.sglang import (
    INTERFACE,
    HiCacheStorage,
    HiCacheStorageConfig,
    HostPool,
    LatentHostPool,
    PoolName,
    PoolTransferResult,
)

HOW_TO = (Path(__file__).parents[3] / "docs" / "how-to" / "sglang.md").read_text(encoding="utf-8")


def config(extra: Any, **more: Any) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(extra_config=extra, **more)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AKV_CONFIG", "AKV_MODEL_KEY", "MOONCAKE_CONFIG_PATH"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("version", ["0.5.20", "0.5.20.post1", "0.5.23", "0.5.99+cu130"])
def test_supported_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.4.10", "0.5.19", "0.5", "0.6.0", "1.0", "0.5.rc1"])
def test_others_are_refused_with_the_range_and_the_reason(version: str) -> None:
    with pytest.raises(DependencyError, match=r"works with 0\.5\.20 and later, before 0\.6"):
        check_version(version)


def test_without_sglang_the_module_imports_and_the_class_says_what_is_missing() -> None:
    with pytest.raises(DependencyError, match="'sglang' is not installed"):
        sglang.AkvHiCacheStorage  # noqa: B018 - asking is what makes it
    with pytest.raises(AttributeError):
        sglang.nothing  # noqa: B018


def test_importing_the_adapter_loads_no_torch_no_mooncake_and_no_engine() -> None:
    code = "import sys, akv.engines.sglang; print([m for m in ('torch', 'mooncake', 'sglang') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_class_that_sglang_asks_for_is_made_of_its_own_modules_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ModuleType("sglang.srt.mem_cache.hicache_storage")
    vars(storage).update(HiCacheStorage=HiCacheStorage, PoolTransferResult=PoolTransferResult, PoolName=PoolName)
    metrics = ModuleType("sglang.srt.observability.metrics_collector")
    parents = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability")
    for module in (*map(ModuleType, parents), storage, metrics):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("akv.engines.sglang.interface.metadata.version", lambda _: "0.5.23")
    made = sglang.AkvHiCacheStorage
    try:
        assert issubclass(made, HiCacheStorage)
        assert sglang.AkvHiCacheStorage is made
        assert (made.interface.kv, made.interface.metrics) == (PoolName.KV, None)
    finally:
        del vars(sglang)["AkvHiCacheStorage"]


def test_what_sglang_cannot_import_of_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akv.engines.sglang.interface.metadata.version", lambda _: "0.5.23")
    with pytest.raises(DependencyError, match="cannot be imported: No module named 'sglang'"):
        sglang.AkvHiCacheStorage  # noqa: B018 - asking is what makes it


def test_the_how_to_page_names_the_class_and_settings_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AKV_STORE__MASTER_ADDRESS", "127.0.0.1:50051")
    (written,) = re.findall(r"--hicache-storage-backend-extra-config \\\s+'(.*?)'", HOW_TO, flags=re.DOTALL)
    extra = json.loads(written)
    assert extra["module_path"] == sglang.__name__
    assert extra["class_name"] in sglang.__all__
    assert is_v1(config(extra))
    assert settings_of(config(extra)).model_key == "Qwen/Qwen3-8B"


def test_the_class_is_of_the_engines_own_kind() -> None:
    made = sglang.storage_class(INTERFACE)
    assert issubclass(made, INTERFACE.base)
    assert made.__name__ == "AkvHiCacheStorage"
    assert not getattr(made, "__abstractmethods__", None)


def test_settings_stand_in_a_section_of_their_own_beside_sglangs() -> None:
    extra = {
        "backend_name": "akv",
        "interface_v1": 1,
        "akv": {"model_key": "m", "pool": "embedded", "staging_buffer_bytes": "8MiB"},
    }
    settings = settings_of(config(extra))
    assert (settings.model_key, settings.staging_buffer_bytes) == ("m", 8 << 20)
    assert is_v1(config(extra))
    assert not is_v1(config({"interface_v1": 0}))
    assert not is_v1(config(None))


def test_the_fields_of_sglangs_own_mooncake_backend_say_the_same_to_akv() -> None:
    fields = {
        "master_server_address": "10.0.0.1:50051",
        "local_hostname": "10.0.0.5",
        "protocol": "rdma",
        "device_name": '{"0": "mlx5_0", "1": "mlx5_1"}',
        "metadata_server": "http://10.0.0.1:8080/metadata",
        "global_segment_size": "4gb",
        "check_server": False,
        "akv": {"model_key": "m"},
    }
    store = settings_of(config(fields, tp_rank=1, tp_size=2)).store
    assert (store.master_address, store.local_hostname, store.protocol) == ("10.0.0.1:50051", "10.0.0.5", "rdma")
    assert (store.device_name, store.metadata_server) == ("mlx5_1", "http://10.0.0.1:8080/metadata")
    # That backend divides its figure by the ranks.
    assert store.segment_bytes == 2 << 30
    own = {**fields, "device_name": "mlx5_7", "akv": {"model_key": "m", "store": {"segment_bytes": 0}}}
    with pytest.raises(SettingsError, match="given twice"):
        settings_of(config(own))
    del own["global_segment_size"]
    assert settings_of(config(own)).store.segment_bytes == 0
    assert settings_of(config(own)).store.device_name == "mlx5_7"


def test_what_the_section_leaves_out_comes_from_akvs_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AKV_MODEL_KEY", "from-the-environment")
    assert settings_of(config({"akv": {"pool": "embedded"}})).model_key == "from-the-environment"


@pytest.mark.parametrize(
    ("extra", "field", "more"),
    [
        (None, "model_key", {}),
        ({"akv": {"pool": "embedded"}}, "model_key", {}),
        ({"akv": "m"}, "akv", {}),
        ({"revision": "2", "akv": {"model_key": "m", "pool": "embedded"}}, "revision", {}),
        ({"akv": {"model_key": "m", "pool": "embedded", "modelkey": 1}}, "modelkey", {}),
        ({"akv": {"model_key": "m", "pool": "embedded", "require_salt": True}}, "require_salt", {}),
        ({"akv": {"model_key": "m", "pool": "embedded", "key_format": "trtllm", "pin_model_key": True}}, "key_format", {}),
        ({"akv": {"model_key": "m", "pool": "embedded"}}, "dcp_size", {"dcp_size": 2}),
    ],
)
def test_K4_what_cannot_be_honoured_is_refused_by_name(extra: Any, field: str, more: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        settings_of(config(extra, **more))
    assert refused.value.field == field


def test_a_host_pool_that_cannot_say_where_pages_lie_is_refused_with_what_to_change() -> None:
    with pytest.raises(SettingsError, match="page_first") as refused:
        HostPages(HostPool(layout="page_unified"), "kv")
    assert refused.value.value == "page_unified"


def test_a_host_pool_that_describes_its_pages_in_another_way_later_is_found_out() -> None:
    pool = HostPool()
    pages = HostPages(pool, "kv")
    assert len(pages.places(range(8), 2)) == 2
    pool.layout = "layer_first"
    with pytest.raises(EngineContractError, match="in another way than when it was registered"):
        pages.places(range(8), 2)


class MLATokenToKVPoolHost(LatentHostPool):
    """Of the name by which SGLang's pools of latents are known."""


class SplitByLayers(LatentHostPool):
    """Each rank holds other layers."""

    _layer_shard_enabled = True


@pytest.mark.parametrize(
    ("pool", "name", "model", "replicated"),
    [
        (LatentHostPool(), "kv", True, True),
        (HostPool(), "kv", False, False),
        (HostPool(), "indexer", True, True),
        (HostPool(), "mamba", True, False),
        (HostPool(), "draft", True, False),
        (MLATokenToKVPoolHost(), "draft", True, True),
        (MLATokenToKVPoolHost(), "draft", False, False),
        (SplitByLayers(), "kv", True, False),
    ],
)
def test_K3_states_and_drafts_of_heads_differ_from_rank_to_rank_though_the_models_latents_do_not(
    pool: HostPool, name: str, model: bool, replicated: bool
) -> None:
    assert HostPages(pool, name).is_replicated(model) is replicated
