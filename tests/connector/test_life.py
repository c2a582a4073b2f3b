"""A connector from its opening to its end: what it leaves behind however its block ends, what it says when it is not open."""

import anyio
import pytest

from akv import (
    Connector,
    PoolError,
    Scheduled,
    SettingsError,
    open_connector,
)
from akv.ports.calls import CallKind
from akv.ports.device import HostBuffer
from akv_testing import tiny_layout
from akv_testing.calls import Latency
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS, work_of_every_kind

pytestmark = pytest.mark.anyio


class Watched:
    """What a connector owns, remembered while it is open."""

    def __init__(self, server: FakeServer, kv: Connector) -> None:
        self.server = server
        self.halves = kv._halves
        self.slots = [staging.slots for staging in kv._halves.local_worker.memory.stagings]

    def assert_all_back(self) -> None:
        assert self.server.left_behind() == []
        assert self.halves.calls.outstanding == 0
        assert len(self.halves.scheduler.requests) == 0
        assert len(self.slots) == 2
        assert [pool.free for pool in self.slots] == [pool.count for pool in self.slots]
        assert self.halves._poller.outstanding == 0


# -- ends of the block


async def test_M6_a_normal_end_lets_queued_saves_run_out_and_leaves_nothing() -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(put_s=0.5))
    async with server.open() as kv:
        watched = Watched(server, kv)
        await work_of_every_kind(server, kv)
    watched.assert_all_back()
    for number in range(2):
        assert server.stored_blocks([number, *LONG]) == list(range(9))
    assert server.wrong_values() == []


async def test_M6_an_open_plan_ends_with_the_block() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        watched = Watched(server, kv)
        request = kv.open_request("r", LONG)
        kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=38, pages=server.allocate(LONG))])
    watched.assert_all_back()
    assert server.stored_blocks(LONG) == []


class EnginesOwn(Exception):
    """An error of the embedding program."""


async def test_M6_an_exception_leaves_as_it_is_and_nothing_stays() -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(put_s=0.5))
    raised = EnginesOwn("mine")
    with pytest.raises(EnginesOwn) as error:
        async with server.open() as kv:
            watched = Watched(server, kv)
            await work_of_every_kind(server, kv)
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
    server = FakeServer.warm(TOKENS)
    with pytest.RaisesGroup(EnginesOwn, EnginesOwn, match="mine"):
        async with server.open() as kv:
            watched = Watched(server, kv)
            raise ExceptionGroup("mine", [EnginesOwn("a"), EnginesOwn("b")])
    watched.assert_all_back()


@pytest.mark.parametrize("held", ["get", "scatter", "gather", "put", "nothing"])
async def test_M6_a_cancelled_block_leaves_nothing_and_waits_for_no_deadline(held: str) -> None:
    server = FakeServer.warm(TOKENS, latency=Latency(get_s=0.01, put_s=0.01))
    if held in {"scatter", "gather"}:
        server.device.script.delay("scatter" if held == "scatter" else "gather", 0.02)
    with anyio.move_on_after(0.005 if held == "get" else 0.012 if held in {"scatter", "put"} else 0.002) as scope:
        async with server.open() as kv:
            watched = Watched(server, kv)
            await work_of_every_kind(server, kv)
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert anyio.current_time() < 0.2
    watched.assert_all_back()


async def test_O6_a_stuck_store_call_is_waited_for_no_longer_than_the_deadline_and_its_buffer_stays_registered() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.GET)
    async with server.open(shutdown_deadline_s=2.0) as kv:
        await work_of_every_kind(server, kv)
        await gate.reached()
        began = anyio.current_time()
    assert 2.0 <= anyio.current_time() - began <= 3.1
    assert len(server.pool.registered) == 2
    assert kv._halves.calls.outstanding == 1


async def test_O6_a_stuck_put_is_bounded_too() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.PUT)
    async with server.open(shutdown_deadline_s=2.0) as kv:
        await work_of_every_kind(server, kv)
        await gate.reached()
        began = anyio.current_time()
    assert anyio.current_time() - began <= 3.1
    assert len(server.pool.registered) == 2


# -- opening


@pytest.mark.parametrize("failing", [0, 1])
async def test_M6_an_opening_that_fails_half_way_leaves_nothing(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer.warm(TOKENS)
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
    server = FakeServer.warm(TOKENS)
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
