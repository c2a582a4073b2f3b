"""The paged cache with windows under random use, against a naive model that reads token by token (H1, W1, W2, W8, D2)."""

from collections import Counter
from collections.abc import Iterator, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from akv.host import Hold, PagedCache, PagedSequence, Window
from akv.plan.tokens import encode_confirmed
from akv.values.scope import Scope

SCOPES = (Scope(), Scope(salt="a"))
#: Two tokens only, so that sequences share beginnings all the time.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
WINDOW = st.builds(Window, st.integers(1, 9), st.sampled_from([0, 0, 1, 5]))


class Running:
    """A sequence and what the model knows of it."""

    def __init__(self, pages: PagedSequence, scope: Scope, tokens: list[int]) -> None:
        self.pages = pages
        self.scope = scope
        self.tokens = tokens
        #: Whether a hold was taken: then it goes no further than it was prepared.
        self.held = False
        self.prepared = pages.local_tokens

    def kv(self, position: int) -> object:
        """What stands in the page of a token once it was computed."""
        return self.scope, tuple(self.tokens[: position + 1])


class WindowMachine(RuleBasedStateMachine):
    """Writes each token's KV where the table says, and reads all that attention reads. Free pages are overwritten at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Running] = []
        self.holds: list[tuple[Hold, Running, Sequence[Sequence[int]]]] = []
        self.named: list[tuple[tuple[int, ...], ...]] = []

    @initialize(data=st.data(), size=st.integers(1, 4), chunk=st.sampled_from([None, 1, 3, 8]))
    def start(self, data: st.DataObject, size: int, chunk: int | None) -> None:
        first = data.draw(st.sampled_from([Window(), Window(), Window(4, 1)]))
        self.groups = [first, data.draw(WINDOW), data.draw(WINDOW)][: data.draw(st.integers(2, 3))]
        counts = [data.draw(st.integers(4, 30)) for _ in self.groups]
        self.size, self.chunk, self.retention = size, chunk, data.draw(st.sampled_from([0, size, 7, 1024]))
        self.cache = PagedCache(size, counts, self.groups, retention_tokens=self.retention, chunk_tokens=chunk)
        #: By group, page and place in the page.
        self.content: dict[tuple[int, int, int], object] = {}

    @rule(tokens=TOKENS, more=st.integers(0, 8), scope=st.sampled_from(SCOPES), reuse=st.booleans())
    def admit(self, tokens: list[int], more: int, scope: Scope, reuse: bool) -> None:
        expected = self.longest_match(tokens, scope) if reuse else 0
        assert not reuse or self.cache.match(tokens, scope) == expected
        before = (self.cache.free_pages, self.cache.available_pages, self.cache.cached_blocks)
        pages = self.cache.admit(tokens, len(tokens) + more, scope, reuse=reuse)
        if pages is None:
            assert before == (self.cache.free_pages, self.cache.available_pages, self.cache.cached_blocks)
            # Nobody waits for pages that nobody has.
            assert self.live or self.holds or self.named or not self.cache.fits(len(tokens) + more)
            return
        assert pages.local_tokens == expected
        request = Running(pages, scope, list(tokens))
        self.live.append(request)
        for group, table in enumerate(pages.page_tables()):
            assert not any((group, page) in self.in_quarantine() for page in table)
            if self.groups[group].window_tokens:  # and nothing that is stale there (W3)
                assert {block for block, page in enumerate(table) if page != -1} == set(self.blocks_read(group, expected))
        self.read(request, expected, pages.page_tables())

    @precondition(lambda self: self.running())
    @rule(data=st.data(), count=st.integers(1, 12), runs=st.booleans())
    def compute(self, data: st.DataObject, count: int, runs: bool) -> None:
        request = data.draw(st.sampled_from(self.running()))
        begin = request.pages.computed_tokens
        count = min(count, len(request.tokens) - begin, self.chunk or count)
        request.pages.prepare(begin + count)
        request.prepared = begin + count
        if runs:
            self.run_pass(request)

    @precondition(lambda self: any(request.held for request in self.live))
    @rule(data=st.data())
    def end_the_pass_of_a_held_one(self, data: st.DataObject) -> None:
        self.run_pass(data.draw(st.sampled_from([request for request in self.live if request.held])))

    def run_pass(self, request: Running) -> None:
        """Compute what was prepared."""
        tables, positions = request.pages.page_tables(), range(request.pages.computed_tokens, request.prepared)
        for position in positions:
            self.write(request, position, tables)
        for position in positions:
            self.read(request, position, tables)
        request.pages.commit(request.prepared)
        self.look_at_windows(request)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), more=st.integers(1, 6), ends=st.sampled_from(["loaded", "failed", "left"]))
    def load(self, data: st.DataObject, more: int, ends: str) -> None:
        request = data.draw(st.sampled_from(self.running()))
        local = request.pages.computed_tokens
        end = (local // self.size + more) * self.size
        if local % self.size or end >= len(request.tokens):
            return
        if not request.pages.prepare_load(end):
            assert local
            request.prepared = local
            return
        tables = request.pages.page_tables()
        for group in range(len(self.groups)):
            for block in {*self.blocks_read(group, local), *self.blocks_read(group, end)}:
                assert tables[group][block] != -1
        self.read(request, local, tables)
        for position in range(local, end):
            self.write(request, position, tables, everywhere=False)
        if ends == "loaded":
            request.pages.commit(end)
            request.prepared = end
            self.read(request, end, request.pages.page_tables())
            for group, window in enumerate(self.groups):
                held = {block for block, page in enumerate(request.pages.page_tables()[group]) if page != -1}
                assert not window.window_tokens or held == set(self.blocks_read(group, end))
        elif ends == "failed":
            request.pages.rewind(local)
            request.prepared = local
        else:
            self.live.remove(request)
            self.release(request.pages, data.draw(st.sampled_from(self.namings(data, request.pages.page_tables()))))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), token=st.integers(0, 1))
    def generate(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.running()))
        if request.pages.grow(len(request.tokens) + 1):
            request.pages.append([token])
            request.tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), holds=st.booleans())
    def leave(self, data: st.DataObject, holds: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        tables = request.pages.page_tables()
        if holds and not request.held:
            self.holds.append((request.pages.hold(), request, tables))
            request.held = True
            return
        self.live.remove(request)
        self.release(request.pages, data.draw(st.sampled_from(self.namings(data, tables))))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        hold, _, tables = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.release(hold, data.draw(st.sampled_from(self.namings(data, tables))))

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def call_returns(self, data: st.DataObject) -> None:
        self.cache.pages_released(self.named.pop(data.draw(st.integers(0, len(self.named) - 1))))

    @rule()
    def forget(self) -> None:
        self.cache.evict_idle()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.check() == []
            for group, free in enumerate(self.cache.free_page_lists()):
                for page in free:
                    assert (group, page) not in self.in_quarantine()
                    for place in range(self.size):
                        self.content.pop((group, page, place), None)

    def teardown(self) -> None:
        for request in self.live:
            request.pages.release()
        for hold, _, _ in self.holds:
            hold.release()
        for named in self.named:
            self.cache.pages_released(named)
        if hasattr(self, "cache"):
            assert self.cache.check() == []
            self.cache.evict_idle()
            assert self.cache.free_pages == self.cache.page_counts
            assert self.cache.check() == []

    def running(self) -> list[Running]:
        """Those that have a token to compute."""
        return [request for request in self.live if not request.held and request.pages.computed_tokens < len(request.tokens)]

    def positions_read(self, group: int, position: int) -> Iterator[int]:
        """What the token at this position reads before its own."""
        window, sinks = self.groups[group]
        return (at for at in range(position) if not window or at > position - window or at < sinks)

    def blocks_read(self, group: int, position: int) -> Iterator[int]:
        return (at // self.size for at in self.positions_read(group, position))

    def write(self, request: Running, position: int, tables: Sequence[Sequence[int]], *, everywhere: bool = True) -> None:
        others: list[Sequence[Sequence[int]]]
        others = [other.pages.page_tables() for other in self.live if other is not request]
        others += [held for _, owner, held in self.holds if owner is not request]
        for group, table in enumerate(tables):
            page = table[position // self.size]
            if page == -1:
                assert not everywhere
                continue
            # A hold may have named it, of a sequence whose pass was under way: that one had the page before.
            assert request.held or (group, page) not in self.in_quarantine()
            assert not any(page in other[group] for other in others)
            self.content[group, page, position % self.size] = request.kv(position)

    def read(self, request: Running, position: int, tables: Sequence[Sequence[int]]) -> None:
        for group, table in enumerate(tables):
            for at in self.positions_read(group, position):
                place = group, table[at // self.size], at % self.size
                assert self.content.get(place) == request.kv(at), (position, at, place)

    def look_at_windows(self, request: Running) -> None:
        """What no token from the retained history on will read is given back, to the page."""
        history = max(0, request.pages.computed_tokens - self.retention)
        for group, table in enumerate(request.pages.page_tables()):
            read = set(self.blocks_read(group, history))
            for block, page in enumerate(table[: history // self.size]):
                assert page == -1 or block in read

    def longest_match(self, tokens: list[int], scope: Scope) -> int:
        """Over what is in the tree: the latest block's end at which all that the next token reads is there."""
        encoded, size = bytes(encode_confirmed(tokens, 0)), 8 * self.size
        most = (len(tokens) - 1) // self.size
        chain = self.cache._holdings.tree.match(scope, [encoded[at : at + size] for at in range(0, most * size, size)])
        windows = [group for group, window in enumerate(self.groups) if window.window_tokens]
        ends = (
            end * self.size
            for end in range(len(chain), -1, -1)
            if all(
                chain[block].windows[at] is not None
                for at, group in enumerate(windows)
                for block in self.blocks_read(group, end * self.size)
            )
        )
        return next(ends)

    def namings(self, data: st.DataObject, tables: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], ...]]:
        """No page in quarantine, or some of these."""
        own = [sorted(set(table) - {-1}) for table in tables]
        some = tuple(
            tuple(data.draw(st.lists(st.sampled_from(pages), unique=True, max_size=3))) if pages else () for pages in own
        )
        return [(), some]

    def release(self, holder: Hold, named: tuple[tuple[int, ...], ...]) -> None:
        holder.release(quarantined=named)
        self.named.append(named)

    def in_quarantine(self) -> Counter[tuple[int, int]]:
        return Counter((group, page) for named in self.named for group, pages in enumerate(named) for page in pages)


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
