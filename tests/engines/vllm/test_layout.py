"""vLLM's cache as a layout: equal layouts, equal bytes, and what cannot be served is refused by name (K4, W9)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from akv.engines.vllm.layout import Cache, cache_of, check_groups
from akv.errors import SettingsError
from akv.values.layout import check_layout
from akv_testing.vllm_objects import FullAttentionSpec, MambaSpec, full_spec, group, window_spec

BLOCKS = 8
NAMES = ["model.layers.0.self_attn.attn", "model.layers.2.self_attn.attn", "model.layers.10.self_attn.attn"]


def tensors(names: list[str], **fields: Any) -> dict[str, torch.Tensor]:
    shape = fields.get("shape", (BLOCKS, 2, 32, 64))
    return {name: torch.zeros(shape) for name in names}


def described(*groups: Any, caches: dict[str, torch.Tensor] | None = None, traits: dict[str, str] | None = None) -> Cache:
    names = [name for one in groups for name in one.layer_names]
    cache = cache_of(groups, BLOCKS, tensors(names) if caches is None else caches, traits or {})
    check_layout(cache.layout)
    return cache


def test_K4_a_block_is_its_layers_in_the_models_order_whatever_order_vllm_lists_them_in() -> None:
    layout, held = described(group(full_spec(), [NAMES[2], NAMES[0], NAMES[1]]))
    assert layout.tokens_per_block == 32
    (one,) = layout.groups
    assert one.layers == (0, 2, 10)
    assert [region.name.split()[0] for region in one.regions] == NAMES
    assert one.bytes_per_page == 3 * 2 * 32 * 64 * 4
    assert (one.dtype, one.kv_heads, one.head_size, one.order) == ("float32", 2, 32, "heads,tokens,content")
    assert layout == described(group(full_spec(), NAMES)).layout
    assert [tensor.shape for tensor in held[0]] == [(BLOCKS, 2, 32, 64)] * 3


@pytest.mark.parametrize(
    ("here", "model_heads", "world", "heads"),
    [
        (2, 2, 1, 2),  # One rank: as its spec says.
        (2, 4, 2, 4),  # Split evenly.
        (4, None, 2, 8),
        (1, 8, 8, 8),  # One head each.
        (1, 2, 4, 2),  # Two ranks share a head, and one of them stores it.
        (1, 1, 4, 1),
        (1, None, 4, 4),  # Nobody knows which ranks share one: each stores its own.
        (1, 3, 4, 4),
    ],
)
def test_K3_heads_of_all_ranks_together(here: int, model_heads: int | None, world: int, heads: int) -> None:
    one = group(full_spec(num_kv_heads=here), NAMES)
    layout = cache_of([one], BLOCKS, tensors(NAMES), {}, world=world, model_heads=model_heads).layout
    check_layout(layout)
    assert (layout.world, layout.groups[0].kv_heads) == (world, heads)


def test_K3_layers_of_one_group_that_differ_in_heads_share_nothing_between_ranks() -> None:
    several = SimpleNamespace(kv_cache_specs={NAMES[0]: full_spec(num_kv_heads=1), NAMES[1]: full_spec(num_kv_heads=2)})
    one = group(several, NAMES[:2])
    one.kv_cache_spec.block_size = 32
    caches = tensors(NAMES[:2])
    layout = cache_of([one], BLOCKS, caches, {}, world=4, model_heads=1).layout
    assert layout.groups[0].kv_heads >= 4


def test_K3_a_latent_is_whole_on_every_rank() -> None:
    class MLAAttentionSpec(FullAttentionSpec):
        pass

    latent = full_spec(num_kv_heads=1)
    latent.__class__ = MLAAttentionSpec
    layout = cache_of([group(latent, NAMES)], BLOCKS, tensors(NAMES), {}, world=2, model_heads=16).layout
    assert layout.groups[0].kv_heads == 1


def test_W1_a_window_group_is_one() -> None:
    layout, _ = described(group(full_spec(), NAMES[:1]), group(window_spec(sliding_window=100), NAMES[1:]))
    assert [one.attention for one in layout.groups] == ["full", "sliding_window"]
    assert [one.window_tokens for one in layout.groups] == [0, 100]


@pytest.mark.parametrize(
    "change",
    [
        {"kv_quant_mode": SimpleNamespace(name="FP8_PER_TENSOR")},
        {"dtype": "torch.bfloat16"},
        {"num_kv_heads": 1},
        {"head_size": 16},
        {"head_size_v": 16},
    ],
    ids=str,
)
def test_K4_whatever_changes_the_bytes_changes_the_layout(change: dict[str, Any]) -> None:
    assert described(group(full_spec(), NAMES)).layout != described(group(full_spec(**change), NAMES)).layout


def test_K4_how_the_backend_packs_a_block_is_part_of_it() -> None:
    plain = described(group(full_spec(), NAMES)).layout
    assert plain != described(group(full_spec(), NAMES), traits={NAMES[0]: "backend=OTHER"}).layout
    turned = {name: torch.zeros((BLOCKS, 32, 2, 64)).permute(0, 2, 1, 3) for name in NAMES}
    layout, held = described(group(full_spec(), NAMES), caches=turned)
    assert layout.groups[0].order == "tokens,heads,content"
    assert held[0][0][0].is_contiguous()
    assert held[0][0].data_ptr() == turned[NAMES[0]].data_ptr()


def test_blocks_that_kernels_see_in_parts_are_whole_again() -> None:
    caches = tensors(NAMES, shape=(BLOCKS * 2, 2, 16, 64))
    layout, held = described(group(full_spec(), NAMES), caches=caches)
    assert layout.groups[0].regions[0].bytes_per_page == 2 * 32 * 64 * 4
    assert held[0][0].shape[0] == BLOCKS


def test_heads_outside_the_blocks_are_pieces_of_their_own() -> None:
    caches = {name: torch.zeros((2, BLOCKS, 32, 64)).permute(1, 0, 2, 3) for name in NAMES}
    layout, held = described(group(full_spec(), NAMES), caches=caches)
    assert len(layout.groups[0].regions) == len(held[0]) == 6
    assert layout.groups[0].bytes_per_page == 3 * 2 * 32 * 64 * 4


def test_layers_that_share_their_cache_are_stored_once() -> None:
    caches = tensors(NAMES)
    caches[NAMES[1]] = caches[NAMES[0]]
    layout, held = described(group(full_spec(), NAMES), caches=caches)
    assert len(layout.groups[0].regions) == len(held[0]) == 2


def test_layers_of_one_kind_may_differ_in_size() -> None:
    specs = {NAMES[0]: full_spec(), NAMES[1]: full_spec(head_size=16, head_size_v=16)}
    uniform = SimpleNamespace(block_size=32, kv_cache_specs=specs)
    caches = {NAMES[0]: torch.zeros((BLOCKS, 2, 32, 64)), NAMES[1]: torch.zeros((BLOCKS, 2, 32, 32))}
    layout, _ = described(group(uniform, NAMES[:2]), caches=caches)
    assert [region.bytes_per_page for region in layout.groups[0].regions] == [16384, 8192]


class StrangeSpec(FullAttentionSpec):
    """One that vLLM has added since."""


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ([], "kv_cache_groups"),
        ([group(full_spec(), NAMES), group(window_spec(block_size=16), NAMES)], "block_size"),
        ([group(MambaSpec(block_size=32), NAMES)], "kv_cache_groups[0].kv_cache_spec"),
        ([group(StrangeSpec(**vars(full_spec())), NAMES)], "kv_cache_groups[0].kv_cache_spec"),
        ([group(full_spec(attention_chunk_size=8), NAMES)], "kv_cache_groups[0].kv_cache_spec.attention_chunk_size"),
        ([group(full_spec(non_causal=True), NAMES)], "kv_cache_groups[0].kv_cache_spec.non_causal"),
        ([group(full_spec(tokens_per_state=4), NAMES)], "kv_cache_groups[0].kv_cache_spec.tokens_per_state"),
        ([group(window_spec(extra_retained_tokens=2), NAMES)], "kv_cache_groups[0].kv_cache_spec.extra_retained_tokens"),
        ([group(full_spec(prefix_replay_tokens=2), NAMES)], "kv_cache_groups[0].kv_cache_spec.prefix_replay_tokens"),
        ([group(full_spec(prefix_cacheable=False), NAMES)], "kv_cache_groups[0].kv_cache_spec.prefix_cacheable"),
        ([group(full_spec(), NAMES, host_resident=True)], "kv_cache_groups[0].host_resident"),
        ([group(full_spec(), NAMES, enable_kv_transfer=False)], "kv_cache_groups[0].enable_kv_transfer"),
        ([group(full_spec(), NAMES), group(full_spec(), NAMES, is_eagle_group=True)], "kv_cache_groups[1].is_eagle_group"),
    ],
)
def test_W9_what_cannot_be_served_is_refused_by_name(groups: list[Any], field: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_groups(groups)
    assert refused.value.field == field


def test_a_layer_without_a_tensor_or_with_scattered_blocks_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="hands over no tensor"):
        described(group(full_spec(), NAMES), caches={NAMES[0]: [torch.zeros(1)]})  # type: ignore[dict-item]
    with pytest.raises(SettingsError, match="the cache has 8 blocks"):
        described(group(full_spec(), NAMES), caches=tensors(NAMES, shape=(9, 2, 32, 64)))
    scattered = {name: torch.zeros((32, BLOCKS, 2, 64)).permute(1, 2, 0, 3) for name in NAMES}
    with pytest.raises(SettingsError, match="does not lie in one piece"):
        described(group(full_spec(), NAMES), caches=scattered)
