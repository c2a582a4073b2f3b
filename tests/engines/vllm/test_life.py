"""Requests of vLLM's in vLLM's order of calls: computed, saved, loaded, preempted, aborted."""

import threading
import time
from typing import Any

import pytest

from akv.ports.calls import CallKind
from akv.values.requests import SavesCompleted
from akv_testing.ports import tiny_layout
from akv_testing.segments import FakeHost
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS
from akv_testing.vllm_objects import Status
from akv_testing.warm_segments import put_into_each
from akv_testing.window_server import WindowServer


def test_what_one_engine_computed_another_one_loads(make: Any) -> None:
    first = make()
    first.add("a", TOKENS)
    first.run()
    assert first.call(first.server.stored_blocks, TOKENS) == [0, 1, 2, 3]
    assert len(first.pool.free) == 63
    second = make(FakeServer(layout=tiny_layout(), store=first.server.store))
    request = second.add("b", TOKENS)
    second.run()
    assert second.loaded == {"b": 16}
    assert request.all_token_ids == first.ended["a"].all_token_ids
    assert len(second.pool.free) == 63


def test_L1_a_prompt_of_whole_blocks_leaves_a_token_to_compute(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS[:16], layout=tiny_layout()))
    engine.add("a", TOKENS[:16])
    engine.run()
    assert engine.loaded == {"a": 12}


def test_S12_what_was_generated_is_saved_and_the_next_turn_finds_it(make: Any) -> None:
    engine = make()
    turn = engine.add("a", TOKENS, max_tokens=8)
    engine.run()
    # 18 and 8 tokens: 25 have KV, and 24 are in whole blocks.
    assert engine.call(engine.server.stored_blocks, turn.all_token_ids) == [0, 1, 2, 3, 4, 5]
    engine.add("b", [*turn.all_token_ids, 7, 7, 7])
    engine.run()
    assert engine.loaded == {"b": 24}


@pytest.mark.parametrize("ahead", [False, True])
def test_S12_a_block_is_saved_when_decoding_completes_it_and_not_only_at_the_end(make: Any, ahead: bool) -> None:
    engine = make(ahead=ahead)
    request = engine.add("a", TOKENS, max_tokens=20)
    # Ahead, the pass that completed it was planned when its last token was not known: the next one has it saved.
    engine.until(lambda: request.num_tokens == 25 + ahead)
    deadline = time.monotonic() + 5
    while 5 not in engine.call(engine.server.stored_blocks, request.all_token_ids):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert "a" not in engine.ended
    engine.run()


def test_K6_S12_what_was_sampled_ahead_is_saved_once_it_is_known(make: Any) -> None:
    engine = make(ahead=True)
    # Blocks end at 20, 24 and 28 tokens: each pass that completes one was planned before its last token was read.
    turn = engine.add("a", TOKENS, max_tokens=11)
    engine.run()
    assert engine.call(engine.server.stored_blocks, turn.all_token_ids) == [0, 1, 2, 3, 4, 5, 6]
    assert engine.call(engine.server.wrong_values) == []


def test_D1_a_server_that_only_saves_waits_for_no_lookup(make: Any) -> None:
    engine = make(FakeServer(layout=tiny_layout(), role="producer"), grace_s=0.0)
    assert engine.scheduler.matched(engine.add("a", TOKENS), 0) == (0, False)
    engine.run()
    assert engine.call(engine.server.stored_blocks, TOKENS) == [0, 1, 2, 3]


def test_a_request_that_is_not_to_be_saved_is_loaded_and_leaves_nothing(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()))
    request = engine.add("a", TOKENS, max_tokens=8, kv_transfer_params={"akv.do_not_save": True})
    engine.run()
    assert engine.loaded == {"a": 16}
    assert engine.call(engine.server.stored_blocks, request.all_token_ids) == [0, 1, 2, 3]


def test_a_step_in_which_requests_decode_within_a_block_costs_no_hop(make: Any) -> None:
    engine = make()
    engine.add("a", TOKENS, max_tokens=8)
    engine.until(lambda: engine.running)
    orders = []
    while engine.requests["a"].num_computed_tokens < 23:
        order, scheduled = engine.schedule()
        orders.append(order.plan is not None)
        engine.act_upon(*engine.execute(order, scheduled))
    # 19, 20 (a block is whole), 21, 22, 23.
    assert orders == [False, True, False, False, False]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("between_steps", [False, True])
def test_D8_a_preempted_request_begins_again_and_loads_what_it_had_saved(make: Any, between_steps: bool, ahead: bool) -> None:
    engine, undisturbed = make(chunk=8, ahead=ahead), make()
    for one in (engine, undisturbed):
        one.add("a", LONG, max_tokens=9)
    undisturbed.run()
    engine.until(lambda: engine.requests["a"].num_tokens == len(LONG) + 1)
    while 8 not in engine.call(engine.server.stored_blocks, LONG):
        time.sleep(0.001)
    engine.preempt("a", between_steps=between_steps)
    engine.run()
    assert engine.loaded["a"] >= 36
    assert engine.ended["a"].all_token_ids == undisturbed.ended["a"].all_token_ids
    assert engine.call(engine.server.wrong_values) == []
    assert len(engine.pool.free) == 63


@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("between_steps", [False, True])
def test_S7_blocks_of_a_preempted_request_are_not_given_on_while_they_are_read(
    make: Any, between_steps: bool, excluded: bool
) -> None:
    engine = make(blocks=8)
    gate = engine.call(engine.server.device.script.hold, "gather")
    engine.add("a", TOKENS, max_tokens=8)
    engine.until(lambda: engine.call(lambda: engine.server.device.busy))
    # What came of it since could not be named; what is read is from before.
    engine.session.requests["a"].ended = excluded
    engine.preempt("a", between_steps=between_steps)
    if between_steps:
        engine.add("b", LONG[:20])
        engine.scheduler.matched(engine.requests["b"], 0)
    else:
        engine.add("b", LONG[:20])
        engine.waiting.reverse()
    # Its blocks go to another, which writes into them: beside a read the device refuses that.
    happened = []

    def release() -> None:
        happened.append("read")
        engine.call(gate.release)

    threading.Timer(0.01, release).start()
    engine.step()
    happened.append("given on")
    engine.run()
    assert happened == ["read", "given on"]
    assert engine.call(engine.server.wrong_values) == []


def test_S7_D6_blocks_of_a_request_that_is_preempted_and_aborted_are_not_given_on_while_they_are_read(make: Any) -> None:
    engine = make(blocks=8)
    gate = engine.call(engine.server.device.script.hold, "gather")
    engine.add("a", TOKENS, max_tokens=8)
    engine.until(lambda: engine.call(lambda: engine.server.device.busy))
    # A reset of the local cache takes the blocks of all that run; its client is gone before the next step.
    engine.preempt("a", between_steps=True)
    happened = []

    def release() -> None:
        happened.append("read")
        engine.call(gate.release)

    threading.Timer(0.01, release).start()
    engine.abort("a")
    happened.append("free")
    engine.add("b", LONG[:20])
    engine.run()
    assert happened == ["read", "free"]
    assert engine.session.requests == {}
    assert engine.call(engine.server.wrong_values) == []


def test_S7_blocks_of_an_ended_request_are_held_until_they_were_read(make: Any) -> None:
    engine = make()
    gate = engine.call(engine.server.device.script.hold, "gather")
    engine.add("a", TOKENS)
    engine.until(lambda: "a" in engine.ended)
    for _ in range(3):
        engine.step()
    assert "a" in engine.requests
    assert len(engine.pool.free) < 63
    engine.call(gate.release)
    engine.run()
    assert len(engine.pool.free) == 63


def test_K8_after_a_reset_of_the_connector_nothing_of_before_is_found_and_nothing_half_new_is_stored(make: Any) -> None:
    engine = make(chunk=8)
    engine.add("before", TOKENS)
    engine.run()
    engine.add("under way", LONG, max_tokens=8)
    engine.until(lambda: engine.running)
    engine.preempt("under way", between_steps=True)
    engine.session.begin_anew()
    engine.run()
    # Of the one under way at most what its first pass had computed.
    assert len(engine.server.store.keys()) <= 4 + 2
    for name in ("after", "later"):
        engine.add(name, TOKENS)
        engine.run()
    # The later one finds what the one after stored.
    assert engine.loaded == {"later": 16}
    assert len(engine.pool.free) == 63


def test_a_request_that_is_aborted_before_its_lookup_came_back_leaves_nothing(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()), grace_s=0.0)
    gate = engine.call(engine.server.runner.hold, CallKind.PROBE)
    engine.add("a", TOKENS)
    engine.step()
    assert engine.requests["a"].status is Status.WAITING
    engine.abort("a")
    engine.call(gate.release)
    engine.run()
    assert engine.session.requests == {}


def test_D6_a_request_that_is_aborted_while_it_loads_is_told_once_its_blocks_are_free(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()))
    gate = engine.call(engine.server.device.script.hold, "scatter")
    engine.add("a", TOKENS)
    engine.until(lambda: engine.requests["a"].status is Status.WAITING_FOR_REMOTE_KVS)
    engine.until(lambda: engine.call(lambda: engine.server.device.busy))
    engine.abort("a")
    for _ in range(3):
        engine.step()
    assert "a" in engine.requests  # A copy still writes into its blocks.
    engine.call(gate.release)
    engine.run()
    assert engine.session.requests == {}
    assert len(engine.pool.free) == 63


def test_D6_a_load_that_has_not_begun_is_withdrawn_and_told(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()))
    gate = engine.call(engine.server.runner.hold, CallKind.GET)
    engine.add("a", TOKENS)
    engine.until(lambda: engine.requests["a"].status is Status.WAITING_FOR_REMOTE_KVS)
    engine.abort("a")
    engine.run()  # The store has not answered, and need not: it writes into akv's own memory.
    assert len(engine.pool.free) == 63
    engine.call(gate.release)


def test_D8_the_end_of_an_earlier_incarnation_ends_no_load(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()))
    gate = engine.call(engine.server.device.script.hold, "scatter")
    engine.add("a", TOKENS)
    engine.until(lambda: engine.call(lambda: engine.server.device.busy))
    earlier = SavesCompleted(request_id="a", incarnation=0, stored_blocks=0, refused_blocks=0)
    engine.session.ends.append(earlier)
    engine.step()
    assert engine.requests["a"].status is Status.WAITING_FOR_REMOTE_KVS
    assert not engine._received
    engine.abort("a")
    engine.session.ends.append(earlier)
    engine.step()
    assert "a" in engine.requests
    engine.call(gate.release)
    engine.run()


def test_an_end_that_was_told_and_not_yet_read_is_not_told_again(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()))
    gate = engine.call(engine.server.runner.hold, CallKind.GET)
    engine.add("a", TOKENS)
    engine.until(lambda: engine.requests["a"].status is Status.WAITING_FOR_REMOTE_KVS)
    engine.call(gate.release)
    while not engine.outputs or not engine.outputs[-1][0].received:
        engine.outputs.clear()
        engine.step(act=False)
    engine.abort("a")
    engine.run()
    assert engine.session.requests == {}
    assert len(engine.pool.free) == 63


def test_blocks_may_be_named_twice_and_nothing_is_loaded_twice(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()))
    engine.add("a", TOKENS)
    engine.run()
    # The stand-in names them for the load, and once more, for no tokens, when the request is computed.
    assert engine.session.counts.take()["loads"] == 1


def test_R1_loads_count_pages_and_bytes_by_the_way_they_came(make: Any) -> None:
    host = FakeHost()
    # Room for two of the four blocks.
    segment = host.lend(3 * 16)
    server = FakeServer(layout=tiny_layout(), segments=host)
    put_into_each(server, [segment])
    server.put_in_store(TOKENS)
    engine = make(server)
    engine.add("a", TOKENS)
    engine.run()
    assert engine.session.counts.take()["staged_pages:not_mapped"] == 2
    engine.add("b", TOKENS)
    engine.run()
    told = engine.session.counts.take()
    assert {name: count for name, count in told.items() if name.startswith(("direct", "staged"))} == {
        "direct_pages": 2,
        "direct_bytes": 2 * 16,
        "staged_pages:no_replica": 2,
        "staged_bytes:no_replica": 2 * 16,
    }


def test_a_pass_that_is_planned_and_never_runs_leaves_no_mark(make: Any) -> None:
    engine = make()
    engine.add("a", TOKENS)
    while True:
        order, scheduled = engine.schedule()
        if order.plan is not None:
            break
        engine.act_upon(*engine.execute(order, scheduled))
    # vetoed: the tokens are scheduled again.
    engine.requests["a"].num_computed_tokens -= scheduled["a"]
    engine.session.requests["a"].noted = ()
    engine.run()
    assert engine.call(engine.server.stored_blocks, TOKENS) == [0, 1, 2, 3]


def test_W3_window_pages_are_saved_before_their_blocks_are_given_on(make: Any) -> None:
    store = (first := make(WindowServer(windows=((8, 0),)), chunk=8)).server.store
    first.add("a", LONG)
    first.run()
    assert first.call(first.server.wrong_values) == []
    second = make(WindowServer(windows=((8, 0),), store=store), chunk=8)
    second.add("b", LONG)
    second.run()
    assert second.loaded == {"b": 36}
    assert second.ended["b"].all_token_ids == first.ended["a"].all_token_ids
    assert len(second.pool.free) == 63


def test_W3_no_page_is_stored_that_a_window_had_left_behind(make: Any) -> None:
    engine = make(WindowServer(windows=((8, 0),), rewind_tokens=24), chunk=8)
    engine.add("a", LONG, max_tokens=9)
    engine.run()
    assert engine.call(engine.server.wrong_values) == []
    assert engine.session.counts.take()["stored_blocks"] == 11


def test_M5_a_pass_waits_until_the_copies_of_its_window_pages_are_queued(make: Any) -> None:
    engine = make(WindowServer(windows=((8, 0),)))
    gate = engine.call(engine.server.runner.hold, CallKind.SNAPSHOT)
    engine.add("a", LONG)
    happened = []

    def release() -> None:
        happened.append("queued")
        engine.call(gate.release)

    threading.Timer(0.01, release).start()
    engine.until(lambda: engine.running)
    happened.append("pass over")
    engine.run()
    assert happened == ["queued", "pass over"]


@pytest.mark.parametrize("tokens", range(34, 39))
def test_S12_at_the_end_no_page_is_read_that_vllm_has_freed(make: Any, tokens: int) -> None:
    engine = make(WindowServer(windows=((8, 0),)), chunk=64)
    engine.add("a", TOKENS, max_tokens=tokens - 17)
    engine.until(lambda: engine.requests["a"].num_tokens == tokens)
    engine.run()
    # The stand-in writes into what was freed; a read that is not ordered before that breaks the connector.
    assert engine.session.serving.bridge.broken == ""
    assert engine.call(engine.server.wrong_values) == []


def test_a_block_that_stands_for_none_is_no_page(make: Any) -> None:
    windowed, full = make(WindowServer(windows=((8, 0),))), make()
    assert windowed.scheduler._pages(([1, 2], [0, 2])) == [[1, 2], [-1, 2]]
    assert full.scheduler._pages(([1, 2],)) == [[1, 2]]


def test_12_requests_at_once_share_what_there_is(make: Any) -> None:
    engine = make(FakeServer.warm(LONG, layout=tiny_layout(), pages=128), blocks=128)
    for number in range(12):
        engine.add(f"r{number}", LONG)
    engine.run()
    assert set(engine.loaded.values()) == {36}
    assert len(engine.loaded) == 12
    assert len(engine.pool.free) == 127
