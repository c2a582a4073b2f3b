"""The next token of many sequences at once, in buffers of fixed size: under CUDA graphs, one for each shape."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from akv_testing.engine.config import AttentionGroup
from akv_testing.engine.large.attention import attend_tokens
from akv_testing.engine.large.host_numbers import shared_numbers
from akv_testing.engine.large.model import LargeModel
from akv_testing.engine.large.places import Place, readable
from akv_testing.engine.pages import Pages
from akv_testing.engine.step import Chunk

#: Tokens of the shortest context that shapes are made for; each next one is twice as long.
_SHORTEST_CONTEXT = 1024


class Shape(NamedTuple):
    """What a graph is captured for."""

    sequences: int
    context_tokens: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "Shape":
        """The smallest one that these fit in."""
        longest = max(chunk.start + 1 for chunk in chunks)
        return cls(_power_of_two(len(chunks)), max(_SHORTEST_CONTEXT, _power_of_two(longest)))


class Slice:
    """Fixed buffers for one shape, and what is computed from them."""

    def __init__(self, model: LargeModel, pages: Pages, groups: Sequence[AttentionGroup], shape: Shape, size: int) -> None:
        """`size`: tokens per block."""
        self._model, self._pages, self._groups, self._shape, self._size = model, pages, groups, shape, size
        widths = [1, 1]
        for group in groups:
            widths += [1, _most_blocks(group, shape.context_tokens, size)]
        # Kernels reach the host's memory themselves: a copy of a few bytes would wait behind those of loads.
        self._on_host, self._from_host = shared_numbers(sum(widths) * shape.sequences, model.device)
        self._sampled, self._to_host = shared_numbers(shape.sequences, model.device)
        self._on_device = torch.zeros_like(self._from_host)
        #: Ids, positions, then for each group the first block and the pages from there on; each (sequences, its width).
        self._host_parts = _columns(self._on_host, widths)
        self._parts = _columns(self._on_device, widths)
        self._spare = [pages.spare_page(group) for group in range(len(groups))]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Name what is computed next."""
        ids, positions, *rest = self._host_parts
        ids.zero_()
        positions.zero_()
        for row, chunk in enumerate(chunks):
            ids[row] = chunk.tokens[0]
            positions[row] = chunk.start
        for number, group in enumerate(self._groups):
            firsts, tables = rest[2 * number : 2 * number + 2]
            # Rows that nobody fills compute position 0 of the spare page.
            firsts.zero_()
            tables.fill_(self._spare[number])
            for row, chunk in enumerate(chunks):
                first, pages = readable(group, chunk.tables[number], chunk.start, chunk.start + 1, self._size)
                firsts[row] = first
                tables[row, : len(pages)] = torch.tensor(pages)

    def run(self, stream: "torch.cuda.Stream | None", memory: "torch.cuda._POOL_HANDLE | None") -> tuple[list[int], Tensor]:
        """Compute what was filled in, and wait for it: the sampled tokens, and the logits, (sequences, vocabulary), which hold
        until the next call.

        On CUDA the first time captures. `memory`: the pool that all graphs take theirs from, since they never run at a time.
        """
        if stream is None:
            self._compute()
        elif self._graph is not None:
            self._graph.replay()
        else:
            # Kernels choose and allocate what they need the first time: not while a graph is captured.
            self._compute()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Others of this process query events and pin memory meanwhile, which only their own captures mind.
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                self._compute()
            self._graph = graph
            graph.replay()
        if stream is not None:
            stream.synchronize()
        return self._sampled.tolist(), self._logits

    def _compute(self) -> None:
        torch.add(self._from_host, 0, out=self._on_device)
        model, sequences = self._model, self._shape.sequences
        ids, positions = (part.flatten() for part in self._parts[:2])
        places = [self._place(number, positions) for number in range(len(self._groups))]
        angles = model.angles(positions)
        hidden = model.embed(ids)
        for number, layer in enumerate(model.layers):
            keys, values = self._pages.layer(number)
            place, mask = places[self._pages.group_of(number)]
            q, k, v = layer.query_key_value(hidden, angles)
            place.write(keys, k)
            place.write(values, v)
            attended = attend_tokens(q, place.read(keys, sequences), place.read(values, sequences), mask)
            hidden = layer.after_attention(hidden, attended)
        self._logits = model.logits(hidden)
        torch.add(self._logits.argmax(dim=-1), 0, out=self._to_host)

    def _place(self, number: int, positions: Tensor) -> tuple[Place, Tensor]:
        group, size = self._groups[number], self._size
        firsts, tables = self._parts[2 + 2 * number], self._parts[3 + 2 * number]
        heads = torch.arange(group.kv_heads, device=positions.device)
        row = positions.unsqueeze(1)
        page = tables.gather(1, row // size - firsts)
        write = (page * group.kv_heads + heads) * size + row % size
        read = (tables * group.kv_heads).unsqueeze(1) + heads.unsqueeze(1)
        columns = firsts * size + torch.arange(tables.shape[1] * size, device=positions.device)
        hidden = columns > row
        if group.window_tokens:
            hidden |= columns <= row - group.window_tokens
        mask = torch.zeros(columns.shape, device=positions.device).masked_fill_(hidden, float("-inf"))
        return Place(write.flatten(), read.flatten()), mask.unsqueeze(1)


def _columns(whole: Tensor, widths: Sequence[int]) -> list[Tensor]:
    rows = len(whole) // sum(widths)
    return [part.view(rows, -1) for part in torch.split(whole, [rows * width for width in widths])]


def _most_blocks(group: AttentionGroup, context_tokens: int, size: int) -> int:
    """Blocks that the last token of a context reads at most: those of a window need not begin where one does."""
    whole = -(-context_tokens // size)
    return min(whole, -(-(group.window_tokens - 1) // size) + 1) if group.window_tokens else whole


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
