"""Which window pages make a prompt's or an answer's end resumable, and which of them are listed for saving (W3, S12)."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from akv.plan.hashing import whole_blocks
from akv.plan.window import closing_window, finishing_window, stale_blocks
from akv.plan.window_search import WindowGroup
from akv.units import NO_PAGE


class WindowPages(NamedTuple):
    """Pages of one window group that a request holds."""

    group: int
    #: Block ordinals, ascending.
    blocks: tuple[int, ...]
    pages: tuple[int, ...]


class Ending(NamedTuple):
    """The window groups of a layout, and how far back an end has to reach."""

    groups: tuple[WindowGroup, ...]
    tokens_per_block: int
    #: R.
    rewind_tokens: int
    #: What the engine keeps behind the window (W4).
    retention_tokens: int
    #: L: a prompt's chain ends so many tokens before it (K2).
    lookahead: int = 0

    def closing(
        self, prompt_tokens: int, computed_before: int, resumed_at: int | None, tables: Sequence[Sequence[int]]
    ) -> tuple[WindowPages, ...]:
        """What the closing pass of a prompt copies: of W3's blocks those that have a page. The engine's table decides."""
        return tuple(
            held_pages(
                group.group,
                closing_window(
                    prompt_tokens,
                    whole_blocks(prompt_tokens, self.tokens_per_block, self.lookahead),
                    computed_before,
                    group.window_tokens,
                    group.sink_tokens,
                    self.tokens_per_block,
                    rewind_tokens=self.rewind_tokens,
                    retention_tokens=self.retention_tokens,
                    resumed_at=resumed_at,
                ),
                tables[group.group],
            )
            for group in self.groups
        )

    def held(self, computed: int, history: int, tables: Sequence[Sequence[int]]) -> tuple[WindowPages, ...]:
        """The window pages that a request holds behind a pass that computed up to `computed` tokens.

        `history` tokens may have KV then, accepted drafts with them: the engine releases pages by these, less its retention.
        """
        size = self.tokens_per_block
        held = []
        for group in self.groups:
            gone = stale_blocks(max(0, history - self.retention_tokens), group.window_tokens, group.sink_tokens, size)
            held.append(
                held_pages(group.group, [range(gone.start), range(gone.stop, -(-computed // size))], tables[group.group])
            )
        return tuple(held)

    def finishing(self, kept: int, resumed_at: int | None, held: Sequence[WindowPages]) -> tuple[WindowPages, ...]:
        """Of the pages that it holds those that a request saves which finishes with KV for `kept` tokens (S12).

        `kept` are those that may be published, of which all are confirmed.
        """
        columns = []
        for group, pages in zip(self.groups, held, strict=True):
            wanted = finishing_window(
                kept,
                group.window_tokens,
                group.sink_tokens,
                self.tokens_per_block,
                rewind_tokens=self.rewind_tokens,
                retention_tokens=self.retention_tokens,
                resumed_at=resumed_at,
            )
            some = [(b, p) for b, p in zip(pages.blocks, pages.pages, strict=True) if any(b in blocks for blocks in wanted)]
            columns.append(WindowPages(pages.group, tuple(b for b, _ in some), tuple(p for _, p in some)))
        return tuple(columns)

    def covered_ends(self, end: int, columns: Sequence[WindowPages]) -> int:
        """How many of the ends within the rewind, `end` included, have the whole tail of their window in these pages (W4)."""
        lows = {group.group: end for group in self.groups}
        for column in columns:
            for block in reversed(column.blocks):
                if block == lows[column.group] - 1:
                    lows[column.group] = block
        return sum(
            all(tail.start >= lows[group] for group, tail in self._tails(at) if tail)
            for at in range(max(1, end - self.rewind_tokens // self.tokens_per_block), end + 1)
        )

    def lacks(self, end: int, saved: Callable[[int, int], bool]) -> bool:
        """Whether a page of the window's tail at `end` was not `saved(group, block)`: nobody will resume there."""
        return any(not saved(group, block) for group, tail in self._tails(end) for block in tail)

    def _tails(self, end: int) -> Iterator[tuple[int, range]]:
        size = self.tokens_per_block
        for group in self.groups:
            yield group.group, range(stale_blocks(end * size, group.window_tokens, group.sink_tokens, size).stop, end)


def held_pages(group: int, blocks: Sequence[range], table: Sequence[int]) -> WindowPages:
    """Those of these blocks that have a page in the table."""
    found: list[int] = []
    pages: list[int] = []
    for some in blocks:
        part = table[some.start : some.stop]
        # Asked for each request in each pass, and as a rule every block has a page: then no entry is looked at by itself.
        if NO_PAGE in part:
            held = [(block, page) for block, page in enumerate(part, some.start) if page != NO_PAGE]
            found += (block for block, _ in held)
            pages += (int(page) for _, page in held)
        else:
            found += range(some.start, some.start + len(part))
            pages += map(int, part)
    return WindowPages(group, tuple(found), tuple(pages))
