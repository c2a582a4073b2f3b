"""vLLM's configuration as akv's settings, and what is refused at start (W9, K4, D1, P1)."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from akv.engines.vllm.configuration import Configuration, configuration_of, model_heads, require_recompute, traits_of
from akv.engines.vllm.versions import check_version
from akv.errors import DependencyError, SettingsError
from akv.settings import Settings
from akv_testing.vllm_objects import cache_config, full_spec, group, vllm_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CACHE = cache_config(group(full_spec(), ["model.layers.0.attn"]))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AKV_CONFIG", "MOONCAKE_CONFIG_PATH", "AKV_MODEL_KEY"):
        monkeypatch.delenv(name, raising=False)


def configured(extra: dict[str, Any] | None = None, address: str = "10.0.0.9", **fields: Any) -> Configuration:
    return configuration_of(vllm_config(extra, **fields), CACHE, lambda: address)


def settings(extra: dict[str, Any] | None = None, **fields: Any) -> Settings:
    return configured(extra, **fields).settings


def refused(extra: dict[str, Any] | None = None, **fields: Any) -> str:
    with pytest.raises(SettingsError) as error:
        settings(extra, **fields)
    return error.value.field


def test_K4_the_model_key_is_the_repository_and_the_commit_that_vllm_resolved() -> None:
    # Not "@main", which is another commit tomorrow: a server that is restarted then would find the older weights' pages.
    assert settings().model_key == f"maker/model@{COMMIT}"
    assert settings(model_config={"revision": COMMIT}).model_key == f"maker/model@{COMMIT}"
    assert settings({"pool": "embedded", "model_key": "own"}).model_key == "own"


@pytest.mark.parametrize(
    "model", [{"revision": None}, {"revision": "main"}, {"revision": "v1.0"}, {"model": "."}, {"model_weights": "elsewhere"}]
)
def test_K4_weights_without_a_name_need_one(model: dict[str, Any]) -> None:
    assert refused(model_config=model) == "model_key"


def test_K4_a_model_key_of_akvs_own_sources_comes_before_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AKV_MODEL_KEY", "from the environment")
    assert settings().model_key == "from the environment"


def test_extra_config_holds_akvs_settings_and_unknown_ones_are_refused_by_name() -> None:
    own = settings({"pool": "embedded", "loaders": 3, "store": {"segment_bytes": "64MiB"}, "store.protocol": "tcp"})
    assert (own.loaders, own.store.segment_bytes) == (3, 64 * 2**20)
    assert refused({"pool": "embedded", "loader": 3}) == "loader"


def test_an_existing_deployments_file_works_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "local_hostname": "10.0.0.5",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "4GB",
        "local_buffer_size": "512MB",
        "protocol": "TCP",
        "device_name": "",
        "master_server_address": "10.0.0.1:50051",
    }
    deployed(tmp_path, monkeypatch, **found)
    store = settings({}).store
    assert (store.master_address, store.local_hostname, store.protocol) == ("10.0.0.1:50051", "10.0.0.5", "tcp")
    assert (store.segment_bytes, store.local_buffer_bytes) == (4 * 2**30, 512 * 2**20)


def deployed(folder: Path, monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """A file of Mooncake's in the environment."""
    path = folder / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "10.0.0.1:50051"} | found))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))


def test_the_how_to_pages_three_steps_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "vllm.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"```json\s+(.*?)```", text, flags=re.DOTALL)
    (transfer,) = re.findall(r"--kv-transfer-config '(.*?)'", text, flags=re.DOTALL)
    deployed(tmp_path, monkeypatch, **json.loads(file))
    named = json.loads(transfer)
    assert (named["kv_connector"], named["kv_connector_module_path"]) == ("AkvConnector", "akv.engines.vllm")
    taken = settings({}, kv_transfer_config={"kv_role": named["kv_role"], "kv_connector_extra_config": {}})
    assert (taken.role, taken.store.protocol, taken.store.segment_bytes) == ("both", "rdma", 32 * 2**30)
    for backend in set(re.findall(r"--distributed-executor-backend (\S+?)`", text)):
        assert settings(parallel_config={"distributed_executor_backend": backend}).role == "both"


def test_R4_what_an_existing_file_leaves_out_is_what_vllms_own_connector_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed(tmp_path, monkeypatch)
    store = settings({}).store
    # With akv's own default, loopback, the other machines would look for this one's pages in themselves.
    assert (store.local_hostname, store.protocol, store.segment_bytes) == ("10.0.0.9", "rdma", 4 * 2**30)
    deployed(tmp_path, monkeypatch, mode="standalone-store", protocol="tcp")
    assert (settings({}).store.protocol, settings({}).store.segment_bytes) == ("tcp", 0)
    own = {"store.local_hostname": "10.0.0.5", "store": {"protocol": "tcp"}, "on_failure": "raise"}
    assert settings(own).store.local_hostname == "10.0.0.5"
    assert (settings(own).store.protocol, settings(own).on_failure) == ("tcp", "raise")


def test_a_server_is_reached_by_its_own_address_wherever_the_pool_spans_machines() -> None:
    def hostname(master: str, address: str = "10.0.0.9") -> str:
        return settings({"store.master_address": master}, address=address).store.local_hostname

    assert hostname("10.0.0.1:50051") == "10.0.0.9"
    assert hostname("master.pool:50051") == "10.0.0.9"
    for here in ("127.0.0.1:50051", "localhost:50051", "127.1.2.3:1", "[::1]:50051"):
        assert hostname(here, address="0.0.0.0") == "127.0.0.1"  # noqa: S104 - nothing is bound
    with pytest.raises(SettingsError, match="VLLM_HOST_IP"):
        hostname("10.0.0.1:50051", address="0.0.0.0")  # noqa: S104
    # akv's own settings, where no file of Mooncake's says where the pool is.
    assert settings({"store.master_address": "10.0.0.1:50051"}).store.protocol == "tcp"


def test_D1_the_role_is_vllms() -> None:
    for kv_role, role in (("kv_both", "both"), ("kv_producer", "producer"), ("kv_consumer", "consumer")):
        assert settings(kv_transfer_config={"kv_role": kv_role}).role == role
    assert refused({"pool": "embedded", "role": "consumer"}) == "role"


def test_O8_a_cache_that_fails_does_not_end_a_server_unless_that_is_wanted() -> None:
    assert settings().on_failure == "degrade"
    assert settings({"pool": "embedded", "on_failure": "raise"}).on_failure == "raise"


def test_the_grace_of_lookups_is_in_milliseconds() -> None:
    assert configured({"pool": "embedded", "lookup_grace_ms": 0}).grace_s == 0
    assert configured().grace_s == 0.003
    for wrong in (-1, 1001, "3", True):
        assert refused({"pool": "embedded", "lookup_grace_ms": wrong}) == "kv_connector_extra_config.lookup_grace_ms"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"parallel_config": {"tensor_parallel_size": 2}}, "tensor_parallel_size"),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size"),
        ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size"),
        ({"parallel_config": {"nnodes": 2, "distributed_executor_backend": "mp"}}, "nnodes"),
        # Each rank and the scheduler would have a pool of its own; the stand-in's configuration says "embedded".
        ({"parallel_config": {"distributed_executor_backend": "mp"}}, "pool"),
        ({"cache_config": {"cache_dtype": "fp8", "calculate_kv_scales": True}}, "calculate_kv_scales"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "speculative_config.method"),
    ],
)
def test_W9_P1_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields) == field


JOINED = {"store.master_address": "10.0.0.1:50051", "model_key": "own"}


class MultiprocExecutor:
    __module__ = "vllm.v1.executor.multiproc_executor"


@pytest.mark.parametrize("backend", ["mp", "vllm.v1.executor.MultiprocExecutor", MultiprocExecutor])
@pytest.mark.parametrize("ranks", [1, 2])
def test_D1_workers_in_processes_of_their_own_have_a_half_each(backend: Any, ranks: int) -> None:
    found = configured(JOINED, parallel_config={"distributed_executor_backend": backend, "tensor_parallel_size": ranks})
    assert (found.apart, found.world) == (True, ranks)
    assert (configured(JOINED).apart, configured(JOINED).world) == (False, 1)


@pytest.mark.parametrize(
    ("fields", "total", "heads"),
    [
        ({"num_key_value_heads": 8}, 8, 8),
        ({}, 8, 8),
        ({"num_kv_heads": 1}, 1, 1),
        ({"num_key_value_heads": 8, "num_global_key_value_heads": 2}, 8, None),
        ({"num_key_value_heads": [8, 4]}, 8, None),
        ({"num_key_value_heads": 4}, 8, None),
        ({"block_configs": [{"attention": {"n_heads_in_group": 4}}]}, 8, None),
        # Some layers' own, a level below the others'.
        ({"num_attention_groups": 8, "attention_other_setting": {"num_attention_groups": 4}}, 8, None),
        ({"num_attention_groups": 8, "attention_other_setting": {"num_attention_groups": 8}}, 8, 8),
        ({"num_query_groups_per_layer": [4, 4]}, 8, None),
        ({"num_key_value_heads": 8, "num_kv_heads": None}, 8, 8),
    ],
)
def test_K3_how_many_heads_every_layer_has_is_known_only_where_one_number_says_it(
    fields: dict[str, Any], total: int, heads: int | None
) -> None:
    text = SimpleNamespace(to_dict=lambda: fields)
    model = SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: total)
    assert model_heads(SimpleNamespace(model_config=model)) == heads


class UniProcExecutor:
    __module__ = "vllm.v1.executor.uniproc_executor"


class OtherExecutor(UniProcExecutor):
    pass


@pytest.mark.parametrize("backend", [None, "uni", "vllm.v1.executor.UniProcExecutor", UniProcExecutor])
def test_W9_whatever_name_the_executor_of_one_process_has_it_is_served(backend: Any) -> None:
    assert settings(parallel_config={"distributed_executor_backend": backend}).model_key


@pytest.mark.parametrize("backend", ["ray", "external_launcher", "own.UniProcExecutor", OtherExecutor])
def test_W9_executors_that_nobody_tried_are_refused(backend: Any) -> None:
    assert refused(parallel_config={"distributed_executor_backend": backend}) == "distributed_executor_backend"


def test_W9_blocks_in_two_places_are_refused_by_name() -> None:
    cache = cache_config(group(full_spec(), ["model.layers.0.attn"]))
    cache.hisparse_host_num_blocks = 4
    with pytest.raises(SettingsError, match="hisparse"):
        configuration_of(vllm_config(), cache, lambda: "10.0.0.9")


def test_P1_a_drafter_without_kv_of_its_own_is_declared() -> None:
    assert configured(speculative_config=SimpleNamespace(method="ngram")).capabilities.drafter == "hidden_state"
    assert configured().capabilities.drafter == "none"


def test_a_load_that_fails_must_not_be_a_request_that_fails() -> None:
    transfer = vllm_config().kv_transfer_config
    assert require_recompute(transfer)
    assert transfer.kv_load_failure_policy == "recompute"
    assert not require_recompute(transfer)


def test_K4_what_is_configured_over_a_models_name_is_part_of_its_blocks() -> None:
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa="amx")
    static = {"static_forward_context": {"a": layer, "moe": SimpleNamespace()}}

    def traits(**model: Any) -> dict[str, str]:
        return traits_of(vllm_config(compilation_config=static, model_config=model))

    plain = traits()
    assert list(plain) == ["a"]
    assert plain["a"].startswith("weights=plain;model=bfloat16;config=")
    assert plain["a"].endswith(";backend=CPU_ATTNamx")
    scaled = SimpleNamespace(to_dict=lambda: {"rope_theta": 5.0, "_name_or_path": "x"})
    elsewhere = SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0, "_name_or_path": "y", "transformers_version": "6"})
    assert traits(hf_text_config=scaled) != plain
    assert traits(hf_text_config=elsewhere) == plain
    assert traits(quantization="fp8") != plain


def test_K4_two_kinds_of_eight_bits_share_nothing() -> None:
    def traits(kind: str) -> dict[str, str]:
        layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"), kv_cache_dtype=kind)
        return traits_of(vllm_config(compilation_config={"static_forward_context": {"a": layer}}))

    assert traits("fp8_e5m2") != traits("fp8_e4m3")
    assert traits("fp8") == traits("fp8_e4m3")
    assert traits("auto") == traits("bfloat16")


def media(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"mm_processor_cache_gb": 4, "mm_processor_kwargs": None, "media_io_kwargs": {}} | fields))


def test_K4_how_a_server_is_given_media_is_part_of_its_blocks() -> None:
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    static = {"static_forward_context": {"a": layer}}

    def traits(patch: int = 14, **fields: Any) -> dict[str, str]:
        whole = {"vision_config": {"patch": patch, "transformers_version": "5"}, "_name_or_path": "x"}
        model = {"multimodal_config": media(**fields), "hf_config": SimpleNamespace(to_dict=lambda: whole)}
        return traits_of(vllm_config(compilation_config=static, model_config=model))

    assert traits() == traits()
    assert traits(patch=16) != traits()
    assert traits(mm_processor_kwargs={"num_crops": 4}) != traits()
    assert traits(media_io_kwargs={"video": {"num_frames": 8}}) != traits()


def test_K1_K5_a_server_that_numbers_pictures_instead_of_hashing_them_is_refused() -> None:
    numbered = {"model_config": {"multimodal_config": media(mm_processor_cache_gb=0)}}
    assert refused(**numbered, cache_config={"enable_prefix_caching": False}) == "mm_processor_cache_gb"
    assert settings(**numbered).model_key
    hashed = {"model_config": {"multimodal_config": media()}}
    assert settings(**hashed, cache_config={"enable_prefix_caching": False}).model_key
    assert settings(cache_config={"enable_prefix_caching": False}).model_key


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "nonsense"])
def test_a_version_that_nobody_tried_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(DependencyError, match=r"vLLM .* >=0\.32,<0\.33"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_a_version_of_the_range_is_taken(version: str) -> None:
    check_version(version)


def test_without_vllm_the_adapter_says_what_is_missing_and_akv_needs_none() -> None:
    import akv.engines.vllm as package

    with pytest.raises(DependencyError, match="vLLM is not installed here"):
        package.AkvConnector  # noqa: B018
    with pytest.raises(AttributeError, match="Other"):
        package.Other  # noqa: B018
