"""What a page is: layer groups, their regions, their size. Whatever changes the bytes of a page is a field here (K4)."""

from typing import NoReturn

import msgspec

from akv.errors import SettingsError
from akv.units import ByteCount


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One buffer of the engine's cache that holds a part of every page of a group, such as the keys of one layer."""

    #: For people and errors ("layers.3.k"). Part of the fingerprint: the order of the regions is the order of the bytes.
    name: str
    #: Bytes of one page in this buffer. The unit is bytes, so the dtype is counted in.
    bytes_per_page: int


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The layers that share one attention kind and one page geometry.

    A page of this group is its regions' bytes for one block, concatenated in the order of `regions`.
    """

    #: The layers' indices in the model, ascending.
    layers: tuple[int, ...]
    #: What the layers read: "full" all earlier tokens, "sliding_window" the last `window_tokens` and the first `sink_tokens`.
    #: "chunked" and "recurrent" can be described and are refused: their state at a position is in no page of ours (W9).
    attention: str = "full"
    #: W: tokens that a sliding window holds, the one being computed included. 0 with full attention.
    window_tokens: int = 0
    #: S: tokens from the sequence's start that a sliding window reads for ever. 0 for none.
    sink_tokens: int = 0
    #: The engine's name of the element type, "bfloat16" or "float8_e4m3fn" say. Two names are two key spaces.
    dtype: str
    #: KV heads of the model in all, not of this rank. 1 for multi-head latent attention, whose latent every rank holds whole.
    kv_heads: int
    #: Elements per head (of the latent, for multi-head latent attention).
    head_size: int
    regions: tuple[Region, ...]
    #: How values are scaled or packed, "" for plain. Scales that are not stored in the page belong in this name.
    quantisation: str = ""
    #: The order of the axes inside a page of one region.
    order: str = "heads,tokens,head_size"

    @property
    def is_window(self) -> bool:
        """Whether the group forgets: its pages behind the window are dead, and the engine reuses them."""
        return self.attention == "sliding_window"

    @property
    def bytes_per_page(self) -> ByteCount:
        """The size of one stored page."""
        return ByteCount(sum(region.bytes_per_page for region in self.regions))


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The geometry of one model's KV cache. Equal layouts, equal bytes: two servers share pages only if theirs are equal."""

    #: T: tokens in a block, the unit of hashing, lookup and storage.
    tokens_per_block: int
    groups: tuple[LayerGroup, ...]
    #: Ranks that one page's heads are split over (tensor parallelism). 1 for an attention-data-parallel owner.
    world: int = 1

    @property
    def largest_page_bytes(self) -> ByteCount:
        """The size of a staging slot: any page of this layout fits in it."""
        return ByteCount(max(group.bytes_per_page for group in self.groups))


def check_layout(layout: Layout) -> None:
    """Refuse a layout that cannot be served, by name.

    Raises SettingsError (fault of the embedding engine): the first field that is wrong, its value and what it must be.
    """
    if not isinstance(layout, Layout):
        raise SettingsError("layout", type(layout).__name__, "it is no akv.Layout", "Describe the engine's KV cache with one.")
    _check_types("", layout)
    if layout.tokens_per_block < 1:
        _refuse(
            "tokens_per_block", layout.tokens_per_block, "a block holds at least one token", "Use the engine's block size."
        )
    if layout.world < 1:
        _refuse("world", layout.world, "there is at least one rank", "Use the tensor-parallel size.")
    if not layout.groups:
        _refuse("groups", (), "a model has at least one layer group", "Describe the engine's KV cache.")
    for index, group in enumerate(layout.groups):
        at = f"groups[{index}]"
        if not group.layers or list(group.layers) != sorted(set(group.layers)) or group.layers[0] < 0:
            _refuse(f"{at}.layers", group.layers, "layers are ascending, distinct and not negative", "List each layer once.")
        if group.kv_heads < 1:
            _refuse(
                f"{at}.kv_heads", group.kv_heads, "a model has at least one KV head", "Count the heads of the whole model."
            )
        if group.head_size < 1:
            _refuse(f"{at}.head_size", group.head_size, "a head has at least one element", "Use the model's head size.")
        _check_attention(at, group)
        if not group.dtype:
            _refuse(f"{at}.dtype", group.dtype, "the element type is part of a page's identity", "Name it, 'bfloat16' say.")
        if not group.regions:
            _refuse(f"{at}.regions", (), "a page has at least one region", "List the buffers that hold the group's pages.")
        for region in group.regions:
            if region.bytes_per_page < 1:
                _refuse(
                    f"{at}.regions.{region.name}.bytes_per_page",
                    region.bytes_per_page,
                    "a region holds at least one byte of a page",
                    "Use bytes, the dtype counted in.",
                )
        fewer, more = sorted((group.kv_heads, layout.world))
        if more % fewer:
            _refuse(
                f"{at}.kv_heads",
                group.kv_heads,
                f"{layout.world} ranks cannot share {group.kv_heads} KV heads evenly, so ranks would hold unequal pages",
                "Use a world that divides the heads, or is a multiple of them.",
            )


def _check_types(at: str, struct: msgspec.Struct) -> None:
    """A struct's constructor checks nothing, and the fingerprint is taken of what stands in it.

    So 4.0 or True in the place of 4 or 1 would give equal layouts different keys, and numpy's integers none at all.
    """
    for field in msgspec.structs.fields(struct):
        where, value = f"{at}{field.name}", getattr(struct, field.name)
        if field.type is int or field.type is str:
            _check_plain(where, value, field.type)
            continue
        kind = field.type.__args__[0]
        if not isinstance(value, tuple | list):
            _refuse(where, type(value).__name__, "it is no tuple", f"Use a tuple of {kind.__name__}.")
        for index, item in enumerate(value):
            # A region is called by its name in errors, where it has one.
            if kind is int:
                _check_plain(f"{where}[{index}]", item, int)
            elif isinstance(item, kind):
                _check_types(f"{where}[{index}].", item)
            else:
                _refuse(f"{where}[{index}]", type(item).__name__, f"it is no akv.{kind.__name__}", "Describe it with one.")


def _check_plain(where: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        _refuse(where, value, f"its type is {type(value).__name__}, not {kind.__name__}", f"Use a plain {kind.__name__}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        _refuse(where, value, "it is outside the range of int64", "Use the size that the engine's cache has.")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        _refuse(where, value, "it is not valid Unicode (a lone surrogate)", "Write it anew.")


def _check_attention(at: str, group: LayerGroup) -> None:
    if group.attention not in ("full", "sliding_window"):
        _refuse(
            f"{at}.attention",
            group.attention,
            "akv stores pages of full attention and of sliding windows; a chunk's or a recurrence's state is in no page (W9)",
            "Serve this model without akv.",
        )
    if group.is_window and group.window_tokens < 1:
        _refuse(f"{at}.window_tokens", group.window_tokens, "a window holds at least one token", "Use the model's window.")
    if group.sink_tokens < 0:
        _refuse(f"{at}.sink_tokens", group.sink_tokens, "sinks are counted from the sequence's start", "Use 0 for none.")
    if not group.is_window and (group.window_tokens or group.sink_tokens):
        _refuse(
            f"{at}.attention",
            group.attention,
            f"full attention has neither a window ({group.window_tokens}) nor sinks ({group.sink_tokens})",
            'Say attention="sliding_window", or leave both out.',
        )


def _refuse(field: str, value: object, why: str, fix: str) -> NoReturn:
    raise SettingsError(f"layout.{field}", value, why, fix)
