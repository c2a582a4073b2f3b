"""What an adapter of akv promises its engine's users, whatever the engine: a suite for the adapter with a server around it.

The server is the engine, or a stand-in that calls the adapter's hooks in the engine's order. It needs no model: the content of
a page has to follow from what its KV depends on, and what a forward reads has to be compared with that
(`akv_testing.engines.tensorrt_llm` does). The pool is a `FakePool`, so that servers share a store and faults can be scripted.
"""

# ruff: noqa: D102, N802 - a test's name says what holds, and by which rule

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import pytest

from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing.pool import FakePool
from akv_testing.store import FakeStore


class AdapterServer(Protocol):
    """A server process. Requests run when `run()` or another method runs passes; blocks of `tokens_per_block` tokens."""

    @property
    def tokens_per_block(self) -> int:
        """T."""
        ...

    @property
    def pool(self) -> FakePool:
        """Its client of the store."""
        ...

    def submit(self, tokens: Sequence[int], *, new_tokens: int = 1, salt: str | None = None) -> int:
        """A client asks for `new_tokens` tokens behind these. Returns what the other methods call the request."""
        ...

    def run(self) -> None:
        """Passes until every request has ended and has given its pages back."""
        ...

    def run_until_loading(self, request: int) -> None:
        """Passes until the request's pages are being loaded."""
        ...

    def run_until_generating(self, request: int, tokens: int) -> None:
        """Passes until so many tokens were generated."""
        ...

    def planned_in_vain(self) -> None:
        """A pass that is planned and does not run. Where the engine has none: nothing."""
        ...

    def preempt(self, request: int) -> None:
        """Its pages are wanted for another; it goes on later."""
        ...

    def cancel(self, request: int) -> None:
        """Its client is gone."""
        ...

    def hold(self, kind: CallKind) -> Callable[[], None]:
        """The store's next call of a kind hangs until what this returns is called."""
        ...

    def tokens_of(self, request: int) -> list[int]:
        """The prompt and what was generated."""
        ...

    def loaded_tokens(self, request: int) -> int:
        """Tokens of the prompt that were not computed when it was served last."""
        ...

    def left_behind(self) -> list[str]:
        """Ends the server. What it has not given back, and wrong bytes that a forward read: nothing, as a rule."""
        ...


class AdapterConformance:
    """Subclass it with a fixture `new_server`: given a store, it makes a server of an adapter that reads and saves."""

    @pytest.fixture
    def store(self) -> FakeStore:
        return FakeStore(time.monotonic)

    @pytest.fixture
    def server(self, store: FakeStore, new_server: Callable[[FakeStore], AdapterServer]) -> AdapterServer:
        """One whose store holds `PROMPT` from another server."""
        first = new_server(store)
        first.submit(PROMPT)
        first.run()
        assert first.left_behind() == []
        return new_server(store)

    def test_L1_what_one_server_computed_another_loads_but_for_the_last_token(
        self, server: AdapterServer, store: FakeStore, new_server: Callable[[FakeStore], AdapterServer]
    ) -> None:
        size = server.tokens_per_block
        whole, cut, longer = server.submit(PROMPT), server.submit(PROMPT[: 2 * size]), server.submit([*PROMPT, 1, 2, 3])
        server.run()
        assert server.loaded_tokens(whole) == len(PROMPT) // size * size
        assert server.loaded_tokens(cut) == size
        assert server.loaded_tokens(longer) == len(PROMPT) // size * size
        assert server.left_behind() == []

    def test_K1_nobody_is_answered_from_another_salts_pages(self, server: AdapterServer) -> None:
        own, other = server.submit(PROMPT, salt="a"), server.submit([7, *PROMPT])
        server.run()
        assert (server.loaded_tokens(own), server.loaded_tokens(other)) == (0, 0)
        assert server.left_behind() == []

    def test_S12_the_next_turn_of_a_conversation_finds_the_answer(
        self, server: AdapterServer, store: FakeStore, new_server: Callable[[FakeStore], AdapterServer]
    ) -> None:
        size = server.tokens_per_block
        turn = server.submit(PROMPT, new_tokens=2 * size)
        server.run()
        said = server.tokens_of(turn)
        assert server.left_behind() == []
        other = new_server(store)
        following = other.submit([*said, 1, 2, 3])
        other.run()
        # The last sampled token was never fed back.
        assert other.loaded_tokens(following) == (len(said) - 1) // size * size
        assert other.left_behind() == []

    def test_D1_others_go_on_while_a_request_loads(self, server: AdapterServer) -> None:
        release = server.hold(CallKind.GET)
        loading = server.submit(PROMPT)
        server.run_until_loading(loading)
        other = server.submit(OTHER, new_tokens=3)
        server.run_until_generating(other, 2)
        release()
        server.run()
        assert server.loaded_tokens(loading) > 0
        assert server.left_behind() == []

    def test_D3_a_page_that_was_lost_costs_its_request_a_computation(self, server: AdapterServer) -> None:
        server.pool.answer("get", KeyState.MISSING, skip=1)
        losing, other = server.submit(PROMPT), server.submit(OTHER)
        server.run()
        assert server.loaded_tokens(losing) < len(PROMPT) // server.tokens_per_block * server.tokens_per_block
        assert server.loaded_tokens(other) == 0
        assert server.left_behind() == []

    def test_D3_a_pool_that_never_delivers_holds_nobody_up_for_ever(self, server: AdapterServer) -> None:
        server.pool.answer("get", KeyState.HOLDER_LOST, times=None)
        losing = server.submit(PROMPT)
        server.run()
        assert server.loaded_tokens(losing) == 0
        assert server.left_behind() == []

    def test_D6_a_request_that_is_cancelled_while_it_loads_gives_its_pages_back(self, server: AdapterServer) -> None:
        release = server.hold(CallKind.GET)
        loading = server.submit(PROMPT)
        server.run_until_loading(loading)
        server.cancel(loading)
        release()
        server.run()
        assert server.left_behind() == []

    def test_D6_a_request_that_is_cancelled_while_it_saves_gives_its_pages_back(self, server: AdapterServer) -> None:
        release = server.hold(CallKind.PUT)
        request = server.submit(OTHER, new_tokens=9)
        server.run_until_generating(request, 3)
        server.cancel(request)
        release()
        server.run()
        assert server.left_behind() == []

    def test_D8_a_preempted_request_goes_on_and_nothing_wrong_is_stored(
        self, server: AdapterServer, store: FakeStore, new_server: Callable[[FakeStore], AdapterServer]
    ) -> None:
        request = server.submit(OTHER, new_tokens=2 * server.tokens_per_block)
        server.run_until_generating(request, server.tokens_per_block)
        server.preempt(request)
        server.run()
        said = server.tokens_of(request)
        assert server.left_behind() == []
        other = new_server(store)
        following = other.submit([*said, 1])
        other.run()
        assert other.loaded_tokens(following) > 0
        assert other.left_behind() == []

    def test_S2_what_a_pass_that_did_not_run_would_have_saved_the_next_one_saves(
        self, server: AdapterServer, store: FakeStore, new_server: Callable[[FakeStore], AdapterServer]
    ) -> None:
        server.submit(OTHER)
        server.planned_in_vain()
        server.planned_in_vain()
        server.run()
        assert server.left_behind() == []
        other = new_server(store)
        following = other.submit(OTHER)
        other.run()
        assert other.loaded_tokens(following) == len(OTHER) // other.tokens_per_block * other.tokens_per_block
        assert other.left_behind() == []

    def test_O7_without_its_pool_a_server_serves(self, server: AdapterServer, store: FakeStore) -> None:
        store.down = True
        request = server.submit(PROMPT, new_tokens=3)
        server.run()
        assert server.loaded_tokens(request) == 0
        assert server.left_behind() == []


#: Prompts that end inside a block, whatever the block size.
PROMPT, OTHER = list(range(1000, 1203)), list(range(5000, 5171))
