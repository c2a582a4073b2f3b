"""What vLLM's thread waits for, and what waits for it: a step without a pass, and what follows a pass."""

import threading
import time
from typing import Any

import pytest

from akv.engines.vllm import scheduler, worker
from akv.engines.vllm import session as session_module
from akv.engines.vllm.session import Session
from akv.engines.vllm.worker import WorkerRole
from akv.ports.calls import CallKind
from akv_testing.ports import tiny_layout
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS
from akv_testing.window_server import WindowServer

#: Seconds after which something that must happen counts as not happening.
LONG_S = 20.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without a pass waits for ever, so that a test sees what ends its wait."""
    for name in ("CPU_WAIT_S", "CPU_MOST_S", "HELD_WAIT_S"):
        monkeypatch.setattr(worker, name, LONG_S)


@pytest.mark.usefixtures("patient")
def test_a_step_in_which_a_load_begins_ends_with_the_load_and_with_nothing_before(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()), grace_s=LONG_S)
    gate = engine.call(engine.server.runner.hold, CallKind.GET)
    engine.add("a", TOKENS)
    # By then its lookup has ended, and what begins the load.
    threading.Timer(0.02, engine.call, (gate.release,)).start()
    began = time.monotonic()
    engine.step()
    assert engine._received == {"a"}
    assert time.monotonic() - began < LONG_S / 2
    engine.run()


def test_loads_begin_beside_the_rest_of_a_step_that_computes_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()), grace_s=LONG_S)
    hurried: list[int] = []
    hurry = engine.session.hurry

    def hurries() -> None:
        hurried.append(engine.session.counts._counts["offers"])
        hurry()

    monkeypatch.setattr(engine.session, "hurry", hurries)
    engine.add("a", TOKENS)
    engine.schedule()
    # Once vLLM had put blocks aside for the load, and not only for the lookup before.
    assert hurried[-1:] == [1]
    engine.abort("a")


@pytest.mark.usefixtures("patient")
def test_requests_that_load_at_once_are_computed_at_once(make: Any) -> None:
    engine = make(FakeServer.warm(LONG, layout=tiny_layout(), pages=128), blocks=128, grace_s=0.0)
    for number in range(12):
        engine.add(f"r{number}", LONG[: 5 + 3 * number])
    passes = []
    while engine.requests:
        order, scheduled = engine.schedule()
        passes.append(len(scheduled))
        engine.act_upon(*engine.execute(order, scheduled))
    # A step that puts the lookups off, one that begins the loads, and two tokens each.
    assert [count for count in passes if count] == [12, 12]
    assert passes[:2] == [0, 0]


def test_a_load_that_takes_its_time_keeps_no_other_request_waiting(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CPU_WAIT_S", 0.02)
    engine = make(FakeServer.warm(LONG, layout=tiny_layout()), grace_s=LONG_S)
    gate = engine.call(engine.server.runner.hold, CallKind.GET)
    engine.add("slow", LONG)
    began = time.monotonic()
    engine.step()
    engine.step()  # With nothing to compute: somebody may come meanwhile.
    assert time.monotonic() - began < LONG_S / 2
    engine.add("quick", TOKENS[:3])
    engine.run("quick")
    assert "slow" in engine.requests
    engine.call(gate.release)
    engine.run()


class Ends:
    """In place of `Session.arrived`, under a clock of its own: what a step waits for ends after these seconds each."""

    def __init__(self, session: Session, ends: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.left = ends
        monkeypatch.setattr(session_module, "monotonic", lambda: self.now)
        monkeypatch.setattr(session, "arrived", self)
        monkeypatch.setattr(session, "_outstanding", lambda: bool(self.left))
        monkeypatch.setattr(session, "hurry", lambda: None)

    def clear(self) -> None:
        """Nothing is kept here: what ends is told by `wait`."""

    def wait(self, limit_s: float) -> bool:
        ends = self.left[0] <= limit_s
        self.now += self.left[0] if ends else limit_s
        if ends:
            del self.left[0]
        return ends


@pytest.mark.parametrize(
    ("on_cpu", "ends", "waited_s", "left"),
    [
        # On a CPU for one after the other, each in its time: there a pass beside loads delays them and itself.
        (True, [0.012] * 4, 0.048, 0),
        (True, [0.008, 0.03], 0.033, 1),
        (True, [0.008] * 12, 0.05, 6),
        # Elsewhere a request is computed beside the loads of others.
        (False, [0.008] * 4, 0.01, 3),
        (False, [0.004, 0.004], 0.008, 0),
    ],
)
def test_a_step_that_computes_nothing_waits_for_loads_that_end_one_after_the_other_on_a_cpu_alone(
    on_cpu: bool, ends: list[float], waited_s: float, left: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    engine.worker = WorkerRole(engine.session, windows=False, on_cpu=on_cpu)
    waits = Ends(engine.session, list(ends), monkeypatch)
    engine.worker.results(idle=False)
    assert waits.now == 0.0
    engine.worker.results(idle=True)
    assert (waits.now, len(waits.left)) == (pytest.approx(waited_s), left)
    monkeypatch.undo()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_step_beside_saves_of_requests_that_ended_waits_shorter_since_whoever_comes_next_gains_nothing(
    on_cpu: bool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "HELD_WAIT_S", 0.02)
    for name in ("IDLE_WAIT_S", "CPU_WAIT_S", "CPU_MOST_S"):
        monkeypatch.setattr(worker, name, LONG_S)
    engine = make(grace_s=0.0)
    engine.worker = WorkerRole(engine.session, windows=False, on_cpu=on_cpu)
    gate = engine.call(engine.server.device.script.hold, "gather")
    engine.add("ended", TOKENS, max_tokens=1)
    engine.until(lambda: "ended" in engine.ended)
    began = time.monotonic()
    engine.step()
    assert 0.02 <= time.monotonic() - began < LONG_S / 2
    assert "ended" in engine.session.requests
    engine.call(gate.release)
    engine.run()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("answered", ["before", "meanwhile"])
def test_a_step_that_put_a_lookup_off_ends_with_its_answer(make: Any, answered: str) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()), grace_s=0.0)
    # Another one has ended and its blocks are read still; that is no reason to wait.
    copies = engine.call(engine.server.device.script.hold, "gather")
    engine.add("ended", LONG[:8], max_tokens=1)
    engine.until(lambda: "ended" in engine.ended)
    gate = engine.call(engine.server.runner.hold, CallKind.PROBE)
    engine.add("a", TOKENS)
    order, scheduled = engine.schedule()
    asked = engine.session.requests["a"].asked
    if answered == "before":
        engine.call(gate.release)
        asked.result(LONG_S)
    else:
        threading.Timer(0.02, engine.call, (gate.release,)).start()
    began = time.monotonic()
    engine.act_upon(*engine.execute(order, scheduled))
    assert asked.done()
    assert time.monotonic() - began < LONG_S / 2
    engine.call(copies.release)
    engine.run()
    assert engine.loaded == {"a": 16}


@pytest.mark.usefixtures("patient")
def test_a_step_waits_for_nothing_where_nothing_is_to_end(make: Any) -> None:
    engine = make(FakeServer.warm(TOKENS, layout=tiny_layout()), grace_s=0.0)
    gate = engine.call(engine.server.runner.hold, CallKind.PROBE)
    began = time.monotonic()
    engine.step()
    # vLLM has no room for it, and has not asked.
    request = engine.add("a", TOKENS)
    engine.waiting.remove(request)
    engine.step()
    assert not engine.session.requests["a"].asked.done()
    engine.waiting.append(request)
    engine.schedule()
    engine.abort("a")
    engine.step()
    assert time.monotonic() - began < LONG_S / 2
    engine.call(gate.release)


@pytest.mark.usefixtures("patient")
def test_what_follows_a_pass_begins_when_the_thread_has_time_for_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scheduler, worker):
        monkeypatch.setattr(module, "STEP_TAIL_S", LONG_S)
    engine = make()
    bridge, begun = engine.session.serving.bridge, []
    begin = bridge.begin_within

    def begins(limit_s: float, function: Any, *args: Any) -> Any:
        begun.append((function.__name__, limit_s))
        return begin(limit_s, function, *args)

    monkeypatch.setattr(bridge, "begin_within", begins)
    engine.add("a", TOKENS, max_tokens=1)
    engine.until(lambda: "a" in engine.ended)
    assert begun == [("look_up", 0.0), ("step", 0.0), ("after_forward", LONG_S), ("finish", LONG_S)]
    began = time.monotonic()
    engine.run()
    assert time.monotonic() - began < LONG_S / 2
    assert engine.call(engine.server.stored_blocks, TOKENS) == [0, 1, 2, 3]


def test_what_follows_a_pass_begins_also_where_no_step_comes_any_more(make: Any) -> None:
    engine = make()
    engine.add("a", TOKENS, max_tokens=1)
    engine.until(lambda: "a" in engine.ended)
    ended = time.monotonic()
    while not engine.session.ends:
        assert time.monotonic() - ended < LONG_S
        time.sleep(0.001)
    engine.run()


def test_S13_a_pass_that_completes_a_prompt_whose_end_the_pool_holds_waits_for_no_copy(make: Any) -> None:
    engine = make(WindowServer(windows=((8, 0),)))
    after_forward, waited = engine.worker.after_forward, []

    def noted(planned: Any) -> None:
        # The loop has said what is copied, so what it waits for is that.
        planned.result()
        waited.append(engine.worker._snapshots(planned))
        after_forward(planned)

    engine.worker.after_forward = noted
    for name in "ab":
        engine.add(name, LONG)
        engine.run()
    assert engine.loaded == {"b": 36}
    assert waited.count(True) == 1, "the first request's closing pass alone"
    assert engine.call(engine.server.wrong_values) == []
