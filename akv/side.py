"""What runs in one process of a server, whichever halves of a connector live there: calls, services, and what becomes of it
when one of them fails.

`akv/halves.py` is such a side, with a scheduler half on it; `akv/rank.py` is one with a worker half alone.
"""

from abc import ABC, abstractmethod
from functools import partial

import msgspec
from anyio import current_time, move_on_after
from anyio.abc import TaskGroup, TaskStatus

from akv import observe
from akv.flow.calls import CallDesk
from akv.flow.sealing import SealedPool
from akv.ownership.store_calls import StoreCalls
from akv.ports import Ports
from akv.ports.calls import CallKind, CallSize
from akv.services.breaker import PoolBreaker
from akv.services.health import HealthLatch
from akv.services.poller import StreamPoller
from akv.services.supervisor import Supervisor
from akv.settings import Settings

#: Seconds beyond the shutdown deadline in which the threads that are idle by then may end.
THREADS_GRACE_S = 1.0


class Side(ABC):
    """The part of a connector that lives in this process. Belongs to one event loop."""

    def __init__(self, settings: Settings, ports: Ports, key_space: str) -> None:
        """`key_space`: what every key of this server begins with."""
        self.settings = settings
        self.latch = HealthLatch()
        self.calls = StoreCalls()
        self.services = Supervisor(self._service_failed)
        self._runner = ports.runner
        self._poller = StreamPoller(settings.poll_tick_s)
        self.breaker = PoolBreaker()
        self._desk = CallDesk(ports.runner, self.calls, self._poller, self.breaker)
        # Every key of a page has more parts, so nobody writes this one.
        probe = partial(ports.pool.probe, [f"{key_space}/breaker"])
        self._ask = partial(self._desk.run, CallKind.PROBE, probe, CallSize(1))

    async def open(self, group: TaskGroup) -> None:
        """Start every service in `group`; usable when it returns. What fails is raised, and `close` undoes the rest."""
        start = partial(self.services.start, group)
        await start(self._deliver_ends, sees_ends=True)
        await start(self._poller.run, sees_ends=True)
        await start(partial(self.breaker.run, self._ask))
        await self._open_rest(group)
        self.services.all_started = True

    @abstractmethod
    async def _open_rest(self, group: TaskGroup) -> None:
        """Start what this side has beside the calls."""

    @property
    @abstractmethod
    def requests(self) -> int:
        """Requests that are open on this side, for its events."""

    @abstractmethod
    async def close(self, *, orderly: bool) -> int:
        """Refuse new work, end or cancel what is under way, and return how many calls are still outstanding (O6)."""

    @abstractmethod
    def unregister(self) -> None:
        """Take back from the store what it was told of. Only when no call is outstanding."""

    @abstractmethod
    def _refuse_queued(self) -> None:
        """It is broken: what nobody takes up any more must not be waited for."""

    @abstractmethod
    def _serve_no_more(self) -> None:
        """From now on there is no cache. What waits ends: at once, or when what touches its pages has ended."""

    async def _close_calls(self, deadline: float) -> int:
        """End the threads of calls, by the deadline and a grace; how many calls are outstanding then. Shielded."""
        with move_on_after(max(0.0, deadline - current_time()) + THREADS_GRACE_S, shield=True):
            await self._runner.close(max(0.0, deadline - current_time()))
        return self.calls.outstanding

    async def _deliver_ends(self, *, task_status: TaskStatus[None]) -> None:  # noqa: ASYNC128 - the runner says it
        """Run the runner's service, and say so when it ends."""
        try:
            await self._runner.serve(task_status=task_status)
        finally:
            self._desk.no_more_ends()

    def _service_failed(self, error: Exception) -> bool:
        """Whether the program around the connector goes on (O8)."""
        return self._fail(f"a service failed with {type(error).__name__}: {error}", error)

    def _fail(self, why: str, error: BaseException) -> bool:
        """The connector is broken or, where that is wanted and it is open, without a cache. Says whether the block goes on."""
        if self.settings.on_failure == "degrade" and self.services.all_started:
            # Each of them is told: what fails later may be another fault.
            observe.emit(observe.CONNECTOR_DEGRADED, reason=type(error).__name__, error=error)
            if self.latch.degrade(why):
                self._serve_no_more()
            return True
        self.latch.break_(why)
        observe.emit(observe.CONNECTOR_BROKEN, reason=type(error).__name__, error=error)
        # In the midst of closing, too: what nobody takes up any more must not be waited for.
        self._refuse_queued()
        return False


def sealed(settings: Settings, ports: Ports) -> Ports:
    """The ports, with a pool that puts a trailer behind each page where the settings want one (S11)."""
    if settings.integrity == "off":
        return ports
    return msgspec.structs.replace(ports, pool=SealedPool(ports.pool, settings.integrity_secret.encode()))
