"""The KV cache of vLLM as a layout: what changes a block's bytes stands in it (K4), what cannot be named is refused (W9)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from akv.errors import SettingsError
from akv.values.layout import LayerGroup, Layout, Region

#: The kinds of cache that are served, by the class of their spec; a subclass may mean something else.
FULL = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW = ("SlidingWindowSpec",)
_SERVED = f"akv serves {', '.join((*FULL, *WINDOW))}"
_WITHOUT = "Serve this model without akv."
#: The axes of one block of a layer's cache, as vLLM names them: heads, tokens, and the keys and values of one token.
_AXES = {1: "heads", 2: "tokens", 3: "content"}


class Cache(NamedTuple):
    """What a connector is opened with."""

    layout: Layout
    #: For each group, for each region, its tensor, first axis the block.
    tensors: list[list[Any]]


def check_groups(groups: Sequence[Any]) -> None:
    """Refuse what cannot be served of a `KVCacheConfig`'s groups. Raises SettingsError, naming the group."""
    if not groups:
        raise SettingsError("kv_cache_groups", (), "the model has no KV cache", _WITHOUT)
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(sizes) > 1:
        why = "a block has one number of tokens in all layer groups, since they are found and loaded together"
        raise SettingsError("block_size", sizes, why, _WITHOUT)
    for index, group in enumerate(groups):
        for spec in {id(spec): spec for spec in _specs_of(group).values()}.values():
            _check_spec(f"kv_cache_groups[{index}]", group, spec)


def cache_of(
    groups: Sequence[Any],
    blocks: int,
    tensors: Mapping[str, Any],
    traits: Mapping[str, str],
    *,
    world: int = 1,
    model_heads: int | None = None,
) -> Cache:
    """Describe the cache. `groups`: of the `KVCacheConfig`; `blocks`: its number of blocks. `tensors`: each layer's cache, by
    name. `traits`: by layer, what else decides over its bytes: the attention backend above all, which may pack them. `world`:
    the tensor-parallel ranks; `model_heads`: the KV heads of each layer in all, None where that is not certain.

    Raises SettingsError for a cache whose blocks do not lie in one piece each.
    """
    described, caches = [], []
    for index, group in enumerate(groups):
        layers = _in_model_order(group.layer_names)
        specs = _specs_of(group)
        regions, held, orders = [], [], set()
        seen: set[int] = set()
        for name in layers:
            pieces, order = _pieces(name, tensors, blocks)
            if pieces[0].data_ptr() in seen:
                continue  # A layer that reads another one's keys and values.
            seen.add(pieces[0].data_ptr())
            orders.add(order)
            for number, piece in enumerate(pieces):
                label = name if len(pieces) == 1 else f"{name}[{number}]"
                page = piece[0]
                regions.append(
                    Region(name=f"{label} {_of_layer(specs[name])}", bytes_per_page=page.numel() * page.element_size())
                )
                held.append(piece)
        spec = specs[layers[0]]
        window = type(spec).__name__ in WINDOW
        kinds = sorted({traits.get(name, "") for name in layers})
        described.append(
            LayerGroup(
                layers=tuple(sorted({number for number, _ in map(_place, layers)})) or (index,),
                attention="sliding_window" if window else "full",
                window_tokens=spec.sliding_window if window else 0,
                dtype=str(spec.dtype).removeprefix("torch."),
                kv_heads=_heads_in_all([specs[name] for name in layers], world, model_heads),
                head_size=spec.head_size,
                regions=tuple(regions),
                quantisation=";".join((f"kv={spec.kv_quant_mode.name}", *kinds)),
                order="|".join(sorted(orders)),
            )
        )
        caches.append(held)
    tokens_per_block = groups[0].kv_cache_spec.block_size
    return Cache(Layout(tokens_per_block=tokens_per_block, groups=tuple(described), world=world), caches)


def _heads_in_all(specs: Sequence[Any], world: int, model_heads: int | None) -> int:
    """The KV heads of these layers on all ranks together, of specs that say one rank's: at least 1, also where the model has
    fewer than ranks, which then share a head.

    Which ranks share one, and store it once, follows from the model's heads. Where these are not certain each rank's are taken
    for its own: equal pages are stored more than once then, and no two that differ under one name.
    """
    heads: set[int] = {spec.num_kv_heads for spec in specs}
    if world == 1:
        return int(specs[0].num_kv_heads)
    if all(type(spec).__name__ == "MLAAttentionSpec" for spec in specs):
        return 1  # A latent, which every rank holds whole.
    shared = heads == {1} and model_heads is not None and world % model_heads == 0
    return model_heads if shared and model_heads else max(heads) * world


def _specs_of(group: Any) -> dict[str, Any]:
    """The spec of each layer: layers of one kind whose pages differ in size share a group."""
    uniform = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: group.kv_cache_spec if uniform is None else uniform[name] for name in group.layer_names}


def _of_layer(spec: Any) -> str:
    """What may differ between the layers of a group."""
    return f"{spec.num_kv_heads}x{spec.head_size}+{spec.head_size_v}"


def _check_spec(at: str, group: Any, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in (*FULL, *WINDOW):
        raise SettingsError(
            f"{at}.kv_cache_spec", kind, f"the state of such layers is in no page of akv's; {_SERVED}", _WITHOUT
        )
    for name, served, why in (
        ("attention_chunk_size", None, "chunked attention forgets at other places than a window"),
        ("non_causal", False, "its KV depends on tokens behind a block"),
        ("tokens_per_state", 1, "a block of it holds other than one state a token"),
        ("extra_retained_tokens", 0, "a drafter of several modules computes a window's tail again"),
        ("prefix_replay_tokens", 0, "vLLM computes the end of a match again, from window pages that are not loaded"),
        ("prefix_cacheable", True, "its pages are no prefix's"),
    ):
        if (value := getattr(spec, name, served)) != served:
            raise SettingsError(f"{at}.kv_cache_spec.{name}", value, why, _WITHOUT)
    for name, served in (("host_resident", False), ("enable_kv_transfer", True), ("is_eagle_group", False)):
        if (value := getattr(group, name, served)) != served:
            raise SettingsError(f"{at}.{name}", value, "akv does not know such a group's blocks", _WITHOUT)


def _place(name: str) -> tuple[int, str]:
    """Where a layer stands in the model: the first number in its name, "model.layers.12.self_attn.attn"."""
    found = re.search(r"\.(\d+)(?:\.|$)", name)
    return (int(found[1]) if found else 0, name)


def _in_model_order(names: Sequence[str]) -> list[str]:
    # vLLM's own order follows the order in which layers were made; the order of the stored bytes must not.
    return sorted(names, key=_place)


def _pieces(name: str, tensors: Mapping[str, Any], blocks: int) -> tuple[list[Any], str]:
    """The tensor of a layer as pieces whose first axis is the block and whose blocks are contiguous, and the order in them."""
    tensor: Any = tensors.get(name)
    if not hasattr(tensor, "data_ptr"):
        raise SettingsError("kv_caches", name, "vLLM hands over no tensor for it", _WITHOUT)
    if tensor.shape[0] != blocks:
        if tensor.shape[0] % blocks:
            raise SettingsError(f"kv_caches.{name}", tuple(tensor.shape), f"the cache has {blocks} blocks", _WITHOUT)
        tensor = tensor.unflatten(0, (blocks, -1))
    strides = tensor.stride()
    axes = sorted(range(1, tensor.dim()), key=lambda axis: (-strides[axis], axis))
    laid = tensor.permute(0, *axes)
    named = _AXES if tensor.dim() == 4 else {}
    order = ",".join(named.get(axis, f"axis{axis}") for axis in axes)
    if laid[0].is_contiguous():
        return [laid], order
    # Heads outside the blocks: one piece for each.
    pieces = [tensor[:, head] for head in range(tensor.shape[1])]
    if not pieces[0][0].is_contiguous():
        raise SettingsError(
            f"kv_caches.{name}",
            f"shape {tuple(tensor.shape)}, strides {strides}",
            "a block does not lie in one piece in memory, nor in one for each head",
            "Leave VLLM_KV_CACHE_LAYOUT to vLLM.",
        )
    return pieces, f"pieces of {order}"
