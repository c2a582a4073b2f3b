"""When the pool, the connector or the adapter's caller fails: vLLM computes, and no block is given on too early."""

import logging
import threading
import time
from typing import Any

import pytest

from akv.errors import DeviceError, SettingsError
from akv.ports.calls import CallKind, CallSize
from akv.ports.pool import KeyState
from akv_testing.ports import tiny_layout
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS
from akv_testing.vllm_engine import VllmEngine
from akv_testing.vllm_objects import Blocks, Status, VllmRequest
from akv_testing.window_server import WindowServer

#: Seconds after which something that must happen counts as not happening.
LONG_S = 20.0


def warm(**settings: Any) -> FakeServer:
    return FakeServer.warm(TOKENS, layout=tiny_layout(), **settings)


class Planted(Exception):
    """What services crash with."""


def raises(*_: object, **__: object) -> Any:
    raise Planted


def crash(engine: Any) -> None:
    engine.call(lambda: engine.server.runner.start(CallKind.COPY, lambda: None, CallSize(), raises))


@pytest.mark.parametrize(("answer", "loads"), [(KeyState.MISSING, 1), (KeyState.LEASE_EXPIRED, 2), (KeyState.HOLDER_LOST, 1)])
def test_D3_a_load_that_fails_is_computed_and_not_tried_for_ever(make: Any, answer: KeyState, loads: int) -> None:
    engine = make(warm())
    engine.call(lambda: engine.server.pool.answer("get", answer, times=None))
    engine.add("a", TOKENS)
    engine.run()
    # A page that is missing is not offered again; where the lease was too short, akv's `max_load_attempts` ends it.
    assert engine.failures == ["a"] * loads
    assert engine.ended["a"].num_tokens == len(TOKENS) + 2
    assert engine.session.counts.take()["failed_loads"] == loads
    assert len(engine.pool.free) == 63


@pytest.mark.parametrize("ahead", [False, True])
def test_D3_S12_what_is_computed_after_a_load_that_failed_is_saved_like_anything(
    make: Any, ahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(warm(), ahead=ahead)
    engine.call(lambda: engine.server.pool.answer("get", KeyState.MISSING))
    with caplog.at_level(logging.DEBUG, "akv"):
        turn = engine.add("a", TOKENS, max_tokens=11)
        engine.run()
    assert engine.failures == ["a"]
    # Its passes build upon each other, also upon those within a block, of which akv is not told.
    assert "akv.engine.pass_unsaved" not in caplog.text
    assert engine.call(engine.server.stored_blocks, turn.all_token_ids) == [0, 1, 2, 3, 4, 5, 6]
    assert engine.call(engine.server.wrong_values) == []
    assert len(engine.pool.free) == 63


def test_D3_after_a_deadline_it_is_computed_although_more_might_be_there(make: Any) -> None:
    engine = make(warm(load_deadline_s=0.02))
    gate = engine.call(engine.server.runner.hold, CallKind.GET)
    engine.add("a", TOKENS)
    engine.until(lambda: engine.failures)
    engine.call(gate.release)
    engine.run()
    assert engine.failures == ["a"]
    assert "loads" not in engine.session.counts.take()


def test_D3_after_a_lost_holder_it_is_computed_although_others_hold_the_beginning(make: Any) -> None:
    engine = make(warm())
    last = engine.server.keys_of(TOKENS)[0][3]
    engine.call(lambda: engine.server.pool.answer("get", KeyState.HOLDER_LOST, key=last, times=None))
    engine.add("a", TOKENS)
    engine.run()
    assert engine.failures == ["a"]
    assert "loads" not in engine.session.counts.take()


def test_a_lookup_that_hangs_delays_no_other_request(make: Any) -> None:
    engine = make(warm(), grace_s=0.0)
    gate = engine.call(engine.server.runner.hold, CallKind.PROBE)
    engine.add("hangs", TOKENS)
    engine.add("reads nothing", TOKENS, kv_transfer_params={"akv.do_not_read": True})
    engine.run("reads nothing")
    assert engine.requests["hangs"].status is Status.WAITING
    engine.call(gate.release)
    engine.run()


def test_the_grace_of_one_step_is_for_all_its_requests_together(make: Any) -> None:
    engine = make(warm(), grace_s=0.02)
    gate = engine.call(engine.server.runner.hold, CallKind.PROBE)
    for number in range(8):
        engine.add(str(number), TOKENS)
    engine.step()
    assert engine.scheduler._grace_left == engine.scheduler._grace_s
    engine.scheduler.matched(engine.requests["0"], 0)
    assert engine.scheduler._grace_left <= 0
    began = engine.scheduler._grace_left
    engine.scheduler.matched(engine.requests["1"], 0)
    assert engine.scheduler._grace_left == began
    engine.call(gate.release)
    engine.run()


def test_another_local_match_is_looked_up_anew_and_a_full_one_not_at_all(make: Any) -> None:
    engine = make(warm(), grace_s=1.0)
    request = engine.add("a", TOKENS)
    assert engine.scheduler.matched(request, 8) == (8, True)
    assert engine.scheduler.matched(request, 8) == (8, True)
    assert engine.session.counts.take()["lookups"] == 2
    assert engine.scheduler.matched(request, 16) == (0, False)
    assert engine.session.counts.take() == {}
    engine.run()


@pytest.mark.parametrize("windows", [False, True])
def test_L1_a_request_that_vllm_has_as_a_whole_asks_the_pool_nothing_and_is_open_all_the_same(
    make: Any, windows: bool
) -> None:
    engine = make(WindowServer.warm(LONG) if windows else warm(), grace_s=1.0)
    busy = threading.Event()
    # vLLM schedules what has just come, and the loop has no time in between.
    engine.session.begin(busy.wait, LONG_S)
    request = engine.add("a", LONG if windows else TOKENS)
    whole = (len(request.all_token_ids) - 1) // engine.server.tokens_per_block * engine.server.tokens_per_block
    assert engine.scheduler.matched(request, whole) == (0, False)
    tracked = engine.session.requests["a"]
    asked = tracked.asked
    # As in each step in which vLLM has no room for it: what opens the request is not taken back.
    assert engine.scheduler.matched(request, whole) == (0, False)
    assert tracked.asked is asked
    busy.set()
    assert tracked.asked.result(LONG_S).tokens == 0
    assert all(call.kind is not CallKind.PROBE for call in engine.server.runner.calls)
    assert tracked.request is not None
    if windows:
        # The pass names the pages of its window, and has no time for a prompt of 100,000 tokens.
        assert engine.call(lambda: tracked.request._record.chain.hash_up_to(0)) == len(LONG) // engine.server.tokens_per_block
    engine.abort("a")
    engine.run()


@pytest.mark.parametrize(
    ("table", "tokens"), [([[1, 1, 1, 1]], 16), ([[1, 2, 3, 4]], 3)], ids=["one page twice", "part of a block"]
)
def test_L6_blocks_that_cannot_be_taken_are_computed_into(
    make: Any, table: list[list[int]], tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(warm(), grace_s=1.0)
    request = engine.add("a", TOKENS)
    assert engine.scheduler.matched(request, 0) == (16, True)
    engine._allocate(request, 16, 0)
    engine.scheduler.allocated(request, Blocks(table), tokens)
    request.status, request.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, 16
    with caplog.at_level(logging.WARNING, "akv"):
        engine.run()
    assert "akv.engine.load_refused" in caplog.text
    # Once: what was refused is not offered again.
    assert engine.failures == ["a"]
    assert "loads" not in engine.session.counts.take()
    assert engine.ended["a"].num_tokens == len(TOKENS) + 2


def test_L6_one_request_of_which_a_pass_says_what_cannot_be_costs_the_others_nothing(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    engine.add("good", TOKENS)
    engine.add("bad", LONG)
    blocks_of = engine.scheduler._pages
    engine.scheduler._pages = lambda ids: [[1] * len(ids[0])] if len(ids[0]) > 6 else blocks_of(ids)
    with caplog.at_level(logging.DEBUG, "akv"):
        engine.run("good")
    engine.scheduler._pages = blocks_of
    engine.run()
    assert "akv.engine.pass_unsaved" in caplog.text
    # The plans that only found out which part it was are no open ends.
    assert "superseded" not in caplog.text
    assert engine.call(engine.server.stored_blocks, TOKENS) == [0, 1, 2, 3]


def test_K6_a_request_whose_tokens_cannot_be_named_is_computed(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    tokens = [*range(17), 2**64]
    with caplog.at_level(logging.WARNING, "akv"):
        engine.add("a", tokens, max_tokens=8)
        engine._forward = lambda *_: None
        engine.until(lambda: engine.running)
        engine.step()
        assert engine.session.requests["a"].request is None
        engine.run()
    assert "akv.engine.request_excluded" in caplog.text
    assert str(2**64) not in caplog.text
    assert engine.session.requests == {}


def test_a_device_that_fails_at_a_requests_end_holds_no_block(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    engine.add("a", TOKENS)
    engine.until(lambda: engine.running)

    def fails() -> Any:
        raise DeviceError("planted")

    engine.call(lambda: engine.session.serving.bridge.kv._halves.scheduler.worker.__dict__.update(fence=fails))
    engine.run()
    assert "akv.engine.pass_unsaved" in caplog.text
    assert engine.session.requests == {}
    assert len(engine.pool.free) == 63


def test_M8_a_connector_that_breaks_while_it_loads_ends_the_wait_and_keeps_the_blocks_that_a_copy_may_touch(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(warm())
    engine.call(engine.server.device.script.hold, "scatter")
    engine.add("a", TOKENS)
    engine.until(lambda: engine.call(lambda: engine.server.device.busy))
    written = set(engine.tables["a"][0][:4])
    crash(engine)
    bridge = engine.session.serving.bridge
    engine.until(lambda: bridge.broken)
    engine.add("b", LONG)
    engine._check_pages = engine._forward = lambda *_: None
    engine.run()
    assert sorted(engine.ended) == ["a", "b"]
    assert "akv.engine.without_cache" in caplog.text
    lost = {block.block_id for block in engine.pool.blocks[1:] if block.ref_cnt}
    assert lost
    assert lost <= written
    engine.left_behind = True


def test_M8_a_connector_that_breaks_while_nothing_is_asked_of_it_is_waited_for_no_more(make: Any) -> None:
    engine = make(warm())
    engine.call(engine.server.runner.hold, CallKind.GET)
    engine.add("a", TOKENS)
    engine.until(lambda: engine.requests["a"].status is Status.WAITING_FOR_REMOTE_KVS)
    engine.call(lambda: engine.server.runner.start(CallKind.COPY, lambda: None, CallSize(), raises))
    engine._forward = lambda *_: None
    engine.run()
    assert engine.failures == ["a"]
    assert len(engine.pool.free) == 63
    engine.left_behind = True


def test_M8_what_a_copy_may_touch_is_kept_before_vllm_frees_it(make: Any) -> None:
    engine = make()
    engine.call(engine.server.device.script.hold, "gather")
    engine.add("a", TOKENS, max_tokens=8)
    engine.until(lambda: engine.call(lambda: engine.server.device.busy))
    read = set(engine.tables["a"][0][:4])
    engine.call(lambda: engine.server.runner.start(CallKind.COPY, lambda: None, CallSize(), raises))
    bridge = engine.session.serving.bridge
    while not bridge.broken:
        time.sleep(0.001)
    # The first that anybody hears of it: vLLM frees the blocks as soon as this returns.
    engine.abort("a")
    assert not read & set(engine.pool.free)
    engine.left_behind = True


def test_O8_pages_that_are_lost_are_never_given_on(make: Any) -> None:
    engine = make(warm(on_failure="degrade", shutdown_deadline_s=0.02))
    engine.call(engine.server.device.script.hold, "scatter")
    engine.add("a", TOKENS)
    engine.until(lambda: engine.call(lambda: engine.server.device.busy))
    written = set(engine.tables["a"][0])
    crash(engine)
    # A copy whose end nobody will see: after the deadline akv says so, and vLLM computes the request in other blocks.
    engine.run()
    assert engine.failures == ["a"]
    kept = set(range(1, 64)) - set(engine.pool.free)
    assert kept
    assert kept <= written
    engine.left_behind = True


def test_O8_without_a_cache_vllm_goes_on(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(warm(on_failure="degrade"))
    monkeypatch.setattr(engine.server.pool, "get", raises)
    engine.add("a", TOKENS)
    engine.run()
    assert engine.failures == ["a"]
    engine.add("b", TOKENS)
    engine.run()
    assert sorted(engine.ended) == ["a", "b"]
    assert len(engine.pool.free) == 63


@pytest.mark.parametrize("method", ["step", "after_forward", "finish"])
def test_M8_a_fault_of_the_loops_side_that_nobody_waits_for_closes_the_connector(
    make: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = make(warm())
    serving = engine.session.serving

    def planted(*_: object) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(serving.loop, method, planted)
    for name in "ab":
        engine.add(name, LONG)
        engine.run()
    assert sorted(engine.ended) == ["a", "b"]
    assert engine.session.failed
    assert serving.bridge.broken
    assert len(engine.pool.free) == 63
    assert list(engine.server.pool.registered) == []


def test_M8_a_plan_that_fails_costs_a_model_with_windows_its_cache_and_no_step(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(WindowServer(windows=((8, 0),)))

    def planted(*_: object) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.session.serving.loop, "step", planted)
    for name in "ab":
        engine.add(name, LONG)
        engine.run()
    assert sorted(engine.ended) == ["a", "b"]
    assert engine.session.failed


def test_S7_a_requests_end_waits_for_nothing_and_its_blocks_are_told(make: Any) -> None:
    engine = make(warm())
    began, held, over = threading.Event(), threading.Event(), threading.Event()

    def is_busy() -> None:
        began.set()
        held.wait(20)
        over.set()

    request = VllmRequest("a", TOKENS, 2)
    engine.session.serving.bridge.post(is_busy)
    assert began.wait(20)
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.finished(request, aborted=False)
    assert engine.worker.results(idle=True).sent == set()
    assert not over.is_set()
    held.set()
    while not (sent := engine.worker.results(idle=True).sent):
        pass
    assert sent == {"a"}


def test_O7_a_pool_that_does_not_answer_is_a_miss_at_once(make: Any) -> None:
    engine = make(warm())
    engine.call(lambda: engine.server.pool.answer("probe", KeyState.UNAVAILABLE, times=None))
    for name in "abc":
        engine.add(name, TOKENS)
    engine.run()
    assert engine.loaded == {}
    assert len(engine.ended) == 3


def test_two_engines_of_a_process_with_one_id_are_refused_and_the_first_goes_on(make: Any) -> None:
    engine = make(warm())
    with pytest.raises(SettingsError, match="engine_id"):
        VllmEngine(FakeServer(layout=tiny_layout()), name="engine 0")
    engine.add("a", TOKENS)
    engine.run()
    assert engine.loaded == {"a": 16}


def test_what_comes_after_the_end_is_answered_without_a_cache(make: Any) -> None:
    engine = make(warm())
    request = engine.add("a", TOKENS)
    engine.close()
    assert engine.scheduler.matched(request, 0) == (0, False)
    engine.run()
    engine.add("b", TOKENS)
    engine.run()
    assert sorted(engine.ended) == ["a", "b"]
