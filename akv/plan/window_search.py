"""Where a request of a model with sliding windows can resume: which window pages a lookup asks for, and what they amount to.

A full-attention prefix of h blocks is a promise for every end in it. A window group keeps its pages only around the ends of
prompts and answers, so what is looked for is the latest end at which each group has its sinks and its window (W2, W7). Near h
every page that could matter is asked for at once. Further back most pages were never stored, and asking for all would cost as
much as the prefix itself: there one page in each window's length is asked for, which no complete window can do without.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from akv.plan.lookup import LookupRange
from akv.plan.window import load_blocks, sink_blocks, stale_blocks
from akv.values.layout import LayerGroup
from akv.values.offers import LookupOutcome


class WindowGroup(NamedTuple):
    """What the arithmetic of windows needs of a layer group."""

    #: Its index in the layout.
    group: int
    #: W.
    window_tokens: int
    #: S.
    sink_tokens: int


def window_groups(groups: Sequence[LayerGroup]) -> tuple[WindowGroup, ...]:
    """Those of a layout's groups that forget; empty for a model of full attention alone."""
    return tuple(
        WindowGroup(index, group.window_tokens, group.sink_tokens) for index, group in enumerate(groups) if group.is_window
    )


class GroupBlocks(NamedTuple):
    """Pages of one layer group."""

    group: int
    #: Block ordinals, ascending.
    blocks: Sequence[int]


#: Pages that one call asks for. Answers come in this order, group by group.
Portion = tuple[GroupBlocks, ...]


class WindowSearch:
    """The search for r, the latest resumable end in (m, h], one step after the other (W7). Blocks are the sequence's.

    A step is a set of pages; what is asked next depends on all of its answers. Its portions may be asked at the same time, and
    answered in any order. No page is asked for twice. Exact: it finds the latest end that there is within the rewind, and with
    `fallback` in all of (m, h].
    """

    def __init__(
        self,
        asked: LookupRange,
        hit: int,
        windows: Sequence[WindowGroup],
        *,
        rewind_tokens: int,
        fallback: bool,
        chunk: int,
    ) -> None:
        """`asked.first` is m, `hit` is h, both in blocks and m < h. `chunk`: keys of a portion at most."""
        self._local = asked.first
        self._hit = hit
        self._tokens_per_block = asked.tokens_per_block
        self._windows = tuple(windows)
        #: The earliest end that is within the rewind.
        self._nearest = max(self._local + 1, hit - rewind_tokens // asked.tokens_per_block)
        self._fallback = fallback
        self._chunk = max(1, chunk)
        #: Of each window group the answers so far: whether a block's page is there.
        self._there: dict[int, dict[int, bool]] = {window.group: {} for window in windows}
        self._ends: list[int] = []
        self._portions: deque[Portion] = deque()
        self._unanswered = 0
        self._settled = False
        self._steps = self._search()
        self._go_on()

    @property
    def settled(self) -> bool:
        """Whether nothing is left to ask."""
        return self._settled

    @property
    def waiting(self) -> int:
        """Portions that may be asked now, all at the same time."""
        return len(self._portions)

    def next(self) -> Portion | None:
        """The next portion to ask for; None if there is none now, which the answers to those under way may change."""
        return self._portions.popleft() if self._portions else None

    def answered(self, portion: Portion, there: Sequence[bool]) -> None:
        """Which of the portion's pages are in the pool.

        Raises ValueError unless there is an answer for each (a fault of akv: a page would count by another one's answer).
        """
        if len(there) != sum(len(pages.blocks) for pages in portion):
            raise ValueError(f"{len(there)} answers for {sum(len(pages.blocks) for pages in portion)} pages")
        answers = iter(there)
        for group, blocks in portion:
            self._there[group].update(zip(blocks, islice(answers, len(blocks)), strict=True))
        self._unanswered -= 1
        if not self._unanswered:
            self._go_on()

    @property
    def ends(self) -> tuple[int, ...]:
        """The ends that are known to be resumable: r last, those that r was found among before it. Empty if there is none."""
        return tuple(self._ends)

    @property
    def missing(self) -> tuple[GroupBlocks, ...]:
        """The pages that were asked for and are not in the pool."""
        gone = (
            (group, sorted(block for block, is_there in there.items() if not is_there)) for group, there in self._there.items()
        )
        return tuple(GroupBlocks(group, blocks) for group, blocks in gone if blocks)

    @property
    def outcome(self) -> LookupOutcome:
        """What to count (W7). Only once the search is settled."""
        if not self._ends:
            return LookupOutcome.WINDOW_MISS
        if self._ends[-1] == self._hit:
            return LookupOutcome.FULL
        return LookupOutcome.REWOUND if self._ends[-1] >= self._nearest else LookupOutcome.RECOVERED

    def _go_on(self) -> None:
        """Take steps as long as their pages are known already."""
        for step in self._steps:
            self._portions.extend(_portions(step, self._chunk))
            self._unanswered = len(self._portions)
            if self._portions:
                return
        self._settled = True

    # -- the steps: each yields pages, and goes on once all of them are known

    def _search(self) -> Iterator[Portion]:
        yield from self._test(self._nearest, self._hit)
        if self._fallback and not self._ends:
            yield from self._fall_back()

    def _test(self, first: int, last: int) -> Iterator[Portion]:
        """Find the resumable ones of the ends [first, last]."""
        yield self._unknown(
            (window.group, (block for blocks in self._stretches(window, first, last) for block in blocks))
            for window in self._windows
        )
        self._ends = self._resumable(first, last)

    def _fall_back(self) -> Iterator[Portion]:
        """Find the latest resumable end before the rewind.

        A window's tail is `step` blocks, so one block in `step` hits every tail, and the first of those behind the sinks (or
        the local match) hits the ones that these cut short. Where it is missing, no end in the `step` behind it is resumable.
        """
        widest = max(self._windows, key=lambda window: window.window_tokens)
        step = max(1, -(-(widest.window_tokens - 1) // self._tokens_per_block))
        lowest = min(self._hit, max(self._local, sink_blocks(widest.sink_tokens, self._tokens_per_block)))
        latest = self._latest_behind_sinks()
        # Ends above `latest` are settled, so what only they need is not asked for.
        walk = [block for block in (*range(self._hit - 1, lowest, -step), lowest) if block < latest]
        # The tail behind a window of one token is the token itself: no page, so none to be missing.
        if widest.window_tokens > 1:
            yield self._unknown([(widest.group, reversed(walk))])
            present = self._there[widest.group]
        else:
            present = dict.fromkeys(walk, True)
        for block in walk:
            if present[block]:
                yield from self._test(block + 1, latest)
                if self._ends:
                    return
            latest = block
        if latest > self._local:
            yield from self._test(self._local + 1, latest)

    def _latest_behind_sinks(self) -> int:
        """The latest end before the rewind for which no sink is missing: those behind a missing one all read it."""
        latest = self._nearest - 1
        for window in self._windows:
            sinks = range(self._local, min(self._hit, sink_blocks(window.sink_tokens, self._tokens_per_block)))
            latest = min(latest, next((block for block in sinks if not self._there[window.group][block]), latest))
        return latest

    def _unknown(self, pages: Iterable[tuple[int, Iterable[int]]]) -> Portion:
        """These pages without those whose answers are known."""
        asked = ((group, [block for block in blocks if block not in self._there[group]]) for group, blocks in pages)
        return tuple(GroupBlocks(group, blocks) for group, blocks in asked if blocks)

    def _stretches(self, window: WindowGroup, first: int, last: int) -> list[range]:
        """All pages of a group that some end in [first, last] reads and the engine does not have: ascending, apart."""
        tokens, sinks = window.window_tokens, window.sink_tokens
        sinks_end = stale_blocks(last * self._tokens_per_block, tokens, sinks, self._tokens_per_block).start
        # The earliest end's tail begins first, the others' follow without a gap: but none has a tail if W = 1.
        tail_start = stale_blocks(first * self._tokens_per_block, tokens, sinks, self._tokens_per_block).stop
        tail_end = last if tokens > 1 else tail_start
        if tail_start <= sinks_end:
            stretches = [range(self._local, max(sinks_end, tail_end))]
        else:
            stretches = [range(self._local, sinks_end), range(max(self._local, tail_start), tail_end)]
        return [blocks for blocks in stretches if blocks]

    def _resumable(self, first: int, last: int) -> list[int]:
        """Those of the ends [first, last] at which every group has what it reads, ascending. Their pages must be known."""
        ends = list(range(first, last + 1))
        for window in self._windows:
            there = self._there[window.group]
            # Of each block how many are there in a row, it being the last of them.
            row: dict[int, int] = {}
            for blocks in self._stretches(window, first, last):
                in_a_row = 0
                for block in blocks:
                    in_a_row = in_a_row + 1 if there[block] else 0
                    row[block] = in_a_row
            ends = [end for end in ends if all(row[blocks[-1]] >= len(blocks) for blocks in self._reads(window, end))]
        return ends

    def _reads(self, window: WindowGroup, end: int) -> list[range]:
        return load_blocks(self._local, end, window.window_tokens, window.sink_tokens, self._tokens_per_block)


def _portions(pages: Portion, chunk: int) -> Iterator[Portion]:
    """Cut pages into portions of at most `chunk` keys, in order."""
    portion: list[GroupBlocks] = []
    room = chunk
    for group, blocks in pages:
        at = 0
        while at < len(blocks):
            part = blocks[at : at + room]
            portion.append(GroupBlocks(group, part))
            at, room = at + len(part), room - len(part)
            if not room:
                yield tuple(portion)
                portion, room = [], chunk
    if portion:
        yield tuple(portion)
