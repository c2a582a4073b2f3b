"""A device that fails where a fence is recorded has taken nothing with it (M6, L6)."""

from functools import partial

import anyio
import anyio.lowlevel
import pytest

from akv import Connector, DeviceError, LoadState, Request
from akv.ports.device import PassEvent
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS, blocks_to_save, part

pytestmark = pytest.mark.anyio

warm = partial(FakeServer.warm, TOKENS)


class Failing:
    """The device's `record`, which fails as often as it is told to."""

    def __init__(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._record = server.device.record
        self.times = 0
        monkeypatch.setattr(server.device, "record", self)

    def __call__(self) -> PassEvent:
        if self.times:
            self.times -= 1
            raise DeviceError("planted")
        return self._record()


async def computed(server: FakeServer, kv: Connector, tokens: tuple[int, ...]) -> Request:
    request = kv.open_request("s", tokens)
    table = server.allocate(tokens)
    server.write(tokens, table)
    plan = kv.plan_pass([part(request, 0, len(tokens), table)])
    await kv.after_forward(plan)
    return request


async def test_M6_a_reservation_whose_fence_fails_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    failing = Failing(server, monkeypatch)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer, table = await request.lookup(), server.allocate(TOKENS)
        failing.times = 1
        with pytest.raises(DeviceError, match="planted"):
            request.reserve(offer, 16, table)
        assert kv.pressure().parked_loads == 0
        assert (await request.reserve(offer, 16, table).wait()).state is LoadState.LOADED
        await request.finished()
    assert server.left_behind() == []


async def test_M6_a_pass_whose_event_fails_is_still_planned_and_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    failing = Failing(server, monkeypatch)
    async with server.open() as kv:
        request, table = kv.open_request("r", LONG), server.allocate(LONG)
        server.write(LONG, table)
        plan = kv.plan_pass([part(request, 0, len(LONG), table)])
        failing.times = 1
        with pytest.raises(DeviceError, match="planted"):
            await kv.after_forward(plan)
        kv.drop_pass(plan)
        again = kv.plan_pass([part(request, 0, len(LONG), table)])
        assert blocks_to_save(again) == blocks_to_save(plan) == list(range(9))
        await kv.after_forward(again)
        await request.finished()
    assert server.stored_blocks(LONG) == list(range(9))


async def test_M6_a_finish_whose_event_fails_leaves_the_request_open_to_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    failing = Failing(server, monkeypatch)
    async with server.open() as kv:
        request = await computed(server, kv, LONG)
        failing.times = 1
        with pytest.raises(DeviceError, match="planted"):
            await request.finished()
        closed = [request.closed]
        await request.cancel()
        closed.append(request.closed)
        assert closed == [False, True]
    assert server.left_behind() == []


async def test_O6_an_end_of_the_block_whose_event_fails_withdraws_what_was_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    failing = Failing(server, monkeypatch)
    async with server.open() as kv:
        gate = server.device.script.hold("gather")
        request = await computed(server, kv, LONG)
        await anyio.lowlevel.checkpoint()
        failing.times = 1
        gate.release()
    assert failing.times == 0
    assert request.closed
    assert server.left_behind() == []
