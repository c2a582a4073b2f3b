"""The paged cache under random use: no page has two owners or none, and no prefix is served that was not computed (H1)."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from akv.host import Hold, PagedCache, PagedSequence
from akv.units import PageIndex
from akv.values.scope import Scope

T = 2
SCOPES = (Scope(), Scope(salt="a"))
#: Two tokens only, so that sequences share beginnings all the time.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class CacheMachine(RuleBasedStateMachine):
    """Writes into each page what it would hold, and looks that a shared prefix still holds exactly that."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[tuple[PagedSequence, Scope, list[int]]] = []
        self.holds: list[tuple[Hold, set[PageIndex]]] = []

    @initialize(first=st.integers(3, 12), second=st.integers(3, 12))
    def start(self, first: int, second: int) -> None:
        self.cache = PagedCache(T, (first, second))
        self.content: tuple[dict[int, object], dict[int, object]] = ({}, {})

    @rule(tokens=TOKENS, more=st.integers(-6, 6), booked=st.integers(0, 6), scope=st.sampled_from(SCOPES), reuse=st.booleans())
    def admit(self, tokens: list[int], more: int, booked: int, scope: Scope, reuse: bool) -> None:
        capacity, assured = max(0, len(tokens) + more), len(tokens) + booked
        expected = self.cache.match(tokens, scope) if reuse else 0
        available, cached = self.cache.available_blocks, self.cache.cached_blocks
        sequence = self.cache.admit(tokens, capacity, scope, reuse=reuse, booked_tokens=assured)
        if sequence is None:
            assert (self.cache.available_blocks, self.cache.cached_blocks) == (available, cached)
            # Shared blocks may be idle ones, so they count on both sides; without any, the answer must be exact.
            assert expected or self.cache.blocks_for(max(capacity, assured)) > available
            return
        assert sequence.local_tokens == expected
        for group, table in enumerate(sequence.page_tables()):
            for block in range(expected // T):
                assert self.content[group][table[block]] == (scope, tuple(tokens[: (block + 1) * T]))
            for page in table[expected // T :]:
                assert all(page not in pages for _, pages in self.holds if group == 0)
                self.content[group][page] = "not computed"
        self.live.append((sequence, scope, list(tokens)))

    @rule(data=st.data(), share=st.floats(0, 1))
    def compute(self, data: st.DataObject, share: float) -> None:
        if self.live:
            sequence, scope, tokens = data.draw(st.sampled_from(self.live))
            done = int(share * min(len(tokens), sequence.capacity_tokens))
            for group, table in enumerate(sequence.page_tables()):
                for block in range(sequence.local_tokens // T, done // T):
                    self.content[group][table[block]] = (scope, tuple(tokens[: (block + 1) * T]))
            sequence.commit(done)

    @rule(data=st.data(), token=st.integers(0, 1))
    def generate(self, data: st.DataObject, token: int) -> None:
        if self.live:
            sequence, _, tokens = data.draw(st.sampled_from(self.live))
            if sequence.grow(len(tokens) + 1):
                sequence.append([token])
                tokens.append(token)

    @rule(data=st.data(), share=st.floats(0, 1))
    def grow_into_what_is_booked(self, data: st.DataObject, share: float) -> None:
        if self.live:
            sequence, _, _ = data.draw(st.sampled_from(self.live))
            before = sequence.page_tables()
            assert sequence.grow(int(share * sequence.assured_tokens))
            for group, table in enumerate(sequence.page_tables()):
                assert table[: len(before[group])] == before[group]
                for page in table[len(before[group]) :]:
                    self.content[group][page] = "not computed"

    @rule(data=st.data(), hold=st.booleans())
    def leave(self, data: st.DataObject, hold: bool) -> None:
        if self.live:
            sequence, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            if hold:
                pages = set(sequence.page_tables()[0])
                self.holds.append((sequence.hold(), pages))
            sequence.release()

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.holds:
            self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))[0].release()

    @rule()
    def forget(self) -> None:
        self.cache.evict_idle()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.check() == []

    def teardown(self) -> None:
        for sequence, _, _ in self.live:
            sequence.release()
        for hold, _ in self.holds:
            hold.release()
        if hasattr(self, "cache"):
            assert self.cache.available_blocks == min(self.cache.page_counts)
            assert self.cache.check() == []


TestPagedCache = CacheMachine.TestCase
TestPagedCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
