"""Loads that fail, requests that are preempted, and clients that go, wherever their request stands (D3, D6, D8)."""

from collections.abc import Callable
from typing import Any

import pytest

from akv.errors import ConnectorBroken, EngineContractError, LoadFailed
from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv.values.messages import PassPlan
from akv.values.requests import Scheduled
from akv_testing import FakeStore
from akv_testing.engines.tensorrt_llm import StandInEngine, StandInRequest, StandInServer, State

Serve = Callable[..., StandInServer]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + number for number in range(tokens)]


def warmed(serve: Serve, *prompts: list[int], **arguments: Any) -> StandInServer:
    """A server on a store where another one has saved these prompts."""
    server = serve(**arguments)
    server.engine.serve(*(StandInRequest(number, tokens) for number, tokens in enumerate(prompts, 1)))
    assert server.left_behind() == []
    return serve(**arguments)


def test_D3_a_request_that_lost_a_page_is_started_anew_and_computed(serve: Serve, store: FakeStore) -> None:
    server = warmed(serve, prompt(200), prompt(150, seed=1))
    server.pool.answer("get", KeyState.MISSING, skip=2)
    server.engine.serve(StandInRequest(1, prompt(200)), StandInRequest(2, prompt(150, seed=1)))
    first, other, *again = server.engine.answers
    assert (first, other) == ((1, 192, 192), (2, 128, 128))
    # Asked anew: what failed is not offered for a while, what lies before it is.
    assert again == [(1, 64, 64)]
    assert server.left_behind() == []


def test_D3_a_pool_that_never_delivers_costs_a_request_two_attempts(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    server.pool.answer("get", KeyState.LEASE_EXPIRED, times=None)
    server.engine.serve(StandInRequest(1, prompt(200)))
    assert server.engine.answers == [(1, 192, 192), (1, 192, 192), (1, 0, 0)]
    assert server.engine.computed_tokens == {1: 200}
    assert server.left_behind() == []


def test_a_failed_load_is_named_as_ended_first_and_as_failed_once(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    server.pool.answer("get", KeyState.MISSING)
    scheduler, worker, request = server.engine.scheduler, server.engine.worker, StandInRequest(1, prompt(200))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (192, True)
    request.py_num_connector_matched_tokens = 192
    scheduler.update_state_after_alloc(request, [0, 1, 2, 3, 4, 5, 6])
    server.until(lambda: worker.take_failed_async_load_requests() == set() and worker.get_finished([], [1])[1])
    assert worker.take_failed_async_load_requests() == {1}
    assert worker.take_failed_async_load_requests() == set()
    assert worker.take_failed_load_requests() == set()


@pytest.mark.parametrize("veto", [False, True])
def test_D3_an_engine_that_builds_on_what_never_arrived_is_refused(serve: Serve, veto: bool) -> None:
    """In the next hook that waits, and no later than the next pass."""

    class Careless(StandInEngine):
        def _settle_transfers(self) -> None:
            saved, loaded, _ = self.transfers.settle()
            assert not saved
            for request_id in loaded:
                self._by_id(request_id).state = State.CONTEXT

    server = warmed(serve, prompt(200))
    server = serve(engine=Careless)
    server.pool.answer("get", KeyState.MISSING)
    server.engine.submit(StandInRequest(1, prompt(200)))
    server.engine.run_until(lambda: server.engine.requests[0].state is State.CONTEXT)
    with pytest.raises(EngineContractError, match="its load did not deliver"):
        server.engine.run_pass(veto=veto)
        server.engine.run_pass(veto=veto)


def test_drop_bound_saves_takes_requests_out_of_the_bound_pass(serve: Serve, store: FakeStore) -> None:
    """Nothing of them is saved: they computed nothing."""
    server = serve()

    leaving, staying = StandInRequest(1, prompt(100)), StandInRequest(2, prompt(100, seed=1))
    failed = [{1}]

    def failed_in_pass() -> set[int]:
        if not failed:
            return set()
        server.engine.worker.drop_bound_saves(failed[0])
        return failed.pop()

    server.engine.chunk = 100
    server.engine.transfers.failed_in_pass = failed_in_pass  # type: ignore[method-assign]
    server.engine.submit(leaving, staying)
    server.engine.run_pass()
    assert leaving.state is State.WAITING
    server.engine.run_until(lambda: staying.state is State.DONE)
    server.engine.run_until_done()
    assert len(store.keys()) == 6
    assert server.left_behind() == []
    again = serve()
    again.engine.serve(StandInRequest(1, prompt(100)), StandInRequest(2, prompt(100, seed=1)))
    assert again.engine.answers == [(1, 96, 96), (2, 96, 96)]
    assert again.left_behind() == []


@pytest.mark.parametrize("at", [State.CONTEXT, State.GENERATION])
@pytest.mark.parametrize("way", ["reset", "finished", "finished_as_cached"])
def test_D8_a_preempted_request_goes_on_in_other_pages(serve: Serve, at: State, way: str) -> None:
    server = serve()
    request = StandInRequest(1, prompt(200), max_new_tokens=70)
    server.engine.submit(request)
    server.engine.run_until(lambda: request.state is at and request.computed >= (128 if at is State.CONTEXT else 230))
    if way == "reset":
        server.engine.preempt(request)
    else:
        server.engine.preempt_by_finishing(request, tells_anew=way == "finished")
    taken = [server.cache.take(0) for _ in range(3)]  # so that its new pages are others
    kv = server.session.serving.kv
    plan, planned = kv.plan_pass, [False]

    def noted(parts: list[Scheduled]) -> PassPlan:
        planned.append(True)
        return plan(parts)

    kv.plan_pass = noted  # type: ignore[method-assign,assignment]
    server.engine.run_until_done()
    for page in taken:
        server.cache.give_back(0, page)
    assert server.left_behind() == []
    # Pages that are counted from where nobody knows are not looked at.
    assert any(planned) is (way != "finished_as_cached")
    # What is in the pool is right, whichever of its lives saved it.
    other = serve()
    other.engine.serve(StandInRequest(1, request.get_tokens(0)))
    assert other.engine.answers[0][1] >= 128
    assert other.left_behind() == []


def test_D8_a_load_that_a_reset_took_back_has_ended(serve: Serve) -> None:
    """It was announced: who waits for it would wait for ever."""
    server = warmed(serve, prompt(200))
    get = server.on_loop(server.runner.hold, CallKind.GET)
    request = StandInRequest(1, prompt(200))
    server.engine.submit(request)
    server.engine.run_pass()
    server.engine.scheduler.request_reset(request)
    assert server.until(lambda: server.engine.worker.get_finished([], [])[1]) == [1]
    server.on_loop(get.release)


def test_D8_an_allocation_that_is_asked_for_anew_without_a_word_begins_anew(serve: Serve) -> None:
    server = serve()
    request = StandInRequest(1, prompt(200), max_new_tokens=5)
    server.engine.submit(request)
    server.engine.run_until(lambda: request.computed == 128)
    held = server.session.serving._held[1]
    before = held.request.incarnation
    assert server.engine.scheduler.get_num_new_matched_tokens(request, 0)[1] in {True, False}
    assert held.request.incarnation != before
    assert (held.allocated, held.introduced) == (False, False)


def test_L1_a_preempted_request_is_asked_for_with_all_that_it_generated(serve: Serve) -> None:
    """The last token too, though no pass has told it: the block before it can be loaded now."""
    server = serve()
    request = StandInRequest(1, prompt(100), max_new_tokens=50)
    server.engine.submit(request)
    server.engine.run_until(lambda: request.length == 129)
    server.until(lambda: len(server.store.keys()) == 4)
    server.engine.preempt(request)
    server.engine.run_until_done()
    assert server.engine.answers == [(1, 0, 0), (1, 128, 128)]
    assert server.left_behind() == []


def test_D8_a_request_that_is_reset_while_its_load_is_under_way_loads_again(serve: Serve) -> None:
    """The runtime waits for the load; whoever does not has the pages back when the reset returns all the same."""
    server = warmed(serve, prompt(200))
    request = StandInRequest(1, prompt(200))
    get = server.on_loop(server.runner.hold_all, CallKind.GET)
    server.engine.submit(request)
    server.engine.run_pass()
    server.engine._restart(request)
    server.engine.run_pass()
    # The end of the first load, which nobody had fetched, is not the end of the second.
    server.engine.run_pass()
    assert request.state is State.PARKED
    server.on_loop(get.release)
    server.engine.run_until_done()
    assert server.engine.computed_tokens == {1: 8}
    assert server.left_behind() == []


@pytest.mark.parametrize("moment", ["waiting", "asked", "parked", "context", "generation", "saving"])
def test_D6_a_cancelled_request_gives_its_pages_back_wherever_it_stands(serve: Serve, moment: str) -> None:
    server = warmed(serve, prompt(200), prompt(100, seed=1), asks_early=moment == "asked")
    server.engine.defers = lambda request: moment == "asked" and request.request_id == 1
    get = server.on_loop(server.runner.hold, CallKind.GET)
    put = server.on_loop(server.runner.hold, CallKind.PUT)
    loads = moment in {"asked", "parked"}
    request = StandInRequest(1, prompt(200, seed=0 if loads else 2), max_new_tokens=9)
    other = StandInRequest(2, prompt(60, seed=3), max_new_tokens=3)
    server.engine.submit(request, other)
    ways: dict[str, Callable[[], bool]] = {
        "waiting": lambda: True,
        "asked": lambda: request.was_asked,
        "parked": lambda: request.state is State.PARKED,
        "context": lambda: request.computed == 128,
        "generation": lambda: len(request.generated) == 4,
        "saving": lambda: request.state is State.SAVING,
    }
    server.engine.run_until(ways[moment])
    server.engine.cancel(request)
    for gate in (get, put):
        server.on_loop(gate.release)
    server.engine.run_until_done()
    assert server.left_behind() == []


def test_D6_a_request_that_ends_while_its_load_is_under_way_names_both_ends(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    get = server.on_loop(server.runner.hold, CallKind.GET)
    scheduler, worker, request = server.engine.scheduler, server.engine.worker, StandInRequest(1, prompt(200))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (192, True)
    request.py_num_connector_matched_tokens = 192
    scheduler.update_state_after_alloc(request, [0, 1, 2, 3, 4, 5, 6])
    held = scheduler.request_finished(request, [0, 1, 2, 3, 4, 5, 6])
    ended: list[tuple[str, int]] = []

    def both() -> bool:
        saved, loaded = worker.get_finished([1] if held and not ended else [], [1] if not ended else [])
        ended.extend([("saved", number) for number in saved] + [("loaded", number) for number in loaded])
        return len(ended) == (2 if held else 1)

    server.until(both)
    assert sorted(ended) == [("loaded", 1), ("saved", 1)][: 1 + held]
    server.on_loop(get.release)


def test_a_lookup_that_is_late_costs_the_hit_and_no_more(serve: Serve) -> None:
    server = warmed(serve, prompt(200), settings={"lookup_grace_ms": 0})
    probe = server.on_loop(server.runner.hold_all, CallKind.PROBE)
    server.engine.serve(StandInRequest(1, prompt(200)))
    assert server.engine.answers == [(1, 0, 0)]
    server.on_loop(probe.release)
    assert server.left_behind() == []


def test_O8_a_connector_that_broke_ends_the_server_and_one_that_degraded_does_not(serve: Serve) -> None:
    broken = serve()
    broken.engine.serve(StandInRequest(1, prompt(70)))
    broken.on_loop(broken.session.serving.kv._halves._fail, "a test", RuntimeError("a test"))
    broken.engine.submit(StandInRequest(2, prompt(70)))
    with pytest.raises(ConnectorBroken):
        broken.engine.run_pass()
    degraded = serve(settings={"on_failure": "degrade"})
    degraded.engine.serve(StandInRequest(1, prompt(70)))
    degraded.on_loop(degraded.session.serving.kv._halves._fail, "a test", RuntimeError("a test"))
    degraded.engine.serve(StandInRequest(2, prompt(70)))
    assert degraded.engine.answers[-1] == (2, 0, 0)
    assert degraded.left_behind() == []


def test_a_pass_without_loads_waits_for_the_loop_once(serve: Serve) -> None:
    server = serve()
    request = StandInRequest(1, prompt(200), max_new_tokens=5)
    server.engine.submit(request)
    server.engine.run_until(lambda: len(request.generated) == 2)
    bridge, hops = server.session.bridge, []
    call = bridge.call

    def counted(*arguments: Any) -> Any:
        hops.append(arguments[0].__name__)
        return call(*arguments)

    bridge.call = counted  # type: ignore[method-assign,assignment]
    server.engine.run_pass()
    server.engine.run_pass()
    assert hops == ["after", "after"]


def test_loads_that_fail_end_a_server_that_cannot_start_requests_anew(serve: Serve) -> None:
    server = warmed(serve, prompt(200), reserves=True)
    server.pool.answer("get", KeyState.MISSING)
    server.engine.submit(StandInRequest(1, prompt(200)))
    with pytest.raises(LoadFailed, match="reservation 1"):
        server.engine.run_until_done()
