"""Where one chunk's KV goes in one layer group, what the chunk reads, and what of that each of its tokens sees."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from akv.plan.window import kept_blocks
from akv_testing.engine.config import AttentionGroup


class Place:
    """Made once per layer group and chunk.

    A window reads the blocks that are kept at the chunk's first position (W1), and those of the chunk. Which these are, and so
    the shapes and the bits of what is computed, follows from positions alone: more pages may be there, because of retention or
    of where the request resumed, and pages that are gone are not touched.
    """

    def __init__(
        self, group: AttentionGroup, table: Sequence[int], start: int, end: int, tokens_per_block: int, device: torch.device
    ) -> None:
        """For positions [start, end) of a sequence with this page table; -1 stands for a block that has no page any more."""
        size = tokens_per_block
        #: The first position.
        self.start = start
        kept = kept_blocks(start, group.window_tokens, group.sink_tokens, size)
        read = [*chain.from_iterable(kept), *range(-(-start // size), -(-end // size))]
        pages = [table[block] for block in read]
        if min(pages) < 0:
            gone = [block for block, page in zip(read, pages, strict=True) if page < 0]
            raise AssertionError(f"positions [{start}, {end}) read blocks {gone}, which have no page")
        self._table = torch.tensor(pages, device=device)
        positions = torch.arange(start, end, device=device)
        self._pages = torch.tensor(table, device=device)[positions // size]
        self._slots = positions % size
        #: The position of each token that is read.
        columns = (torch.tensor(read, device=device).unsqueeze(1) * size + torch.arange(size, device=device)).flatten()
        self._columns = columns[: len(columns) - -end % size]
        #: What to add to the scores of the chunk's tokens (rows) against those that are read: minus infinity where the key is
        #: in the future, or behind the window and no sink. None if every token sees all.
        self.mask = _mask(group, positions, self._columns)

    def write(self, cache: Tensor, chunk: Tensor) -> None:
        """Store (tokens, heads, head_size) of the chunk."""
        cache[self._pages, :, self._slots] = chunk.to(cache.dtype)

    def read(self, cache: Tensor) -> Tensor:
        """What the chunk reads, itself included, (heads, tokens, head_size), float32."""
        pages = cache[self._table].transpose(0, 1)
        return pages.reshape(pages.shape[0], -1, pages.shape[3])[:, : len(self._columns)].float()


def _mask(group: AttentionGroup, rows: Tensor, columns: Tensor) -> Tensor | None:
    if len(rows) == 1 and not group.window_tokens:
        return None  # the last position sees everything
    distance = rows.unsqueeze(1) - columns
    hidden = distance < 0
    if group.window_tokens:
        hidden |= (distance >= group.window_tokens) & (columns >= group.sink_tokens)
    return torch.zeros(hidden.shape, device=rows.device).masked_fill_(hidden, float("-inf"))
