"""How large the reference engine's model is, and how the engine runs it. `presets.py` has some."""

from hashlib import blake2b
from typing import Literal

import msgspec

from akv.errors import SettingsError

#: Bytes are tokens; above them stand the special tokens of `akv_testing.engine.text`.
VOCABULARY = 260


class AttentionGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that attend alike and keep alike KV: one layer group of the layout."""

    #: Their indices, ascending. They need not be neighbours: models alternate windows and full attention. The layer of a
    #: drafter with KV comes behind the target's: its index is `ModelConfig.layers`.
    layers: tuple[int, ...]
    #: W: tokens that a layer sees, the one being computed included. 0: all of them.
    window_tokens: int = 0
    #: S: tokens from the sequence's start that a window sees as well.
    sink_tokens: int = 0
    #: How KV lies in the pages. The arithmetic is float32 everywhere.
    dtype: Literal["float32", "bfloat16"] = "float32"
    #: KV heads of these layers; 0 for as many as `ModelConfig.kv_heads`.
    kv_heads: int = 0

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one number in a page."""
        return 4 if self.dtype == "float32" else 2


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer with random weights. Equal configurations are equal models, in every process."""

    layers: int
    hidden: int
    #: Query heads. A multiple of `kv_heads`: each KV head serves as many query heads (grouped-query attention).
    heads: int
    kv_heads: int
    #: Elements per head; even, because RoPE turns them in pairs.
    head_size: int
    #: Width of the SwiGLU.
    intermediate: int
    #: Tokens in the vocabulary; as many bytes as there are, and the special tokens.
    vocabulary: int = VOCABULARY
    #: Tokens that a sequence may have at most; the length of the RoPE table.
    max_tokens: int = 16384
    #: Seeds the weights.
    seed: int = 0
    #: What each layer sees and keeps, every layer in one group. Empty: full attention in all of them, float32.
    groups: tuple[AttentionGroup, ...] = ()
    #: What drafts tokens: nothing; a layer with KV of its own in the target's cache; a head without KV (`drafter.py`).
    drafter: Literal["none", "eagle3", "hidden_state"] = "none"
    #: Rank of the adapters' matrices. Every `akv.Lora` names an adapter: its weights follow from its id and revision.
    adapter_rank: int = 4
    #: Whether ids outside the vocabulary are taken: each looks to the model like the id that is left of it, modulo the
    #: vocabulary. So tests can tell apart what is computed and what it is called.
    any_ids: bool = False

    @property
    def lookahead(self) -> int:
        """L: tokens behind a position that its KV depends on."""
        return 1 if self.drafter == "eagle3" else 0

    @property
    def cached_layers(self) -> int:
        """Layers with KV: the target's, and the drafter's behind them."""
        return self.layers + (self.drafter == "eagle3")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token takes in all layers."""
        return sum(
            2 * len(group.layers) * group.kv_heads * self.head_size * group.bytes_per_element for group in self.layer_groups()
        )

    def layer_groups(self, parts: int = 1) -> tuple[AttentionGroup, ...]:
        """The groups with their numbers of heads. A model that names none has `parts` alike ones of neighbouring layers, and
        a drafter's layer in the last one.
        """
        if self.groups:
            return tuple(msgspec.structs.replace(group, kv_heads=group.kv_heads or self.kv_heads) for group in self.groups)
        size = self.layers // parts
        starts = range(0, self.layers, size)
        ends = [*starts[1:], self.cached_layers]
        return tuple(
            AttentionGroup(layers=tuple(range(first, end)), kv_heads=self.kv_heads)
            for first, end in zip(starts, ends, strict=True)
        )

    @property
    def key(self) -> str:
        """A `model_key` for akv: names the weights, because they follow from these fields."""
        return f"akv-reference-{blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()}"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine runs its model. Two engines compute equal bits if all fields but `pages` and the two maxima are equal."""

    model: ModelConfig
    #: T: tokens in a page.
    tokens_per_block: int = 32
    #: Pages of each layer group: one number for all, or one for each.
    pages: int | tuple[int, ...] = 512
    #: Layer groups that the layers of a model without `groups` are split over, evenly and in order. More than one is for tests
    #: of several page tables.
    layer_groups: int = 1
    #: Whether a page of a layer group is one piece of memory, so that a store can reach it without a copy. Else each layer's
    #: keys and values are a tensor of their own.
    contiguous_pages: bool = False
    #: Tokens behind the window for which requests keep their window pages, so that more ends can be resumed at (W4).
    window_retention_tokens: int = 0
    #: Where a prompt is cut, in tokens: chunks end at multiples of this, wherever they begin. So what is computed together
    #: depends on where the request resumes, and never on what else is in the pass.
    chunk_tokens: int = 256
    #: Tokens that one pass computes at most.
    max_tokens_per_pass: int = 512
    #: Requests that one pass computes for at most.
    max_running: int = 32
    #: Tokens that the model's drafter drafts in a pass, for each request that decodes; 0 for none. Its KV is computed all the
    #: same, so pages are those of a server that drafts.
    draft_tokens: int = 0
    #: Tokens at the end of a local match that are computed again, as engines do beside a drafter. This one needs none, since
    #: its cache calls a block what a drafter's KV in it depends on (K2).
    reuse_backoff_tokens: int = 0
    #: Beside a pool that is read: "off" takes local matches whole, "align" keeps the backoff and rounds down to a block (P2).
    local_reuse_backoff: Literal["off", "align"] = "off"
    #: Where no pool is read: local matches end at multiples of this, a divisor of T, and a page that they end in is copied
    #: (P3). 0: T.
    reuse_match_alignment: int = 0
    #: Whether only prompts are computed here, for servers that decode elsewhere: a request for more than the first token is
    #: refused, alone (P1).
    prefill_only: bool = False
    #: CPU threads of torch, which has one number for the whole process. Bits may differ between numbers. One is the default:
    #: torch's threads spin while they wait for each other, and crawl when anything else needs the cores.
    threads: int = 1
    #: Where the pages lie, for torch: "cpu", "cuda", "cuda:1". The weights have to lie there too.
    device: str = "cpu"

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """The layer groups, in the order of the layout."""
        return self.model.layer_groups(self.layer_groups)

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages of each layer group."""
        return self.pages if isinstance(self.pages, tuple) else (self.pages,) * len(self.groups)


def check_config(config: EngineConfig) -> None:
    """Refuse a configuration that cannot run, by name. Raises SettingsError (fault of whoever wrote it)."""
    for is_wrong, field, value, fix in (*_of_engine(config), *_of_model(config.model)):
        if is_wrong:
            raise SettingsError(field, value, "the reference engine cannot run with it", fix)
    # Last: what a group is follows from the numbers that were checked.
    if len(config.page_counts) != len(config.groups) or min(config.page_counts) < 1:
        fix = f"use at least 1, for each of {len(config.groups)} groups"
        raise SettingsError("pages", config.pages, "the reference engine cannot run with it", fix)


#: Whether it is wrong, the field, its value, what to do.
_Check = tuple[bool, str, object, str]


def _of_engine(config: EngineConfig) -> tuple[_Check, ...]:
    model, parts = config.model, config.layer_groups
    return (
        (parts < 1 or model.layers % parts != 0, "layer_groups", parts, f"use a divisor of {model.layers}"),
        (parts != 1 and bool(model.groups), "layer_groups", parts, "leave it out: the model names its groups"),
        (config.tokens_per_block < 1, "tokens_per_block", config.tokens_per_block, "use at least 1"),
        (config.chunk_tokens < 1, "chunk_tokens", config.chunk_tokens, "use at least 1"),
        (config.max_running < 1, "max_running", config.max_running, "use at least 1"),
        (config.window_retention_tokens < 0, "window_retention_tokens", config.window_retention_tokens, "use 0 for none"),
        (config.reuse_backoff_tokens < 0, "reuse_backoff_tokens", config.reuse_backoff_tokens, "use 0 for none"),
        (
            config.local_reuse_backoff not in {"off", "align"},
            "local_reuse_backoff",
            config.local_reuse_backoff,
            "use 'off' or 'align'",
        ),
        (
            config.reuse_match_alignment < 0
            or (config.reuse_match_alignment > 0 and config.tokens_per_block % config.reuse_match_alignment != 0),
            "reuse_match_alignment",
            config.reuse_match_alignment,
            f"use a divisor of tokens_per_block={config.tokens_per_block}",
        ),
        (config.draft_tokens < 0, "draft_tokens", config.draft_tokens, "use 0 for none"),
        (
            config.draft_tokens > 0 and model.drafter == "none",
            "draft_tokens",
            config.draft_tokens,
            "use a model with a drafter",
        ),
        (
            config.draft_tokens >= config.chunk_tokens,
            "draft_tokens",
            config.draft_tokens,
            "use less than chunk_tokens: the token that they follow is computed with them",
        ),
        (
            # Then a chunk fits beside any number of decoding requests, and prompts are never starved by them.
            config.max_tokens_per_pass < config.chunk_tokens + config.max_running * (1 + config.draft_tokens),
            "max_tokens_per_pass",
            config.max_tokens_per_pass,
            "use at least chunk_tokens + max_running * (1 + draft_tokens)",
        ),
    )


def _of_model(model: ModelConfig) -> tuple[_Check, ...]:
    layers = sorted(layer for group in model.groups for layer in group.layers)
    heads = [group.kv_heads for group in model.layer_groups()]
    windows = [(group.window_tokens, group.sink_tokens) for group in model.groups]
    return (
        (any(model.heads % of for of in heads), "model.heads", model.heads, f"use a multiple of every kv_heads ({heads})"),
        (model.head_size % 2 != 0, "model.head_size", model.head_size, "use an even number"),
        (model.adapter_rank < 1, "model.adapter_rank", model.adapter_rank, "use at least 1"),
        (
            bool(model.groups) and layers != list(range(model.cached_layers)),
            "model.groups",
            [group.layers for group in model.groups],
            f"put each of {model.cached_layers} layers, a drafter's with KV among them, into one group",
        ),
        (
            any(window < 0 or sinks < 0 or (sinks > 0 and not window) for window, sinks in windows),
            "model.groups",
            windows,
            "use at least 0 for a window and for its sinks, and sinks with windows only",
        ),
    )
