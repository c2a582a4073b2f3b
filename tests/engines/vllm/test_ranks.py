"""Tensor-parallel ranks in processes of their own: what is said to them is pickled, and vLLM counts their answers (D3, L2)."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from akv.errors import SettingsError
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing import FakePool, FakeStore
from akv_testing.conformance.adapter import AdapterConformance, AdapterServer
from akv_testing.ports import tiny_layout
from akv_testing.ranked_server import RankedServer
from akv_testing.ranked_vllm_engine import Aggregator, RankedVllmEngine
from akv_testing.traffic import LONG, TOKENS
from akv_testing.vllm_objects import Status, VllmRequest
from akv_testing.window_server import window_layout

from .test_conformance import BLOCKS, Driven


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., RankedVllmEngine]]:
    """Makes engines of two ranks; of one layer group unless a server is given."""
    engines: list[RankedVllmEngine] = []

    def one(server: RankedServer | None = None, **arguments: Any) -> RankedVllmEngine:
        ranked = RankedServer(layout=tiny_layout()) if server is None else server
        engines.append(RankedVllmEngine(ranked, name=f"ranks {len(engines)}", **arguments))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()
        assert engine.left_behind or [rank.pool.registered for rank in engine.ranked.ranks] == [[], []]
        assert engine.aggregator.half_said == []


class DrivenRanks(Driven):
    """As in one process; faults are those of rank 0, on its own loop."""

    def __init__(self, engine: RankedVllmEngine) -> None:
        super().__init__(engine)
        self._ranks = engine

    def hold(self, kind: CallKind) -> Callable[[], None]:
        _, call = self._ranks.devices[0]
        gate = call(self._ranks.server.runner.hold, kind)
        return lambda: call(gate.release)

    def left_behind(self) -> list[str]:
        wrong = self._ranks.ranked.wrong_values()
        held = [f"block {block.block_id}" for block in self._ranks.pool.blocks[1:] if block.ref_cnt]
        known = [f"request {name}" for name in self._ranks.session.requests]
        self._ranks.close()
        return [*wrong, *held, *known, *map(str, self._ranks.aggregator.half_said)]


@pytest.fixture(params=[True, False], ids=["ahead", "in step"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestAkvConnectorOfRanks(AdapterConformance):
    @pytest.fixture
    def new_server(self, make_ranks: Any, ahead: bool) -> Callable[[FakeStore], AdapterServer]:
        def one(store: FakeStore) -> AdapterServer:
            server = RankedServer(layout=tiny_layout(), store=store, pages=BLOCKS, slots=BLOCKS)
            return DrivenRanks(make_ranks(server, ahead=ahead, blocks=BLOCKS))

        return one


def stored(engine: RankedVllmEngine, tokens: Any) -> list[int]:
    return engine.ranked.stored_blocks(tokens)


def fails(pool: FakePool) -> None:
    """Every get of this rank fails from now on."""
    get = pool.get

    def none(keys: Any, *arguments: Any) -> Any:
        answers = get(keys, *arguments)
        return [type(answer)(KeyState.MISSING) for answer in answers]

    pool.get = none  # type: ignore[method-assign, assignment]


def test_L2_what_two_ranks_computed_another_engine_s_ranks_load(make_ranks: Any, ahead: bool) -> None:
    first = make_ranks(ahead=ahead)
    first.add("a", TOKENS)
    first.run()
    assert stored(first, TOKENS) == [0, 1, 2, 3]
    second = make_ranks(RankedServer(layout=tiny_layout(), store=first.ranked.store), ahead=ahead)
    request = second.add("b", TOKENS)
    second.run()
    assert second.loaded == {"b": 16}
    assert request.all_token_ids == first.ended["a"].all_token_ids
    counted = second.session.counts.take()
    assert (counted["loads"], counted["loaded_tokens"], counted["offers"]) == (1, 16, 1), "once, and not by rank"


def test_W5_window_pages_of_every_rank_are_copied_at_the_pass(make_ranks: Any, ahead: bool) -> None:
    layout = window_layout([(10, 0)])
    first = make_ranks(RankedServer(layout=layout, rewind_tokens=0), ahead=ahead, chunk=8)
    first.add("a", LONG)
    first.run()
    second = make_ranks(RankedServer(layout=layout, rewind_tokens=0, store=first.ranked.store), ahead=ahead, chunk=8)
    second.add("b", LONG)
    second.run()
    assert second.loaded["b"] == (len(LONG) - 1) // 4 * 4
    assert first.ranked.wrong_values() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_D3_a_load_that_fails_on_one_rank_is_computed_on_both(make_ranks: Any, ahead: bool, rank: int) -> None:
    store = RankedServer(layout=tiny_layout())
    store.put_in_store(LONG)
    server = RankedServer(layout=tiny_layout(), store=store.store)
    fails(server.ranks[rank].pool)
    engine = make_ranks(server, ahead=ahead)
    request = engine.add("a", LONG)
    engine.run()
    assert request.status is Status.FINISHED_STOPPED
    assert engine.failures == ["a"]
    assert engine.loaded == {}
    assert engine.session.counts.take()["failed_loads"] == 1
    # Its second life begins like a first: the blocks were computed, and the pool holds them as before.
    assert stored(engine, LONG) == list(range(len(LONG) // 4))
    assert len(engine.pool.free) == 63


def test_D8_blocks_of_a_preempted_request_are_read_by_no_rank_when_the_next_forward_writes_them(
    make_ranks: Any, ahead: bool
) -> None:
    # The fakes raise if a page is written that a copy still reads.
    engine = make_ranks(ahead=ahead, chunk=8)
    request = engine.add("a", LONG, max_tokens=4)
    engine.until(lambda: request.num_computed_tokens >= 24)
    engine.preempt("a")
    other = engine.add("b", TOKENS)
    engine.run()
    assert request.num_preemptions == 1
    assert other.status is Status.FINISHED_STOPPED
    assert engine.ranked.wrong_values() == []
    assert stored(engine, LONG) == list(range(len(LONG) // 4))
    assert len(engine.pool.free) == 63


def test_D8_S7_the_next_forward_waits_for_a_rank_that_still_reads_what_was_taken_away(make_ranks: Any) -> None:
    engine = make_ranks(chunk=8)
    _, (rank, call) = engine.devices
    gate = call(rank.runner.hold, CallKind.COPY)
    request = engine.add("a", LONG, max_tokens=4)
    engine.until(lambda: request.num_computed_tokens >= 16)
    call(gate.reached)
    engine.preempt("a")
    # The fakes raise if the stand-in overwrites a page that a copy reads, so this step must not get that far.
    stepped = threading.Thread(target=engine.step)
    stepped.start()
    stepped.join(0.1)
    waited = stepped.is_alive()
    call(gate.release)
    stepped.join(10)
    engine.run()
    assert waited
    assert not stepped.is_alive()
    assert engine.ranked.wrong_values() == []
    assert len(engine.pool.free) == 63


def test_D8_a_pass_of_a_request_whose_preemption_a_rank_has_not_reported_is_left_out_and_told_to_nobody(
    make_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_ranks(chunk=8)
    gates = [(call, call(rank.runner.hold, CallKind.PUT)) for rank, call in engine.devices]
    request = engine.add("a", LONG, max_tokens=4)
    engine.until(lambda: request.num_computed_tokens >= 16)
    with caplog.at_level(logging.DEBUG, "akv"):
        engine.preempt("a", between_steps=True)
        engine.scheduler.matched = lambda request, local_tokens: (0, False)
        engine.step(act=False)
        assert request.status is Status.RUNNING
        for call, gate in gates:
            call(gate.release)
        engine.run()
    assert "akv.engine.pass_unsaved" not in caplog.text
    assert engine.ranked.wrong_values() == []
    assert len(engine.pool.free) == 63


def beside_a_preempted(make_ranks: Any) -> tuple[RankedVllmEngine, VllmRequest]:
    """An engine that has taken the blocks of request "a" away, and has begun a load of "b" into them in the same step, whose
    output it has not read.
    """
    warm = RankedServer(layout=tiny_layout())
    in_pool = [token + 1 for token in LONG]
    warm.put_in_store(in_pool)
    engine: RankedVllmEngine = make_ranks(RankedServer(layout=tiny_layout(), store=warm.store), chunk=8)
    gates = [(call, call(rank.runner.hold, CallKind.PUT)) for rank, call in engine.devices]
    request = engine.add("a", LONG, max_tokens=4)
    engine.until(lambda: request.num_computed_tokens >= 32)
    engine.preempt("a", between_steps=True)
    loading = engine.add("b", in_pool)
    # It comes first, and the blocks that were taken away are the first free ones.
    engine.waiting.reverse()
    engine.step(act=False)
    assert loading.status is Status.WAITING_FOR_REMOTE_KVS
    for call, gate in gates:
        call(gate.release)
    return engine, loading


@pytest.mark.parametrize("gone", [False, True])
def test_D8_a_load_into_blocks_that_a_rank_may_still_read_waits_for_it_and_is_not_refused(
    make_ranks: Any, gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "akv"):
        engine, _ = beside_a_preempted(make_ranks)
        if gone:
            # Then nothing but the load that waits has anything to say to the ranks.
            engine.abort("a")
        engine.run()
    assert "akv.engine.load_refused" not in caplog.text
    assert engine.loaded["b"] == (len(LONG) - 1) // 4 * 4
    assert engine.session.counts.take()["saved_requests"] == 2, "the end of what was preempted is no request's"
    assert engine.ranked.wrong_values() == []
    assert len(engine.pool.free) == 63


def test_D8_D6_aborted_while_its_load_waits_for_blocks_that_were_taken_away_vllm_has_its_blocks_back(make_ranks: Any) -> None:
    engine, loading = beside_a_preempted(make_ranks)
    engine.abort("b")
    engine.run()
    assert loading.is_finished()
    assert len(engine.pool.free) == 63
    assert engine.session.requests == {}


def test_D6_aborted_while_it_loads_every_rank_answers_once_and_every_block_is_back(make_ranks: Any, ahead: bool) -> None:
    store = RankedServer(layout=tiny_layout())
    store.put_in_store(LONG)
    engine = make_ranks(RankedServer(layout=tiny_layout(), store=store.store), ahead=ahead)
    gates = [call(rank.runner.hold, CallKind.GET) for rank, call in engine.devices]
    request = engine.add("a", LONG)
    engine.until(lambda: request.status is Status.WAITING_FOR_REMOTE_KVS)
    engine.step()
    engine.abort("a")
    (_, first), (_, second) = engine.devices
    first(gates[0].release)
    for _ in range(3):
        engine.step()
    second(gates[1].release)
    engine.run()
    assert len(engine.pool.free) == 63
    assert engine.session.requests == {}


def test_D6_aborted_between_its_blocks_and_the_step_no_rank_hears_of_the_load_and_vllm_does(make_ranks: Any) -> None:
    store = RankedServer(layout=tiny_layout())
    store.put_in_store(LONG)
    engine = make_ranks(RankedServer(layout=tiny_layout(), store=store.store))
    request = engine.add("a", LONG)
    told = engine.ranked_scheduler.step_of_ranks

    def aborted_first(output: Any) -> Any:
        if request.status is Status.WAITING_FOR_REMOTE_KVS and not request.is_finished():
            engine.abort("a")
        return told(output)

    engine.ranked_scheduler.step_of_ranks = aborted_first
    engine.run()
    assert len(engine.pool.free) == 63
    assert engine.session.requests == {}


def test_O8_a_rank_that_breaks_costs_the_server_its_cache_and_no_request(make_ranks: Any) -> None:
    store = RankedServer(layout=tiny_layout())
    store.put_in_store(LONG)
    engine = make_ranks(RankedServer(layout=tiny_layout(), store=store.store))
    engine.add("a", LONG)
    engine.run()
    assert engine.loaded == {"a": (len(LONG) - 1) // 4 * 4}
    engine.roles[1]._faults.append(RuntimeError("a fault of the adapter's"))
    engine.add("b", TOKENS)
    engine.run()
    late = engine.add("c", LONG)
    engine.run()
    assert late.status is Status.FINISHED_STOPPED
    assert "c" not in engine.loaded
    assert len(engine.pool.free) == 63


def test_L8_a_rank_that_loads_nothing_for_a_while_says_so_again_when_it_does(make_ranks: Any) -> None:
    store = RankedServer(layout=tiny_layout())
    for tokens in (LONG, TOKENS):
        store.put_in_store(tokens)
    engine = make_ranks(RankedServer(layout=tiny_layout(), store=store.store, role="consumer"))
    worker = engine.roles[1]._bridge.worker._rank.worker
    worker.gets_hang = lambda: True
    engine.devices[1][1](engine.roles[1]._bridge.worker.changed.set)
    workers = engine.session.ranks._scheduler._ranks
    deadline = time.monotonic() + 5
    while not workers.gets_hang():
        engine.step()
        assert time.monotonic() < deadline
    engine.add("a", LONG)
    engine.run()
    assert engine.loaded == {}, "a load would come to nothing there"
    worker.gets_hang = lambda: False
    while workers.gets_hang():
        engine.step()
        assert time.monotonic() < deadline
    engine.add("b", TOKENS)
    engine.run()
    assert engine.loaded == {"b": 16}


def test_D1_a_rank_that_is_missing_is_refused_when_the_scheduler_opens(make_ranks: Any) -> None:
    engine = make_ranks()
    engine.session.close()
    configuration = engine.roles[0]
    with pytest.raises(SettingsError, match="ranks"):
        engine.session.open_ranks(engine.configuration, [configuration.hello], ports=engine.ranked.ports)


def test_the_aggregator_of_the_stand_in_counts_as_vllms() -> None:
    from akv.engines.vllm.ends import Results

    counted = Aggregator(2)
    one, none = Results(set(), {"a"}, {"a"}, set()), Results(set(), set(), set(), set())
    assert counted.join([one, none]) == none
    assert counted.half_said == [("received", "a")]
    assert counted.join([none, Results(set(), {"a"}, set(), set())]) == Results(set(), {"a"}, {"a"}, set())
