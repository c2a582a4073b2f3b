"""A server of several ranks: what its scheduler opens, and what each of its ranks does.

The scheduler half (`akv/scheduler.py`) lives where the engine schedules; each rank has a worker half (`akv/worker.py`), as a
rule in a process of its own. They talk in messages that the engine carries: what `Scheduler.take_orders()` returns goes to
every rank's `Worker.carry_out()`, and what each `Worker.take_report()` returns goes to `Scheduler.take_report()`. All ranks
are told the same, and what they report holds once it is true of all of them, so all agree on what becomes of a request (D3).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from akv.connector import Caches, Connector
from akv.errors import AkvError, ConnectorBroken, SettingsError
from akv.halves import Halves
from akv.opening import Opening, check_all, own_ports, pool_alone, running
from akv.ports import Ports
from akv.rank import Rank
from akv.services.notices import Changed
from akv.settings import Settings
from akv.values.capabilities import DEFAULT_CAPABILITIES, EngineCapabilities
from akv.values.layout import Layout
from akv.values.messages import PagesPerGroup, RankHello
from akv.workers import RemoteWorkers


class Scheduler(Connector):
    """What `open_scheduler()` yields: a connector whose pages are moved by the worker halves of the ranks.

    What is awaited of it ends with the ranks' reports, so the engine goes on carrying messages meanwhile. A plan ends with
    `after_forward()` once its pass is bound to be queued, by every rank, before whatever later orders say.
    """

    def __init__(self, halves: Halves, ranks: RemoteWorkers) -> None:
        super().__init__(halves)
        self._ranks = ranks

    @property
    def has_orders(self) -> bool:
        """Whether `take_orders()` has something to return. From any thread, with no hop."""
        return self._ranks.has_orders

    def take_orders(self) -> bytes:
        """What was said since the last call, for every rank's `Worker.carry_out()`; empty for nothing.

        Ranks get what this returns whole, each of them all of it, in the order of the calls.
        """
        self._halves.latch.check()
        return self._ranks.take_orders()

    def take_report(self, report: bytes) -> None:
        """What `Worker.take_report()` of one rank returned. Completions follow once every rank has said the same thing ended.

        Raises EngineContractError for anything else; then nothing changed.
        """
        self._halves.latch.check()
        if report:
            self._ranks.take_report(report)


class Worker:
    """What `open_worker()` yields: one rank's pages. Belongs to the event loop that opened it, and is called there."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @property
    def hello(self) -> bytes:
        """What `open_scheduler()` is to be given of this rank."""
        return self._rank.hello

    @property
    def settings(self) -> Settings:
        """What it was opened with, checked and complete."""
        return self._rank.settings

    @property
    def changed(self) -> Changed:
        """Set while `take_report()` has something to return."""
        return self._rank.changed

    @property
    def failure(self) -> AkvError | None:
        """As `Connector.failure`: why it can be used no more. From any thread."""
        return self._rank.latch.failure

    @property
    def touched_pages(self) -> PagesPerGroup:
        """The engine's pages, per layer group, that a store call touches; once it has ended, that a copy may touch, too."""
        return self._rank.touched_pages

    async def carry_out(self, orders: bytes) -> None:
        """Do what `Scheduler.take_orders()` said, in order.

        Call it before the pass that these orders were made for is queued on the execution stream, and for those that followed
        `after_forward()` of a plan once its pass is. It returns when the engine may go on: nothing touches pages any more that
        a preempted request gave back, and of a plan that ended the copies of window pages are queued. It waits for no store
        call of theirs, and otherwise for nothing.

        Raises EngineContractError for what is no such message, ConnectorBroken once this half cannot go on. PagesLost if this
        half degraded (`on_failure`) and nobody can see any more whether copies on pages of preempted requests have ended: what
        `touched_pages` names must not be used again while the process lives. The rest is carried out by the next call.
        **Cancellation:** what was not carried out is, first of all, by the next call.
        """
        self._rank.latch.check()
        with self._rank.latch.ending_waits():
            await self._rank.carry_out(orders)

    def take_report(self) -> bytes:
        """What ended since the last call, for `Scheduler.take_report()`; empty for nothing.

        Also once its block has ended: then what that ended. From any thread by then. Raises ConnectorBroken once this half
        cannot go on.
        """
        if isinstance(failure := self._rank.latch.failure, ConnectorBroken):
            raise failure
        return self._rank.take_report()


def open_scheduler(
    settings: Settings | Mapping[str, Any],
    hellos: Sequence[bytes],
    *,
    capabilities: EngineCapabilities = DEFAULT_CAPABILITIES,
    ports: Ports | None = None,
) -> AbstractAsyncContextManager[Scheduler]:
    """Open the scheduler half of a server whose ranks have opened their worker halves, as a context manager.

    `hellos`: `Worker.hello` of every rank, in any order. Settings and capabilities are those of the ranks. It lends no memory
    to the pool, and asks it only what it holds. `ports` replaces Mooncake and threads; its device is not used.

    Raises SettingsError for ranks that differ from one another or from these settings, naming both values (D1), and otherwise
    as `open_connector()`. **Cancellation:** closes as any error does.
    """
    return Opening(_open_scheduler(settings, hellos, capabilities, ports), "open_scheduler")


def open_worker(
    settings: Settings | Mapping[str, Any],
    layout: Layout,
    caches: Caches = (),
    *,
    rank: int,
    stream: Any = None,
    capabilities: EngineCapabilities = DEFAULT_CAPABILITIES,
    ports: Ports | None = None,
) -> AbstractAsyncContextManager[Worker]:
    """Open the worker half of rank `rank` of `layout.world`, as a context manager.

    Arguments, errors and what leaving the block does are those of `open_connector()`; `caches` holds this rank's part of each
    page, and `layout` describes it: the same on every rank.
    """
    return Opening(_open_worker(settings, layout, caches, rank, stream, capabilities, ports), "open_worker")


@asynccontextmanager
async def _open_scheduler(
    raw: Settings | Mapping[str, Any], hellos: Sequence[bytes], capabilities: EngineCapabilities, given: Ports | None
) -> AsyncIterator[Scheduler]:
    if not hellos:
        raise SettingsError("hellos", 0, "a server has one rank at least", "Hand over Worker.hello of every rank.")
    told = [_hello(data) for data in hellos]
    settings = check_all(raw, told[0].layout, capabilities)
    ranks = RemoteWorkers(told, settings.max_parked_loads)
    async with AsyncExitStack() as stack:
        ports = given if given is not None else await stack.enter_async_context(pool_alone(_shared(settings)))
        halves = Halves(settings, ranks.layout, ports, capabilities, ranks)
        async with running(halves, ranks.layout):
            yield Scheduler(halves, ranks)


@asynccontextmanager
async def _open_worker(
    raw: Settings | Mapping[str, Any],
    layout: Layout,
    caches: Caches,
    rank: int,
    stream: Any,
    capabilities: EngineCapabilities,
    given: Ports | None,
) -> AsyncIterator[Worker]:
    settings = check_all(raw, layout, capabilities)
    if not 0 <= rank < layout.world:
        why = f"the layout is of {layout.world} ranks"
        raise SettingsError("rank", rank, why, f"Use 0 to {layout.world - 1}, or describe a layout of more (layout.world).")
    async with AsyncExitStack() as stack:
        if given is None:
            given = await stack.enter_async_context(own_ports(_shared(settings), layout, caches, stream))
        side = Rank(settings, layout, given, capabilities, rank)
        async with running(side, layout):
            yield Worker(side)


def _shared(settings: Settings) -> Settings:
    if settings.pool == "embedded":
        why = "each rank would start a pool of its own, and the scheduler another one"
        raise SettingsError("pool", settings.pool, why, "Start one with `akv master`, and name it in store.master_address.")
    return settings


def _hello(data: bytes) -> RankHello:
    try:
        return msgspec.msgpack.decode(data, type=RankHello)
    except msgspec.MsgspecError as error:
        why = f"{len(data)} bytes are none ({error})"
        raise SettingsError(
            "hellos", type(data).__name__, why, "Hand over Worker.hello, and run one version of akv."
        ) from error
