"""A `FakeServer` whose model forgets: prompts in chunks, window pages released and overwritten right after each pass.

server = WindowServer(windows=((10, 3),), retention_tokens=0)        # one full-attention group, one of W = 10, S = 3
async with server.open() as kv:
    await server.serve(kv, "a", tokens, chunk=6)                      # lookup, load, chunked prefill, finished
    assert server.ends(tokens) == [...]                               # where the stored pages let a request resume
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from akv.connector import Connector
from akv.plan.window import kept_blocks, load_blocks, stale_blocks
from akv.request import Request
from akv.units import NO_PAGE
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import Layout
from akv.values.offers import Offer
from akv.values.requests import Scheduled
from akv_testing.ports import tiny_layout
from akv_testing.server import FakeServer, PageTable


def window_layout(windows: Sequence[tuple[int, int]], *, full: int = 1, tokens_per_block: int = 4) -> Layout:
    """`tiny_layout()` with `full` full-attention groups, then one group of (W, S) tokens for each of `windows`."""
    layout = tiny_layout(groups=full + len(windows), tokens_per_block=tokens_per_block)
    groups = list(layout.groups)
    for number, (window, sinks) in enumerate(windows, full):
        groups[number] = msgspec.structs.replace(
            groups[number], attention="sliding_window", window_tokens=window, sink_tokens=sinks
        )
    return msgspec.structs.replace(layout, groups=tuple(groups))


class WindowServer(FakeServer):
    """A server process of a model with sliding windows. `retention_tokens`: what it keeps behind the window, and declares."""

    def __init__(
        self,
        *,
        windows: Sequence[tuple[int, int]] = ((10, 0),),
        full: int = 1,
        tokens_per_block: int = 4,
        retention_tokens: int = 0,
        **arguments: Any,
    ) -> None:
        self.retention_tokens = retention_tokens
        super().__init__(
            layout=window_layout(windows, full=full, tokens_per_block=tokens_per_block),
            **{"capabilities": EngineCapabilities(window_retention_tokens=retention_tokens), "rewind_tokens": 0, **arguments},
        )

    # -- one request

    async def serve(self, kv: Connector, request_id: str, tokens: Sequence[int], *, chunk: int = 8) -> Offer:
        """A request's whole way, with the whole offer taken up; its pages are given back. Returns the offer."""
        request, offer, table = await self.resume(kv, request_id, tokens)
        await self.prefill(kv, request, tokens, table, start=offer.tokens, chunk=chunk)
        await request.finished()
        self.free(table)
        return offer

    async def resume(self, kv: Connector, request_id: str, tokens: Sequence[int]) -> tuple[Request, Offer, PageTable]:
        """Look a prompt up and load the whole offer into new pages. Raises AssertionError if a loaded page is wrong."""
        request = kv.open_request(request_id, tokens)
        offer = await request.lookup()
        end = offer.tokens // self.tokens_per_block
        table: PageTable = [[] for _ in self.layout.groups]
        self._grow(table, [self.loads(group, end) for group in range(len(table))])
        await request.reserve(offer, offer.tokens, table).wait()
        for group in range(len(table)):
            wrong = [
                block
                for block in self.loads(group, end)
                if self._page(table, group, block) != self._right(tokens, group, block)
            ]
            if wrong:
                raise AssertionError(f"loaded pages of group {group} are wrong: blocks {wrong}")
        return request, offer, table

    async def prefill(
        self, kv: Connector, request: Request, tokens: Sequence[int], table: PageTable, *, start: int = 0, chunk: int = 8
    ) -> None:
        """Compute the prompt behind `start` tokens, `chunk` at a time."""
        for before in range(start, len(tokens), chunk):
            await self.run_pass(kv, request, tokens, table, before, min(len(tokens), before + chunk))

    async def run_pass(
        self, kv: Connector, request: Request, tokens: Sequence[int], table: PageTable, before: int, end: int
    ) -> None:
        """One pass over tokens [before, end), and the release of what its window has left behind."""
        self.prepare(table, before, end)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=before, tokens=end - before, pages=table)])
        self.forward(tokens, table, before, end)
        await kv.after_forward(plan)
        self.commit(table, end)

    def prepare(self, table: PageTable, before: int, end: int) -> None:
        """Pages for what a pass over [before, end) writes."""
        blocks = range(before // self.tokens_per_block, -(-end // self.tokens_per_block))
        self._grow(table, [blocks] * len(table))

    def forward(self, tokens: Sequence[int], table: PageTable, before: int, end: int) -> None:
        """The kernel of a pass: reads what its first token reads, writes the chunk's blocks, the last perhaps in part."""
        size = self.tokens_per_block
        written = range(before // size, -(-end // size))
        # Of what lies behind the chain's lookahead nobody says what it holds.
        whole = min(end // size, len(self.hashes(tokens)))
        reads, writes = [], []
        for group in range(len(table)):
            kept = (block for blocks in kept_blocks(before, *self._shape(group)) for block in blocks)
            reads += [(group, table[group][block]) for block in kept if block < written.start]
            for block in written:
                content = self._right(tokens, group, block) if block < whole else 0x55
                writes.append((group, table[group][block], content))
        self.device.kernel(reads=reads, writes=writes)

    def commit(self, table: PageTable, computed: int) -> None:
        """The pass is over: pages that the window has left behind, less the retention, are overwritten and reused at once."""
        gone: PageTable = []
        for group, pages in enumerate(table):
            stale = stale_blocks(max(0, computed - self.retention_tokens), *self._shape(group))
            gone.append([pages[block] for block in stale])
            pages[stale.start : stale.stop] = [NO_PAGE] * len(stale)
        self.free(gone)

    # -- what the store holds

    def ends(self, tokens: Sequence[int]) -> list[int]:
        """Every block q at which a request could resume with what the store holds, token by token and without arithmetic.

        A query at position i >= qT reads, below qT: of full attention everything; of a window the last W tokens up to i, its
        own included, and the sinks.
        """
        size, there = self.tokens_per_block, set(self.store.keys())
        keys = self.keys_of(tokens)
        ends = []
        for end in range(1, min((len(tokens) - 1) // size, len(keys[0])) + 1):
            needed = set()
            for group, shape in enumerate(self.layout.groups):
                for token in range(end * size):
                    in_window = token > end * size - shape.window_tokens or token < shape.sink_tokens
                    if not shape.is_window or in_window:
                        needed.add(keys[group][token // size])
            if needed <= there:
                ends.append(end)
        return ends

    def loads(self, group: int, end: int) -> list[int]:
        """The blocks of a group that a request loads to resume at `end` blocks."""
        return [block for blocks in load_blocks(0, end, *self._shape(group)) for block in blocks]

    def _shape(self, group: int) -> tuple[int, int, int]:
        shape = self.layout.groups[group]
        return shape.window_tokens, shape.sink_tokens, self.tokens_per_block

    def _right(self, tokens: Sequence[int], group: int, block: int) -> bytes:
        return self.content(self.hashes(tokens)[block], group)

    def _page(self, table: PageTable, group: int, block: int) -> bytes:
        return self.device.read_page(group, table[group][block])

    def _grow(self, table: PageTable, blocks: Sequence[Iterable[int]]) -> None:
        for group, some in enumerate(blocks):
            pages = table[group]
            for block in some:
                pages.extend([NO_PAGE] * (block + 1 - len(pages)))
                if pages[block] == NO_PAGE:
                    # The page that was freed last: nothing reuses pages sooner.
                    pages[block] = self._free[group].pop()
