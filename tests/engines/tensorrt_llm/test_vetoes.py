"""Passes that end after the connector has seen them: nothing of them is saved, and nothing that they told is lost (S1, S2)."""

from collections.abc import Callable
from typing import Any

from structlog.testing import capture_logs

from akv_testing import FakeStore
from akv_testing.engines.tensorrt_llm import SchedulerOutput, StandInRequest, StandInServer, State

Serve = Callable[..., StandInServer]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + number for number in range(tokens)]


def test_S2_a_vetoed_pass_is_saved_by_the_one_that_runs(serve: Serve, store: FakeStore) -> None:
    server = serve()
    request = StandInRequest(1, prompt(200))
    server.engine.submit(request)
    for _ in range(3):
        server.engine.run_pass(veto=True)
    assert request.computed == 0
    server.engine.run_until_done()
    assert len(store.keys()) == 6
    assert server.left_behind() == []
    other = serve()
    other.engine.serve(StandInRequest(1, prompt(200)))
    assert other.engine.answers == [(1, 192, 192)]
    assert other.left_behind() == []


def test_S1_a_pass_that_was_vetoed_is_not_saved_by_one_of_which_nothing_was_told(serve: Serve, store: FakeStore) -> None:
    """The runtime binds nothing for a batch without requests, and leaves what was bound before."""
    server = serve()
    server.engine.submit(StandInRequest(1, prompt(100)))
    server.engine.run_pass(veto=True)
    ran: list[Any] = []
    kv = server.session.serving.kv
    after, kv.after_forward = kv.after_forward, ran.append  # type: ignore[method-assign,assignment]
    server.engine.worker.start_load_kv(None)
    server.engine.worker.wait_for_save(None)
    assert ran == []
    kv.after_forward = after  # type: ignore[method-assign]
    server.engine.run_until_done()
    assert server.left_behind() == []
    other = serve()
    other.engine.serve(StandInRequest(1, prompt(100)))
    assert other.engine.answers == [(1, 96, 96)]
    assert other.left_behind() == []


def test_S2_a_pass_that_ran_is_known_by_its_number(serve: Serve, store: FakeStore) -> None:
    server = serve()
    scheduler, worker = server.engine.scheduler, server.engine.worker
    server.engine.submit(StandInRequest(1, prompt(100)))
    earlier: list[Any] = []
    build = scheduler.build_connector_meta

    def noted(output: SchedulerOutput) -> Any:
        earlier.append(build(output))
        return earlier[-1]

    scheduler.build_connector_meta = noted
    server.engine.run_pass(veto=True)
    server.engine.run_pass(veto=True)
    ran: list[Any] = []
    kv = server.session.serving.kv
    after, kv.after_forward = kv.after_forward, ran.append  # type: ignore[method-assign,assignment]
    worker.bind_connector_meta(earlier[0])
    worker.start_load_kv(None)
    worker.wait_for_save(None)
    assert ran == []
    kv.after_forward = after  # type: ignore[method-assign]
    server.engine.run_until_done()
    assert server.left_behind() == []
    other = serve()
    other.engine.serve(StandInRequest(1, prompt(100)))
    assert other.left_behind() == []


def test_S2_a_vetoed_pass_is_dropped_when_the_next_one_is_planned(serve: Serve) -> None:
    server = serve()
    server.engine.submit(StandInRequest(1, prompt(100)))
    with capture_logs() as logs:
        server.engine.run_pass(veto=True)
        server.engine.run_until_done()
    assert [line["reason"] for line in logs if line["event"] == "akv.plan.dropped"] == ["dropped by the engine"]
    assert server.left_behind() == []


def test_a_veto_does_not_stop_a_load_and_a_parked_request_is_in_no_batch(serve: Serve) -> None:
    first = serve()
    first.engine.serve(StandInRequest(1, prompt(200)))
    assert first.left_behind() == []
    server = serve()
    request = StandInRequest(1, prompt(200))
    server.engine.submit(request)
    server.engine.run_pass(veto=True)
    assert request.state is State.PARKED
    server.engine.run_until_done()
    assert server.engine.computed_tokens == {1: 8}
    assert server.left_behind() == []
