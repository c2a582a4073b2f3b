"""Where a request with window groups can resume, which pages are asked for to find out, and in which portions (W2, W7)."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.lookup import LookupRange
from akv.plan.window import closing_window, sink_blocks
from akv.plan.window_search import GroupBlocks, WindowGroup, WindowSearch, window_groups
from akv.values.layout import LayerGroup, Region
from akv.values.offers import LookupOutcome

T = 4
FULL, REWOUND, RECOVERED, WINDOW_MISS = (
    LookupOutcome.FULL,
    LookupOutcome.REWOUND,
    LookupOutcome.RECOVERED,
    LookupOutcome.WINDOW_MISS,
)
#: Per window group the blocks that the pool holds.
Stored = Sequence[Iterable[int]]


def shapes(*windows: tuple[int, int]) -> tuple[WindowGroup, ...]:
    """Window groups of these (W, S), behind a group of full attention."""
    return tuple(WindowGroup(index, *window) for index, window in enumerate(windows, 1))


class Run:
    """A search that was run to its end against what is stored, one portion at a time or several in any order."""

    def __init__(
        self,
        local: int,
        hit: int,
        windows: Sequence[WindowGroup],
        stored: Stored,
        *,
        rewind: int = 0,
        fallback: bool = True,
        chunk: int = 512,
        pick: Callable[[int], int] = lambda open_portions: 0,
    ) -> None:
        held = {window.group: set(blocks) for window, blocks in zip(windows, stored, strict=True)}
        self.search = WindowSearch(
            LookupRange(local, hit, T), hit, windows, rewind_tokens=rewind, fallback=fallback, chunk=chunk
        )
        #: The pages of each step, in the order of asking.
        self.steps: list[list[tuple[int, int]]] = []
        self.portions: list[int] = []
        while not self.search.settled:
            waiting = self.search.waiting
            flying = [portion for _ in range(waiting) if (portion := self.search.next()) is not None]
            assert len(flying) == waiting > 0
            assert self.search.next() is None
            self.steps.append([(group, block) for portion in flying for group, blocks in portion for block in blocks])
            self.portions += [sum(len(blocks) for _, blocks in portion) for portion in flying]
            while flying:
                portion = flying.pop(pick(len(flying)))
                self.search.answered(portion, [block in held[group] for group, blocks in portion for block in blocks])
        assert self.search.next() is None

    @property
    def asked(self) -> Counter[tuple[int, int]]:
        return Counter(page for step in self.steps for page in step)

    @property
    def end(self) -> int | None:
        return self.search.ends[-1] if self.search.ends else None


def test_S13_what_is_missing_is_what_was_asked_for_and_is_not_there_in_order() -> None:
    """Further back it asks in descending order, and for some pages only."""
    run = Run(0, 40, shapes((9, 0), (5, 6)), [{20, 21}, {0, 1, 21, 39}], rewind=8)
    assert run.end == 22
    gone = sorted(page for page in run.asked if page not in {(1, 20), (1, 21), (2, 0), (2, 1), (2, 21), (2, 39)})
    assert [(group, block) for group, blocks in run.search.missing for block in blocks] == gone
    assert (1, 38) in gone
    assert Run(0, 10, shapes((9, 0)), [range(10)]).search.missing == ()


def naive_reads(end: int, window: WindowGroup) -> set[int]:
    """Blocks that the token at position T * end reads, token by token: the sinks, and a window that ends with itself."""
    return {
        token // T
        for token in range(T * end)
        if token // T < sink_blocks(window.sink_tokens, T) or token // T >= (T * end + 1 - window.window_tokens) // T
    }


def naive_ends(local: int, hit: int, windows: Sequence[WindowGroup], stored: Stored) -> list[int]:
    """Every resumable end in (m, h], found by looking at each (W2)."""
    held = {window.group: set(blocks) for window, blocks in zip(windows, stored, strict=True)}
    return [
        end
        for end in range(local + 1, hit + 1)
        if all(block < local or block in held[window.group] for window in windows for block in naive_reads(end, window))
    ]


@pytest.mark.parametrize(
    ("local", "hit", "windows", "stored", "rewind", "end", "outcome"),
    [
        # W = 9 and T = 4: an end q reads [q - 2, q).
        (0, 10, [(9, 0)], [{8, 9}], 0, 10, FULL),
        (0, 10, [(9, 0)], [{7, 8}], 0, 9, RECOVERED),
        (0, 10, [(9, 0)], [{7, 8}], 3, 9, RECOVERED),
        (0, 10, [(9, 0)], [{7, 8}], 4, 9, REWOUND),
        # R is rounded down to whole blocks: 7 tokens reach one block back.
        (0, 10, [(9, 0)], [{6, 7}], 7, 8, RECOVERED),
        (0, 10, [(9, 0)], [{6, 7}], 8, 8, REWOUND),
        (0, 10, [(9, 0)], [{6, 7}], 1024, 8, REWOUND),
        (0, 10, [(9, 0)], [{9}], 0, None, WINDOW_MISS),
        (0, 10, [(9, 0)], [set()], 0, None, WINDOW_MISS),
        (0, 10, [(9, 0)], [{0, 1, 4, 6, 9}], 0, 2, RECOVERED),
        (0, 10, [(9, 0)], [{0, 4, 6, 9}], 0, 1, RECOVERED),
        # What is below the local match is the engine's own: block 7 for the end at 9, both for one that ends at it.
        (8, 10, [(9, 0)], [{8}], 0, 9, RECOVERED),
        (8, 10, [(9, 0)], [{8}], 4, 9, REWOUND),
        (8, 10, [(9, 0)], [{9}], 4, None, WINDOW_MISS),
        (9, 10, [(9, 0)], [{9}], 0, 10, FULL),
        (9, 10, [(9, 0)], [{8}], 400, None, WINDOW_MISS),
        # The rewind ends before the local match: nothing is left to fall back to.
        (5, 10, [(9, 0)], [{5}], 1024, 6, REWOUND),
        # Sinks: below the local match, from it on, missing, and beyond the prefix.
        (3, 10, [(9, 12)], [{8, 9}], 0, 10, FULL),
        (2, 10, [(9, 12)], [{8, 9}], 0, None, WINDOW_MISS),
        (2, 10, [(9, 12)], [{2, 8, 9}], 0, 10, FULL),
        (0, 10, [(9, 12)], [{0, 1, 8, 9}], 0, 2, RECOVERED),
        (0, 10, [(9, 12)], [{0, 1, 2, 3}], 0, 4, RECOVERED),
        (0, 10, [(9, 400)], [set(range(10))], 0, 10, FULL),
        (0, 10, [(9, 400)], [{0, 1, 2, 8, 9}], 0, 3, RECOVERED),
        (0, 10, [(9, 40)], [{0, 1, 2, 8, 9}], 32, 3, REWOUND),
        # A window of one token reads no page behind the sinks; one no longer than a block reads the last block, or none.
        (0, 10, [(1, 0)], [set()], 0, 10, FULL),
        (0, 10, [(1, 5)], [{0, 1}], 0, 10, FULL),
        (0, 10, [(1, 5)], [{0}], 0, 1, RECOVERED),
        (0, 10, [(1, 5)], [{1}], 0, None, WINDOW_MISS),
        (0, 10, [(1, 0), (1, 24)], [set(), {0, 1, 2, 3}], 0, 4, RECOVERED),
        (0, 10, [(2, 0)], [{9}], 0, 10, FULL),
        (0, 10, [(2, 0)], [{4}], 0, 5, RECOVERED),
        (0, 10, [(5, 0)], [{4}], 0, 5, RECOVERED),
        (0, 10, [(6, 0)], [{4}], 0, None, WINDOW_MISS),
        (0, 10, [(6, 0)], [{0}], 0, 1, RECOVERED),
        # A window beyond the prompt.
        (0, 10, [(400, 0)], [set(range(10))], 0, 10, FULL),
        (0, 10, [(400, 0)], [set(range(7))], 0, 7, RECOVERED),
        (4, 10, [(400, 0)], [{4, 5}], 0, 6, RECOVERED),
        # Two groups, in either order: the latest end of both.
        (0, 10, [(9, 0), (17, 0)], [{8, 9}, {6, 7, 8, 9}], 0, 10, FULL),
        (0, 10, [(17, 0), (9, 0)], [{6, 7, 8, 9}, {8, 9}], 0, 10, FULL),
        (0, 12, [(9, 0), (17, 0)], [{10, 11, 3, 4}, set(range(1, 12))], 0, 12, FULL),
        (0, 12, [(9, 0), (17, 0)], [{3, 4}, set(range(1, 12))], 0, 5, RECOVERED),
        (0, 12, [(17, 0), (9, 0)], [set(range(1, 12)), {3, 4}], 0, 5, RECOVERED),
        (0, 12, [(9, 0), (17, 8)], [{3, 4, 10, 11}, {0, 1, 8, 9, 10}], 0, None, WINDOW_MISS),
        # The narrower group has the longer sinks.
        (0, 12, [(9, 16), (17, 0)], [{0, 1, 2, 3, 5, 6}, {3, 4, 5, 6}], 0, 7, RECOVERED),
        (0, 12, [(9, 16), (17, 0)], [{0, 1, 2, 5, 6}, set(range(12))], 0, 3, RECOVERED),
        # h = m + 1: one end, and no way back.
        (0, 1, [(9, 0)], [{0}], 0, 1, FULL),
        (0, 1, [(9, 0)], [set()], 0, None, WINDOW_MISS),
    ],
)
def test_W7_where_a_request_resumes(
    local: int,
    hit: int,
    windows: list[tuple[int, int]],
    stored: list[set[int]],
    rewind: int,
    end: int | None,
    outcome: LookupOutcome,
) -> None:
    run = Run(local, hit, shapes(*windows), stored, rewind=rewind)
    assert (run.end, run.search.outcome) == (end, outcome)


@pytest.mark.parametrize(("rewind", "end"), [(0, None), (15, None), (16, 6), (1024, 6)])
def test_W7_without_fallback_nothing_behind_the_rewind_is_looked_at(rewind: int, end: int | None) -> None:
    run = Run(0, 10, shapes((9, 0)), [{4, 5}], rewind=rewind, fallback=False)
    assert (run.end, len(run.steps)) == (end, 1)


def test_W7_near_the_hit_one_stretch_of_pages_covers_every_end_within_the_rewind() -> None:
    run = Run(1, 20, shapes((9, 5), (17, 0)), [{1, 14, 15, 16, 17, 19}, range(10, 20)], rewind=16)
    # Ends 16 to 20, sinks from the local match on.
    assert run.steps == [[(1, block) for block in (1, *range(14, 20))] + [(2, block) for block in range(12, 20)]]
    assert run.search.ends == (16, 17, 18)


def test_W7_further_back_one_page_in_each_windows_length_is_asked_for_and_then_the_windows_behind_those_that_are_there() -> (
    None
):
    run = Run(2, 30, shapes((9, 0), (17, 0)), [{17, 18, 19}, {9, 16, 17, 18, 19}])
    assert run.steps == [
        [(1, 28), (1, 29), (2, 26), (2, 27), (2, 28), (2, 29)],
        # 29 was asked for already; every fourth block from there on down, and the first one behind the local match.
        [(2, block) for block in (2, 5, 9, 13, 17, 21, 25)],
        # Behind 17, the ends 18 to 21.
        [(1, block) for block in range(16, 21)] + [(2, block) for block in (14, 15, 16, 18, 19, 20)],
    ]
    assert (run.search.ends, run.search.outcome) == ((20,), RECOVERED)


def test_W7_the_ends_up_to_the_sinks_are_tried_last() -> None:
    run = Run(0, 30, shapes((9, 16)), [{0, 1, 2, 29}], rewind=0)
    # A sink is missing, so nothing behind it is worth a question.
    assert run.steps == [[(1, block) for block in (0, 1, 2, 3, 28, 29)]]
    assert (run.search.ends, run.search.outcome) == ((1, 2, 3), RECOVERED)


@st.composite
def searches(draw: st.DrawFn) -> tuple[int, int, tuple[WindowGroup, ...], list[set[int]], int, int]:
    """m, h, the groups, what is stored of each, R and the size of a portion."""
    hit = draw(st.integers(1, 40))
    local = draw(st.integers(0, hit - 1))
    windows = shapes(*draw(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 24)), min_size=1, max_size=3)))
    # Runs and holes: a set of single blocks would hardly ever hold a window.
    stored = [
        {
            block
            for first, length, there in draw(
                st.lists(st.tuples(st.integers(0, 40), st.integers(1, 14), st.booleans()), max_size=6)
            )
            if there
            for block in range(first, first + length)
        }
        ^ draw(st.sets(st.integers(0, 40), max_size=4))
        for _ in windows
    ]
    return local, hit, windows, stored, draw(st.integers(0, 90)), draw(st.integers(1, 30))


@given(searches(), st.randoms(use_true_random=False))
def test_W7_it_finds_what_looking_at_every_end_finds_whatever_the_order_of_the_answers(
    given_search: tuple[int, int, tuple[WindowGroup, ...], list[set[int]], int, int], order: random.Random
) -> None:
    local, hit, windows, stored, rewind, chunk = given_search
    naive = naive_ends(local, hit, windows, stored)
    nearest = max(local + 1, hit - rewind // T)
    near = Run(local, hit, windows, stored, rewind=rewind, chunk=chunk, fallback=False, pick=order.randrange)
    assert list(near.search.ends) == [end for end in naive if end >= nearest]
    run = Run(local, hit, windows, stored, rewind=rewind, chunk=chunk, pick=order.randrange)
    assert run.end == (naive[-1] if naive else None)
    assert set(run.search.ends) <= set(naive)
    if run.end is None:
        assert run.search.outcome is WINDOW_MISS
    elif run.end == hit:
        assert run.search.outcome is FULL
    else:
        assert run.search.outcome is (REWOUND if run.end >= nearest else RECOVERED)
    # No page twice, none of the local match, none behind the prefix, no portion above its bound, none half empty but the last.
    assert set(run.asked.values()) <= {1}
    assert all(local <= block < hit for _, block in run.asked)
    assert all(0 < keys <= chunk for keys in run.portions)
    assert len(run.portions) <= sum(-(-len(step) // chunk) for step in run.steps)


@given(searches())
def test_W7_what_the_fallback_asks_for_is_bounded_by_its_walk_and_the_windows_it_tests(
    given_search: tuple[int, int, tuple[WindowGroup, ...], list[set[int]], int, int],
) -> None:
    local, hit, windows, stored, rewind, _ = given_search
    widest = max(windows, key=lambda window: window.window_tokens)
    step = max(1, -(-(widest.window_tokens - 1) // T))
    lowest = max(local, sink_blocks(widest.sink_tokens, T))
    walk = {*range(hit - 1, lowest - 1, -step), *({lowest} if lowest < hit else ())}
    held = set(stored[windows.index(widest)])
    run = Run(local, hit, windows, stored, rewind=rewind)
    tested = set(range(max(local + 1, hit - rewind // T), hit + 1))
    reads: set[tuple[int, int]] = set()
    for block in sorted(walk, reverse=True):
        if widest.window_tokens == 1 or block in held:
            tested |= {end for end in range(block + 1, block + step + 1) if end <= hit}
    tested |= set(range(local + 1, min(lowest, hit) + 1))
    for window in windows:
        reads |= {(window.group, block) for end in tested for block in naive_reads(end, window) if block >= local}
    assert set(run.asked) <= reads | {(widest.group, block) for block in walk}


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=2),
    st.lists(st.integers(1, 160), min_size=1, max_size=4),
    st.integers(0, 40),
    st.integers(0, 60),
)
def test_W3_W7_the_last_prompt_end_that_was_stored_whole_is_found(
    windows: list[tuple[int, int]], prompts: list[int], rewind: int, longer: int
) -> None:
    groups = shapes(*windows)
    stored: list[set[int]] = [set() for _ in groups]
    for tokens in prompts:
        for blocks, window in zip(stored, groups, strict=True):
            saved = closing_window(
                tokens,
                tokens // T,
                tokens,
                window.window_tokens,
                window.sink_tokens,
                T,
                rewind_tokens=rewind,
                # The engine still holds all of it.
                retention_tokens=tokens,
                resumed_at=None,
            )
            blocks.update(block for some in saved for block in some)
    ends = [tokens // T for tokens in prompts if tokens >= T]
    hit = max(ends, default=0) + longer
    if not hit:
        return
    run = Run(0, hit, groups, stored, rewind=rewind)
    assert run.end == max(naive_ends(0, hit, groups, stored), default=None)
    if ends:
        assert run.end is not None
        assert run.end >= max(ends)


def test_W7_a_long_prompt_whose_end_was_never_stored_costs_a_page_in_each_window() -> None:
    held = set(range(1000, 1064))
    run = Run(0, 6000, shapes((257, 0)), [held], rewind=0)
    assert run.end == 1064
    assert [len(step) for step in run.steps] == [64, 94, 126]


def test_L3_portions_are_bounded_in_keys_over_groups_and_keep_the_order() -> None:
    search = WindowSearch(LookupRange(0, 10, T), 10, shapes((9, 0), (17, 0)), rewind_tokens=12, fallback=True, chunk=4)
    assert search.waiting == 3
    assert [search.next() for _ in range(4)] == [
        (GroupBlocks(1, [5, 6, 7, 8]),),
        (GroupBlocks(1, [9]), GroupBlocks(2, [3, 4, 5])),
        (GroupBlocks(2, [6, 7, 8, 9]),),
        None,
    ]


def test_L3_a_portion_takes_all_the_keys_that_it_may() -> None:
    assert Run(0, 10, shapes((9, 0), (17, 0)), [range(10), range(10)], rewind=12, chunk=6).portions == [6, 6]


def test_W7_an_answer_for_another_number_of_pages_is_a_fault() -> None:
    search = WindowSearch(LookupRange(0, 10, T), 10, shapes((9, 0)), rewind_tokens=0, fallback=True, chunk=4)
    portion = search.next()
    assert portion is not None
    for wrong in ([True], [True] * 3):
        with pytest.raises(ValueError, match=f"{len(wrong)} answers for 2 pages"):
            search.answered(portion, wrong)
    search.answered(portion, [True, True])
    assert (search.settled, search.ends) == (True, (10,))


def test_W7_the_window_groups_of_a_layout_keep_their_index() -> None:
    def group(attention: str, window_tokens: int = 0, sink_tokens: int = 0) -> LayerGroup:
        return LayerGroup(
            layers=(0,),
            attention=attention,
            window_tokens=window_tokens,
            sink_tokens=sink_tokens,
            dtype="float32",
            kv_heads=1,
            head_size=2,
            regions=(Region(name="k", bytes_per_page=8),),
        )

    layout = [group("full"), group("sliding_window", 9, 3), group("full"), group("sliding_window", 17)]
    assert window_groups(layout) == (WindowGroup(1, 9, 3), WindowGroup(3, 17, 0))
    assert window_groups(layout[:1]) == ()
