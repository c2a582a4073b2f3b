"""Which window pages make a prompt's or an answer's end resumable, and which of them are listed for saving (W3, S12)."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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

    def closing(
        self, prompt_tokens: int, computed_before: int, resumed_at: int | None, tables: Sequence[Sequence[int]]
    ) -> tuple[WindowPages, ...]:
        """What the closing pass of a prompt copies: of W3's blocks those that have a page. The engine's table decides."""
        return tuple(
            held_pages(
                group.group,
                closing_window(
                    prompt_tokens,
                    prompt_tokens // self.tokens_per_block,
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

    def finishing(self, kept: int, history: int, resumed_at: int | None) -> dict[int, list[range]]:
        """The blocks of each window group that a request saves which finishes with KV for `kept` tokens that may be published.

        `history` tokens may have KV in all, drafts and unconfirmed ones with them: by these the engine released pages.
        """
        shapes = {g.group: (g.window_tokens, g.sink_tokens, self.tokens_per_block) for g in self.groups}
        released_at = max(0, history - self.retention_tokens)
        return {
            group: without(
                finishing_window(
                    kept,
                    *shape,
                    rewind_tokens=self.rewind_tokens,
                    retention_tokens=self.retention_tokens,
                    resumed_at=resumed_at,
                ),
                stale_blocks(released_at, *shape),
            )
            for group, shape in shapes.items()
        }

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
    held = [
        (block, int(page))
        for some in blocks
        for block, page in enumerate(table[some.start : some.stop], some.start)
        if page != NO_PAGE
    ]
    return WindowPages(group, tuple(block for block, _ in held), tuple(page for _, page in held))


def without(blocks: Sequence[range], gone: range) -> list[range]:
    """These blocks without those that are gone."""
    if not gone:
        return list(blocks)
    ahead = [range(some.start, min(some.stop, gone.start)) for some in blocks]
    behind = [range(max(some.start, gone.stop), some.stop) for some in blocks]
    return [some for some in (*ahead, *behind) if some]
