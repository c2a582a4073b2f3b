"""How many slots the snapshot ring has."""

from collections.abc import Iterable

from akv.plan.window import sink_blocks
from akv.values.layout import LayerGroup

#: A ring has no fewer: many short prompts that end in one pass need a few slots each.
FEWEST_SLOTS = 256


def closing_pages(groups: Iterable[LayerGroup], rewind_tokens: int, tokens_per_block: int) -> int:
    """The most pages that one sequence's closing pass saves (W3): every window group's sinks, and its window and rewind.

    An end is on a block: behind it lie the W - 1 tokens that the next one still reads, and before these the rewind, R'.
    """
    reach = max(rewind_tokens, tokens_per_block)
    return sum(
        sink_blocks(group.sink_tokens, tokens_per_block) + -(-(group.window_tokens - 1 + reach) // tokens_per_block)
        for group in groups
        if group.is_window
    )


def ring_slots(groups: Iterable[LayerGroup], rewind_tokens: int, tokens_per_block: int, asked: int) -> int:
    """The number of slots: as asked for, or by default two closing passes and at least `FEWEST_SLOTS`. 0 without windows."""
    most = closing_pages(groups, rewind_tokens, tokens_per_block)
    return 0 if not most else asked or max(FEWEST_SLOTS, 2 * most)
