"""vLLM's configuration as akv's: settings, what the engine can do, and what is refused at start, by name."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from akv.engines.vllm.layout import check_groups
from akv.errors import SettingsError
from akv.settings import DEFAULT, ExplainedSettings, Settings, explain_settings
from akv.settings_sources import MOONCAKE_VARIABLE
from akv.values.capabilities import EngineCapabilities

#: What `kv_connector_extra_config` may hold beside akv's settings: milliseconds that one step of the scheduler waits at most,
#: in all, for lookups that have not been answered. A lookup takes about one; an answer that comes later costs a step.
GRACE = "lookup_grace_ms"
DEFAULT_GRACE_MS = 3.0
_ROLES = {"kv_both": "both", "kv_producer": "producer", "kv_consumer": "consumer"}
#: Drafters without KV of their own, as vLLM calls them. Others write KV that depends on tokens behind it, into pages whose
#: place in the cache nobody has tested akv with.
_DRAFTERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
#: Of a model's configuration, what says nothing about its KV.
_WITHOUT_EFFECT = ("transformers_version", "torch_dtype", "dtype", "use_cache")
#: What a server's arguments say about media before a request's own do. vLLM's hashes of media know the latter alone.
_GIVEN_MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
)
#: A commit, as a repository names it.
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
#: What vLLM's own connector takes where Mooncake's file leaves it out; akv's defaults are others, and a pool's other members
#: have not changed.
_LEFT_OUT = {"store.protocol": "rdma", "store.segment_bytes": 4 * 2**30}
#: What vLLM says where it found no address of this machine.
_NO_ADDRESS = "0.0.0.0"  # noqa: S104 - nothing is bound to it
#: vLLM's executor with the worker in the scheduler's process, as vLLM leaves it alone; and its other names.
_IN_PROCESS = (
    None,
    "uni",
    "vllm.v1.executor.UniProcExecutor",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor",
)
#: The one with a process for each worker.
_PROCESSES = ("mp", "vllm.v1.executor.MultiprocExecutor", "vllm.v1.executor.multiproc_executor.MultiprocExecutor")
#: What a model's configuration calls a number of KV heads, of all layers or of some.
_KV_HEADS = re.compile(r"(kv|key_value)s?_heads?|heads?_kv|(query|attention)_groups?|multi_query_group")
#: Two spellings of one kind.
_SPELT = {"fp8": "fp8_e4m3"}


class Configuration(NamedTuple):
    """What a session is opened with, but for the cache itself."""

    settings: Settings
    capabilities: EngineCapabilities
    grace_s: float
    #: Tensor-parallel ranks.
    world: int = 1
    #: Whether workers live in processes of their own, one for each rank.
    apart: bool = False


def configuration_of(vllm_config: Any, kv_cache_config: Any, own_address: Callable[[], str]) -> Configuration:
    """Read and check. `vllm_config`: a `vllm.config.VllmConfig`; `kv_cache_config`: a `KVCacheConfig`. `own_address`: what
    vLLM's connectors tell others to reach this machine by.

    Raises SettingsError (fault of whoever configured this server), naming what is wrong, in akv's words or vLLM's.
    """
    apart = _check_parallel(vllm_config.parallel_config)
    if vllm_config.cache_config.cache_dtype != "auto" and getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        why = "scales that a server finds in its first requests differ between servers, and so do the bytes of equal blocks"
        raise SettingsError("calculate_kv_scales", True, why, "Use a checkpoint that brings them.")
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise SettingsError("hisparse", "on", "its blocks lie in two places", "Serve this model without akv.")
    check_groups(kv_cache_config.kv_cache_groups)
    _check_media(vllm_config)
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    grace_ms = extra.pop(GRACE, DEFAULT_GRACE_MS)
    if isinstance(grace_ms, bool) or not isinstance(grace_ms, int | float) or not 0 <= grace_ms <= 1000:
        why = "every request of the batch waits with the scheduler"
        raise SettingsError(f"kv_connector_extra_config.{GRACE}", grace_ms, why, "Use milliseconds from 0 to 1000.")
    settings, world = _settings(vllm_config, extra, own_address), vllm_config.parallel_config.tensor_parallel_size
    if apart and settings.pool == "embedded":
        why = "each worker would start one of its own, and the scheduler another"
        raise SettingsError("pool", settings.pool, why, "Start a pool with `akv master`, and name it in store.master_address.")
    return Configuration(settings, _capabilities(vllm_config), grace_ms / 1000, world, apart)


def require_recompute(transfer: Any) -> bool:
    """A load that fails is computed instead: with vLLM's default, "fail", a page that was evicted would be a failed request.
    Returns whether that had to be changed. Before the scheduler reads it.
    """
    changed: bool = transfer.kv_load_failure_policy != "recompute"
    transfer.kv_load_failure_policy = "recompute"
    return changed


def traits_of(vllm_config: Any) -> dict[str, str]:
    """By layer, what else its bytes depend on: how the backend packs them, and what computes them."""
    model = vllm_config.model_config
    common = f"weights={model.quantization or 'plain'};model={str(model.dtype).removeprefix('torch.')};config={_digest(model)}"
    traits = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        backend = getattr(layer, "attn_backend", None)
        if backend is not None:
            # A CPU's backend packs keys for the instructions that it found there.
            traits[name] = f"{common};backend={backend.get_name()}{getattr(layer, 'isa', None) or ''}{_eight_bits(layer)}"
    return traits


def _eight_bits(layer: Any) -> str:
    """Which eight bits: vLLM's spec of a cache says the same for both."""
    kind = str(getattr(layer, "kv_cache_dtype", ""))
    return f";bits={_SPELT.get(kind, kind)}" if kind.startswith("fp8") else ""


def _digest(model: Any) -> str:
    """What is configured over a model's name: rope scaling, say, changes keys, and how media are prepared what they become."""
    fields: Any = _named(model.hf_text_config.to_dict())
    media = getattr(model, "multimodal_config", None)
    if media is not None:
        given = {name: getattr(media, name, None) for name in _GIVEN_MEDIA}
        fields = {"text": fields, "whole": _named(model.hf_config.to_dict()), "media": given}
    # What has no spelling that is the same in every process is left out: else nothing would ever be found again.
    spelt = json.dumps(fields, sort_keys=True, default=lambda _: None)
    return blake2b(spelt.encode(), digest_size=8).hexdigest()


def _named(fields: Any) -> Any:
    """A part of a model's configuration without what does not change its KV."""
    if not isinstance(fields, dict):
        return fields
    return {
        name: _named(value) for name, value in fields.items() if not str(name).startswith("_") and name not in _WITHOUT_EFFECT
    }


def _check_media(vllm_config: Any) -> None:
    """Refuse a server that does not hash what its pictures show."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    if media is None or media.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching:
        return
    why = "without it and without prefix caching vLLM numbers pictures from 1 instead of hashing them, so that any two are one"
    raise SettingsError("mm_processor_cache_gb", 0, why, "Leave either of them on.")


def model_heads(vllm_config: Any) -> int | None:
    """The KV heads of every layer in all; None where a configuration says several numbers, or none of them for each layer.

    Ranks that share a head store it once, under one name: that must be right for every layer, whatever makes it different.
    """
    model = vllm_config.model_config
    total = model.get_total_num_kv_heads()
    said = set(_kv_heads(_named(model.hf_text_config.to_dict())))
    return int(total) if said <= {total} else None


def _kv_heads(fields: Any, name: str = "") -> Iterator[Any]:
    """What a model's configuration, and the parts of it that are for some layers, say of KV heads."""
    if isinstance(fields, dict):
        for key, value in fields.items():
            yield from _kv_heads(value, str(key))
    elif isinstance(fields, list) and any(isinstance(each, dict) for each in fields):
        # Layers that are described one by one, each of which may have its own.
        yield None
    elif _KV_HEADS.search(name) and fields is not None:
        yield fields if isinstance(fields, int) else None


def _check_parallel(parallel: Any) -> bool:
    """Refuse what is not served. Returns whether the workers live in processes of their own."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if (ranks := getattr(parallel, name, 1)) > 1:
            why = "a rank would hold a part of the layers, or of the tokens, and a page has all of both"
            raise SettingsError(name, ranks, why, "Use 1 of it, and tensor_parallel_size or data_parallel_size for more GPUs.")
    if (nodes := getattr(parallel, "nnodes", 1)) > 1:
        raise SettingsError(
            "nnodes", nodes, "akv has not been tried with the ranks of one engine on several machines", "Use 1 of it."
        )
    backend = parallel.distributed_executor_backend
    named = backend if isinstance(backend, str | None) else f"{backend.__module__}.{backend.__qualname__}"
    if named in _PROCESSES:
        return True
    if named not in _IN_PROCESS:
        why = "akv has not been tried with its way of starting workers"
        raise SettingsError("distributed_executor_backend", backend, why, "Use 'mp', or 'uni' with one rank.")
    if (ranks := parallel.tensor_parallel_size) > 1:
        raise SettingsError("tensor_parallel_size", ranks, f"executor {named!r} runs one rank", "Use executor 'mp'.")
    return False


def _settings(vllm_config: Any, extra: dict[str, Any], own_address: Callable[[], str]) -> Settings:
    """What stands in `kv_connector_extra_config`, else in akv's variables and file, else in Mooncake's file."""
    role = vllm_config.kv_transfer_config.kv_role
    given = extra.setdefault("role", _ROLES[role])
    if given != _ROLES[role]:
        raise SettingsError("role", given, f"kv_role is {role!r}", f"Leave it out: kv_role means {_ROLES[role]!r}.")
    found = _explained(extra, vllm_config.model_config)
    # A cache that fails must not end a server.
    here = {"on_failure": "degrade"} | _as_deployed(found, own_address)
    here = {name: value for name, value in here.items() if found.sources[name] == DEFAULT}
    return _explained({**extra, **here}, vllm_config.model_config).settings if here else found.settings


def _as_deployed(found: ExplainedSettings, own_address: Callable[[], str]) -> dict[str, Any]:
    """What the file of a deployment leaves to its reader, which was vLLM's own connector."""
    store, here = found.settings.store, {}
    if found.settings.pool != "mooncake":
        return {}
    if MOONCAKE_VARIABLE in found.sources["store.master_address"]:
        here = dict(_LEFT_OUT)
    if found.sources["store.local_hostname"] == DEFAULT and not _is_loopback(store.master_address.rpartition(":")[0]):
        # Pages that this server lends under the default, which is loopback, could be read on this machine alone.
        here["store.local_hostname"] = own_address()
        if here["store.local_hostname"] == _NO_ADDRESS:
            why = "vLLM found no address by which the other machines of the pool reach this one"
            raise SettingsError("store.local_hostname", _NO_ADDRESS, why, "Set VLLM_HOST_IP, or this setting.")
    return here


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _explained(given: Mapping[str, Any], model: Any) -> ExplainedSettings:
    try:
        return explain_settings(overrides=given)
    except SettingsError as error:
        if error.field != "model_key" or "model_key" in given:
            raise
        return explain_settings(overrides={**given, "model_key": _model_key(model)})


def _model_key(model: Any) -> str:
    """The name of the weights, where vLLM knows one: a repository and the commit that it resolved. A path is a name on one
    machine, and a path, a branch or a tag may hold other weights tomorrow.
    """
    name, asked = str(model.model), model.revision
    # Spelt out, a resolved revision is what was asked for, "main" as a rule: the commit is an attribute of it.
    commit = str(getattr(asked, "resolved", asked))
    if _COMMIT.fullmatch(commit) and not Path(name).exists() and getattr(model, "model_weights", "") in ("", name):
        return f"{name}@{commit}"
    raise SettingsError(
        "model_key",
        "",
        f"{name!r} with revision {asked!s} does not say which weights it holds, to every server that shares the pool",
        "Set kv_connector_extra_config.model_key to a name of the weights and their revision.",
    )


def _capabilities(vllm_config: Any) -> EngineCapabilities:
    drafting = vllm_config.speculative_config
    if drafting is None:
        return EngineCapabilities()
    if drafting.method not in _DRAFTERS:
        why = "its drafter writes KV of its own, which akv has not been tried with in vLLM"
        raise SettingsError("speculative_config.method", drafting.method, why, f"Use one of {', '.join(_DRAFTERS)}, or none.")
    return EngineCapabilities(drafter="hidden_state")
