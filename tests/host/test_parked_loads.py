"""Requests of any size on few pages, with loads that are slow, fail or are cancelled: everything finishes, no page is lost.

A host in virtual time, without an event loop: it decides as `akv.host` tells hosts to, and a step in which nothing moves and
nothing is waited for is a deadlock.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akv.host import PagedCache, PagedSequence, Window, youngest_behind

T = 2
CHUNK = 4
ATTEMPTS = 2


class Request:
    """What a client wants, and how far it got."""

    def __init__(
        self,
        number: int,
        prompt: list[int],
        *,
        loads: int,
        new_tokens: int = 1,
        load_s: int = 3,
        fails: int = 0,
        gives_up_at: int | None = None,
    ) -> None:
        self.number = number
        self.tokens = prompt
        self.prompt_tokens = len(prompt)
        #: Blocks that the pool has of it.
        self.loads = loads
        self.length = len(prompt) + new_tokens
        self.load_s = load_s
        #: Loads that fail.
        self.fails = fails
        self.gives_up_at = gives_up_at
        self.sequence: PagedSequence | None = None
        self.loaded_at: int | None = None
        self.failed = 0
        self.state = "queued"

    @property
    def over(self) -> bool:
        return self.state in {"complete", "gone"}

    def leave(self, state: str) -> None:
        """Give everything back."""
        if self.sequence is not None:
            self.sequence.release()
        self.sequence, self.state = None, state


class Host:
    """Passes, loads and admissions over one cache."""

    def __init__(self, cache: PagedCache, requests: Sequence[Request]) -> None:
        self.cache = cache
        self.requests = sorted(requests, key=lambda request: request.number)
        self.now = 0
        self.stalled: set[int] = set()
        self.preempted = 0

    def run(self) -> bool:
        """Serve all of them; False if they wait for each other."""
        while not all(request.over for request in self.requests):
            before = self._progress(), self.preempted
            self._clients_leave()
            self._loads_end()
            self._admit()
            self._pass()
            assert self.cache.check() == []
            waits = any(request.state == "loading" or request.gives_up_at for request in self.requests if not request.over)
            if (self._progress(), self.preempted) == before and not waits:
                return False
            self.now += 1
            assert self.now < 5000
        return True

    def _progress(self) -> list[tuple[str, int, int]]:
        return [
            (request.state, len(request.tokens), request.sequence.computed_tokens if request.sequence is not None else -1)
            for request in self.requests
        ]

    def _clients_leave(self) -> None:
        for request in self.requests:
            if request.gives_up_at == self.now and not request.over:
                self.stalled.discard(request.number)
                request.leave("gone")

    def _loads_end(self) -> None:
        for request in self.requests:
            if request.state == "loading" and request.loaded_at == self.now:
                assert request.sequence is not None
                if request.failed < request.fails:
                    request.failed += 1
                    request.leave("queued")  # and nothing of it is committed
                else:
                    request.sequence.commit(self._resume_at(request))
                    request.state = "running"

    def _resume_at(self, request: Request) -> int:
        return min(request.loads, (len(request.tokens) - 1) // T) * T

    def _admit(self) -> None:
        for request in self.requests:
            if request.state != "queued":
                continue
            if self.stalled and min(self.stalled) < request.number:
                return
            loads = request.failed < ATTEMPTS
            resume = self._resume_at(request) if loads else 0
            known = len(request.tokens)
            sequence = self.cache.admit(request.tokens, resume, booked_tokens=known)
            if sequence is None:
                return
            request.sequence, request.state = sequence, "running"
            if resume > sequence.local_tokens and sequence.prepare_load(resume):
                request.state, request.loaded_at = "loading", self.now + request.load_s

    def _pass(self) -> None:
        running = {request.number: request for request in self.requests if request.state == "running"}
        for number, request in list(running.items()):
            sequence = request.sequence
            if number not in running or sequence is None:
                continue  # it has just given way
            upto = min(len(request.tokens), sequence.computed_tokens + CHUNK)
            assured = sequence.assured_tokens
            if not sequence.grow(upto):
                assert upto > assured, "the rest of a prompt is booked"
                self.stalled.add(number)
                victim = youngest_behind(number, running)
                if victim is not None:
                    running.pop(victim).leave("queued")
                    self.stalled.discard(victim)
                    self.preempted += 1
                continue
            self.stalled.discard(number)
            sequence.prepare(upto)
            sequence.commit(upto)
            if upto < len(request.tokens):
                continue
            request.tokens.append(number)
            sequence.append([number])
            if len(request.tokens) == request.length:
                request.leave("complete")


def served(pages: int, requests: Sequence[Request]) -> Host:
    host = Host(PagedCache(T, [pages]), requests)
    assert host.run(), "they wait for each other"
    return host


@pytest.mark.parametrize(("pages", "first", "second"), [(7, (4, 1), (3, 1)), (8, (4, 2), (3, 1))])
def test_D7_two_requests_that_do_not_fit_together_both_finish(
    pages: int, first: tuple[int, int], second: tuple[int, int]
) -> None:
    def both() -> list[Request]:
        return [Request(at, [at] * (sum(part) * T), loads=part[0]) for at, part in enumerate((first, second))]

    host = served(pages, both())
    assert host.cache.available_blocks == pages
    assert host.preempted == 0


def test_D7_a_decoding_request_waits_for_parked_ones_and_preempts_who_has_joined() -> None:
    old = Request(0, [0] * 4, loads=0, new_tokens=12)
    young = Request(1, [1] * 12, loads=3, new_tokens=6, load_s=5)
    host = served(9, [old, young])
    assert host.preempted > 0
    assert [request.state for request in host.requests] == ["complete", "complete"]


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 14),  # prompt
        st.integers(0, 7),  # blocks in the pool
        st.integers(1, 8),  # new tokens
        st.integers(0, 4),  # seconds of a load
        st.integers(0, 2),  # loads that fail
        st.one_of(st.none(), st.integers(1, 30)),  # when its client gives up
        st.integers(0, 1),  # first token: some share their beginnings
    ),
    min_size=1,
    max_size=8,
)
GROUPS = st.sampled_from([(), (Window(),), (Window(), Window()), (Window(), Window(3)), (Window(), Window(4, 1), Window(2))])


@given(REQUESTS, GROUPS, st.integers(2, 14), st.integers(3, 12))
@settings(max_examples=150)
def test_D7_everything_always_finishes_and_no_page_is_lost(
    drawn: list[tuple[int, int, int, int, int, int | None, int]], groups: tuple[Window, ...], pages: int, window_pages: int
) -> None:
    counts = [window_pages if group.window_tokens else pages for group in groups] or [pages]
    cache = PagedCache(T, counts, groups or None, retention_tokens=0, chunk_tokens=CHUNK)
    requests = [
        Request(number, [first] * length, loads=loads, new_tokens=new, load_s=1 + load_s, fails=fails, gives_up_at=gives_up_at)
        for number, (length, loads, new, load_s, fails, gives_up_at, first) in enumerate(drawn)
        if cache.fits(length + new)
    ]
    host = Host(cache, requests)
    assert host.run(), "they wait for each other"
    assert all(request.over for request in requests)
    cache.evict_idle()
    assert cache.free_pages == tuple(counts)
    assert cache.check() == []
