"""What a server's `llm_args` mean for akv: which drafter it runs, and which servers are refused (P1, S9, W9). Pure."""

from typing import Any

from akv.errors import SettingsError
from akv.values.capabilities import EngineCapabilities
from akv.values.settings import Settings

_ONE_RANK = "this adapter serves one rank, and a page of several would be a part of one only"
_PARALLEL = {
    "tensor_parallel_size": "Use 1, or attention data parallelism (enable_attention_dp), whose owners hold whole pages.",
    "pipeline_parallel_size": "Use 1: a stage holds a part of the layers only.",
    "context_parallel_size": "Use 1: a rank holds a part of the tokens only.",
}


def capabilities_of(llm_args: Any, settings: Settings) -> EngineCapabilities:
    """What this server can do, in akv's words.

    Raises SettingsError (fault of whoever configured the server) naming the argument: more ranks than one, a drafter that
    cannot be keyed, attention data parallelism that saves beside decoding.
    """
    owners = getattr(llm_args, "enable_attention_dp", False) is True
    for name, fix in _PARALLEL.items():
        ranks = int(getattr(llm_args, name, None) or 1)
        if ranks > 1 and not (owners and name == "tensor_parallel_size"):
            raise SettingsError(f"llm_args.{name}", ranks, _ONE_RANK, fix)
    if owners and settings.role != "consumer" and getattr(llm_args, "cache_transceiver_config", None) is None:
        # Only such an owner takes pages back from a running request, and nothing in this interface tells that (S9).
        raise SettingsError(
            "llm_args.enable_attention_dp",
            True,
            f"role {settings.role!r} saves, and an owner that also decodes takes pages back without telling the connector",
            "Use role 'consumer' there, or let a context server (cache_transceiver_config) save.",
        )
    drafter, draft_tokens = _drafter(getattr(llm_args, "speculative_config", None))
    # The runtime keeps a parked load's pages to its end, and no window page longer than its window is read.
    return EngineCapabilities(drafter=drafter, draft_tokens=draft_tokens, window_retention_tokens=0)


def _drafter(config: Any) -> tuple[str, int]:
    """The drafter by what its KV depends on, with the tokens that it proposes (P1)."""
    if config is None:
        return "none", 0
    kind = str(getattr(config, "decoding_type", type(config).__name__))
    match kind.lower():
        case "mtp" if getattr(config, "use_mtp_vanilla", False):
            return "vanilla_mtp", _draft_tokens(config)
        case "mtp" if getattr(config, "mtp_eagle_one_model", True):
            return "mtp", _draft_tokens(config)
        case "eagle" | "eagle3" if getattr(config, "eagle3_one_model", True):
            return "eagle3", _draft_tokens(config)
        case "medusa":
            return "hidden_state", 0
        case _:
            pass
    raise SettingsError(
        "llm_args.speculative_config",
        kind,
        "akv cannot tell on which tokens this drafter's KV depends, or it has a cache of its own",
        "Use MTP or EAGLE3 in one model with the target, Medusa, or serve this model without akv.",
    )


def _draft_tokens(config: Any) -> int:
    """0 where the server has not resolved it yet: refused where it matters, by `check_capabilities`."""
    layers = getattr(config, "num_nextn_predict_layers", None)
    return int(layers or getattr(config, "max_draft_len", None) or 0)
