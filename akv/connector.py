"""The connector: what an asynchronous server opens.

Read this file, then the steps in `flow/` in order: lookup, reserve, load, save, release. `open_connector()` joins the
scheduler half (`akv/scheduler.py`) and the worker half (`akv/worker.py`) in one process; all their tasks live in the one task
group that it owns.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeAlias

from akv import observe
from akv.errors import AkvError, ConnectorBroken, NotOpenError, SettingsError
from akv.flow.release import ended_with_block
from akv.halves import Halves
from akv.opening import Opening, check_all, own_ports, running
from akv.plan.tokens import Tokens
from akv.ports import Ports
from akv.request import Request
from akv.services.notices import Changed
from akv.settings import Settings
from akv.values.capabilities import DEFAULT_CAPABILITIES, EngineCapabilities
from akv.values.layout import Layout
from akv.values.messages import PagesPerGroup, PassPlan
from akv.values.pressure import Pressure
from akv.values.requests import Completion, Scheduled
from akv.values.scope import EMPTY_SCOPE, Scope

#: For each layer group, for each region: the tensor that holds it, first axis the page.
Caches: TypeAlias = Sequence[Sequence[Any]]


class Connector:
    """What `open_connector()` yields. Belongs to the event loop that opened it; every method is called there."""

    def __init__(self, halves: Halves) -> None:
        self._halves = halves

    @property
    def changed(self) -> Changed:
        """Set while `completed()` has something to return; `await kv.changed.wait()` in a batching loop that has nothing to
        run.
        """
        return self._halves.changed

    @property
    def settings(self) -> Settings:
        """What it was opened with, checked and complete."""
        return self._halves.settings

    @property
    def failure(self) -> AkvError | None:
        """Why it can be used no more: ConnectorBroken, or NotOpenError after its block; None while it can. From any thread."""
        return self._halves.latch.failure

    @property
    def reads(self) -> bool:
        """Whether this server's role is one that reads: then its engine keeps local matches on blocks (P2), as
        `akv.host.local_reuse()` and `declared_reuse()` have it.
        """
        return self._halves.settings.role != "producer"

    def open_request(
        self,
        request_id: str,
        tokens: Tokens,
        scope: Scope = EMPTY_SCOPE,
        *,
        reads_cache: bool = True,
        dummy: bool = False,
    ) -> Request:
        """Begin a request with its prompt: a sequence of ints or a one-dimensional integer array, n tokens.

        An array is encoded in 3 ns per token, a list in 30: hand prompts of 100,000 tokens over as arrays. With
        `reads_cache=False` (prompt logits are wanted) the request is offered nothing and saved all the same (L7). `dummy`: it
        fills a batch or warms the engine up, neither reads nor writes, no page of it is looked at, no lookup of it is told.

        Raises TokenError for a token outside int64 or a scope that cannot be, EngineContractError for an id that is open; then
        nothing was opened.
        """
        self._halves.latch.check()
        record = self._halves.scheduler.open(request_id, tokens, scope, reads_cache=reads_cache, dummy=dummy)
        return Request(self._halves, record)

    @asynccontextmanager
    async def request(
        self,
        request_id: str,
        tokens: Tokens,
        scope: Scope = EMPTY_SCOPE,
        *,
        reads_cache: bool = True,
        dummy: bool = False,
    ) -> AsyncIterator[Request]:
        """`open_request` for one task per request: finished at the end of the block, cancelled if the block raises.

        **Cancellation:** the request is cancelled, and the block left when its pages are free, however often the task is
        cancelled. If a copy on the device takes longer than `shutdown_deadline_s`, or the connector ends meanwhile, the block
        is left all the same: `Request.closed` tells whether the pages are free.
        """
        req = self.open_request(request_id, tokens, scope, reads_cache=reads_cache, dummy=dummy)

        async def cancelled() -> None:
            # If the connector ends meanwhile it withdraws the request itself, and what ended the block must not be hidden.
            with suppress(ConnectorBroken, NotOpenError):
                await req.cancel()

        def released() -> bool:
            return req.closed or req.lost or self._halves.latch.tripped

        grace_s = self._halves.settings.shutdown_deadline_s
        try:
            async with ended_with_block(req.finished, cancelled, released, grace_s):
                yield req
        finally:
            if req.closed:
                # Also where the cancellation came in the instant of its end, and no wait returned.
                req._told()
            if not released():
                observe.emit(observe.REQUEST_UNRELEASED, request_id=request_id, incarnation=req.incarnation, grace_s=grace_s)

    def completed(self) -> list[Completion]:
        """Fetch what ended since the last call, in order: loads (LoadCompleted) and finished or cancelled requests
        (SavesCompleted).

        For batching loops, woken by `changed`. What `wait()`, `finished()` or `cancel()` returned does not come here again.
        Pages that left quarantine come as PagesReleased, and only here. Raises PagesLost, once for each request and in place
        of its completion, if the connector degraded and nobody can see any more what touches its pages.
        """
        self._halves.latch.check()
        return self._halves.fetch()

    @property
    def touched_pages(self) -> PagesPerGroup:
        """The engine's pages, per layer group, that a store call reads or writes at this moment; `()` for none. Once the
        connector has ended or degraded also those that a copy may touch whose end nobody saw.

        Also after the connector's block has ended, when nobody delivers `PagesReleased` any more: what is named then was left
        to a call that did not return within `shutdown_deadline_s`, and must not be used again while the process lives.
        """
        return self._halves.touched_pages

    def pressure(self) -> Pressure:
        """How busy the connector is, for admission (V4). A snapshot; changes nothing."""
        self._halves.latch.check()
        halves = self._halves
        return halves.worker.pressure(
            halves.calls, halves.scheduler.backlog, halves.breaker.state, halves.latch.degraded, halves.unsaved_blocks
        )

    async def reset(self, revision: str) -> None:
        """The model's weights change: from here on this server's pages are those of weights of that name (K8).

        `revision` takes the place of the setting `revision`: a stable name, the same in every server that runs these weights.
        Whatever is asked for after this call is found and saved under it, and nothing that was computed before is.

        Call it between passes: with no pass planned or running, before one that uses the new weights is planned. Every open
        request is cancelled, as by `Request.cancel()`, and told to `completed()`: its KV is of no use any more, nor are the
        pages that the engine keeps itself. Loads that wait are withdrawn; what is on its way to the pool ends under the old
        name, or not at all. Returns when the pages of these requests are free, or named as quarantined.

        Raises SettingsError for a name that cannot stand in a key; then nothing was reset. **Cancellation:** the reset stands;
        only the wait ends, and `completed()` tells.
        """
        self._halves.latch.check()
        await self._halves.reset(revision)

    def plan_pass(self, scheduled: Iterable[Scheduled]) -> PassPlan:
        """Plan the saves of one coming pass, and ask for the slots of its window pages. Changes no request and no mark: a plan
        that never runs leaves no trace once it is dropped (S2).

        Raises EngineContractError naming the request whose part cannot be.
        """
        self._halves.latch.check()
        return self._halves.scheduler.passes.plan(scheduled)

    async def after_forward(self, plan: PassPlan) -> None:
        """The planned pass has been queued on the execution stream: queue its saves behind it and return.

        Call it before anything is queued that may overwrite pages of window groups. Where the pass completes a prompt it waits
        until their copies are queued on the execution stream, at most `snapshot_wait_ms` for slots, never for a copy's end.

        Raises EngineContractError if the plan has ended. A plan that this connector never made breaks it, since marks of other
        requests may be wrong by then (L6). **Cancellation:** the saves are queued all the same.
        """
        self._halves.latch.check()
        await self._halves.after_forward(plan)

    def drop_pass(self, plan: PassPlan) -> None:
        """The planned pass will not run. Its blocks are listed again by a later plan. Errors as for `after_forward`."""
        self._halves.latch.check()
        self._halves.end_plan(lambda: self._halves.scheduler.passes.drop(plan, "dropped by the engine"))


def open_connector(
    settings: Settings | Mapping[str, Any],
    layout: Layout,
    caches: Caches = (),
    *,
    stream: Any = None,
    capabilities: EngineCapabilities = DEFAULT_CAPABILITIES,
    ports: Ports | None = None,
) -> AbstractAsyncContextManager[Connector]:
    """Open a connector for one rank, as the context manager of an `async with`. Runs on asyncio and trio.

    `caches[g][r]` is the tensor that holds region r of the pages of layer group g, first axis the page. `stream` is the CUDA
    stream that the engine computes on (default: the current one). `capabilities` is what the engine can do. `ports` replaces
    Mooncake, torch and threads; who passes them closes them.

    Leaving the block ends every task, thread and child, gives back every page and unregisters every buffer, within
    `shutdown_deadline_s`; store calls that never return are kept on record, and the exit guard sees to the end of the process
    (O6). `Connector.touched_pages` names the pages that such calls were left with. An error of the block leaves as it is; a
    fault of the connector leaves as ConnectorBroken.

    Raises SettingsError, DependencyError, PoolError: then nothing stays open. **Cancellation:** closes as any error does.
    """
    return Opening(_open_connector(settings, layout, caches, stream, capabilities, ports), "open_connector")


@asynccontextmanager
async def _open_connector(
    raw: Settings | Mapping[str, Any],
    layout: Layout,
    caches: Caches,
    stream: Any,
    capabilities: EngineCapabilities,
    given: Ports | None,
) -> AsyncIterator[Connector]:
    settings = check_all(raw, layout, capabilities)
    if layout.world != 1:
        raise SettingsError(
            "layout.world",
            layout.world,
            "this connector serves one rank",
            "Use open_scheduler() and, for each rank, open_worker(); or a layout of one rank, world=1.",
        )
    async with AsyncExitStack() as stack:
        ports = given if given is not None else await stack.enter_async_context(own_ports(settings, layout, caches, stream))
        halves = Halves(settings, layout, ports, capabilities)
        async with running(halves, layout):
            yield Connector(halves)
