"""The ends that sequences leave behind at full scale, with symbolic pages (W2, W3, W4, W7, S12).

A naive engine keeps a page list pass by pass, and a model that counts tokens says what is resumable from the blocks stored.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, product
from typing import Any, NamedTuple

import pytest

from akv.plan.lookup import LookupRange
from akv.plan.window import closing_window, finishing_window, needed_blocks
from akv.plan.window_search import WindowGroup, WindowSearch

T = 32


@cache
def distances_read(window: int) -> frozenset[int]:
    """How far behind an end the tokens lie that some query from the end on reads through its window."""
    return frozenset(distance for later in range(window) for distance in range(1, window - later))


@cache
def read_at(window: int, sinks: int, end: int) -> frozenset[int]:
    """The blocks before an end of so many blocks that hold what some query from there on reads."""
    tokens = {end * T - distance for distance in distances_read(window)} | {*range(sinks)}
    return frozenset(token // T for token in tokens if 0 <= token < end * T)


@cache
def held_behind(window: int, sinks: int, retention: int, resumed_at: int, pass_ends: tuple[int, ...]) -> frozenset[int]:
    """A naive engine's page list: blocks that passes write, less what no query reads any more when each is committed (W1).

    Tokens that it retains count as read still (W4). Where it resumed it began with what is read at that end.
    """
    held, before = {*read_at(window, sinks, resumed_at)}, resumed_at * T
    for done in pass_ends:
        held |= {token // T for token in range(before, done)}
        # The next query sits at position `done` and reads `window` tokens, itself the last of them.
        first_read = max(0, done - retention) - (window - 1)
        held = {block for block in held if (block + 1) * T - 1 >= first_read or block * T < sinks}
        before = done
    return frozenset(held)


class Case(NamedTuple):
    """One sequence, and how an engine computes it."""

    window: int
    sinks: int
    rewind: int
    retention: int
    chunk: int
    tokens: int
    #: Blocks at which it resumed.
    resumed_at: int = 0
    #: The first chunk is shorter, by another number for each residue, so that passes end anywhere in blocks; and so is the one
    #: that completes the last block: it ends inside the partial block behind it, and is not the last.
    trimmed: bool = False

    @property
    def blocks(self) -> int:
        """The length of the chain, p."""
        return self.tokens // T

    @property
    def pass_ends(self) -> list[int]:
        """The positions at which passes end."""
        start, chain_end = self.resumed_at * T, self.blocks * T
        if not self.trimmed:
            return [*range(start + self.chunk, self.tokens, self.chunk), self.tokens]
        ends = [*range(start + self.chunk - self.tokens % T, self.tokens, self.chunk), self.tokens]
        middle = (chain_end + self.tokens) // 2
        return sorted({middle, *(end for end in ends if not chain_end <= end < middle)})

    @property
    def history(self) -> int:
        """H0, the tokens that are done before the closing pass: it is the first after which the chain's tokens are."""
        return max([self.resumed_at * T, *(end for end in self.pass_ends if end < self.blocks * T)])

    @property
    def wanted_ends(self) -> range:
        """The ends within the rewind, and the one at which the same prompt resumes: it leaves a token to compute."""
        latest = min(self.blocks, (self.tokens - 1) // T)
        return range(max(0, min(self.blocks - self.rewind // T, latest)), self.blocks + 1)

    def read_at(self, end: int) -> frozenset[int]:
        return read_at(self.window, self.sinks, end)

    def held_behind(self, position: int) -> frozenset[int]:
        """The blocks that have a page once the passes that end up to this position are committed."""
        done = tuple(end for end in self.pass_ends if end <= position)
        return held_behind(self.window, self.sinks, self.retention, self.resumed_at, done)

    def held_in_closing_pass(self) -> frozenset[int]:
        """The chain's blocks that have a page while the closing pass runs: its own were allocated before it."""
        return self.held_behind(self.history) | {token // T for token in range(self.history, self.blocks * T)}

    def stored_by_closing_pass(self) -> list[int]:
        blocks = closing_window(
            self.tokens,
            self.blocks,
            self.history,
            self.window,
            self.sinks,
            T,
            rewind_tokens=self.rewind,
            retention_tokens=self.retention,
            resumed_at=self.resumed_at,
        )
        return [*chain.from_iterable(blocks)]

    def stored_by_finishing(self) -> list[int]:
        blocks = finishing_window(
            self.tokens,
            self.window,
            self.sinks,
            T,
            rewind_tokens=self.rewind,
            retention_tokens=self.retention,
            resumed_at=self.resumed_at,
        )
        return [*chain.from_iterable(blocks)]


@cache
def resumable_ends(window: int, sinks: int, stored: frozenset[int], blocks: int) -> tuple[int, ...]:
    """All ends of which each block that some later query reads is stored."""
    return tuple(end for end in range(1, blocks + 1) if read_at(window, sinks, end) <= stored)


def search(case: Case, stored: frozenset[int], hit: int, *, fallback: bool) -> int | None:
    """The end that a lookup offers where full attention has `hit` blocks and the window group these."""
    return _search(WindowGroup(1, case.window, case.sinks), case.rewind, stored, hit, fallback)


@cache
def _search(group: WindowGroup, rewind: int, stored: frozenset[int], hit: int, fallback: bool) -> int | None:
    found = WindowSearch(LookupRange(0, hit, T), hit, [group], rewind_tokens=rewind, fallback=fallback, chunk=1024)
    while not found.settled:
        portion = found.next()
        assert portion is not None
        found.answered(portion, [block in stored for pages in portion for block in pages.blocks])
    return found.ends[-1] if found.ends else None


def check_offers(case: Case, stored: frozenset[int], resumable: tuple[int, ...]) -> None:
    """W7: prompts that share all blocks, and fewer, with what was stored are offered the latest end, or none without one."""
    for hit in {case.blocks, case.blocks - 1, case.blocks - 17, case.blocks - 40} & {*range(1, case.blocks + 1)}:
        ends = [end for end in resumable if end <= hit]
        near = [end for end in ends if end >= hit - case.rewind // T]
        assert search(case, stored, hit, fallback=False) == max(near, default=None), (case, hit)
        assert search(case, stored, hit, fallback=True) == max(ends, default=None), (case, hit)


def check_stored(case: Case, listed: list[int], held: frozenset[int]) -> list[int]:
    """What an end stores against what its pages could serve; returns which of the wanted ends can be resumed."""
    stored = frozenset(listed)
    assert len(stored) == len(listed), case
    assert stored <= held, case
    # No block that a wanted end reads is left out where there is a page to copy, and no other is stored.
    assert stored == held & frozenset().union(*map(case.read_at, case.wanted_ends)), case
    resumable = resumable_ends(case.window, case.sinks, stored, case.blocks)
    wanted = [end for end in case.wanted_ends if end > 0]
    possible = [end for end in wanted if case.read_at(end) <= held]
    assert [end for end in wanted if end in resumable] == possible, case
    check_offers(case, stored, resumable)
    return possible


#: Prompts of one block, of about a window, and two long ones that 100 divides differently: each with every residue modulo T.
LENGTHS = [blocks * T + residue for blocks, residue in product((1, 62, 312, 313), range(T))]


def cases(window: int, chunks: Iterable[tuple[int, bool]]) -> Iterator[Case]:
    ways = product(chunks, LENGTHS, (0, 1024), (True, False), (0, 1, 40), (0, 12))
    for (chunk, trimmed), tokens, rewind, retains, sinks, computed_anew in ways:
        blocks = tokens // T
        if computed_anew < blocks:
            retention = max(rewind, T) if retains else 0
            resumed_at = blocks - computed_anew if computed_anew else 0
            yield Case(window, sinks, rewind, retention, chunk, tokens, resumed_at, trimmed)


@pytest.mark.parametrize(("window", "ends"), [(64, 89_622), (1000, 88_623), (2040, 112_323), (2048, 112_446)])
def test_W3_W4_W7_every_end_that_a_closing_pass_can_leave_is_resumable_and_no_other(window: int, ends: int) -> None:
    """The acceptance sweep: `ends` is what all its sequences leave within the rewind, and moves with any arithmetic."""
    found = 0
    for case in cases(window, [(100, False), (2048, False), (100, True), (2048, True)]):
        possible = check_stored(case, case.stored_by_closing_pass(), case.held_in_closing_pass())
        if case.retention:
            # Kept as far back as the rewind, so all of them, or those from where it resumed on: W4's 33 of 33.
            assert {end for end in case.wanted_ends if end >= max(1, case.resumed_at)} <= {*possible}, case
        found += len(possible)
    assert found == ends


@pytest.mark.parametrize(
    ("window", "ends", "unretained"), [(64, 15_333, 31), (1000, 14_328, 7), (2040, 23_178, 23), (2048, 23_418, 31)]
)
def test_S12_finishing_stores_what_is_held_and_a_retention_of_T_covers_every_length(
    window: int, ends: int, unretained: int
) -> None:
    """`unretained` is at how many of T lengths the end survives without retention: not at ((1 - W) mod T) of them (W3)."""
    found = 0
    for case in cases(window, [(2048, False)]):
        found += len(check_stored(case, case.stored_by_finishing(), case.held_behind(case.tokens)))
    assert found == ends
    for retention, lengths in ((0, unretained), (T, T), (1024, T)):
        finished = [Case(window, 0, 0, retention, 2048, 9984 + residue) for residue in range(T)]
        covered = [case for case in finished if case.read_at(312) <= {*case.stored_by_finishing()}]
        assert len(covered) == lengths


@pytest.mark.parametrize("window", [1, 2, 64, 1000, 2040, 2048])
def test_W2_the_blocks_that_an_end_needs_are_those_that_later_queries_read(window: int) -> None:
    for sinks, end in product((0, 1, 40), range(350)):
        assert frozenset(chain.from_iterable(needed_blocks(end, window, sinks, T))) == read_at(window, sinks, end)


@pytest.mark.parametrize(
    ("case", "blocks", "history", "lowest", "stored", "ends"),
    [
        (Case(1000, 0, 0, 0, 100, 10_015), 312, 9900, 280, 32, [312]),
        # The repeated prompt's end too.
        (Case(1000, 0, 0, 0, 100, 9984), 312, 9900, 279, 33, [311, 312]),
        (Case(1000, 0, 1024, 0, 100, 10_015), 312, 9900, 278, 34, [310, 311, 312]),
        (Case(1000, 0, 1024, 0, 2048, 10_015), 312, 8192, 248, 64, [*range(280, 313)]),
        (Case(1000, 0, 1024, 1024, 100, 10_015), 312, 9900, 248, 64, [*range(280, 313)]),
        # Computed in one pass behind what it resumed from.
        (Case(1000, 0, 1024, 1024, 10_335, 10_335, resumed_at=312), 322, 9984, 280, 42, [*range(312, 323)]),
        (Case(2040, 0, 0, 0, 2048, 10_015), 312, 8192, 248, 64, [312]),
        (Case(2040, 0, 1024, 0, 100, 10_015), 312, 9900, 245, 67, [309, 310, 311, 312]),
        (Case(2048, 0, 1024, 1024, 100, 10_015), 312, 9900, 216, 96, [*range(280, 313)]),
    ],
)
def test_W4_table(case: Case, blocks: int, history: int, lowest: int, stored: int, ends: list[int]) -> None:
    assert (case.blocks, case.history) == (blocks, history)
    listed = case.stored_by_closing_pass()
    assert listed == [*range(lowest, blocks)]
    assert len(listed) == stored
    assert check_stored(case, listed, case.held_in_closing_pass()) == ends
    assert [*resumable_ends(case.window, case.sinks, frozenset(listed), blocks)] == ends


def test_W3_a_chain_shorter_than_the_prompt_by_a_lookahead_reaches_no_further_back_than_its_own_end() -> None:
    """One token more than the chain covers: the repeated prompt resumes at the chain's end, so no earlier one is stored."""
    far: dict[str, Any] = {"rewind_tokens": 0, "retention_tokens": T, "resumed_at": None}
    assert closing_window(9985, 312, 9900, 1000, 0, T, **far) == [range(280, 312)]
    assert closing_window(9984, 311, 9900, 1000, 0, T, **far) == [range(279, 311)]
    assert closing_window(9984, 312, 9900, 1000, 0, T, **far) == [range(279, 312)]
