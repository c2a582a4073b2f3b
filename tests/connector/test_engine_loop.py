"""What an engine may do to a connector from its loop, from another thread, and with Ctrl-C (O6)."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import msgspec
import pytest

from akv import Connector, EngineContractError, NotOpenError, Request
from akv.ports.calls import CallKind
from akv.values.messages import PassPlan
from akv.values.stats import ConnectorStats
from akv_testing import run_virtual, settle
from akv_testing.server import FakeServer, PageTable
from akv_testing.traffic import LONG, TOKENS, part, work_of_every_kind

pytestmark = pytest.mark.anyio


class Uses:
    """Every synchronous use of a connector, by name, while each kind of its work hangs."""

    def __init__(self, kv: Connector, request: Request, loading: Any, plan: PassPlan, table: PageTable, offer: Any) -> None:
        self.calls: dict[str, Callable[[], object]] = {
            "open_request": lambda: kv.open_request("new", LONG),
            "completed": kv.completed,
            "pressure": kv.pressure,
            "plan_pass": lambda: kv.plan_pass([part(request, 0, 38, table)]),
            "drop_pass": lambda: kv.drop_pass(plan),
            "reserve": lambda: request.reserve(offer, 0, table),
            "append": lambda: request.append([1]),
            "finish": request.finish,
        }
        #: Which say nothing but what is known, so they may be read from anywhere.
        self.reads: dict[str, Callable[[], object]] = {
            "touched_pages": lambda: kv.touched_pages,
            "changed": kv.changed.is_set,
            "closed": lambda: request.closed,
            "lost": lambda: request.lost,
            "quarantined": lambda: request.quarantined,
            "incarnation": lambda: request.incarnation,
            "state": lambda: loading.state,
        }


async def everything_hangs(server: FakeServer, kv: Connector) -> tuple[Uses, list[Any]]:
    """No call returns and no copy begins, and the clock stands still, since nothing that would end is under way."""
    request = kv.open_request("r", LONG)
    offer = await request.lookup()
    other = kv.open_request("other", TOKENS)
    its = await other.lookup()
    holds: list[Any] = [server.runner.hold_all(kind) for kind in CallKind]
    loading = other.reserve(its, its.tokens, server.allocate(TOKENS))
    saving = kv.open_request("saving", [9, *LONG])
    await server.compute(kv, saving, [9, *LONG], server.allocate([9, *LONG]))
    table = server.allocate(LONG)
    plan = kv.plan_pass([part(request, 0, 38, table)])
    await settle()
    return Uses(kv, request, loading, plan, table, offer), holds


async def test_O6_every_synchronous_use_in_the_running_loop_returns_or_raises_at_once() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open(shutdown_deadline_s=0.1) as kv:
        uses, holds = await everything_hangs(server, kv)
        began, clock = anyio.current_time(), time.perf_counter()
        for use in (*uses.reads.values(), *uses.calls.values()):
            use()
        # Again, after the request has begun to end.
        for name, use in uses.calls.items():
            if name in {"completed", "pressure", "finish"}:
                use()
            else:
                with pytest.raises(EngineContractError):
                    use()
        assert anyio.current_time() == began
        # Generous: what blocks does so for a second and more.
        assert time.perf_counter() - clock < 1.0
        for hold in holds:
            hold.release()


async def test_O6_from_another_thread_every_use_is_refused_and_what_is_only_read_is_told() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open(shutdown_deadline_s=0.1) as kv:
        uses, holds = await everything_hangs(server, kv)

        def elsewhere() -> dict[str, str]:
            for read in uses.reads.values():
                read()
            said = {}
            for name, use in uses.calls.items():
                try:
                    use()
                except NotOpenError as error:
                    said[name] = str(error)
            return said

        said = await in_a_thread(elsewhere)
        assert set(said) == set(uses.calls)
        assert all("another thread" in text for text in said.values())
        # Nothing happened: the loop's own uses go on.
        for use in uses.calls.values():
            use()
        for hold in holds:
            hold.release()


async def in_a_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    # For a moment only; a worker thread's end would come in real time, which virtual clocks outrun.
    thread.join()
    await anyio.lowlevel.checkpoint()
    return results[0]


def test_O6_outside_a_loop_a_connector_that_was_left_says_so() -> None:
    kept: list[Any] = []

    async def main() -> None:
        server = FakeServer.warm(TOKENS)
        async with server.open() as kv:
            kept.extend([kv, kv.open_request("r", TOKENS)])

    anyio.run(main)
    kv, request = kept
    for use in (kv.completed, kv.pressure, lambda: kv.open_request("x", TOKENS), lambda: kv.plan_pass([]), request.finish):
        with pytest.raises(NotOpenError, match="closed"):
            use()
    assert kv.touched_pages == ()
    assert request.closed


async def test_O6_a_connector_may_be_left_before_it_opened_and_left_twice() -> None:
    server = FakeServer.warm(TOKENS)
    opening = server.open()
    assert await opening.__aexit__(None, None, None) is None
    kv = await opening.__aenter__()
    await kv.open_request("r", TOKENS).lookup()
    assert not await opening.__aexit__(None, None, None)
    assert server.left_behind() == []
    assert await opening.__aexit__(None, None, None) is None
    with pytest.raises(NotOpenError):
        kv.completed()


async def test_O6_left_twice_with_a_stuck_call_takes_the_deadline_once() -> None:
    server = FakeServer.warm(TOKENS)
    gate = server.runner.hold(CallKind.GET)
    async with AsyncExitStack() as stack:
        kv = await stack.enter_async_context(server.open(shutdown_deadline_s=1.0))
        await work_of_every_kind(server, kv)
        await gate.reached()
        began = anyio.current_time()
        await stack.aclose()
        left = anyio.current_time()
        assert left - began <= 2.1
    assert anyio.current_time() == left


class Interrupted:
    """Where the connector posts what it counted; Ctrl-C comes while one of its services waits for that."""

    def __init__(self, interrupt: type[BaseException]) -> None:
        self._interrupt = interrupt

    def post(self, stats: ConnectorStats) -> None:
        raise self._interrupt


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("ended", [False, True])
def test_O6_an_interrupt_that_comes_while_a_service_runs_is_the_program_s(interrupt: type[BaseException], ended: bool) -> None:
    # On trio, which raises it in the task that runs; asyncio has its own way.
    async def main() -> None:
        server = FakeServer()
        server.ports = msgspec.structs.replace(server.ports, board=Interrupted(interrupt))
        async with server.open(shutdown_deadline_s=0.5):
            if not ended:
                await anyio.sleep_forever()

    with pytest.raises(interrupt):
        run_virtual("trio", main)


#: Arguments: the backend, and what hangs. Prints a line when it may be interrupted.
SERVER = """
import signal
import sys
import threading
import anyio
from akv.ports.calls import CallKind
from akv_testing.server import FakeServer
from akv_testing.traffic import TOKENS, work_of_every_kind

# A shell that started the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    server = FakeServer.warm(TOKENS)
    gates = [server.runner.hold_all(CallKind.GET)] if sys.argv[2] == "stuck" else []
    try:
        async with server.open(shutdown_deadline_s=0.5) as kv:
            await work_of_every_kind(server, kv)
            print("ready", flush=True)
            await anyio.sleep_forever()
    finally:
        print("left", len(server.left_behind()), flush=True)

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("work", ["flows", "stuck"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_O6_an_interrupted_server_leaves_its_connector_and_ends_as_interrupted(backend: str, work: str, times: int) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SERVER, backend, work], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read() if process.stderr else ""
        began = time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        said, log = process.communicate(timeout=20)
    # The deadline, the grace of the threads, and what a loaded machine takes to end an interpreter.
    assert time.monotonic() - began < 10
    # Python ends itself by the signal, which shells show as 130.
    assert process.returncode in {-signal.SIGINT, 130}, log
    assert "KeyboardInterrupt" in log
    if times == 1:
        assert said == ("left 0\n" if work == "flows" else said)
        assert said.startswith("left")
