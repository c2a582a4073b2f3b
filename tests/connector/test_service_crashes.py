"""Each service of a connector crashes in each state of its work: every wait ends, no page comes back under a copy (M8, O8).

What goes wrong is planted in the service itself, so that what is under way belongs to somebody else. The fake device raises if
a page that came back is written while a copy still uses it.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from akv import ConnectorBroken, LoadFailed, LookupOutcome, NotOpenError, PagesLost
from akv.connector import Connector
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.crashes import SERVICES, Planted, crash
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import LONG, TOKENS, part
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

STATES = ["idle", "lookup", "get", "scatter", "gather", "put", "snapshot", "plan"]
DEADLINE_S = 1.0
#: Seconds after which what is held goes on, where it does.
HELD_S = 0.5
#: Seconds in which the work of a scene gets to where it is held: a tick of the poller or two.
REACHED_S = 0.01


def crashed(service: str, server: FakeServer, kv: Connector, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = kv._halves
    crash(service, halves, halves.local_worker, server.runner, monkeypatch.setattr)


class Scene:
    """A connector with one piece of work that is held, and the engine's task that waits for it."""

    def __init__(self, state: str) -> None:
        self.state = state
        # Two of each, so that one is idle.
        pair: dict[str, Any] = {"loaders": 2, "savers": 2}
        self.server = WindowServer(**pair) if state == "snapshot" else FakeServer.warm(TOKENS, **pair)
        #: Goes on, or never.
        self.held: Any = None
        self.tables: list[PageTable] = []
        #: The wait's end, and when it came.
        self.end: object = None
        self.ended_at: float | None = None
        self._wait: Callable[[], Awaitable[object]] = settle

    async def enter(self, kv: Connector) -> None:
        server, state = self.server, self.state
        if state in {"scatter", "gather"}:
            self.held = server.device.script.hold(state)  # type: ignore[arg-type]
        elif state in {"lookup", "get", "put", "snapshot"}:
            kind = CallKind("probe" if state == "lookup" else state)
            self.held = server.runner.hold(kind, nth=2 if state == "lookup" else 1)
        request = kv.open_request("r", LONG if state in {"gather", "put", "snapshot"} else TOKENS)
        if state in {"lookup", "get", "scatter"}:
            offer = await request.lookup()
            self._wait = request.lookup
            if state != "lookup":
                self.tables = [server.allocate(TOKENS)]
                self._wait = request.reserve(offer, offer.tokens, self.tables[0]).wait
        elif state in {"gather", "put"}:
            self.tables = [server.allocate(LONG)]
            await server.compute(kv, request, LONG, self.tables[0])
            self._wait = request.finished
        elif state in {"snapshot", "plan"}:
            tokens = LONG if state == "snapshot" else TOKENS
            self.tables = [server.allocate(tokens)]
            plan = kv.plan_pass([part(request, 0, len(tokens), self.tables[0])])
            server.write(tokens, self.tables[0])
            if state == "plan":
                self._wait = lambda: self._until_used(kv, plan)
            else:
                self._wait = lambda: kv.after_forward(plan)

    async def _until_used(self, kv: Connector, plan: Any) -> None:
        await anyio.sleep(HELD_S)
        await kv.after_forward(plan)

    async def wait(self) -> None:
        """The engine's task: what came back is used at once."""
        try:
            self.end = await self._wait()
        except (ConnectorBroken, NotOpenError, LoadFailed) as error:
            self.end = error
        else:
            self.end = self.end if self.end is not None else "done"
        self.ended_at = anyio.current_time()
        came_back = self.state in {"get", "scatter", "gather", "put"} and not isinstance(
            self.end, (ConnectorBroken, NotOpenError)
        )
        if came_back:
            self.reuse()

    def reuse(self) -> None:
        while self.tables:
            self.server.free(self.tables.pop())

    async def let_go(self) -> None:
        if self.held is not None:
            self.held.release()
        await settle()


@pytest.mark.parametrize("goes_on", [True, False], ids=["held_a_while", "held_for_ever"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("service", SERVICES)
async def test_M8_a_crash_ends_the_block_and_every_wait_and_gives_no_page_back_under_a_copy(
    service: str, state: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(state)
    with capture_logs() as logs:
        async with anyio.create_task_group() as group:
            with pytest.raises(ConnectorBroken) as broken:
                async with scene.server.open(shutdown_deadline_s=DEADLINE_S) as kv:
                    slots = [staging.slots for staging in kv._halves.local_worker.memory.stagings]
                    await scene.enter(kv)
                    group.start_soon(scene.wait)  # noqa: ASYNC111 - the engine's own task
                    await anyio.sleep(REACHED_S)
                    began = anyio.current_time()
                    crashed(service, scene.server, kv, monkeypatch)
                    if goes_on:
                        group.start_soon(later, scene)  # noqa: ASYNC111
                    await anyio.sleep(60)
            closed_at = anyio.current_time()
    # The deadline, and the grace in which threads may end.
    assert closed_at - began < DEADLINE_S + 1.2
    assert scene.ended_at is not None
    assert scene.ended_at - began < DEADLINE_S + 1.2
    assert isinstance(broken.value.__cause__, BaseExceptionGroup)
    assert {type(error) for error in broken.value.__cause__.exceptions} == {Planted}
    assert [log["reason"] for log in logs if log["event"] == "akv.connector.broken"] == ["Planted"]
    if goes_on:
        assert scene.server.left_behind() == []
        assert [pool.free for pool in slots] == [pool.count for pool in slots]
    touched = kv.touched_pages
    assert bool(touched) == (not goes_on and state in {"scatter", "gather"})
    if not touched:
        scene.reuse()
    await scene.let_go()


async def later(scene: Scene) -> None:
    await anyio.sleep(HELD_S)
    await scene.let_go()


@pytest.mark.parametrize("goes_on", [True, False], ids=["held_a_while", "held_for_ever"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("service", SERVICES)
async def test_O8_M8_degraded_the_block_goes_on_and_every_wait_ends_without_a_page_under_a_copy(
    service: str, state: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(state)
    server = scene.server
    with capture_logs() as logs:
        async with server.open(shutdown_deadline_s=DEADLINE_S, on_failure="degrade") as kv, anyio.create_task_group() as group:
            slots = [staging.slots for staging in kv._halves.local_worker.memory.stagings]
            await scene.enter(kv)
            group.start_soon(scene.wait)
            await anyio.sleep(REACHED_S)
            began = anyio.current_time()
            crashed(service, server, kv, monkeypatch)
            if goes_on:
                group.start_soon(later, scene)
            await anyio.sleep(2 * DEADLINE_S)
            assert scene.ended_at is not None
            # The breaker gets its turn with its first probe.
            assert scene.ended_at - began < DEADLINE_S + 0.06
            lost = not goes_on and state in {"scatter", "gather"}
            assert isinstance(scene.end, PagesLost) == lost
            assert not isinstance(scene.end, NotOpenError)
            assert kv.touched_pages == (tuple(map(tuple, pages_in_use(scene))) if lost else ())
            if state == "lookup":
                # One that the breaker's own opening ended says so.
                expected = LookupOutcome.UNAVAILABLE if service == "breaker" else LookupOutcome.DEGRADED
                assert (scene.end.tokens, scene.end.outcome) == (0, expected)  # type: ignore[attr-defined]
            if state in {"get", "scatter"} and not lost and service != "breaker":
                assert isinstance(scene.end, LoadFailed)
                assert scene.end.reason == "degraded"
            await a_whole_life_without_a_cache(server, kv)
            if not lost:
                scene.reuse()
            left_at = anyio.current_time()
    assert anyio.current_time() - left_at < DEADLINE_S + 1.2
    assert {log["reason"] for log in logs if log["event"] == "akv.connector.degraded"} == {"Planted"}
    if goes_on:
        assert server.left_behind() == []
        assert [pool.free for pool in slots] == [pool.count for pool in slots]
    await scene.let_go()
    assert server.wrong_values() == []


def pages_in_use(scene: Scene) -> list[list[int]]:
    """Pages of the whole blocks: those that a load fills or a save reads."""
    whole = (len(TOKENS) if scene.state == "scatter" else len(LONG)) // 4
    return [sorted(pages[:whole]) for pages in scene.tables[0]]


async def a_whole_life_without_a_cache(server: FakeServer, kv: Connector) -> None:
    stored = list(server.store.keys())
    began = anyio.current_time()
    request = kv.open_request("after", [7, *LONG])
    offer = await request.lookup()
    assert (offer.tokens, offer.outcome) == (0, LookupOutcome.DEGRADED)
    table = server.allocate([7, *LONG])
    kv.drop_pass(kv.plan_pass([part(request, 0, 39, table)]))
    plan = kv.plan_pass([part(request, 0, 39, table)])
    assert plan.saves == ()
    await kv.after_forward(plan)
    request.append([1, 2])
    await request.finished()
    server.free(table)
    await kv.open_request("cancelled", TOKENS).cancel()
    kv.completed()
    assert anyio.current_time() == began
    assert list(server.store.keys()) == stored
    pressure = kv.pressure()
    assert "Planted" in pressure.degraded
    assert pressure.unsaved_blocks >= 9
