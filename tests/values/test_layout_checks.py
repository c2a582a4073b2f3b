"""Which layouts are refused, and by which name."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import SettingsError
from akv.values.layout import LayerGroup, Layout, Region, check_layout

GROUP = LayerGroup(
    layers=(0, 2, 5),
    dtype="bfloat16",
    kv_heads=4,
    head_size=64,
    regions=(Region(name="k", bytes_per_page=100), Region(name="v", bytes_per_page=28)),
)
LAYOUT = Layout(tokens_per_block=32, groups=(GROUP,))


def with_group(**changes: Any) -> Layout:
    """The layout whose second group is wrong, so that its index shows in the field."""
    return msgspec.structs.replace(LAYOUT, groups=(GROUP, msgspec.structs.replace(GROUP, **changes)))


def test_K4_a_page_is_its_regions_and_a_slot_holds_the_largest() -> None:
    layout = with_group(regions=(Region(name="k", bytes_per_page=500),))
    assert [group.bytes_per_page for group in layout.groups] == [128, 500]
    assert layout.largest_page_bytes == 500
    assert LAYOUT.largest_page_bytes == 128


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        with_group(kv_heads=1),
        with_group(attention="sliding_window", window_tokens=1),
        with_group(attention="sliding_window", window_tokens=2040, sink_tokens=40),
        msgspec.structs.replace(LAYOUT, tokens_per_block=1),
        msgspec.structs.replace(LAYOUT, world=2),
        msgspec.structs.replace(LAYOUT, world=4),
        msgspec.structs.replace(LAYOUT, world=12),
    ],
)
def test_K4_a_layout_that_can_be_served_is_taken(layout: Layout) -> None:
    check_layout(layout)


class Name(str):
    """Text that msgspec writes as none."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (msgspec.structs.replace(LAYOUT, tokens_per_block=32.0), "layout.tokens_per_block"),
        (msgspec.structs.replace(LAYOUT, world=True), "layout.world"),
        (msgspec.structs.replace(LAYOUT, groups=GROUP), "layout.groups"),
        (msgspec.structs.replace(LAYOUT, groups=(GROUP, "g")), "layout.groups[1]"),
        (with_group(layers=range(3)), "layout.groups[1].layers"),
        (with_group(layers=(0, np.int64(1))), "layout.groups[1].layers[1]"),
        (with_group(kv_heads=np.int64(4)), "layout.groups[1].kv_heads"),
        (with_group(kv_heads=2**63), "layout.groups[1].kv_heads"),
        (with_group(dtype=np.dtype("float32")), "layout.groups[1].dtype"),
        (with_group(dtype=Name("bfloat16")), "layout.groups[1].dtype"),
        (with_group(dtype="\ud800"), "layout.groups[1].dtype"),
        (with_group(quantisation=None), "layout.groups[1].quantisation"),
        (with_group(window_tokens=False), "layout.groups[1].window_tokens"),
        (with_group(regions=(Region(name=0, bytes_per_page=1),)), "layout.groups[1].regions[0].name"),  # type: ignore[arg-type]
        (
            with_group(regions=(Region(name="k", bytes_per_page=1.0),)),  # type: ignore[arg-type]
            "layout.groups[1].regions[0].bytes_per_page",
        ),
    ],
)
def test_K4_what_would_give_an_equal_layout_another_fingerprint_or_none_is_refused(layout: Layout, field: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_layout(layout)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("layout", "field", "value"),
    [
        (msgspec.structs.replace(LAYOUT, tokens_per_block=0), "layout.tokens_per_block", 0),
        (msgspec.structs.replace(LAYOUT, world=0), "layout.world", 0),
        (msgspec.structs.replace(LAYOUT, groups=()), "layout.groups", ()),
        (with_group(layers=()), "layout.groups[1].layers", ()),
        (with_group(layers=(1, 1)), "layout.groups[1].layers", (1, 1)),
        (with_group(layers=(2, 1)), "layout.groups[1].layers", (2, 1)),
        (with_group(layers=(-1, 0)), "layout.groups[1].layers", (-1, 0)),
        (with_group(kv_heads=0), "layout.groups[1].kv_heads", 0),
        (with_group(head_size=0), "layout.groups[1].head_size", 0),
        (with_group(dtype=""), "layout.groups[1].dtype", ""),
        (with_group(regions=()), "layout.groups[1].regions", ()),
        (with_group(regions=(Region(name="k", bytes_per_page=0),)), "layout.groups[1].regions.k.bytes_per_page", 0),
        (msgspec.structs.replace(LAYOUT, world=3), "layout.groups[0].kv_heads", 4),
        (msgspec.structs.replace(LAYOUT, world=6), "layout.groups[0].kv_heads", 4),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_K4_a_layout_that_cannot_be_served_is_refused_by_field_value_and_fix(layout: Layout, field: str, value: Any) -> None:
    with pytest.raises(SettingsError) as raised:
        check_layout(layout)
    assert (raised.value.field, raised.value.value) == (field, value)
    assert raised.value.fix
    assert raised.value.fix in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"attention": "chunked"}, "attention", "chunked"),
        ({"attention": "recurrent"}, "attention", "recurrent"),
        # The kind decides alone: a window does not make a chunk one.
        ({"attention": "chunked", "window_tokens": 64}, "attention", "chunked"),
        ({"attention": "sliding-window", "window_tokens": 64}, "attention", "sliding-window"),
        ({"attention": ""}, "attention", ""),
        ({"attention": "sliding_window"}, "window_tokens", 0),
        ({"attention": "sliding_window", "window_tokens": -1}, "window_tokens", -1),
        ({"attention": "sliding_window", "window_tokens": 64, "sink_tokens": -1}, "sink_tokens", -1),
        # A window or sinks without a kind that has them: the kind was forgotten, and full attention would be stored.
        ({"window_tokens": 64}, "attention", "full"),
        ({"sink_tokens": 4}, "attention", "full"),
        ({"sink_tokens": -4}, "sink_tokens", -4),
    ],
    ids=str,
)
def test_W9_a_kind_of_attention_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], field: str, value: Any
) -> None:
    with pytest.raises(SettingsError) as raised:
        check_layout(with_group(**changes))
    assert (raised.value.field, raised.value.value) == (f"layout.groups[1].{field}", value)
    assert raised.value.fix in str(raised.value)


@pytest.mark.parametrize("layout", [None, {"tokens_per_block": 32}, Layout])
def test_K4_a_layout_is_a_struct(layout: Any) -> None:
    with pytest.raises(SettingsError) as raised:
        check_layout(layout)
    assert (raised.value.field, raised.value.value) == ("layout", type(layout).__name__)


def test_W1_only_a_sliding_window_forgets() -> None:
    assert not GROUP.is_window
    assert msgspec.structs.replace(GROUP, attention="sliding_window", window_tokens=1).is_window


@given(st.integers(1, 16), st.integers(1, 16))
def test_K3_a_layout_is_taken_exactly_if_every_rank_holds_as_many_heads(kv_heads: int, world: int) -> None:
    query_heads = kv_heads * world
    held = [
        sorted(query * kv_heads // query_heads for query in range(query_heads) if query * world // query_heads == rank)
        for rank in range(world)
    ]
    whole = all(len(set(heads)) == max(1, kv_heads // world) for heads in held)
    layout = Layout(tokens_per_block=1, groups=(msgspec.structs.replace(GROUP, kv_heads=kv_heads),), world=world)
    if whole:
        check_layout(layout)
    else:
        with pytest.raises(SettingsError, match="evenly"):
            check_layout(layout)
