"""Lookups of layouts with window groups: what is asked and offered, and what a slow or silent pool makes of it (W7, W8)."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from akv import EngineContractError, LookupOutcome
from akv.flow.calls import CallDesk
from akv.flow.lookup import LookupAnswer, LookupParts, look_up
from akv.flow.reserve import reserve
from akv.ownership.negative_keys import NegativeKeys
from akv.ownership.requests import Requests
from akv.ownership.store_calls import StoreCalls
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import ServerKeys
from akv.plan.recent_chains import RecentChains
from akv.plan.window_search import window_groups
from akv.ports.calls import CallKind
from akv.ports.pool import KeyAnswer, KeyState
from akv.services.poller import StreamPoller
from akv.settings import check_settings
from akv.units import NO_PAGE
from akv.values.layout import Layout
from akv.values.offers import Offer
from akv.values.scope import EMPTY_SCOPE
from akv_testing import settle, tiny_layout
from akv_testing.calls import Latency
from akv_testing.server import FakeServer

pytestmark = pytest.mark.anyio

#: Ten whole blocks of four tokens, and two tokens.
TOKENS = tuple(range(42))
EVERY = range(10)
FULL, REWOUND, RECOVERED, WINDOW_MISS = (
    LookupOutcome.FULL,
    LookupOutcome.REWOUND,
    LookupOutcome.RECOVERED,
    LookupOutcome.WINDOW_MISS,
)


def layout_of(*windows: tuple[int, int] | None) -> Layout:
    """A layout of groups with these (W, S); None for full attention."""
    plain = tiny_layout(groups=len(windows))
    return msgspec.structs.replace(
        plain,
        groups=tuple(
            group
            if window is None
            else msgspec.structs.replace(group, attention="sliding_window", window_tokens=window[0], sink_tokens=window[1])
            for group, window in zip(plain.groups, windows, strict=True)
        ),
    )


#: With W = 9 and T = 4 an end at q blocks reads [q - 2, q).
MIXED = layout_of(None, (9, 0))


class Seeker:
    """What a lookup works with, on a fake server's store."""

    def __init__(self, *stored: Iterable[int], layout: Layout = MIXED, latency: Latency | None = None) -> None:
        self.server = FakeServer(layout=layout, latency=latency)
        self.records = StoreCalls()
        hashes = self.server.hashes(TOKENS)
        for group, blocks in enumerate(stored):
            keys = self.server.keys_of(TOKENS)[group]
            for block in blocks:
                self.server.store.write(keys[block], self.server.content(hashes[block], group))

    @asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[Callable[..., Any]]:
        """Gives `look(local_tokens, tokens)`."""
        parts = LookupParts(
            **{
                "pool": self.server.pool,
                "desk": CallDesk(self.server.runner, self.records, StreamPoller(0.001)),
                "keys": ServerKeys.of_settings(check_settings(self.server.settings), self.server.layout),
                "groups": len(self.server.layout.groups),
                "windows": window_groups(self.server.layout.groups),
                "probe_head": 64,
                "probe_chunk": 512,
                "probe_concurrency": 2,
                "rewind_tokens": 8,
                "window_fallback": True,
                "turn": anyio.Lock(),
                "recent": RecentChains(0),
                "negative": NegativeKeys(len(self.server.layout.groups), 15.0),
                "deadline_s": 1.0,
                **settings,
            }
        )

        async def look(local_tokens: int = 0, tokens: Sequence[int] = TOKENS) -> LookupAnswer:
            chain = Chain(scope_seed(EMPTY_SCOPE), self.server.tokens_per_block)
            chain.append(tokens)
            return await look_up(parts, chain, "r", local_tokens)

        async with anyio.create_task_group() as group:
            await group.start(self.server.runner.serve)
            yield look
            group.cancel_scope.cancel()

    @property
    def calls(self) -> list[int]:
        """Keys of each call."""
        return [len(call.keys) for call in self.server.pool.calls]

    def asked(self, group: int) -> list[int]:
        """The blocks of a group that were asked for, in order."""
        keys = self.server.keys_of(TOKENS)[group]
        return [keys.index(key) for call in self.server.pool.calls for key in call.keys if key in keys]


@pytest.mark.parametrize(
    ("full", "window", "local_tokens", "ends", "outcome"),
    [
        (EVERY, EVERY, 0, (32, 36, 40), FULL),
        (EVERY, {8, 9}, 0, (40,), FULL),
        (EVERY, {7, 8}, 0, (36,), REWOUND),
        (EVERY, {5, 6}, 0, (28,), RECOVERED),
        (EVERY, {4, 7, 9}, 0, (), WINDOW_MISS),
        # A hole in the prefix is not the window's: full is the latest end before it.
        ({0, 1, 2, 4}, {1, 2}, 0, (12,), FULL),
        (range(1, 10), EVERY, 0, (), LookupOutcome.FULL_ATTENTION_MISS),
        # Beyond the local match, whose pages are the engine's own.
        (range(6, 10), {6}, 24, (4,), RECOVERED),
        (range(6, 10), {6, 7, 8, 9}, 24, (8, 12, 16), FULL),
        (EVERY, EVERY, 40, (), LookupOutcome.SKIPPED),
        (EVERY, EVERY, 39, (), LookupOutcome.UNALIGNED),
    ],
)
async def test_W7_an_offer_ends_where_every_window_is_whole(
    full: Iterable[int], window: Iterable[int], local_tokens: int, ends: tuple[int, ...], outcome: LookupOutcome
) -> None:
    async with Seeker(full, window).running() as look:
        answer = await look(local_tokens)
    assert (answer.tokens, answer.ends, answer.outcome) == (ends[-1] if ends else 0, ends, outcome)


@pytest.mark.parametrize(("fallback", "tokens"), [(True, 28), (False, 0)])
async def test_W7_the_fallback_can_be_turned_off(fallback: bool, tokens: int) -> None:
    async with Seeker(EVERY, {5, 6}).running(window_fallback=fallback) as look:
        assert (await look()).tokens == tokens


async def test_W7_a_layout_of_windows_alone_is_searched_back_from_the_prompts_end() -> None:
    seeker = Seeker({0, 5, 6}, {4, 5, 6}, layout=layout_of((9, 3), (13, 0)))
    async with seeker.running() as look:
        answer = await look()
        assert (answer.tokens, answer.outcome, answer.hole) == (28, RECOVERED, None)
        assert (await look(0, tuple(range(500)))).tokens == 28


async def test_W7_window_pages_are_asked_for_once_and_only_around_the_hit() -> None:
    seeker = Seeker(EVERY, {5, 6}, layout=MIXED)
    async with seeker.running() as look:
        answer = await look(8)
    assert sorted(seeker.asked(1)) == sorted(set(seeker.asked(1)))
    # The prefix; blocks 6 to 9 for the ends 8 to 10; the walk's 2, 3 and 5; what the ends 6 and 7 read besides, block 4.
    assert seeker.calls == [8, 4, 3, 1]
    assert (answer.tokens, answer.ends) == (20, (20,))
    assert answer.probed == 16


async def test_L3_a_cold_prompt_costs_one_small_call() -> None:
    seeker = Seeker()
    async with seeker.running(probe_head=4) as look:
        assert (await look()).outcome is LookupOutcome.FULL_ATTENTION_MISS
    assert seeker.calls == [4]


async def test_L3_a_full_hit_costs_one_call_more_than_without_windows() -> None:
    seeker = Seeker(EVERY, EVERY)
    async with seeker.running() as look:
        assert (await look()).tokens == 40
    assert seeker.calls == [10, 4]


async def test_L3_without_window_groups_nothing_is_asked_beside_the_prefix() -> None:
    seeker = Seeker(EVERY, range(7), layout=layout_of(None, None))
    async with seeker.running() as look:
        assert await look() == LookupAnswer(28, FULL, 20, 7, None)
    assert seeker.calls == [20]


@pytest.mark.parametrize(("at_a_time", "rounds"), [(1, 5), (2, 3), (9, 3)])
async def test_L3_portions_of_one_step_are_in_flight_together_and_no_more_than_allowed(at_a_time: int, rounds: int) -> None:
    seeker = Seeker(EVERY, EVERY, layout=MIXED, latency=Latency(probe_s=0.01))
    async with seeker.running(rewind_tokens=1024, probe_chunk=2, probe_concurrency=at_a_time) as look:
        began = anyio.current_time()
        assert (await look()).tokens == 40
        # The head, and five portions of two keys.
        assert anyio.current_time() - began == pytest.approx(0.01 * (1 + rounds))
    assert seeker.calls == [10, 2, 2, 2, 2, 2]
    assert seeker.server.runner.most_running[CallKind.PROBE] == min(at_a_time, 2)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
async def test_L4_past_the_deadline_the_answer_is_a_miss_whichever_call_hangs(nth: int) -> None:
    seeker = Seeker(EVERY, {1, 2})
    gate = seeker.server.runner.hold(CallKind.PROBE, nth=nth)
    async with seeker.running(deadline_s=0.5) as look:
        answer = await look()
        assert (answer.tokens, answer.ends, answer.outcome) == (0, (), LookupOutcome.DEADLINE)
        assert anyio.current_time() == pytest.approx(0.5)
        gate.release()
        await settle()
        assert (await look()).tokens == 12
    assert seeker.records.outstanding == 0


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
async def test_D6_a_lookup_that_is_cancelled_in_any_of_its_calls_holds_nothing(nth: int) -> None:
    seeker = Seeker(EVERY, {1, 2})
    gate = seeker.server.runner.hold(CallKind.PROBE, nth=nth)
    async with seeker.running() as look:
        with anyio.move_on_after(0.1) as scope:
            await look()
        assert scope.cancelled_caught
        assert anyio.current_time() == pytest.approx(0.1)
        assert seeker.records.outstanding == seeker.records.given_up == 1
        gate.release()
        await settle()
        assert seeker.records.outstanding == 0
        assert (await look()).tokens == 12


async def test_L5_asking_again_gives_what_a_fresh_lookup_would() -> None:
    seeker = Seeker(EVERY, {3, 4, 7, 8})
    async with seeker.running() as look:
        answers = [await look(local_tokens) for local_tokens in (0, 20, 36, 0, 20, 36)]
        assert answers[:3] == answers[3:]
        assert [answer.tokens for answer in answers[:3]] == [36, 16, 0]


@pytest.mark.parametrize(
    ("window", "missing"),
    [
        (EVERY, []),
        # Of the ends within the rewind every page that matters, and no other; then further back.
        ({6, 7, 9}, [8]),
        ({2, 3, 9}, [0, 1, 4, 5, 6, 7, 8]),
    ],
)
async def test_S13_a_lookup_names_the_window_pages_that_it_asked_for_in_vain(
    window: Iterable[int], missing: list[int]
) -> None:
    seeker = Seeker(EVERY, window)
    hashes = seeker.server.hashes(TOKENS)
    async with seeker.running() as look:
        answer = await look()
    assert answer.missing == (((1, [hashes[block] for block in missing]),) if missing else ())
    assert {hashes[block] for block in missing} == {hashes[block] for block in seeker.asked(1) if block not in set(window)}


@pytest.mark.parametrize(
    "answer", [state for state in KeyState if state is not KeyState.OK] + [KeyAnswer(KeyState.REFUSED, 7)]
)
async def test_L2_a_window_page_counts_only_if_the_pool_says_that_it_is_there(answer: KeyState | KeyAnswer) -> None:
    seeker = Seeker(EVERY, EVERY)
    seeker.server.pool.answer("probe", answer, key=seeker.server.keys_of(TOKENS)[1][9])
    async with seeker.running() as look:
        assert ((found := await look()).tokens, found.outcome) == (36, REWOUND)


@pytest.mark.parametrize("change", [lambda answers: answers[:-1], lambda answers: [*answers, answers[0]], lambda answers: []])
@pytest.mark.parametrize(("nth", "outcome"), [(1, LookupOutcome.FULL_ATTENTION_MISS), (2, RECOVERED)])
async def test_L2_a_list_of_another_length_says_nothing_of_any_key(
    change: Callable[[list[KeyAnswer]], list[KeyAnswer]],
    nth: int,
    outcome: LookupOutcome,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeker, calls = Seeker(EVERY, EVERY), [0]
    probe = seeker.server.pool.probe

    def changed(keys: Sequence[str]) -> list[KeyAnswer]:
        calls[0] += 1
        return change(probe(keys)) if calls[0] == nth else probe(keys)

    monkeypatch.setattr(seeker.server.pool, "probe", changed)
    async with seeker.running() as look:
        assert (await look()).outcome is outcome


async def test_L2_a_pool_that_answers_nobody_any_more_is_unavailable_and_not_asked_further() -> None:
    seeker = Seeker(EVERY, {1, 2})
    seeker.server.pool.answer("probe", KeyState.UNAVAILABLE, key=lambda key: "/lg1/" in key, times=None)
    async with seeker.running() as look:
        assert await look() == LookupAnswer(0, LookupOutcome.UNAVAILABLE, 14, None, ())
    assert seeker.calls == [10, 4]


async def test_L2_what_the_pool_said_before_it_fell_silent_is_still_offered() -> None:
    seeker = Seeker(EVERY, {2, 3})
    behind_the_head = seeker.server.keys_of(TOKENS)[0][4:]
    seeker.server.pool.answer("probe", KeyState.UNAVAILABLE, key=lambda key: key in behind_the_head, times=None)
    async with seeker.running(probe_head=4) as look:
        answer = await look()
    assert (answer.tokens, answer.outcome, answer.hole) == (16, FULL, 4)


async def test_an_error_of_a_window_probe_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seeker = Seeker(EVERY, EVERY)
    probe = seeker.server.pool.probe

    def fails(keys: Sequence[str]) -> list[KeyAnswer]:
        if "/lg1/" in keys[0]:
            raise ZeroDivisionError
        return probe(keys)

    monkeypatch.setattr(seeker.server.pool, "probe", fails)
    async with seeker.running(probe_chunk=2, probe_concurrency=1) as look:
        with pytest.raises(ZeroDivisionError):
            await look()


def test_W8_a_load_covers_what_is_read_after_resuming_and_its_hashes_follow_the_blocks() -> None:
    layout = layout_of(None, (9, 9))
    chain = Chain(scope_seed(EMPTY_SCOPE), 4)
    chain.append(TOKENS)
    requests = Requests(groups=2, backoff_s=0.1)
    record = requests.open("r", chain, reads_cache=True)
    offer = Offer(
        request_id="r",
        incarnation=record.incarnation,
        local_tokens=4,
        tokens=36,
        outcome=FULL,
        tokens_per_block=4,
        ends=(28, 36),
    )
    table = [list(range(10)), [0, 11, 12, *[NO_PAGE] * 5, 18, 19]]

    def take(honoured: int) -> Any:
        return reserve(requests, record, offer, honoured, table, (20, 20), 4, window_groups(layout.groups))

    with pytest.raises(EngineContractError, match="all or nothing"):
        take(28)
    order, hold = take(36)
    hashes = chain.hashes(0, 10)
    assert [(group.group, group.blocks, group.pages) for group in order.groups] == [
        (0, tuple(range(1, 10)), tuple(range(1, 10))),
        (1, (1, 2, 8, 9), (11, 12, 18, 19)),
    ]
    assert [group.hashes for group in order.groups] == [tuple(hashes[1:]), tuple(hashes[block] for block in (1, 2, 8, 9))]
    assert (hold.local_tokens, hold.tokens) == (4, 36)
