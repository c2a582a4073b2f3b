"""What the paged cache is told of its layer groups: what it takes, and what it refuses by name (H1, W4)."""

import pytest

from akv.errors import SettingsError
from akv.host import PagedCache, Window
from akv.values.layout import LayerGroup, Region


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("groups", {"groups": (Window(),)}),
        (r"groups\[1\]", {"groups": (Window(), Window(-1))}),
        (r"groups\[1\]", {"groups": (Window(), Window(0, 3))}),
        (r"groups\[0\]", {"groups": (Window(4, -1), Window())}),
        ("retention_tokens", {"retention_tokens": -1}),
        ("chunk_tokens", {"chunk_tokens": 0}),
    ],
)
def test_H1_a_cache_that_cannot_be_is_refused_by_name(field: str, arguments: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=field):
        PagedCache(4, (4, 4), **arguments)  # type: ignore[arg-type]


def test_W4_takes_the_groups_of_a_layout_and_says_what_to_declare() -> None:
    regions = (Region(name="kv", bytes_per_page=64),)
    full = LayerGroup(layers=(0,), dtype="bfloat16", kv_heads=1, head_size=8, regions=regions)
    window = LayerGroup(
        layers=(1,), dtype="bfloat16", kv_heads=1, head_size=8, regions=regions, attention="sliding_window", window_tokens=6
    )
    cache = PagedCache(4, (9, 9), (full, window), retention_tokens=8, chunk_tokens=4)
    assert cache.window_retention_tokens == 8
    sequence = cache.admit(list(range(30)), 30)
    assert sequence is not None
    sequence.prepare(4)
    assert sequence.page_tables() == ((0, 1, 2, 3, 4, 5, 6, 7), (0, *[-1] * 7))


def test_W4_windows_are_kept_for_the_default_rewind_unless_told_otherwise() -> None:
    assert PagedCache(4, (4,), (Window(6),)).window_retention_tokens == 1024
    assert PagedCache(2048, (4,), (Window(6),)).window_retention_tokens == 2048
    assert PagedCache(4, (4,), (Window(6),), retention_tokens=0).window_retention_tokens == 0
