"""How far the saving of one request's blocks has come (S2, S6).

A block is unsaved, queued, stored, or refused: by the pool, or shed for want of room in the backlog. The mark is the first
block that is neither queued nor stored: it follows what a pass queued and steps back to what was refused. A plan changes
nothing here; only a pass that ran does.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice


class BlockState(IntEnum):
    """The state of one block's save. "Planned" is no state: a plan that never ran leaves no trace (S2)."""

    UNSAVED = 0
    QUEUED = 1
    STORED = 2
    #: By the pool, which may take later blocks all the same.
    REFUSED = 3
    #: Dropped before it was handed over, with every later block (S6).
    SHED = 4


#: States of a block that was refused, by anybody.
_TURNED_AWAY = frozenset({BlockState.REFUSED, BlockState.SHED})
_OPEN = _TURNED_AWAY | {BlockState.UNSAVED}


def _any_of(states: Iterable[BlockState]) -> re.Pattern[bytes]:
    return re.compile(b"[" + re.escape(bytes(sorted(states))) + b"]", re.DOTALL)


#: Finds blocks by their state without a step of Python for each block that it passes over: every pass asks, of every request
#: in it, and behind one block that was refused may lie a hundred thousand tokens that are stored (L3).
_FIND_OPEN = _any_of(_OPEN)
_FIND_UNSAVED = _any_of({BlockState.UNSAVED})
_FIND_SHED = _any_of({BlockState.SHED})


#: The n-th refusal in a row makes refused blocks wait `backoff * 2 ** (n - 1)`; more doublings than this add nothing.
MOST_DOUBLINGS = 6


#: More blocks than any sequence has.
UNLIMITED = 2**40


class SaveMarks:
    """The save state of each block of one request."""

    def __init__(self, backoff_s: float) -> None:
        self._backoff_s = backoff_s
        self._states = bytearray()
        self._refusals = 0
        self._retry_at = 0.0
        #: The first block that is neither queued nor stored.
        self.mark = 0

    def count(self, state: BlockState) -> int:
        """How many blocks are in this state (not for UNSAVED, whose number is not known here)."""
        return self._states.count(state)

    @property
    def refused_count(self) -> int:
        """How many blocks were refused, and are not queued again."""
        return sum(map(self.count, _TURNED_AWAY))

    @property
    def shed_blocks(self) -> list[int]:
        """The blocks that were shed and are not queued again, ascending."""
        return list(self._found(_FIND_SHED, 0, len(self._states)))

    def to_offer(self, end: int, now: float, most: int = UNLIMITED) -> list[int]:
        """The first `most` blocks below `end` that a pass may list: the unsaved, and the refused once their back-off has
        passed. Until then none behind one that was shed: it would be of no use without that (S6).
        """
        offered = _FIND_OPEN
        if now < self._retry_at:
            offered = _FIND_UNSAVED
            first_shed = self._states.find(BlockState.SHED)
            end = end if first_shed < 0 else min(end, first_shed)
        known = min(end, len(self._states))
        blocks = list(islice(self._found(offered, self.mark, known), most))
        blocks.extend(range(known, min(end, known + most - len(blocks))))
        return blocks

    def is_open(self, block: int) -> bool:
        """Whether the block is neither queued nor stored."""
        return block >= len(self._states) or self._states[block] in _OPEN

    def is_stored(self, block: int) -> bool:
        """Whether the block is in the pool, as far as this request knows."""
        return block < len(self._states) and self._states[block] == BlockState.STORED

    def queued(self, blocks: Iterable[int]) -> None:
        """A pass that ran handed these blocks over for saving."""
        self._set(blocks, BlockState.QUEUED)

    def stored(self, blocks: Iterable[int]) -> None:
        """These blocks are in the pool: saved by this request or another, or loaded from it (D9). Ends a row of refusals."""
        # Only a block that is there shows that the pool takes blocks again. Each pass reports what is there, mostly nothing.
        if self._set(blocks, BlockState.STORED):
            self._refusals = 0

    def refused(self, blocks: Iterable[int], now: float) -> None:
        """The pool did not take these blocks. The mark steps back to the first of them, and a back-off begins."""
        self._set(blocks, BlockState.REFUSED)
        self._retry_at = now + self._backoff_s * 2 ** min(self._refusals, MOST_DOUBLINGS)
        self._refusals += 1

    def shed(self, blocks: Sequence[int], now: float) -> None:
        """These blocks, ascending, were to be handed over, and the backlog had no room for them (S6). The mark steps back, and
        a back-off begins; but for blocks that were shed only because an earlier one had been.

        It does not grow with each time: no store call is made for the answer.
        """
        first_shed = self._states.find(BlockState.SHED)
        if first_shed < 0 or blocks[0] <= first_shed:
            self._retry_at = max(self._retry_at, now + self._backoff_s)
        self._set(blocks, BlockState.SHED)

    def dropped(self, blocks: Iterable[int]) -> None:
        """These blocks were queued and never read; they are as if no pass had listed them."""
        self._set(blocks, BlockState.UNSAVED)

    def lost(self) -> None:
        """The pool may have lost what is stored: it is listed again (S13)."""
        self._forget(BlockState.STORED)

    def withdrawn(self) -> None:
        """What was queued will not be heard of: the pages were taken away, and it is as if no pass had listed them."""
        self._forget(BlockState.QUEUED)

    def _forget(self, state: BlockState) -> None:
        self._states = self._states.replace(bytes([state]), bytes([BlockState.UNSAVED]))
        self._move_mark(0)

    def _move_mark(self, first: int) -> None:
        """The mark is the first open block from `first` on."""
        self.mark = next(self._found(_FIND_OPEN, first, len(self._states)), max(first, len(self._states)))

    def _found(self, states: re.Pattern[bytes], first: int, end: int) -> Iterator[int]:
        """The blocks of [first, end) that are in one of these states, ascending."""
        return (found.start() for found in states.finditer(self._states, first, end))

    def _set(self, blocks: Iterable[int], state: BlockState) -> bool:
        """Set the state of these blocks and move the mark; whether there was any block."""
        chosen = set(blocks)
        if chosen:
            first, end = min(chosen), max(chosen) + 1
            self._states.extend(bytes(max(0, end - len(self._states))))
            if len(chosen) == end - first:
                # One stretch, as a load's or a pass's blocks mostly are: of thousands, and the engine's loop waits.
                self._states[first:end] = bytes([state]) * (end - first)
            else:
                for block in chosen:
                    self._states[block] = state
            if state in _OPEN:
                self.mark = min(self.mark, first)
        self._move_mark(self.mark)
        return bool(chosen)
