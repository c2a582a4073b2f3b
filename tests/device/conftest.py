"""What the tests of the torch device share: the devices of this machine, and caches with known bytes."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from akv.values.layout import LayerGroup, Layout, Region

#: Every device that this machine has: nothing is skipped, what is not there is not collected.
DEVICES = [
    pytest.param("cpu"),
    *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else []),
]

#: What needs CUDA throughout.
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_cuda_*.py"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.zeros(1, device=request.param).device  # with its index, as caches have it


@pytest.fixture
def layout_for() -> Callable[[Sequence[Sequence[int]]], Layout]:
    """A layout from the bytes per page of each region of each group."""

    def build(groups: Sequence[Sequence[int]]) -> Layout:
        return Layout(
            tokens_per_block=16,
            groups=tuple(
                LayerGroup(
                    layers=(index,),
                    dtype="uint8",
                    kv_heads=1,
                    head_size=1,
                    regions=tuple(Region(name=f"{index}.{part}", bytes_per_page=size) for part, size in enumerate(sizes)),
                )
                for index, sizes in enumerate(groups)
            ),
        )

    return build


@pytest.fixture
def noise() -> Callable[[int], np.ndarray]:
    """Reproducible random bytes, in which every kind of NaN occurs: a copy that computes would change some of them."""
    generator = np.random.default_rng(7)

    def build(nbytes: int) -> np.ndarray:
        return generator.integers(0, 256, nbytes, dtype=np.uint8)

    return build
