"""The objects of vLLM 0.32 that its connectors see, with the attributes that akv reads, and nothing behind them."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from akv.values.layout import Layout


class Status(IntEnum):
    """As `RequestStatus`: whatever comes after PREEMPTED has ended."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_ABORTED = 6


class VllmRequest:
    """As `vllm.v1.request.Request`. `fields` replace its attributes."""

    def __init__(self, request_id: str, tokens: Sequence[int], max_tokens: int, **fields: Any) -> None:
        self.request_id = request_id
        self.prompt_token_ids: list[int] | None = list(tokens)
        self.prompt_embeds: Any = None
        self.prompt_is_token_ids: Any = None
        self.all_token_ids = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.max_tokens = max_tokens
        self.status = Status.WAITING
        self.cache_salt: str | None = None
        self.lora_request: Any = None
        self.mm_features: list[Any] = []
        self.resumable = False
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params: dict[str, Any] | None = None
        vars(self).update(fields)

    @property
    def num_tokens(self) -> int:
        """Those of the prompt, and what was generated."""
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status > Status.PREEMPTED


class ResolvedRevision(str):
    """As `huggingface_hub`'s, which vLLM makes of a model's revision: it is spelt as it was asked for."""

    __slots__ = ("resolved",)

    def __init__(self, asked: str) -> None:
        self.resolved = "0123456789abcdef0123456789abcdef01234567"


class BlockPool:
    """As `BlockPool`: blocks with reference counts, of which the first is the null block and belongs to nobody."""

    def __init__(self, count: int) -> None:
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(count)]
        self.blocks[0].ref_cnt = 1
        #: Those that somebody has given back since they were looked at.
        self.released: list[int] = []

    @property
    def free(self) -> list[int]:
        """Those that the next request may get."""
        return [block.block_id for block in self.blocks if not block.ref_cnt]

    def touch(self, blocks: Sequence[Any]) -> None:
        """One reference more to each."""
        for block in blocks:
            block.ref_cnt += 1

    def release(self, ids: Sequence[int]) -> None:
        """One reference less to each, the null block aside."""
        for number in ids:
            if number:
                self.blocks[number].ref_cnt -= 1
                self.released.append(number)


class Blocks:
    """As `KVCacheBlocks`: a request's blocks in each group."""

    def __init__(self, table: Sequence[Sequence[int]]) -> None:
        self._table = table

    def get_block_ids(self) -> tuple[list[int], ...]:
        """A list of its own for each group."""
        return tuple(map(list, self._table))


def scheduler_output(
    scheduled: dict[str, int],
    preempted: Sequence[str],
    finished: Sequence[str],
    blocks_of: Callable[[str], tuple[list[int], ...]],
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """As `SchedulerOutput`, of `scheduled` tokens by request."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens=drafts or {},
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
        kv_connector_block_state=SimpleNamespace(get_block_ids=blocks_of),
    )


class FullAttentionSpec(SimpleNamespace):
    """As the spec of that name. akv tells specs by their class's name."""


class SlidingWindowSpec(SimpleNamespace):
    """As the spec of that name."""


class MambaSpec(SimpleNamespace):
    """As the spec of that name, which akv refuses."""


def full_spec(**fields: Any) -> FullAttentionSpec:
    """Full attention of two heads, 32 tokens to the block. `fields` replace its attributes."""
    return FullAttentionSpec(**(_SPEC | {"attention_chunk_size": None, "non_causal": False} | fields))


def window_spec(**fields: Any) -> SlidingWindowSpec:
    """As `full_spec`, with a window of 64 tokens."""
    return SlidingWindowSpec(**(_SPEC | {"sliding_window": 64, "extra_retained_tokens": 0} | fields))


_SPEC: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 32,
    "head_size_v": 32,
    "dtype": "torch.float32",
    "kv_quant_mode": SimpleNamespace(name="NONE"),
    "tokens_per_state": 1,
    "prefix_cacheable": True,
    "prefix_replay_tokens": 0,
}


def group(spec: Any, layers: Sequence[str], **fields: Any) -> Any:
    """As `KVCacheGroupSpec`."""
    defaults = {"host_resident": False, "enable_kv_transfer": True, "is_eagle_group": False}
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers), **(defaults | fields))


def cache_config(*groups: Any, blocks: int = 8) -> Any:
    """As `KVCacheConfig`."""
    return SimpleNamespace(kv_cache_groups=list(groups), num_blocks=blocks, hisparse_host_num_blocks=None)


def vllm_config(extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """As `VllmConfig`, of a model whose commit vLLM knows. `fields` replace attributes of its parts, by the part's name."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "distributed_executor_backend": "uni",
        },
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
        "kv_transfer_config": {
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"pool": "embedded"} if extra is None else extra,
            "kv_load_failure_policy": "fail",
            "engine_id": "engine",
        },
        "model_config": {
            "model": "maker/model",
            "revision": ResolvedRevision("main"),
            "quantization": None,
            "dtype": "torch.bfloat16",
            "multimodal_config": None,
            "hf_text_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0, "_name_or_path": "x"}),
        },
        "compilation_config": {"static_forward_context": {}},
    }
    config = {name: SimpleNamespace(**(part | fields.get(name, {}))) for name, part in parts.items()}
    return SimpleNamespace(**config, speculative_config=fields.get("speculative_config"))


def windows_of(layout: Layout) -> list[int]:
    """The window in tokens of each group that has one."""
    return [group.window_tokens for group in layout.groups if group.is_window]
