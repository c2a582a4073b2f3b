"""For engines of several ranks whose hooks are synchronous: a scheduler half, or one rank's worker half, on a loop of its own.

As `akv/bridge.py` does for a connector of one process. `akv/ranks.py` says what each half is told and what it tells.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from akv.bridge import Bridge, ServingThread, closed_at_exit
from akv.connector import Caches
from akv.ports import Ports
from akv.ranks import Scheduler, Worker, open_scheduler, open_worker
from akv.settings import Settings
from akv.values.capabilities import DEFAULT_CAPABILITIES, EngineCapabilities
from akv.values.layout import Layout


class SchedulerBridge(Bridge):
    """A scheduler half, open on a loop of its own. Made by `open_scheduler_bridge()`."""

    @property
    def scheduler(self) -> Scheduler:
        """As `kv`, which it is."""
        if not isinstance(self.served, Scheduler):
            raise AssertionError("made by open_scheduler_bridge() alone")  # noqa: TRY004 - a slip of ours, and no argument
        return self.served


class WorkerBridge(ServingThread[Worker]):
    """One rank's worker half, open on a loop of its own. Made by `open_worker_bridge()`."""

    @property
    def worker(self) -> Worker:
        """It belongs to the loop: use it within what `call()`, `begin()` and `post()` run."""
        return self.served


def open_scheduler_bridge(
    settings: Settings | Mapping[str, Any],
    hellos: Sequence[bytes],
    *,
    capabilities: EngineCapabilities = DEFAULT_CAPABILITIES,
    ports: Ports | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> SchedulerBridge:
    """As `open_scheduler()`, in a thread of its own. Blocks until it is open. Close it with `Bridge.close()`."""
    return closed_at_exit(
        SchedulerBridge(
            lambda: open_scheduler(settings, hellos, capabilities=capabilities, ports=ports),
            name="akv-scheduler",
            backend=backend,
        )
    )


def open_worker_bridge(
    settings: Settings | Mapping[str, Any],
    layout: Layout,
    caches: Caches = (),
    *,
    rank: int,
    stream: Any = None,
    capabilities: EngineCapabilities = DEFAULT_CAPABILITIES,
    ports: Ports | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> WorkerBridge:
    """As `open_worker()`, in a thread of its own. Blocks until it is open. Close it with `WorkerBridge.close()`."""
    return closed_at_exit(
        WorkerBridge(
            lambda: open_worker(settings, layout, caches, rank=rank, stream=stream, capabilities=capabilities, ports=ports),
            name=f"akv-rank-{rank}",
            backend=backend,
        )
    )
