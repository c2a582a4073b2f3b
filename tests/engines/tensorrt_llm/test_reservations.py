"""Prefix reservations and sliding windows: protected, confirmed with pages, dispatched, released once (W3, W8, W9)."""

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from akv.errors import LoadFailed, SettingsError
from akv.ports.calls import CallKind
from akv_testing import FakeStore
from akv_testing.engines.tensorrt_llm import (
    BAD_PAGE_INDEX,
    GroupShape,
    PrefixLoad,
    Refused,
    SchedulerOutput,
    StandInEngine,
    StandInRequest,
    StandInServer,
    State,
)

Serve = Callable[..., StandInServer]
#: Full attention beside a window of 100 tokens, of which 4 are sinks besides.
MIXED = (GroupShape(), GroupShape(100, 4))


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + number for number in range(tokens)]


def warmed(serve: Serve, *prompts: list[int], **arguments: Any) -> StandInServer:
    """A server on a store where another one has saved these prompts."""
    arguments = {"reserves": True, "groups": MIXED} | arguments
    server = serve(**arguments)
    server.engine.serve(*(StandInRequest(number, tokens) for number, tokens in enumerate(prompts, 1)))
    assert server.left_behind() == []
    return serve(**arguments)


@pytest.mark.parametrize("chunk", [40, 64, 500])
@pytest.mark.parametrize("length", [200, 256, 321])
def test_W3_a_model_with_windows_resumes_where_another_server_ended(serve: Serve, chunk: int, length: int) -> None:
    server = warmed(serve, prompt(length), chunk=chunk)
    request = StandInRequest(1, [*prompt(length), 5, 6, 7], max_new_tokens=40)
    server.engine.serve(request)
    assert server.engine.answers == [(1, length // 32 * 32, length // 32 * 32)]
    assert server.left_behind() == []


def test_S12_an_answers_end_is_resumed_too(serve: Serve) -> None:
    server = serve(reserves=True, groups=MIXED)
    request = StandInRequest(1, prompt(100), max_new_tokens=120)
    server.engine.serve(request)
    assert server.left_behind() == []
    other = serve(reserves=True, groups=MIXED)
    other.engine.serve(StandInRequest(1, [*request.get_tokens(0), 1, 2]))
    assert other.engine.answers == [(1, 192, 192)]
    assert other.left_behind() == []


def test_a_page_that_became_none_unstated_is_not_saved(serve: Serve, store: FakeStore) -> None:
    """Pages that a window left behind belong to somebody else, and nothing told so: the last list does."""

    class Takes(StandInEngine):
        """The runtime takes all window pages back before the request ends, without a word."""

        def finish(self, request: StandInRequest) -> None:
            for block, page in enumerate(request.pages[1]):
                self.cache.give_back(1, page)
                request.pages[1][block] = BAD_PAGE_INDEX
            super().finish(request)

    server = serve(reserves=True, groups=MIXED, engine=Takes)
    request = StandInRequest(1, prompt(100), max_new_tokens=60)
    server.engine.serve(request)
    assert server.left_behind() == []
    other = serve(reserves=True, groups=MIXED)
    other.engine.serve(StandInRequest(1, [*request.get_tokens(0), 1, 2]))
    # The prompt's end is there; that of the answer would have been poison.
    assert other.engine.answers == [(1, 96, 96)]
    assert other.left_behind() == []


def test_a_reservation_moves_nothing_before_it_is_confirmed(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    scheduler, request = server.engine.scheduler, StandInRequest(1, prompt(200))
    assert scheduler.reserve_prefix(request, 0, 7) == (192, True)
    assert server.pool.bytes_moved["get"] == 0
    scheduler.release_prefix_reservation(request, 7, 0, 192)
    scheduler.release_prefix_reservation(request, 7, 0, 192)
    assert scheduler.reserve_prefix(StandInRequest(2, prompt(40, seed=1)), 0, 8) == (0, False)


def confirmed(server: StandInServer, request: StandInRequest, reservation_id: int, start: int, end: int) -> SchedulerOutput:
    pages = [[server.cache.take(group) for _ in range(7)] for group in range(len(MIXED))]
    load = PrefixLoad(reservation_id, request.request_id, start, end, True, pages, request.get_tokens(0))
    return SchedulerOutput(prefix_loads=[load])


def test_a_bound_load_can_be_withdrawn_until_it_is_dispatched(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    scheduler, worker, request = server.engine.scheduler, server.engine.worker, StandInRequest(1, prompt(200))
    scheduler.reserve_prefix(request, 0, 7)
    worker.bind_connector_meta(scheduler.build_connector_meta(confirmed(server, request, 7, 0, 192)))
    scheduler.release_prefix_reservation(request, 7, 0, 192)
    worker.start_load_kv(None)
    assert worker.get_finished_prefix_loads() == []
    assert server.pool.bytes_moved["get"] == 0


def test_a_reservation_that_was_released_or_lost_its_allocation_is_not_loaded(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    scheduler, worker = server.engine.scheduler, server.engine.worker
    request = StandInRequest(1, prompt(200))
    scheduler.reserve_prefix(request, 0, 7)
    scheduler.release_prefix_reservation(request, 7, 0, 192)
    worker.bind_connector_meta(scheduler.build_connector_meta(confirmed(server, request, 7, 0, 192)))
    worker.start_load_kv(None)
    scheduler.reserve_prefix(request, 0, 8)
    worker.bind_connector_meta(scheduler.build_connector_meta(confirmed(server, request, 8, 0, 192)))
    scheduler.request_reset(request)
    worker.start_load_kv(None)
    assert worker.get_finished_prefix_loads() == []
    assert server.pool.bytes_moved["get"] == 0


def test_a_load_is_dispatched_once(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    scheduler, request = server.engine.scheduler, StandInRequest(1, prompt(200))
    scheduler.reserve_prefix(request, 0, 7)
    scheduler.build_connector_meta(confirmed(server, request, 7, 0, 192))
    for _ in range(2):
        server.on_loop(server.session.reservations.dispatch, [7])
    assert server.until(server.engine.worker.get_finished_prefix_loads) == [7]


def test_unknown_and_late_ids_are_ignored(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    scheduler, worker, request = server.engine.scheduler, server.engine.worker, StandInRequest(1, prompt(200))
    scheduler.release_prefix_reservation(request, 99, 0, 32)
    scheduler.reserve_prefix(request, 0, 7)
    output = confirmed(server, request, 7, 0, 192)
    worker.bind_connector_meta(scheduler.build_connector_meta(confirmed(server, request, 98, 0, 32)))
    worker.start_load_kv(None)
    worker.bind_connector_meta(scheduler.build_connector_meta(output))
    worker.start_load_kv(None)
    worker.start_load_kv(None)  # once
    assert server.until(worker.get_finished_prefix_loads) == [7]
    scheduler.release_prefix_reservation(request, 7, 0, 192)
    assert worker.get_finished_prefix_loads() == []
    # After the request has ended nothing of its reservations begins.
    scheduler.reserve_prefix(StandInRequest(2, prompt(200)), 0, 9)
    worker.bind_connector_meta(scheduler.build_connector_meta(confirmed(server, StandInRequest(2, prompt(200)), 9, 0, 192)))
    scheduler.request_finished_by_layer_group(StandInRequest(2, prompt(200)), [[], []])
    worker.start_load_kv(None)
    assert worker.get_finished_prefix_loads() == []


def test_a_preempted_request_reserves_anew_under_a_fresh_id(serve: Serve) -> None:
    server = warmed(serve, prompt(200))
    request = StandInRequest(1, prompt(200), max_new_tokens=30)
    server.engine.submit(request)
    server.engine.run_until(lambda: len(request.generated) == 10)
    server.engine.preempt(request)
    server.engine.run_until_done()
    assert [offered for _, offered, _ in server.engine.answers] == [192, 192]
    assert server.left_behind() == []


@pytest.mark.parametrize("dispatched", [False, True])
def test_D6_a_cancelled_reservation_is_withdrawn_or_drained(serve: Serve, dispatched: bool) -> None:
    class CancelsWhileBound(StandInEngine):
        def _between_binding_and_loading(self) -> None:
            for request in self.requests:
                if not dispatched and request.state is State.PARKED:
                    self.cancel(request)

    server = warmed(serve, prompt(200), engine=CancelsWhileBound)
    get = server.on_loop(server.runner.hold, CallKind.GET)
    request = StandInRequest(1, prompt(200))
    server.engine.submit(request)
    server.engine.run_pass()
    if dispatched:
        server.engine.cancel(request)
        server.engine.run_pass()
        assert request.state is State.PARKED
    server.on_loop(get.release)
    server.engine.run_until_done()
    assert server.pool.bytes_moved["get"] == 0 or dispatched
    assert server.left_behind() == []


def test_W8_a_part_of_an_offer_that_no_end_is_known_for_ends_the_server(serve: Serve) -> None:
    """The windows' pages of a shorter end may never have been stored, and the runtime counts its tokens as there."""
    server = warmed(serve, prompt(1000))
    server.engine.honours = lambda request, tokens: 64
    server.engine.submit(StandInRequest(1, prompt(1000)))
    with pytest.raises(LoadFailed, match="window_end"):
        server.engine.run_until_done()


def test_without_windows_a_part_of_a_reservation_is_loaded(serve: Serve) -> None:
    server = warmed(serve, prompt(200), groups=(GroupShape(),))
    server.engine.honours = lambda request, tokens: 64
    server.engine.serve(StandInRequest(1, prompt(200)))
    assert server.engine.computed_tokens == {1: 136}
    assert server.left_behind() == []


def test_W9_windows_need_the_classes_that_reserve_and_these_say_what_a_lost_page_costs(serve: Serve, store: FakeStore) -> None:
    with pytest.raises(Refused, match="window groups need"):
        serve(groups=MIXED)
    plain = serve()
    with pytest.raises(SettingsError, match="AkvReservingScheduler"):
        plain.engine.worker.register_kv_cache_layout(_window_layout())
    with capture_logs() as logs:
        serve(groups=MIXED, reserves=True)
        serve(reserves=True)
        serve(groups=MIXED, reserves=True, settings={"role": "producer"})
        serve()
    assert [(line["log_level"], line["windows"]) for line in logs if line["event"] == "akv.engine.loads_fatal"] == [
        ("warning", True),
        ("warning", False),
    ]


def _window_layout() -> Any:
    from akv_testing.engines.tensorrt_llm import StandInCache

    return StandInCache(MIXED, tokens_per_block=32, pages=8).layout()
