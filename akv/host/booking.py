"""How many window pages a sequence has at one time at most, and so what is booked for it when it is admitted.

A window group has far fewer pages than a long sequence has blocks, so no admission can wait for all of them. What is booked
is a count, not pages: pages change hands as the sequence advances, and the count says that there is always one to be had.
"""

from typing import NamedTuple, Protocol

from akv.plan.window import kept_blocks, load_blocks, needed_blocks, sink_blocks, stale_blocks


class Attention(Protocol):
    """What the cache asks of a layer group. `akv.LayerGroup` is one, and so is `Window`."""

    @property
    def window_tokens(self) -> int:
        """W: tokens that a window holds, the one being computed included; 0 for full attention."""
        ...

    @property
    def sink_tokens(self) -> int:
        """S: tokens from the sequence's start that a window reads for ever; 0 for none."""
        ...


class Window(NamedTuple):
    """How far back a layer group reads, for engines that have no `akv.Layout` at hand. The default is full attention."""

    #: W in tokens; 0 for full attention.
    window_tokens: int = 0
    #: S in tokens.
    sink_tokens: int = 0


class WindowRule(NamedTuple):
    """When a page of one window group is needed, and how many are at one time."""

    #: The group's index in the layout.
    group: int
    window_tokens: int
    sink_tokens: int
    tokens_per_block: int
    #: Tokens behind the window for which pages stay (W4).
    retention_tokens: int
    #: Tokens of one sequence that are prepared and not committed at most; None for as many as it may have.
    chunk_tokens: int | None

    def stale(self, history: int) -> range:
        """Blocks that nobody reads any more at `history` tokens (W1), without retention."""
        return stale_blocks(history, self.window_tokens, self.sink_tokens, self.tokens_per_block)

    def released(self, history: int) -> range:
        """Blocks that a sequence has let go of once `history` tokens were committed (W4)."""
        return self.stale(max(0, history - self.retention_tokens))

    def kept(self, history: int) -> list[range]:
        """Blocks that are read from `history` tokens on, the one that they end inside included (W1)."""
        return kept_blocks(history, self.window_tokens, self.sink_tokens, self.tokens_per_block)

    def needed(self, end_block: int) -> list[range]:
        """Blocks that a sequence reads after resuming at `end_block` blocks (W2)."""
        return needed_blocks(end_block, self.window_tokens, self.sink_tokens, self.tokens_per_block)

    def to_load(self, local_blocks: int, end_block: int) -> list[range]:
        """Of these, the blocks that a local match of `local_blocks` lacks (W8)."""
        return load_blocks(local_blocks, end_block, self.window_tokens, self.sink_tokens, self.tokens_per_block)

    def pages_for_passes(self, capacity_blocks: int) -> int:
        """The most pages that a sequence of so many blocks has at one time while it is computed chunk by chunk.

        After a pass at H tokens and before the commit of the next it has its sinks, and every block from the one that holds
        position H - retention + 1 - W to the one that holds position H + chunk - 1.
        """
        if self.chunk_tokens is None:
            return capacity_blocks
        positions = self.window_tokens + self.retention_tokens + self.chunk_tokens - 1
        # So many positions in a row begin one block for each T, and one more where they begin with a block's last position.
        touched = 1 + -(-(positions - 1) // self.tokens_per_block)
        return min(capacity_blocks, sink_blocks(self.sink_tokens, self.tokens_per_block) + touched)

    def pages_for_load(self, capacity_blocks: int, local_blocks: int) -> int:
        """The most pages that it has during a load: what it matched, since the load may fail, and what is loaded."""
        tail = -(-(self.window_tokens - 1) // self.tokens_per_block)
        sinks = sink_blocks(self.sink_tokens, self.tokens_per_block)
        return min(capacity_blocks, sinks + min(local_blocks, tail) + tail)
