"""A connector from its opening to its end: what it leaves behind however its block ends, what it says when it is not open."""

import os
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from akv import (
    Connector,
    ConnectorBroken,
    EngineContractError,
    LoadState,
    NotOpenError,
    PoolError,
    Scheduled,
    SettingsError,
    open_connector,
)
from akv.ports.calls import CallKind
from akv.ports.device import HostBuffer
from akv.values.messages import PassPlan
from akv_testing import run_virtual, settle, tiny_layout
from akv_testing.calls import Latency
from akv_testing.server import FakeServer

pytestmark = pytest.mark.anyio

TOKENS = list(range(18))
LONG = list(range(100, 138))


def warm(**arguments: Any) -> FakeServer:
    server = FakeServer(**arguments)
    server.put_in_store(TOKENS)
    return server


async def busy_with_everything(server: FakeServer, kv: Connector) -> None:
    """A load that is under way, one that is queued behind it, a save that is, and one queued behind that."""
    for number in range(4):
        request = kv.open_request(f"load{number}", TOKENS)
        request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
    for number in range(2):
        tokens = [number, *LONG]
        request = kv.open_request(f"save{number}", tokens)
        await server.compute(kv, request, tokens, server.allocate(tokens))
    await settle()


class Watched:
    """What a connector owns, remembered while it is open."""

    def __init__(self, server: FakeServer, kv: Connector) -> None:
        self.server = server
        self.halves = kv._halves
        self.slots = [staging.slots for staging in kv._halves.worker.stagings]

    def assert_all_back(self) -> None:
        assert self.server.left_behind() == []
        assert self.halves.calls.outstanding == 0
        assert len(self.halves.scheduler.requests) == 0
        assert len(self.slots) == 2
        assert [pool.free for pool in self.slots] == [pool.count for pool in self.slots]
        assert self.halves._poller.outstanding == 0


# -- ends of the block


async def test_M6_a_normal_end_lets_queued_saves_run_out_and_leaves_nothing() -> None:
    server = warm(latency=Latency(put_s=0.5))
    async with server.open() as kv:
        watched = Watched(server, kv)
        await busy_with_everything(server, kv)
    watched.assert_all_back()
    for number in range(2):
        assert server.stored_blocks([number, *LONG]) == list(range(9))
    assert server.wrong_values() == []


async def test_M6_an_open_plan_ends_with_the_block() -> None:
    server = warm()
    async with server.open() as kv:
        watched = Watched(server, kv)
        request = kv.open_request("r", LONG)
        kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=38, pages=server.allocate(LONG))])
    watched.assert_all_back()
    assert server.stored_blocks(LONG) == []


class EnginesOwn(Exception):
    """An error of the embedding program."""


async def test_M6_an_exception_leaves_as_it_is_and_nothing_stays() -> None:
    server = warm(latency=Latency(put_s=0.5))
    raised = EnginesOwn("mine")
    with pytest.raises(EnginesOwn) as error:
        async with server.open() as kv:
            watched = Watched(server, kv)
            await busy_with_everything(server, kv)
            try:
                raise KeyError("first")
            except KeyError:
                raise raised from None
    assert error.value is raised
    # How it came about is the program's to tell, and stays as it was.
    assert isinstance(raised.__context__, KeyError)
    assert raised.__cause__ is None
    watched.assert_all_back()
    # What was queued is withdrawn: the program has trouble of its own, and does not wait for half a second of puts.
    assert server.stored_blocks([1, *LONG]) == []


async def test_M6_a_group_of_exceptions_leaves_as_it_is() -> None:
    server = warm()
    with pytest.RaisesGroup(EnginesOwn, EnginesOwn, match="mine"):
        async with server.open() as kv:
            watched = Watched(server, kv)
            raise ExceptionGroup("mine", [EnginesOwn("a"), EnginesOwn("b")])
    watched.assert_all_back()


@pytest.mark.parametrize("held", ["get", "scatter", "gather", "put", "nothing"])
async def test_M6_a_cancelled_block_leaves_nothing_and_waits_for_no_deadline(held: str) -> None:
    server = warm(latency=Latency(get_s=0.01, put_s=0.01))
    if held in {"scatter", "gather"}:
        server.device.script.delay("scatter" if held == "scatter" else "gather", 0.02)
    with anyio.move_on_after(0.005 if held == "get" else 0.012 if held in {"scatter", "put"} else 0.002) as scope:
        async with server.open() as kv:
            watched = Watched(server, kv)
            await busy_with_everything(server, kv)
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert anyio.current_time() < 0.2
    watched.assert_all_back()


async def test_O6_a_stuck_store_call_is_waited_for_no_longer_than_the_deadline_and_its_buffer_stays_registered() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.GET)
    async with server.open(shutdown_deadline_s=2.0) as kv:
        await busy_with_everything(server, kv)
        await gate.reached()
        began = anyio.current_time()
    assert 2.0 <= anyio.current_time() - began <= 3.1
    assert len(server.pool.registered) == 2
    assert kv._halves.calls.outstanding == 1


async def test_O6_a_stuck_put_is_bounded_too() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.PUT)
    async with server.open(shutdown_deadline_s=2.0) as kv:
        await busy_with_everything(server, kv)
        await gate.reached()
        began = anyio.current_time()
    assert anyio.current_time() - began <= 3.1
    assert len(server.pool.registered) == 2


# -- opening


@pytest.mark.parametrize("failing", [0, 1])
async def test_M6_an_opening_that_fails_half_way_leaves_nothing(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    register, calls = server.pool.register, []

    def refuses(buffer: HostBuffer) -> None:
        calls.append(buffer)
        if len(calls) > failing:
            raise PoolError("no memory region left")
        register(buffer)

    monkeypatch.setattr(server.pool, "register", refuses)
    with pytest.raises(PoolError, match="no memory region"):
        async with server.open():
            raise AssertionError("it is not open")
    assert server.left_behind() == []


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("after_body", [False, True])
async def test_M6_an_opening_that_is_cancelled_leaves_nothing(nth: int, after_body: bool) -> None:
    server = warm()
    gate = server.runner.hold(CallKind.COPY, nth=nth, after_body=after_body)

    async def release_later() -> None:
        await anyio.sleep(2)
        gate.release()

    async with anyio.create_task_group() as group:
        group.start_soon(release_later)
        with anyio.move_on_after(1) as scope:
            async with server.open():
                raise AssertionError("it is not open")
    assert scope.cancelled_caught
    assert server.left_behind() == []


async def test_a_layout_of_several_ranks_and_staging_without_room_for_a_page_are_refused_by_name() -> None:
    with pytest.raises(SettingsError) as error:
        async with FakeServer(layout=tiny_layout(world=2)).open():
            raise AssertionError("it is not open")
    assert error.value.field == "layout.world"
    with pytest.raises(SettingsError) as error:
        async with FakeServer().open(staging_buffer_bytes=40):
            raise AssertionError("it is not open")
    assert error.value.field == "staging_buffer_bytes"
    with pytest.raises(SettingsError) as error:
        async with FakeServer().open(model_key=""):
            raise AssertionError("it is not open")
    assert error.value.field == "model_key"


async def test_the_same_ports_open_again_after_a_block_ended() -> None:
    server = FakeServer()
    for number in range(2):
        async with open_connector(server.settings, server.layout, ports=FakeServer(store=server.store).ports) as kv:
            assert (await kv.open_request("r", TOKENS).lookup()).tokens == 0, number


# -- not open


async def test_use_before_the_block_says_how_to_open() -> None:
    opening: Any = FakeServer().open()
    for use in (
        "open_request",
        "completed",
        "changed",
        "plan_pass",
        "after_forward",
    ):
        with pytest.raises(NotOpenError, match="async with"):
            getattr(opening, use)
    async with opening as kv:
        kv.completed()


async def test_use_after_the_block_is_refused_everywhere() -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
        plan = kv.plan_pass([])
    calls: list[Callable[[], object]] = [
        lambda: kv.open_request("x", TOKENS),
        kv.completed,
        lambda: kv.plan_pass([]),
        lambda: kv.drop_pass(plan),
        request.finish,
        lambda: request.append([1]),
    ]
    for call in calls:
        with pytest.raises(NotOpenError, match="closed"):
            call()
    for wait in (request.lookup, request.cancel, request.finished, kv.changed.wait, lambda: kv.after_forward(plan)):
        with pytest.raises(NotOpenError, match="closed"):
            await wait()
    # A load that the end of the connector cancelled says so; its pages are free.
    assert load.state is LoadState.CANCELLED


def test_use_in_a_forked_child_is_refused_and_never_hangs() -> None:
    """A real fork; the child drives the coroutines by hand, leaves at once, and says by its status what it saw."""

    def seen_by_child(calls: list[Callable[[], object]], waits: list[Callable[[], Any]]) -> int:
        for number, call in enumerate(calls):
            try:
                call()
            except NotOpenError:
                continue
            return 10 + number
        for number, wait in enumerate(waits):
            coroutine = wait()
            try:
                coroutine.send(None)
            except NotOpenError:
                continue
            return 20 + number
        return 0

    async def main() -> None:
        server = warm()
        gate = server.runner.hold(CallKind.GET)
        async with server.open() as kv:
            request = kv.open_request("r", TOKENS)
            load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
            plan = kv.plan_pass([])
            children.append(os.fork())
            if children[0] == 0:
                status = 99
                try:
                    status = seen_by_child(
                        [lambda: kv.open_request("x", TOKENS), kv.completed, lambda: kv.plan_pass([]), request.finish],
                        [
                            request.lookup,
                            load.wait,
                            request.finished,
                            request.cancel,
                            kv.changed.wait,
                            lambda: kv.after_forward(plan),
                        ],
                    )
                finally:
                    os._exit(status)
            gate.release()
            await load.wait()

    children: list[int] = []
    run_virtual("asyncio", main)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


# -- a crash inside


async def waited(ends: dict[str, BaseException], name: str, wait: Callable[[], Any]) -> None:
    try:
        await wait()
    except (ConnectorBroken, NotOpenError) as error:
        ends[name] = error


@pytest.mark.parametrize("crash", ["done", "poller", "loader", "saver"])
async def test_M8_a_crash_inside_ends_the_block_and_every_wait_in_other_tasks(
    crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = warm()
    ends: dict[str, BaseException] = {}
    fault = RuntimeError("planted")

    def fails(*_: object, **__: object) -> Any:
        raise fault

    async with anyio.create_task_group() as group:
        with pytest.raises(ConnectorBroken) as broken:
            async with server.open(shutdown_deadline_s=0.05) as kv:
                request = kv.open_request("r", TOKENS)
                offer = await request.lookup()
                gate = server.runner.hold(CallKind.GET)
                load = request.reserve(offer, 16, server.allocate(TOKENS))
                saving = kv.open_request("s", LONG)
                hold = server.device.script.hold("gather")
                await server.compute(kv, saving, LONG, server.allocate(LONG))
                probes = server.runner.hold(CallKind.PROBE)
                group.start_soon(waited, ends, "load", load.wait)
                group.start_soon(waited, ends, "saves", saving.finished)
                # These tasks outlive the block on purpose: the engine's own are in no group of the connector's.
                group.start_soon(waited, ends, "changed", kv.changed.wait)  # noqa: ASYNC111
                group.start_soon(waited, ends, "lookup", kv.open_request("l", TOKENS).lookup)  # noqa: ASYNC111
                await settle()
                began = anyio.current_time()
                if crash == "done":
                    monkeypatch.setattr(kv._halves.calls, "ended", fails)
                elif crash == "poller":
                    monkeypatch.setattr("akv_testing.timeline.FakeEvent.query", fails)
                elif crash == "loader":
                    monkeypatch.setattr(server.pool, "get", fails)
                else:
                    monkeypatch.setattr(server.pool, "put", fails)
                gate.release()
                hold.release()
                await anyio.sleep(60)
        assert broken.value.__cause__ is not None
        assert anyio.current_time() - began < 2
    assert set(ends) == {"load", "saves", "changed", "lookup"}
    assert all(isinstance(error, ConnectorBroken) for error in ends.values())
    assert anyio.current_time() - began < 2
    probes.release()
    with pytest.raises(ConnectorBroken):
        kv.completed()


async def test_M8_an_error_of_the_block_is_not_lost_beside_a_services_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()

    def fails(*_: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(server.pool, "get", fails)
    with pytest.raises(ConnectorBroken) as broken:
        async with server.open() as kv:
            request = kv.open_request("r", TOKENS)
            request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
            try:
                await anyio.sleep(1)
            finally:
                raise EnginesOwn
    cause = broken.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert {type(error) for error in cause.exceptions} == {IndexError, EnginesOwn}


async def test_M8_the_block_of_a_request_passes_on_what_ended_the_connector() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.GET)
    with pytest.raises(ConnectorBroken):
        async with server.open() as kv:
            async with kv.request("r", TOKENS) as request:
                load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
                await gate.reached()
                kv._halves._break("planted", RuntimeError())
                gate.release()
                await load.wait()
                await request.finished()


async def test_M8_an_error_of_a_requests_block_is_not_hidden_by_the_end_of_the_connector() -> None:
    server = warm()
    hold = server.device.script.hold("scatter")

    async def breaks(kv: Connector) -> None:
        await anyio.sleep(0.01)
        kv._halves._break("planted", RuntimeError())
        hold.release()

    async with server.open() as kv, anyio.create_task_group() as group:
        group.start_soon(breaks, kv)
        with pytest.raises(EnginesOwn):
            async with kv.request("r", TOKENS) as request:
                request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
                await settle()
                raise EnginesOwn
    assert server.left_behind() == []


async def test_L6_a_broken_connector_publishes_nothing_more_at_its_end() -> None:
    server = warm(latency=Latency(put_s=0.01))
    async with server.open() as kv:
        await busy_with_everything(server, kv)
        with pytest.raises(EngineContractError, match="never made"):
            kv.drop_pass(PassPlan(plan_id=99))
    # Of the first save a batch may have been under way; the queued one is withdrawn.
    assert server.stored_blocks([1, *LONG]) == []
    assert server.left_behind() == []
