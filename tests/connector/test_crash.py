"""A fault inside the connector: it ends the block and every wait, and hides nobody's error (M8)."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from akv import (
    Connector,
    ConnectorBroken,
    EngineContractError,
    NotOpenError,
)
from akv.ports.calls import CallKind
from akv.values.messages import PassPlan
from akv_testing import settle
from akv_testing.calls import Latency
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS, work_of_every_kind

pytestmark = pytest.mark.anyio


class EnginesOwn(Exception):
    """An error of the embedding program."""


async def waited(ends: dict[str, BaseException], name: str, wait: Callable[[], Any]) -> None:
    try:
        await wait()
    except (ConnectorBroken, NotOpenError) as error:
        ends[name] = error


@pytest.mark.parametrize("crash", ["done", "poller", "loader", "saver"])
async def test_M8_a_crash_inside_ends_the_block_and_every_wait_in_other_tasks(
    crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer.warm(TOKENS)
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
                if crash != "saver":
                    # Beside a save that still moves, the load would be done before the saver gets to its put.
                    gate.release()
                hold.release()
                await anyio.sleep(60)
        assert broken.value.__cause__ is not None
        assert anyio.current_time() - began < 2
    assert set(ends) == {"load", "saves", "changed", "lookup"}
    assert all(isinstance(error, ConnectorBroken) for error in ends.values())
    assert anyio.current_time() - began < 2
    probes.release()
    gate.release()
    with pytest.raises(ConnectorBroken):
        kv.completed()


async def test_M8_an_error_of_the_block_is_not_lost_beside_a_services_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer.warm(TOKENS)

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
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.GET)
    with pytest.raises(ConnectorBroken):
        async with server.open() as kv:
            async with kv.request("r", TOKENS) as request:
                load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
                await gate.reached()
                kv._halves._fail("planted", RuntimeError())
                gate.release()
                await load.wait()
                await request.finished()


async def test_M8_an_error_of_a_requests_block_is_not_hidden_by_the_end_of_the_connector() -> None:
    server = FakeServer.warm(TOKENS)
    hold = server.device.script.hold("scatter")

    async def breaks(kv: Connector) -> None:
        await anyio.sleep(0.01)
        kv._halves._fail("planted", RuntimeError())
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
    server = FakeServer.warm(TOKENS, latency=Latency(put_s=0.01))
    async with server.open() as kv:
        await work_of_every_kind(server, kv)
        with pytest.raises(EngineContractError, match="never made"):
            kv.drop_pass(PassPlan(plan_id=99))
    # Of the first save a batch may have been under way; the queued one is withdrawn.
    assert server.stored_blocks([1, *LONG]) == []
    assert server.left_behind() == []
