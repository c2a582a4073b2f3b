"""Where KV lies in the pages: rows of the caches that a chunk of a prompt, or the tokens that are decoded, write and read.

A cache of keys or values is (pages, KV heads, tokens per block, head size). Seen as rows of one head's block it is read, seen
as rows of one head's token it is written.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from akv.plan.window import kept_blocks
from akv_testing.engine.config import AttentionGroup

#: What moves as one element when blocks are gathered: fewer elements, less arithmetic.
_WORDS = torch.complex128


class Place:
    """One layer group's part: which rows are written, which are read. Tensors on the device of the caches."""

    def __init__(self, write_rows: Tensor, read_rows: Tensor) -> None:
        #: (tokens, KV heads) flattened: rows of one head's token.
        self._write_rows = write_rows
        #: (sequences, KV heads, blocks) flattened: rows of one head's block.
        self._read_rows = read_rows

    def write(self, cache: Tensor, new: Tensor) -> None:
        """Store (tokens, KV heads, head size)."""
        size = new.shape[-1]
        cache.view(-1, size).index_copy_(0, self._write_rows, new.reshape(-1, size))

    def read(self, cache: Tensor, sequences: int) -> Tensor:
        """(sequences * KV heads, tokens, head size), in whole blocks."""
        _, heads, block, size = cache.shape
        rows = cache.view(-1, block * size).view(_WORDS)
        return rows.index_select(0, self._read_rows).view(cache.dtype).view(sequences * heads, -1, size)


class PromptPlace(Place):
    """Where positions [start, end) of one sequence lie in a layer group."""

    def __init__(
        self, group: AttentionGroup, table: Sequence[int], start: int, end: int, size: int, device: torch.device
    ) -> None:
        """`table`: the page of block i at i; `size`: tokens per block."""
        first, pages = readable(group, table, start, end, size)
        heads = torch.arange(group.kv_heads, device=device)
        there = upload(pages, device)
        positions = torch.arange(start, end, device=device)
        write = ((there[positions // size - first] * group.kv_heads).unsqueeze(1) + heads) * size
        super().__init__(
            (write + (positions % size).unsqueeze(1)).flatten(), (there * group.kv_heads + heads.unsqueeze(1)).flatten()
        )
        #: Tokens that are read; behind them stands what is in the last block beyond `end`.
        self.length = end - first * size


def readable(group: AttentionGroup, table: Sequence[int], start: int, end: int, size: int) -> tuple[int, list[int]]:
    """The first block that positions [start, end) read, and the pages from there to the last one.

    Raises AssertionError for a page that is gone: a fault of the cache.
    """
    kept = chain.from_iterable(kept_blocks(start, group.window_tokens, group.sink_tokens, size))
    first = min(kept, default=start // size)
    pages = list(table[first : -(-end // size)])
    if min(pages) < 0:
        raise AssertionError(f"positions [{start}, {end}) read blocks from {first} on, of which some have no page")
    return first, pages


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64, in the order of the current stream."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    # Pinned first: a copy from pageable memory makes the host wait for what is on the stream.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
