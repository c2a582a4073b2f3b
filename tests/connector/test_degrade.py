"""`on_failure = "degrade"`: a fault inside the connector costs the program its cache, and nothing else (O8, M8, L6)."""

from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from akv import (
    Connector,
    ConnectorBroken,
    EngineContractError,
    LoadCompleted,
    LoadFailed,
    LoadState,
    LookupOutcome,
    PagesLost,
    PagesReleased,
    SavesCompleted,
)
from akv.ports.calls import CallKind, CallSize
from akv.values.messages import PassPlan
from akv.values.settings import Settings
from akv_testing import settle
from akv_testing.server import FakeServer
from akv_testing.traffic import LONG, TOKENS

pytestmark = pytest.mark.anyio


class Planted(Exception):
    """What services crash with."""


class EnginesOwn(Exception):
    """An error of the embedding program."""


def raises(*_: object, **__: object) -> Any:
    raise Planted


def warm(**arguments: Any) -> FakeServer:
    return FakeServer.warm(TOKENS, on_failure="degrade", shutdown_deadline_s=1.0, **arguments)


async def crash(server: FakeServer) -> None:
    server.runner.start(CallKind.COPY, lambda: None, CallSize(), raises)
    await settle()


def test_a_program_that_asks_for_nothing_is_told() -> None:
    assert Settings(model_key="m").on_failure == "raise"


# -- what was under way


async def test_O8_the_load_whose_loader_crashed_fails_and_computing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    async with server.open(max_load_attempts=1) as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        monkeypatch.setattr(server.pool, "get", raises)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        assert (failed.value.reason, failed.value.key) == ("degraded", "")
        server.free(table)
        # Whatever else could be said of a request: this is the reason now.
        for asking in (request, kv.open_request("again", TOKENS)):
            assert (await asking.lookup()).outcome is LookupOutcome.DEGRADED
    assert server.left_behind() == []


async def test_O8_the_save_whose_saver_crashed_is_refused_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    monkeypatch.setattr(server.pool, "put", raises)
    with capture_logs() as logs:
        async with server.open() as kv:
            request, other = kv.open_request("r", LONG), kv.open_request("queued behind", [1, *LONG])
            table, its = server.allocate(LONG), server.allocate([1, *LONG])
            await server.compute(kv, request, LONG, table)
            await server.compute(kv, other, [1, *LONG], its)
            await other.finished()
            await request.finished()
            server.free(table)
            server.free(its)
            assert kv.pressure().backlog_bytes == 0
            began = anyio.current_time()
    assert anyio.current_time() == began
    refused = {log["request_id"]: log["blocks"] for log in logs if log["event"] == "akv.save.refused"}
    assert refused == {"r": 9, "queued behind": 9}
    assert server.left_behind() == []


async def test_O8_of_what_hangs_in_the_store_nothing_is_waited_for() -> None:
    server = warm()
    get, put = server.runner.hold(CallKind.GET), server.runner.hold(CallKind.PUT)
    async with server.open() as kv:
        _, load, its = await server.load(kv, "r", TOKENS)
        request = kv.open_request("still open", LONG)
        table = server.allocate(LONG)
        await server.compute(kv, request, LONG, table)
        await get.reached()
        await put.reached()
        await anyio.sleep(0.01)
        await crash(server)
        await anyio.sleep(0.01)
        # The loader has given its call up, and the slots of that are counted.
        assert kv.pressure().given_up_calls == 1
        assert kv.pressure().loading.quarantined > 0
        began = anyio.current_time()
        with pytest.raises(LoadFailed):
            await load.wait()
        await request.finished()
        assert anyio.current_time() == began
        server.free(its)
        server.free(table)
        get.release()
        put.release()
    assert server.left_behind() == []


async def test_M8_a_saver_that_crashes_while_the_connector_closes_leaves_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FakeServer()
    with pytest.raises(ConnectorBroken):
        async with server.open() as kv:
            gate = server.runner.hold(CallKind.PUT)
            for number in range(3):
                tokens = [number, *LONG]
                await server.compute(kv, kv.open_request(str(number), tokens), tokens, server.allocate(tokens))
            await gate.reached()
            monkeypatch.setattr(server.pool, "put", raises)
            gate.release()
            began = anyio.current_time()
    assert anyio.current_time() - began < 0.1
    assert server.left_behind() == []


async def test_O8_an_offer_of_before_is_taken_up_and_fails_like_any_load() -> None:
    server = warm()
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        offer = await request.lookup()
        await crash(server)
        table = server.allocate(TOKENS)
        load = request.reserve(offer, offer.tokens, table)
        assert load.state is LoadState.FAILED
        assert kv.completed() == [
            LoadCompleted(request_id="r", incarnation=request.incarnation, state=LoadState.FAILED, reason="degraded")
        ]
        server.free(table)
        # The engine's mistakes are still told at the call.
        with pytest.raises(EngineContractError):
            request.reserve(offer, 3, table)
        await request.finished()
    assert server.left_behind() == []


async def test_O8_a_batching_loop_is_woken_and_told_of_every_end() -> None:
    server = warm()
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, _, table = await server.load(kv, "r", TOKENS)
        saving = kv.open_request("s", LONG)
        its = server.allocate(LONG)
        await server.compute(kv, saving, LONG, its)
        saving.finish()
        await gate.reached()
        async with anyio.create_task_group() as group:
            group.start_soon(crash, server)
            await kv.changed.wait()
            # The service that was started again delivers the end of the copy.
            await anyio.sleep(0.01)
        ended = {(type(one), one.request_id) for one in kv.completed()}
        assert ended == {(LoadCompleted, "r"), (SavesCompleted, "s")}
        server.free(table)
        server.free(its)
        assert not kv.changed.is_set()
        # The page that the call which still runs may write is a slot of ours.
        assert kv.touched_pages == ()
        await request.cancel()
        gate.release()


async def test_O8_D2_pages_of_a_call_into_pages_are_named_and_come_back_when_it_returned() -> None:
    server = warm(host_pages=True)
    gate = server.runner.hold(CallKind.GET)
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        await gate.reached()
        await crash(server)
        with pytest.raises(LoadFailed) as failed:
            await load.wait()
        # The first group's batch is under way.
        assert failed.value.quarantined == (tuple(table[0][:4]), ())
        assert kv.touched_pages == failed.value.quarantined
        await request.cancel()
        gate.release()
        await anyio.sleep(0.01)
        released = [one for one in kv.completed() if isinstance(one, PagesReleased)]
        assert [one.pages for one in released] == [failed.value.quarantined]
        server.free(table)
    assert server.left_behind() == []


# -- what nobody can see any more


def lose_copies(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies into pages are issued, and whoever is to hear of their end crashes over it."""
    copy = server.device.scatter

    def issue(*arguments: Any) -> None:
        copy(*arguments)  # Instead of its event, nothing that can be asked.

    monkeypatch.setattr(server.device, "scatter", issue)


async def a_lost_load(server: FakeServer, kv: Connector, monkeypatch: pytest.MonkeyPatch) -> Any:
    request, load, table = await server.load(kv, "r", TOKENS)
    lose_copies(server, monkeypatch)
    await anyio.sleep(0.1)
    return request, load, table


async def test_M8_pages_whose_copy_nobody_can_see_to_end_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    with capture_logs() as logs:
        async with server.open() as kv:
            request, load, table = await a_lost_load(server, kv, monkeypatch)
            pages = tuple(tuple(pages[:4]) for pages in table)
            assert load.state is None
            assert kv.touched_pages == pages
            began = anyio.current_time()
            with pytest.raises(PagesLost, match=r"8 pages of request 'r'") as lost:
                await load.wait()
            assert anyio.current_time() - began < 1.0
            assert lost.value.pages == pages
            for wait in (request.cancel, request.finished, load.wait):
                with pytest.raises(PagesLost):
                    await wait()
            assert request.lost
            assert not request.closed
            # It was told; and its id is free, while its pages are not.
            assert kv.completed() == []
            again = kv.open_request("r", TOKENS)
            offer = (await again.lookup()).at_most(0)
            assert kv.touched_pages == pages
            assert again.reserve(offer, 0, table).state is LoadState.LOADED
            await again.finished()
    assert kv.touched_pages == pages
    assert [(log["request_id"], log["pages"]) for log in logs if log["event"] == "akv.pages.lost"] == [("r", 8)]


async def test_M8_a_batching_loop_is_told_of_lost_pages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    async with server.open() as kv:
        await a_lost_load(server, kv, monkeypatch)
        assert kv.completed() == []
        await kv.changed.wait()
        with pytest.raises(PagesLost) as lost:
            kv.completed()
        assert lost.value.request_id == "r"
        assert kv.completed() == []
        assert not kv.changed.is_set()
        assert (await kv.open_request("next", TOKENS).lookup()).tokens == 0


async def test_M8_the_block_of_a_request_whose_pages_are_lost_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    async with server.open() as kv:
        lose_copies(server, monkeypatch)
        with pytest.raises(EnginesOwn):
            async with kv.request("r", TOKENS) as request:
                offer = await request.lookup()
                request.reserve(offer, 16, server.allocate(TOKENS))
                await anyio.sleep(0.1)
                raise EnginesOwn
        assert request.lost
        assert anyio.current_time() < 1.1


async def test_M8_a_request_whose_gather_is_not_seen_to_end_goes_on_and_is_lost_at_its_end() -> None:
    server = warm()
    server.device.script.hold("gather")
    async with server.open() as kv:
        request = kv.open_request("r", LONG)
        table = server.allocate(10)
        await server.compute(kv, request, LONG, table)
        await settle()
        await crash(server)
        await anyio.sleep(2)
        assert not request.lost
        request.append([1])
        await server.compute(kv, request, [*LONG, 1], table, before=38)
        began = anyio.current_time()
        with pytest.raises(PagesLost):
            await request.finished()
        assert anyio.current_time() == began


async def test_M8_M7_a_call_on_pages_that_are_lost_may_return_after_the_copy_was_seen_to_end() -> None:
    server = FakeServer.warm(TOKENS, LONG, on_failure="degrade", shutdown_deadline_s=1.0, host_pages=True)
    others, first, second = (server.runner.hold(CallKind.GET) for _ in range(3))
    scatter = server.device.script.hold("scatter")
    with capture_logs() as logs:
        async with server.open() as kv:
            other, _, its = await server.load(kv, "other", TOKENS)
            await others.reached()
            # While its pages are in quarantine the next load goes through slots.
            assert await other.cancel() == (tuple(its[0][:4]), ())
            _, load, _ = await server.load(kv, "r", LONG)
            await first.reached()
            others.release()
            await settle()
            first.release()
            await second.reached()
            await crash(server)
            with pytest.raises(PagesLost):
                await load.wait()
            scatter.release()
            await anyio.sleep(0.1)
            second.release()
            await anyio.sleep(0.1)
            assert [type(one) for one in kv.completed()] == [PagesReleased], "of the other request alone"
            assert not server.device.busy
    assert [log["reason"] for log in logs if log["event"] == "akv.connector.degraded"] == ["Planted"]
    assert server.left_behind() == []


# -- what degrades, and what does not


async def test_L6_a_pass_of_another_connector_degrades_and_says_why() -> None:
    server = warm()
    hold = server.device.script.hold("gather")
    with capture_logs() as logs:
        async with server.open() as kv:
            request = kv.open_request("r", LONG)
            table = server.allocate(LONG)
            await server.compute(kv, request, LONG, table)
            with pytest.raises(EngineContractError, match="never made"):
                kv.drop_pass(PassPlan(plan_id=99))
            assert "never made" in kv.pressure().degraded
            hold.release()
            await request.finished()
            server.free(table)
    assert [log["reason"] for log in logs if log["event"] == "akv.connector.degraded"] == ["UnknownPlan"]
    # Marks may be wrong, so nothing that was not on its way is published.
    assert server.stored_blocks(LONG) == []


async def test_L6_an_engines_other_mistakes_and_its_pools_trouble_degrade_nothing() -> None:
    server = warm()
    async with server.open() as kv:
        plan = kv.plan_pass([])
        kv.drop_pass(plan)
        with pytest.raises(EngineContractError):
            kv.drop_pass(plan)
        request = kv.open_request("r", TOKENS)
        with pytest.raises(EngineContractError):
            await request.lookup(99)
        server.store.down = True
        assert (await request.lookup()).outcome is LookupOutcome.UNAVAILABLE
        server.store.down = False
        await anyio.sleep(5)
        assert (await request.lookup()).tokens == 16
        assert kv.pressure().degraded == ""


async def test_O8_what_fails_while_it_opens_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    monkeypatch.setattr(server.pool, "register", raises)
    with pytest.RaisesGroup(Planted, flatten_subgroups=True, allow_unwrapped=True):
        async with server.open():
            raise AssertionError("it is not open")
    assert server.left_behind() == []


async def test_O8_a_crash_while_it_closes_does_not_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    async with server.open() as kv:
        gate = server.runner.hold(CallKind.PUT)
        requests = [kv.open_request(str(number), [number, *LONG]) for number in range(3)]
        for number, request in enumerate(requests):
            await server.compute(kv, request, [number, *LONG], server.allocate([number, *LONG]))
        await gate.reached()
        monkeypatch.setattr(server.pool, "put", raises)
        gate.release()
        began = anyio.current_time()
    assert anyio.current_time() - began < 0.1
    assert server.left_behind() == []


async def test_O8_the_programs_own_error_leaves_a_degraded_block_as_it_is() -> None:
    server = warm()
    with pytest.raises(EnginesOwn):
        async with server.open():
            await crash(server)
            raise EnginesOwn


async def test_O8_every_failure_is_told_and_a_connector_that_is_opened_anew_has_a_cache() -> None:
    server = warm()
    with capture_logs() as logs:
        async with server.open() as kv:
            for _ in range(3):
                await crash(server)
                await anyio.sleep(1)
            assert (await kv.open_request("r", TOKENS).lookup()).tokens == 0
    assert len([log for log in logs if log["event"] == "akv.connector.degraded"]) == 3
    async with FakeServer(store=server.store).open() as kv:
        assert (await kv.open_request("r", TOKENS).lookup()).tokens == 16


async def test_O8_a_deliverer_that_cannot_run_at_all_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warm()
    runs: list[float] = []

    async def serve(**_: object) -> None:
        await anyio.lowlevel.checkpoint()
        runs.append(anyio.current_time())
        raise Planted

    async with server.open() as kv:
        monkeypatch.setattr(server.runner, "serve", serve)
        await crash(server)
        await anyio.sleep(30)
        assert len(runs) < 60
        assert (await kv.open_request("r", TOKENS).lookup()).outcome is LookupOutcome.DEGRADED
