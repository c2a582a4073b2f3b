"""What the scheduler half and the worker half of one server share: its settings, its bridge, and who joins whom.

The engine makes both halves in one process, at the same time, from one `llm_args`: by that object they find each other.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

from akv import observe
from akv.bridge import Bridge, open_bridge
from akv.connector import Caches
from akv.device import joined_stream, rows_at
from akv.engines.tensorrt_llm.arguments import capabilities_of
from akv.engines.tensorrt_llm.ends import Ends
from akv.engines.tensorrt_llm.layout import Described, describe
from akv.engines.tensorrt_llm.reservations import Confirmed, Reservations
from akv.engines.tensorrt_llm.serving import Reported, Serving
from akv.errors import NotOpenError, SettingsError
from akv.ports import Ports
from akv.settings import Settings
from akv.values.layout import Layout


class Seams(NamedTuple):
    """What tests put in the place of Mooncake, a GPU and the engine's own classes."""

    #: Makes the ports of a connector from the engine's layout and its memory.
    ports: Callable[[Layout, Caches], Ports] | None = None
    backend: Literal["asyncio", "trio"] = "asyncio"
    #: Whether the engine's cache lies in the GPU's memory.
    cuda: bool = True


class Session:
    """One server."""

    def __init__(self, llm_args: Any, settings: Settings, seams: Seams, *, reserves: bool) -> None:
        """`reserves`: its classes reserve prefixes. Raises SettingsError for a server that akv cannot serve."""
        self.llm_args = llm_args
        self.settings = settings
        self.reserves = reserves
        self.capabilities = capabilities_of(llm_args, settings)
        #: Which halves have joined.
        self.halves: set[str] = set()
        self.closed = False
        self._seams = seams
        self.ends = Ends(restarts=not reserves)
        self._bridge: Bridge | None = None
        self._described: Described | None = None
        self._number = 0
        #: The plan that was begun last: it runs beside the pass, and its error is raised in the next hook that waits.
        self._planned: Future[None] | None = None

    @property
    def reads(self) -> bool:
        """Whether this server loads."""
        return self.settings.role != "producer"

    @property
    def described(self) -> Described:
        """The cache. Raises NotOpenError before the engine has described it."""
        if self._described is None:
            raise self._unregistered()
        return self._described

    @property
    def bridge(self) -> Bridge:
        """The way to the loop. Raises NotOpenError before the engine has described its cache, and when it was closed."""
        if self._bridge is None:
            raise self._unregistered()
        return self._bridge

    def open(self, cache: Any) -> None:
        """The engine describes its cache: from here on it is served. Again: for a cache in place of the one before.

        Raises what `open_connector()` raises, and SettingsError for classes that do not fit the model.
        """
        self.close_bridge()
        described = describe(cache, self.llm_args)
        windows = any(group.is_window for group in described.layout.groups)
        if windows and not self.reserves:
            raise SettingsError(
                "kv_connector_config.connector_scheduler_class",
                "AkvScheduler",
                "the model has sliding windows, whose pages must be kept for a load before it begins (W9)",
                "Use AkvReservingScheduler and AkvReservingWorker; failed loads then end the server.",
            )
        if self.reserves and self.reads:
            observe.emit(observe.LOADS_FATAL, engine="tensorrt_llm", windows=windows)
        cuda = self._seams.cuda
        caches = [[rows_at(*rows, cuda=cuda) for rows in group] for group in described.rows]
        #: Ordered with the engine's stream around what akv records on it.
        self.stream = joined_stream(cuda=cuda)
        ports = None if self._seams.ports is None else self._seams.ports(described.layout, caches)
        self._bridge = bridge = open_bridge(
            self.settings,
            described.layout,
            caches,
            stream=self.stream.stream,
            capabilities=self.capabilities,
            ports=ports,
            backend=self._seams.backend,
        )
        self._described = described
        self.serving = Serving(bridge.kv, self.ends, grace_s=self.settings.lookup_grace_ms / 1000, windows=windows)
        self.reservations = Reservations(self.serving, self.ends)
        bridge.begin(self.serving.watch)

    def plan(self, reported: Sequence[Reported], confirmed: Sequence[Confirmed]) -> int:
        """Plan a coming pass on the loop, and return its number without waiting. Raises what the plan before raised."""
        self.raise_of_plan()
        self._number += 1
        number = self._number

        def plan() -> None:
            self.reservations.confirm(confirmed)
            self.serving.plan(number, reported)

        self._planned = self.bridge.begin(plan)
        return number

    def raise_of_plan(self) -> None:
        """Raise what planning the last pass raised, if it did. Waits for it: a moment, since the loop waits for nothing."""
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.result()

    def close_bridge(self) -> None:
        """End the connector. Idempotent; another `open()` may follow."""
        bridge, self._bridge, self._described = self._bridge, None, None
        if bridge is not None:
            bridge.close()

    def close(self) -> None:
        """The server ends. Idempotent."""
        self.closed = True
        self.close_bridge()

    @staticmethod
    def _unregistered() -> NotOpenError:
        return NotOpenError(
            "the engine has not described its KV cache, or was shut down: a hook was called outside of "
            "register_kv_cache_layout() and shutdown(). TensorRT-LLM calls it with use_kv_cache_manager_v2 alone"
        )


class Sessions:
    """The servers of one pair of classes in this process."""

    def __init__(self, settings: Settings, seams: Seams, *, reserves: bool) -> None:
        self.settings = settings
        self.reserves = reserves
        self._seams = seams
        self._lock = threading.Lock()
        self._sessions: list[Session] = []

    def join(self, llm_args: Any, half: str) -> Session:
        """The session of this server, made by whichever half comes first. Raises as `Session` does."""
        with self._lock:
            self._sessions = [session for session in self._sessions if not session.closed]
            for session in self._sessions:
                if session.llm_args is llm_args and half not in session.halves:
                    session.halves.add(half)
                    return session
            session = Session(llm_args, self.settings, self._seams, reserves=self.reserves)
            session.halves.add(half)
            self._sessions.append(session)
            return session
