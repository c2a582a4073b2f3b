"""What the device refuses at the door, and the shapes of cache that it takes as they are."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch

from akv.device import open_torch_device
from akv.device.caches import take_caches
from akv.errors import DependencyError, SettingsError
from akv.values.layout import Layout

LayoutFor = Callable[[Sequence[Sequence[int]]], Layout]


def cache(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


REFUSED = {
    "groups": ([[24]], [[cache(4, 24)], [cache(4, 24)]], "caches", "1 layer groups"),
    "regions": ([[24, 24]], [[cache(4, 24)]], "caches[0]", "2 regions"),
    "no tensor": ([[24]], [["k"]], "caches[0][0]", "torch tensor"),
    "page not contiguous": ([[24, 24]], [[cache(4, 24), cache(4, 6, 8)[:, :, ::2]]], "caches[0][1]", "not contiguous"),
    "page transposed": ([[24]], [[cache(6, 4, 4).transpose(0, 1)]], "caches[0][0]", "not contiguous"),
    "bytes per page": ([[24], [24]], [[cache(4, 24)], [cache(4, 25)]], "caches[1][0]", "has 25 bytes"),
    "dtype counted in": ([[24]], [[cache(4, 24).to(torch.float32)]], "caches[0][0]", "has 96 bytes"),
    "page counts": ([[24, 24]], [[cache(4, 24), cache(5, 24)]], "caches[0][1]", "has 4 pages"),
    "no page": ([[24]], [[cache(0, 24)]], "caches[0][0]", "no page"),
    "no axis": ([[1]], [[torch.tensor(0, dtype=torch.uint8)]], "caches[0][0]", "no page"),
    "expanded": ([[24]], [[cache(1, 24).expand(4, 24)]], "caches[0][0]", "overlap"),
    "unfolded": ([[24]], [[cache(100).unfold(0, 24, 8)]], "caches[0][0]", "overlap"),
    "same memory": ([[24, 24]], [[cache(4, 24)] * 2], "caches[0][1]", "same byte as caches[0][0]"),
    "two devices": ([[24, 24]], [[cache(4, 24), cache(4, 24).to("meta")]], "caches[0][1]", "caches[0][0] is on cpu"),
    "strange device": ([[24]], [[cache(4, 24).to("meta")]], "caches[0][0]", "CPU or on CUDA"),
    "sparse": ([[24]], [[cache(4, 24).to_sparse()]], "caches[0][0]", "dense"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_cache_that_does_not_fit_the_layout_is_refused_by_name(case: str, layout_for: LayoutFor) -> None:
    sizes, caches, field, why = REFUSED[case]
    with pytest.raises(SettingsError, match=re.escape(why)) as refused:
        open_torch_device(layout_for(sizes), caches)  # type: ignore[arg-type]  # wrong on purpose
    assert refused.value.field == field
    assert refused.value.fix


def test_the_refusal_shows_shape_dtype_and_strides(layout_for: LayoutFor) -> None:
    with pytest.raises(SettingsError) as refused:
        open_torch_device(layout_for([[24]]), [[torch.zeros(4, 7, dtype=torch.bfloat16)]])
    assert refused.value.value == "shape (4, 7), torch.bfloat16, strides (7, 1), cpu"


def test_a_stream_is_refused_where_there_are_none(layout_for: LayoutFor) -> None:
    with pytest.raises(SettingsError, match="no streams"):
        open_torch_device(layout_for([[24]]), [[cache(4, 24)]], stream=object())


@pytest.mark.parametrize(
    ("size", "word"),
    [(48, 16), (40, 8), (36, 4), (34, 2), (33, 1)],
    ids=["16 bytes", "8 bytes", "4 bytes", "2 bytes", "1 byte"],
)
def test_the_widest_word_that_the_sizes_allow_is_used(size: int, word: int, layout_for: LayoutFor) -> None:
    groups, _ = take_caches(layout_for([[size, size]]), [[cache(4, size), cache(4, size)]])
    assert [region.word for region in groups[0].regions] == [word, word]


def test_an_odd_pitch_or_an_odd_begin_narrows_the_word(layout_for: LayoutFor) -> None:
    caches = [[cache(4, 52)[:, :48]], [cache(4, 64)[:, 8:56]]]
    groups, _ = take_caches(layout_for([[48], [48]]), caches)
    assert [group.regions[0].word for group in groups] == [4, 8]


def test_the_stride_of_a_single_page_means_nothing(layout_for: LayoutFor) -> None:
    groups, _ = take_caches(layout_for([[48]]), [[torch.zeros(48, dtype=torch.uint8).as_strided((1, 48), (7, 1))]])
    assert groups[0].regions[0].word == 16


def test_groups_may_share_one_pool_of_pages(layout_for: LayoutFor) -> None:
    pool = cache(4, 24)
    assert open_torch_device(layout_for([[24], [24]]), [[pool], [pool]]).page_counts == (4, 4)


def test_one_tensor_with_the_regions_on_its_first_axis_is_a_group(layout_for: LayoutFor) -> None:
    assert open_torch_device(layout_for([[24, 24]]), [cache(2, 5, 24)]).page_counts == (5,)  # type: ignore[list-item]


def test_importing_the_device_loads_no_torch() -> None:
    code = "import sys, akv.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, layout_for: LayoutFor) -> None:
    for name in ("torch_copier", "caches", "host_memory"):
        monkeypatch.delitem(sys.modules, f"akv.device.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DependencyError, match=r"akv\[torch\]"):
        open_torch_device(layout_for([[24]]), [[cache(4, 24)]])
