"""What runs in one process of a server, whichever halves of a connector live there: calls, services, and what becomes of it
when one of them fails.

`akv/halves.py` is such a side, with a scheduler half on it; `akv/rank.py` is one with a worker half alone.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Protocol

import msgspec
from anyio import Event, current_time, move_on_after, sleep
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
from akv.services.teller import StatsTeller
from akv.settings import Settings

#: The reason with which loads fail and saves are refused once the connector goes on without a cache.
DEGRADED = "degraded"
#: Seconds beyond the shutdown deadline in which the threads that are idle by then may end.
THREADS_GRACE_S = 1.0


class Moves(Protocol):
    """What moves pages, here or in other processes."""

    def no_more_passes(self) -> None:
        """The connector closes: plans that are open will not run."""
        ...

    def refuse_queued(self) -> None:
        """What is queued ends now."""
        ...

    async def drained(self) -> None:
        """Return when nothing is under way."""
        ...

    def unregister(self) -> None:
        """Take back from the store what it was told of."""
        ...


class Side(ABC):
    """The part of a connector that lives in this process. Belongs to one event loop."""

    #: Set by whoever is made from this, as is what tells which way its pages came.
    worker: Moves
    _teller: StatsTeller

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
        #: Set when it turns into "no cache".
        self._degraded = Event()
        #: Whether what is under way since then has had its time; what has no end by now has none.
        self._overdue = False

    async def open(self, group: TaskGroup) -> None:
        """Start every service in `group`; usable when it returns. What fails is raised, and `close` undoes the rest."""
        start = partial(self.services.start, group)
        await start(self._deliver_ends, sees_ends=True)
        await start(self._poller.run, sees_ends=True)
        await start(partial(self.breaker.run, self._ask))
        await start(self._end_patience)
        await self._open_rest(group)
        await start(self._teller.run)
        self.services.all_started = True

    @abstractmethod
    async def _open_rest(self, group: TaskGroup) -> None:
        """Start what this side has beside the calls."""

    @property
    @abstractmethod
    def requests(self) -> int:
        """Requests that are open on this side, for its events."""

    async def close(self, *, orderly: bool) -> int:
        """Refuse new work, end or cancel what is under way, and return how many calls are still outstanding (O6).

        An orderly end lets queued saves run out, any other withdraws them, and so does a broken connector, whose marks nobody
        may trust. Shielded; takes at most the shutdown deadline. The services go on until `stop`, since they deliver the ends.
        """
        deadline = current_time() + self.settings.shutdown_deadline_s
        orderly = orderly and not self.latch.tripped
        self.latch.close()
        self.worker.no_more_passes()
        self.breaker.stop()
        self._teller.stop()
        self._end_work(orderly=orderly)
        with move_on_after(self.settings.shutdown_deadline_s, shield=True):
            await self.worker.drained()
            # Calls that nobody waits for any more, too: a registration of memory, a get that was given up.
            await self._desk.drained()
        self._teller.tell()
        with move_on_after(max(0.0, deadline - current_time()) + THREADS_GRACE_S, shield=True):
            await self._runner.close(max(0.0, deadline - current_time()))
        return self.calls.outstanding

    @abstractmethod
    def _end_work(self, *, orderly: bool) -> None:
        """The connector closes: end what is open. An orderly end lets queued saves go on."""

    def unregister(self) -> None:
        """Take back from the store what it was told of. Only when no call is outstanding."""
        self.worker.unregister()

    def _serve_no_more(self) -> None:
        """From now on there is no cache. What waits ends: at once, or when what touches its pages has ended."""
        self.breaker.shut()
        self._end_waiting()
        self._degraded.set()

    @abstractmethod
    def _end_waiting(self) -> None:
        """There is no cache any more: what has not begun ends."""

    async def _end_patience(self, *, task_status: TaskStatus[None]) -> None:
        """Once degraded, give the copies that are under way as long as a shutdown would; then tell what has no end.

        Nothing begins any more, so what has none by then was the failed service's to see, or hangs in the device.
        """
        task_status.started()
        await self._degraded.wait()
        await sleep(self.settings.shutdown_deadline_s)
        self._overdue = True
        self._lose_overdue()
        # A pass whose snapshot no thread has queued by now: nobody will use the copy.
        self._desk.no_more_ends()

    @abstractmethod
    def _lose_overdue(self) -> None:
        """Where it is overdue: whoever waits for what nobody will see is told."""

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
        self.worker.refuse_queued()
        return False


def sealed(settings: Settings, ports: Ports) -> Ports:
    """The ports, with a pool that puts a trailer behind each page where the settings want one (S11)."""
    if settings.integrity == "off":
        return ports
    return msgspec.structs.replace(ports, pool=SealedPool(ports.pool, settings.integrity_secret.encode()))
