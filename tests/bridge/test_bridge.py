"""A connector behind synchronous hooks: a whole life, its end with the process, and what hooks hear when it broke (M8, O6)."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest

from akv import Connector, ConnectorBroken, EngineContractError, NotOpenError, Offer, Request, SettingsError
from akv.bridge import Bridge, open_bridge
from akv.ports.calls import CallKind
from akv.values.messages import PassPlan
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS

LONG_S = 20.0


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture(params=["asyncio", "trio"])
def bridge(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[Bridge]:
    backend: Literal["asyncio", "trio"] = request.param
    opened = open_bridge(server.settings, server.layout, ports=server.ports, backend=backend)
    yield opened
    opened.close()


def opened_and_begun(bridge: Bridge, name: str, tokens: Sequence[int]) -> tuple[Request, Offer]:
    """What a hook for a new request does: one hop to open it, and its lookup goes on by itself."""
    req = bridge.call(bridge.kv.open_request, name, tokens)
    return req, bridge.begin(req.lookup).result(LONG_S)


def test_a_life_through_synchronous_hooks(bridge: Bridge, server: FakeServer) -> None:
    req, offer = opened_and_begun(bridge, "first", LONG)
    assert offer.tokens == 0
    table = server.allocate(LONG)
    bridge.call(server.compute, bridge.kv, req, LONG, table)
    bridge.call(req.finished)
    assert bridge.call(server.stored_blocks, LONG) == list(range(9))
    again, offer = opened_and_begun(bridge, "second", LONG)
    assert offer.tokens == 36
    there = server.allocate(LONG)
    load = bridge.call(again.reserve, offer, offer.tokens, there)
    assert bridge.call(load.wait).tokens == 36
    assert bridge.call(server.wrong_pages, LONG, there, 0, 9) == []
    bridge.call(again.cancel)
    assert bridge.broken == ""
    assert bridge.close()
    assert list(server.pool.registered) == []
    assert sum(map(server.runner.outstanding, CallKind)) == 0


def test_a_lookup_that_was_begun_holds_no_hook(bridge: Bridge, server: FakeServer) -> None:
    gate = bridge.call(server.runner.hold, CallKind.PROBE)
    req = bridge.call(bridge.kv.open_request, "r", TOKENS)
    asked = bridge.begin(req.lookup)
    assert bridge.call(bridge.kv.plan_pass, []).saves == ()
    assert not asked.done()
    bridge.call(gate.release)
    assert asked.result(LONG_S).tokens == 0


def test_M8_after_a_fault_every_hook_hears_of_it(bridge: Bridge, server: FakeServer) -> None:
    waiting = bridge.begin(bridge.kv.changed.wait)

    async def misreports(kv: Connector) -> None:
        await kv.after_forward(PassPlan(plan_id=77))

    with pytest.raises(EngineContractError, match="never made"):
        bridge.call(misreports, bridge.kv)
    for hook in (lambda: bridge.call(bridge.kv.completed), lambda: bridge.begin(bridge.kv.plan_pass, [])):
        with pytest.raises(ConnectorBroken, match="the connector stopped"):
            hook()
    assert "the connector stopped" in bridge.broken
    with pytest.raises((ConnectorBroken, NotOpenError)):
        waiting.result(LONG_S)
    assert bridge.close()


def test_after_its_end_it_says_that_it_is_closed(bridge: Bridge) -> None:
    assert bridge.close()
    assert bridge.close()
    assert "closed" in bridge.broken
    with pytest.raises(NotOpenError, match="closed"):
        bridge.call(bridge.kv.completed)


def test_O6_a_connector_that_does_not_close_in_time_is_reported(
    bridge: Bridge, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    held = threading.Event()
    bridge.post(held.wait, LONG_S)
    with caplog.at_level(logging.WARNING, "akv"):
        assert not bridge.close(0.01)
    assert "akv.bridge.unclosed waited_s=0.01" in caplog.text
    held.set()
    assert bridge.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_cannot_be_opened_raises_what_open_connector_raises(
    backend: Literal["asyncio", "trio"], server: FakeServer
) -> None:
    with pytest.raises(SettingsError, match="model_key"):
        open_bridge({}, server.layout, ports=server.ports, backend=backend)


def _run(program: str) -> Any:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise ValueError('the engine failed')", 1), ("sys.exit(3)", 3)])
def test_O6_a_process_that_forgets_to_close_it_ends_all_the_same(backend: str, end: str, status: int) -> None:
    program = (
        "import logging, sys\n"
        "from akv.bridge import open_bridge\n"
        "from akv_testing.server import FakeServer\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "server = FakeServer()\n"
        f"bridge = open_bridge(server.settings, server.layout, ports=server.ports, backend={backend!r})\n"
        f"bridge.begin(bridge.kv.changed.wait)\n{end}\n"
    )
    done = _run(program)
    assert done.returncode == status, done.stderr
    assert "akv.connector.close requests=0" in done.stdout
    assert "outcome='ok'" in done.stdout
