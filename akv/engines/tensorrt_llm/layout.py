"""TensorRT-LLM's description of its KV cache (`KvCacheLayout`), in akv's words."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from akv.errors import SettingsError
from akv.values.layout import LayerGroup, Layout, Region


class Rows(NamedTuple):
    """One region in memory: `slots` rows of `size` bytes, `stride` bytes apart, the first at address `base`."""

    base: int
    size: int
    stride: int
    slots: int


class Described(NamedTuple):
    """A cache, and how the engine numbers its groups."""

    layout: Layout
    #: For each group of the layout its regions in memory, in the order of the layout.
    rows: tuple[tuple[Rows, ...], ...]
    #: For each group of the layout the engine's own id, by which its page lists are indexed.
    group_ids: tuple[int, ...]

    def tables(self, by_id: Sequence[Sequence[int]], flat: Sequence[int] = ()) -> list[list[int]]:
        """Page lists as akv orders them. `flat`: the one list of a cache with one group, where none is given by group.

        A list that is missing is empty.
        """
        if not by_id and len(self.group_ids) == 1:
            return [list(flat)]
        return [list(by_id[number]) if number < len(by_id) else [] for number in self.group_ids]


def describe(cache: Any, llm_args: Any) -> Described:
    """Read a `KvCacheLayout`.

    Whatever changes the bytes of a page has to be in the layout (K4). TensorRT-LLM tells sizes, layers and roles; what it does
    not tell (heads, their size) follows from the weights, which `model_key` names. Raises SettingsError for a cache without
    groups.
    """
    if not cache.groups:
        raise SettingsError("layout.groups", (), "TensorRT-LLM described a cache without layer groups", "Report this.")
    dtype, quantisation, order = _element(cache, llm_args)
    groups = []
    rows = []
    for group in cache.groups:
        # Replicated regions hold the same bytes on every rank; on one rank they are a part of the page like any other.
        regions = (*group.regions, *getattr(group, "replicated_regions", ()))
        window = getattr(group, "window_size", None)
        groups.append(
            LayerGroup(
                layers=tuple(sorted(set(map(int, group.layer_ids)))),
                attention="full" if window is None else "sliding_window",
                window_tokens=0 if window is None else int(window),
                sink_tokens=0 if window is None else _sinks(group, llm_args),
                dtype=dtype,
                kv_heads=1,
                head_size=1,
                regions=tuple(Region(name=_name(region), bytes_per_page=int(region.size)) for region in regions),
                quantisation=quantisation,
                order=order,
            )
        )
        rows.append(tuple(Rows(int(part.base), int(part.size), int(part.stride), int(part.num_slots)) for part in regions))
    layout = Layout(tokens_per_block=int(cache.tokens_per_block), groups=tuple(groups))
    return Described(layout, tuple(rows), tuple(int(group.layer_group_id) for group in cache.groups))


def _element(cache: Any, llm_args: Any) -> tuple[str, str, str]:
    config = getattr(llm_args, "kv_cache_config", None)
    dtype = getattr(cache, "dtype", None) or getattr(config, "dtype", None) or getattr(llm_args, "dtype", None) or "auto"
    quantisation = getattr(getattr(llm_args, "quant_config", None), "kv_cache_quant_algo", None)
    # Kernels of different backends lay a block's heads and tokens out differently.
    backend = getattr(llm_args, "attn_backend", None) or "TRTLLM"
    return str(dtype), "" if quantisation is None else str(quantisation), f"tensorrt_llm/{backend}"


def _sinks(group: Any, llm_args: Any) -> int:
    """Sinks of a window group, by any name that they have had: pages that are not stored would be missed in silence."""
    config = getattr(llm_args, "kv_cache_config", None)
    named = (getattr(group, name, None) for name in ("sink_tokens", "num_sink_tokens", "sinks"))
    return int(next((told for told in named if told is not None), getattr(config, "sink_token_length", None)) or 0)


def _name(region: Any) -> str:
    """The buffers of a region, in the order of their bytes: "0.key+0.value"."""
    parts = [
        f"{part.layer_id}.{part.role}" + (f"x{part.expansion}" if getattr(part, "expansion", 1) != 1 else "")
        for part in getattr(region, "buffers", ())
    ]
    return "+".join(parts) or "page"
