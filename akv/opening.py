"""How what is opened is opened, and left: ports, services around a block, and what leaves in place of the block's error."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec
from anyio import create_task_group

from akv import observe
from akv.errors import ConnectorBroken, NotOpenError
from akv.plan.integrity import trailer_bytes
from akv.plan.keys import layout_fingerprint
from akv.ports import Ports
from akv.ports.calls import CallKind
from akv.ports.device import DeviceCopier
from akv.settings import Settings, check_backlog, check_settings, check_staging
from akv.side import Side
from akv.values.capabilities import EngineCapabilities, check_capabilities
from akv.values.layout import Layout, check_layout

Opened = TypeVar("Opened")


class Opening(AbstractAsyncContextManager[Opened]):
    """A connector, or a half of one, that is not open yet: entering opens it, anything else says so."""

    def __init__(self, opening: AbstractAsyncContextManager[Opened], function: str) -> None:
        """`function`: by which it is opened."""
        self._opening = opening
        self._function = function
        self._entered = False
        self._open = False

    async def __aenter__(self) -> Opened:
        if self._entered:
            raise NotOpenError(
                f"this connector was opened before, and a connector is opened once: call {self._function}() again"
            )
        self._entered = True
        kv = await self._opening.__aenter__()
        self._open = True
        return kv

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        # Whoever enters and leaves by hand, in a server's start and stop hooks, may stop what never started, and stop twice.
        if not self._open:
            return None
        self._open = False
        return await self._opening.__aexit__(kind, error, trace)  # noqa: ASYNC102 - bounded there

    def __getattr__(self, name: str) -> Any:
        raise NotOpenError(
            f"the connector is not open, so it has no {name!r}: write `async with {self._function}(...) as kv:`"
        )


def check_all(raw: Settings | Mapping[str, Any], layout: Layout, capabilities: EngineCapabilities) -> Settings:
    """The settings, checked, for this layout and this engine. Raises SettingsError naming what cannot be."""
    settings = check_settings(raw)
    check_layout(layout)
    check_capabilities(capabilities, layout)
    check_staging(settings, layout.largest_page_bytes + trailer_bytes(settings.integrity))
    check_backlog(settings, sum(group.bytes_per_page for group in layout.groups if not group.is_window))
    return settings


@asynccontextmanager
async def running(side: Side, layout: Layout) -> AsyncIterator[None]:
    """Run the services around a block. The block's own error leaves as it is, a service's as ConnectorBroken."""
    settings = side.settings
    block_failed: BaseException | None = None
    try:
        async with create_task_group() as group:
            try:
                with observe.step(
                    observe.CONNECTOR_OPEN,
                    pool=settings.pool,
                    role=settings.role,
                    layout=layout_fingerprint(layout),
                    groups=len(layout.groups),
                    loaders=settings.loaders,
                    savers=settings.savers,
                ):
                    await side.open(group)
                yield
            except BaseException as error:
                block_failed = error
                raise
            finally:
                # In a task of its own, which the group waits for: asyncio's own cancellation goes through shields, and would
                # cut the closing short with copies and calls under way.
                group.start_soon(_close, side, block_failed is None)
    except BaseExceptionGroup as failures:
        interrupt = _first_interrupt(failures)
        if interrupt is not None:
            # trio raises Ctrl-C in whatever task runs, a service's too, and the block was only cancelled for it. That must not
            # leave in its place.
            block_failed = interrupt
        elif block_failed is None or side.services.raises:
            raise ConnectorBroken(
                "the connector stopped: one of its services failed. Requests go on without a cache; the cause is attached"
            ) from failures
    finally:
        # What a call may still touch stays registered, whatever cut the closing short (M1).
        if not side.calls.outstanding:
            side.unregister()
    if block_failed is not None:
        # The task group wraps whatever leaves it; the embedding program's own error is not a group of errors. Raised here, and
        # not while the group is handled, so that its context stays its own.
        raise block_failed


def _first_interrupt(failures: BaseExceptionGroup) -> BaseException | None:
    """What ends the program and no task."""
    for failure in failures.exceptions:
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            return failure
        if isinstance(failure, BaseExceptionGroup) and (inner := _first_interrupt(failure)) is not None:
            return inner
    return None


async def _close(side: Side, orderly: bool) -> None:
    try:
        with observe.step(observe.CONNECTOR_CLOSE, requests=side.requests) as closing:
            closing["outstanding_calls"] = await side.close(orderly=orderly)
    finally:
        side.services.stop()


@asynccontextmanager
async def own_ports(settings: Settings, layout: Layout, caches: Any, stream: Any) -> AsyncIterator[Ports]:
    """Mooncake, torch and threads. Imported here, so that `import akv` stays light and other ports need none of them."""
    from akv.device import open_torch_device  # noqa: PLC0415
    from akv.pool import RegisteredSegments, ThreadRunner, open_pool, posting  # noqa: PLC0415

    device = open_torch_device(layout, caches, stream)
    runner = ThreadRunner(
        {
            CallKind.PROBE: settings.probe_concurrency,
            CallKind.GET: settings.loaders,
            CallKind.PUT: settings.savers,
            CallKind.COPY: settings.loaders + settings.savers,
            CallKind.SNAPSHOT: 1,
            # A stretch that a device copies keeps its place until the copy has ended; the next one is asked for meanwhile.
            CallKind.READ: (2 if device.copies_behind_calls else 1) * settings.loaders,
            CallKind.DESCRIBE: settings.loaders,
            CallKind.MAP: 1,
        }
    )
    segments = RegisteredSegments(settings.store)
    async with open_pool(settings) as pool:
        try:
            with posting(settings.store) as board:
                yield Ports(pool=pool, device=device, runner=runner, segments=segments, board=board)
        finally:
            if not runner.outstanding:
                device.close()


@asynccontextmanager
async def pool_alone(settings: Settings) -> AsyncIterator[Ports]:
    """For a process that looks pages up and touches none: a client that lends no memory, and threads for probes."""
    from akv.pool import ThreadRunner, open_pool  # noqa: PLC0415

    lends_nothing = msgspec.structs.replace(settings.store, segment_bytes=0)
    runner = ThreadRunner({CallKind.PROBE: settings.probe_concurrency})
    async with open_pool(msgspec.structs.replace(settings, store=lends_nothing)) as pool:
        # Nothing of it asks a device for anything.
        yield Ports(pool=pool, device=cast("DeviceCopier", None), runner=runner)
