"""Indices as an engine's pools want them."""

import torch


def first_indices(count: int) -> torch.Tensor:
    """The indices 0 to `count` - 1, int64, on the host."""
    return torch.arange(count, dtype=torch.int64)
