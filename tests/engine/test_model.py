"""The reference engine's model: attention over pages is attention, wherever the pages lie and however a prompt is cut."""

import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from akv.device.caches import take_caches
from akv.errors import SettingsError
from akv.values.layout import check_layout
from akv_testing.engine import (
    DEMO,
    TINY,
    TINY_SLIDING,
    AttentionGroup,
    EngineConfig,
    Model,
    ModelConfig,
    Pages,
    layout_of,
)
from akv_testing.engine.config import check_config

TOKENS = [7 * position % 251 for position in range(90)]
#: The fixture `dense_logits`, which conftest.py describes.
Dense = Callable[[Model, list[int]], Tensor]


def paged_logits(model: Model, config: EngineConfig, cuts: list[int], table: list[int]) -> list[Tensor]:
    """The logits at the end of each chunk of `TOKENS`, cut at `cuts`."""
    pages = Pages(config)
    ends = [*cuts, len(TOKENS)]
    tables = [table] * config.layer_groups
    return [model.forward(TOKENS[start:end], start, tables, pages) for start, end in zip([0, *cuts], ends, strict=True)]


@pytest.mark.parametrize("layer_groups", [1, 2])
@pytest.mark.parametrize("cuts", [[], [1], [32, 64], [5, 6, 7, 50, 89]], ids=str)
def test_chunks_on_scattered_pages_equal_a_dense_forward(
    model: Model, dense_logits: Dense, cuts: list[int], layer_groups: int
) -> None:
    config = EngineConfig(model=TINY, tokens_per_block=8, pages=64, layer_groups=layer_groups)
    table = [(17 * block + 3) % 64 for block in range(12)]
    expected = dense_logits(model, TOKENS)
    for end, logits in zip([*cuts, len(TOKENS)], paged_logits(model, config, cuts, table), strict=True):
        torch.testing.assert_close(logits, expected[end - 1], atol=2e-5, rtol=1e-4)


def test_Q1_equal_chunks_give_equal_bits_wherever_the_pages_lie(model: Model) -> None:
    config = EngineConfig(model=TINY, tokens_per_block=8, pages=64)
    one = paged_logits(model, config, [32, 64], list(range(12)))
    other = paged_logits(model, config, [32, 64], [(17 * block + 3) % 64 for block in range(12)])
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_Q1_another_process_computes_the_same_bits(model: Model) -> None:
    program = (
        "import sys, torch; from akv_testing.engine import *; torch.set_num_threads(1)\n"
        "config = EngineConfig(model=TINY, tokens_per_block=8, pages=64); pages = Pages(config); model = Model(TINY)\n"
        f"tokens = {TOKENS}; table = list(range(12))\n"
        "model.forward(tokens[:32], 0, [table], pages); logits = model.forward(tokens[32:], 32, [table], pages)\n"
        "print(logits.numpy().tobytes().hex(), pages.digests([table], 11)[0][10].hex())"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    config = EngineConfig(model=TINY, tokens_per_block=8, pages=64)
    pages, table = Pages(config), list(range(12))
    torch.set_num_threads(1)
    model.forward(TOKENS[:32], 0, [table], pages)
    logits = model.forward(TOKENS[32:], 32, [table], pages)
    assert printed == [logits.numpy().tobytes().hex(), pages.digests([table], 11)[0][10].hex()]


def test_digests_tell_pages_apart_by_one_bit() -> None:
    config = EngineConfig(model=TINY, tokens_per_block=8, pages=4, layer_groups=2)
    pages = Pages(config)
    before = pages.digests([[0, 1], [2, 3]], 2)
    pages.caches[1][0][3, 1, 7, 7] = 1e-40
    after = pages.digests([[0, 1], [2, 3]], 2)
    assert before[0] == after[0]
    assert before[1][0] == after[1][0]
    assert before[1][1] != after[1][1]


@pytest.mark.parametrize("contiguous", [False, True])
def test_K4_groups_have_pages_of_their_own_number_dtype_and_size(contiguous: bool) -> None:
    config = EngineConfig(model=TINY_SLIDING, tokens_per_block=8, pages=(6, 4, 5), contiguous_pages=contiguous)
    layout, pages = layout_of(config), Pages(config)
    assert [group.layers for group in layout.groups] == [(0, 2), (1,), (3,)]
    assert [(group.attention, group.window_tokens, group.sink_tokens) for group in layout.groups] == [
        ("full", 0, 0),
        ("sliding_window", 20, 3),
        ("sliding_window", 50, 0),
    ]
    # Keys and values; layers, elements of a page, bytes of each.
    assert [group.bytes_per_page for group in layout.groups] == [2 * 2 * 128 * 4, 2 * 1 * 128 * 2, 2 * 1 * 256 * 4]
    check_layout(layout)
    caches, _ = take_caches(layout, pages.caches)  # what akv makes of them
    assert [group.page_count for group in caches] == [6, 4, 5]
    for regions in pages.caches:
        assert {cache.is_contiguous() for cache in regions} == {not contiguous}
    assert sum(group.bytes_per_page for group in layout.groups) == 8 * TINY_SLIDING.kv_bytes_per_token


@pytest.mark.parametrize("layer_groups", [1, 2])
def test_K4_the_layout_describes_the_caches(layer_groups: int) -> None:
    config = EngineConfig(model=TINY, tokens_per_block=8, pages=4, layer_groups=layer_groups)
    layout, pages = layout_of(config), Pages(config)
    assert [group.layers for group in layout.groups] == ([(0, 1)] if layer_groups == 1 else [(0,), (1,)])
    for group, caches in zip(layout.groups, pages.caches, strict=True):
        assert len(group.regions) == len(caches)
        for region, cache in zip(group.regions, caches, strict=True):
            assert cache[0].is_contiguous()
            assert cache[0].nbytes == region.bytes_per_page
    assert sum(group.bytes_per_page for group in layout.groups) == 8 * TINY.kv_bytes_per_token


def test_K4_other_weights_have_another_model_key() -> None:
    other = msgspec.structs.replace(TINY, seed=1)
    windows = msgspec.structs.replace(TINY, groups=(AttentionGroup(layers=(0, 1), window_tokens=9),))
    assert len({TINY.key, DEMO.key, other.key, windows.key}) == 4
    assert not torch.equal(Model(TINY).unembedding, Model(other).unembedding)


def with_groups(*groups: AttentionGroup) -> ModelConfig:
    return msgspec.structs.replace(TINY, groups=groups)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("layer_groups", {"layer_groups": 3}),
        ("tokens_per_block", {"tokens_per_block": 0}),
        ("pages", {"pages": 0}),
        ("pages", {"pages": (4, 4)}),
        ("window_retention_tokens", {"window_retention_tokens": -1}),
        ("layer_groups", {"model": TINY_SLIDING, "layer_groups": 2}),
        ("model.groups", {"model": with_groups(AttentionGroup(layers=(0,)))}),
        ("model.groups", {"model": with_groups(AttentionGroup(layers=(0, 1)), AttentionGroup(layers=(1,)))}),
        ("model.groups", {"model": with_groups(AttentionGroup(layers=(0, 1), sink_tokens=1))}),
        ("model.groups", {"model": with_groups(AttentionGroup(layers=(0, 1), window_tokens=-1))}),
        ("model.heads", {"model": with_groups(AttentionGroup(layers=(0, 1), kv_heads=3))}),
        ("chunk_tokens", {"chunk_tokens": 0}),
        ("max_running", {"max_running": 0}),
        ("max_tokens_per_pass", {"max_tokens_per_pass": 256}),
        ("model.heads", {"model": ModelConfig(layers=1, hidden=8, heads=3, kv_heads=2, head_size=2, intermediate=8)}),
        ("model.head_size", {"model": ModelConfig(layers=1, hidden=8, heads=2, kv_heads=2, head_size=3, intermediate=8)}),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_by_name(field: str, changed: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as refused:
        check_config(EngineConfig(**({"model": TINY} | changed)))  # type: ignore[arg-type]
    assert refused.value.field == field
