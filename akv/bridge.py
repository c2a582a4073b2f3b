"""For engines whose hooks are synchronous: a connector on an event loop of its own, in a thread, and the way over to it.

An engine's thread calls a hook, the hook calls `Bridge.call()`: the function runs on the loop that owns the connector, and its
result, or its error, comes back. What takes time, a lookup above all, is begun with `Bridge.begin()` and looked at later, so
that no hook waits for the network. `engines/` is written on top of this module.

The thread is a daemon: one that is not would hold up the end of a process whose engine forgets to close it. Its end comes by
`close()`, called at exit at the latest.
"""

import atexit
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from inspect import isawaitable
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar, TypeVarTuple, overload

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from akv import observe
from akv.connector import Caches, Connector, open_connector
from akv.errors import AkvError, NotOpenError
from akv.ports import Ports
from akv.settings import Settings
from akv.values.capabilities import DEFAULT_CAPABILITIES, EngineCapabilities
from akv.values.layout import Layout

Served = TypeVar("Served")
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

#: Seconds that `close()` waits beyond `shutdown_deadline_s`: the store's own `close` comes last and knows no deadline (O7).
_GRACE_S = 5.0


class _Settling:
    """Whatever the block raises is the future's, so that it is raised where somebody waits for it; but for `let_through`."""

    def __init__(self, future: "Future[Any]", *let_through: type[BaseException]) -> None:
        self._future = future
        self._let_through = let_through

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None or isinstance(error, self._let_through):
            return False
        _settle(self._future, error=error)
        return True


def _settle(future: "Future[Any]", result: object = None, error: BaseException | None = None) -> None:
    """End a future, unless whoever waited has given it up."""
    if future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class LoopThread(Generic[Served]):
    """An event loop in a daemon thread, with one asynchronous context manager open on it.

    Making one blocks until it is open, and raises what opening raised. Its methods may be called from any thread but its own.
    """

    def __init__(
        self,
        opening: Callable[[], AbstractAsyncContextManager[Served]],
        *,
        name: str,
        backend: Literal["asyncio", "trio"] = "asyncio",
        backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._opening = opening
        self._process = os.getpid()
        #: Guards the two below: what is put into the inbox is either run or refused.
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Callable[..., Any], tuple[Any, ...], Future[Any] | None]] = deque()
        self._leaving = False
        #: Why it ended, if not because `close()` was called.
        self.failure: BaseException | None = None
        self._opened: Future[Served] = Future()
        self._post: Callable[[Callable[[], object]], object] | None = None
        self._arrived: anyio.Event | None = None
        #: For each thing in the inbox that nobody waits for, in how many seconds it is to run at the latest.
        self._unhurried: SimpleQueue[float] = SimpleQueue()
        arguments = (backend, dict(backend_options or {}))
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._thread.start()
        threading.Thread(target=self._wake_unhurried, name=f"{name}-wake", daemon=True).start()
        try:
            #: What was opened. Used on the loop alone: within what `call()` and `begin()` run.
            self.served = self._opened.result()
        except BaseException:
            # What opens may be half open, and whoever interrupts this wait has no handle to close it with.
            self._leave()
            raise

    @overload
    def call(self, function: Callable[[*Arguments], Coroutine[Any, Any, Result]], *args: *Arguments) -> Result: ...

    @overload
    def call(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result: ...

    def call(self, function: Callable[[*Arguments], Any], *args: *Arguments) -> Any:
        """Run a function on the loop, a coroutine function to its end, and return what it returns or raise what it raises.

        Raises as `begin()` does. An interrupt of the wait, KeyboardInterrupt say, cancels what runs.
        """
        future: Future[Any] = Future()
        try:
            self._put(function, args, future)
            # At once: the interpreter is free for the loop in a moment, when this thread waits.
            self._wake()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @overload
    def begin(self, function: Callable[[*Arguments], Coroutine[Any, Any, Result]], *args: *Arguments) -> "Future[Result]": ...

    @overload
    def begin(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> "Future[Result]": ...

    def begin(self, function: Callable[[*Arguments], Any], *args: *Arguments) -> "Future[Any]":
        """Have a function run on the loop, and return at once. They run in the order of the calls, each up to its first wait.

        What it returns or raises is the future's; `cancel()` of the future cancels what is awaited. The future ends with
        NotOpenError if the loop ends before the function does. Raises NotOpenError (fault of the adapter) where the loop has
        ended, in a forked child, and on the loop itself, which would wait for itself.
        """
        return self._begin_within(0.0, function, args)

    def begin_within(
        self,
        limit_s: float,
        function: Callable[[*Arguments], Coroutine[Any, Any, Result]] | Callable[[*Arguments], Result],
        *args: *Arguments,
    ) -> "Future[Result]":
        """As `begin()`, for what may wait: with whatever wakes the loop next, and `hurry()` does, or in `limit_s` seconds."""
        return self._begin_within(limit_s, function, args)

    def _begin_within(self, limit_s: float, function: Callable[..., Any], args: tuple[Any, ...]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._put(function, args, future)
        self._unhurried.put(limit_s)
        return future

    def hurry(self) -> None:
        """Have the loop run now what was put there. For a thread that is about to wait, and leaves it the interpreter."""
        if self._inbox:
            self._wake()

    def post(self, function: Callable[[*Arguments], object], *args: *Arguments) -> None:
        """As `begin()`, for a synchronous function whose result nobody looks at. It must not raise: as nobody would hear of
        it, that ends the loop, and what was opened on it.
        """
        self._put(function, args, None)
        self._unhurried.put(0.0)

    def _put(self, function: Callable[..., Any], args: tuple[Any, ...], future: "Future[Any] | None") -> None:
        self._check()
        with self._lock:
            if self._leaving:
                raise self._ended()
            self._inbox.append((function, args, future))

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise NotOpenError(
                f"this loop runs in process {self._process} and was called in a forked child: threads do not survive a fork. "
                "Start worker processes with 'spawn'"
            )
        if threading.current_thread() is self._thread:
            raise NotOpenError("this is the bridge's own loop: call what is open on it directly, or await it")

    def close(self, limit_s: float) -> bool:
        """Leave what was opened, end the loop and the thread. False if that took longer than `limit_s`. Idempotent."""
        if os.getpid() != self._process:
            return True  # A forked child has no such thread.
        self._leave()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _leave(self) -> None:
        with self._lock:
            self._leaving = True
        self._wake()

    def _wake_unhurried(self) -> None:
        """A thread of its own wakes the loop for what nobody waits for.

        Waking a loop is a write to a socket, in which Python lets the loop have the interpreter, and the engine's thread would
        wait until the loop has done all that it can: a millisecond, in the midst of a step. Putting something into a queue
        keeps it: the loop runs as soon as the engine's thread waits, or is in a kernel.
        """
        due = inf
        while not self._leaving:
            with suppress(Empty):
                limit_s = self._unhurried.get(timeout=None if due == inf else max(0.0, due - monotonic()))
                now = monotonic()
                due = min(due, now + limit_s)
                if now < due:
                    continue
            due = inf
            # The loop may have been woken meanwhile, and have taken it.
            self.hurry()

    def _wake(self) -> None:
        def arrived() -> None:
            if self._arrived is not None:
                self._arrived.set()

        if self._post is not None:
            # RuntimeError: the loop is gone (asyncio: closed; trio: RunFinishedError), and the inbox was refused.
            with suppress(RuntimeError):
                self._post(arrived)

    def _ended(self) -> NotOpenError:
        why = f" after {type(self.failure).__name__}: {self.failure}" if self.failure is not None else ""
        return NotOpenError(f"the bridge's loop has ended{why}. Requests go on without a cache")

    def _run(self, backend: str, options: dict[str, Any]) -> None:
        """The thread, from beginning to end."""
        ended: Future[None] = Future()
        with _Settling(ended):
            anyio.run(self._serve, backend=backend, backend_options=options)
            _settle(ended)
        # Kept, and not raised: nobody is there to raise it to, and a connector that broke has told it.
        self.failure = self.failure or ended.exception()
        with self._lock:
            self._leaving = True
            unserved = list(self._inbox)
            self._inbox.clear()
        self._unhurried.put(0.0)
        for _, _, future in unserved:
            if future is not None:
                _settle(future, error=self._ended())
        if not self._opened.done():
            _settle(self._opened, error=self.failure or self._ended())

    async def _serve(self) -> None:
        native: Any = anyio.lowlevel.current_token().native_token
        self._post = getattr(native, "run_sync_soon", None) or native.call_soon_threadsafe
        async with self._opening() as served, anyio.create_task_group() as tasks:
            _settle(self._opened, served)
            await self._work(tasks)
            # Waits for what will not come any more: what was opened is about to close.
            tasks.cancel_scope.cancel()

    async def _work(self, tasks: TaskGroup) -> None:
        while True:
            # The event before the inbox: what is put there meanwhile sets the new event and is seen in the next round.
            self._arrived = anyio.Event()
            for _ in range(len(self._inbox)):
                function, args, future = self._inbox.popleft()
                if future is not None and future.cancelled():
                    continue
                ended: Future[Any] = future or Future()
                await self._start(tasks, function, args, ended)
                if future is None and (error := ended.exception()) is not None:
                    self.failure = error
                    return
            if self._leaving:
                return
            await self._arrived.wait()

    async def _start(
        self, tasks: TaskGroup, function: Callable[..., Any], args: tuple[Any, ...], future: "Future[Any]"
    ) -> None:
        result: Any = None
        with _Settling(future):
            result = function(*args)
            if not isawaitable(result):
                _settle(future, result)
        if isawaitable(result):
            # A task begins later than what starts it, and trio's in any order: what came behind it would run before it.
            begun = anyio.Event()
            tasks.start_soon(self._finish, result, future, begun)
            await begun.wait()

    async def _finish(self, awaitable: Awaitable[Any], future: "Future[Any]", begun: anyio.Event) -> None:
        begun.set()
        post = self._post
        with anyio.CancelScope() as scope:

            def given_up(future: "Future[Any]") -> None:
                if future.cancelled() and post is not None:
                    with suppress(RuntimeError):
                        post(scope.cancel)

            future.add_done_callback(given_up)
            try:
                with _Settling(future, anyio.get_cancelled_exc_class()):
                    _settle(future, await awaitable)
            finally:
                if not future.done():
                    # Cancelled with the loop's end, and by nobody who waits.
                    _settle(future, error=self._ended())


class Serves(Protocol):
    """What a bridge has open: a connector, or a half of one."""

    @property
    def failure(self) -> AkvError | None:
        """Why it can be used no more; None while it can."""
        ...

    @property
    def settings(self) -> Settings:
        """What it was opened with."""
        ...


Open = TypeVar("Open", bound=Serves)


class ServingThread(LoopThread[Open]):
    """A connector, or a half of one, open on a loop of its own."""

    @property
    def broken(self) -> str:
        """Why the connector serves no more; empty while it does. Read from any thread, with no hop."""
        failure = self.served.failure or (self._ended() if self._leaving else None)
        return str(failure) if failure is not None else ""

    def close(self, limit_s: float | None = None) -> bool:
        """Close the connector, end loop and thread. At most `limit_s`, by default what closing a connector may take; False if
        that did not do: then the thread goes on, and nothing of the connector may be used again. Idempotent.
        """
        atexit.unregister(self.close)
        limit_s = self.served.settings.shutdown_deadline_s + _GRACE_S if limit_s is None else limit_s
        if not (closed := super().close(limit_s)):
            observe.emit(observe.BRIDGE_UNCLOSED, waited_s=limit_s)
        return closed

    def _check(self) -> None:
        super()._check()
        # A crash of a service is not seen by who only puts work into an inbox.
        if (failure := self.served.failure) is not None:
            raise failure


class Bridge(ServingThread[Connector]):
    """A connector, open on a loop of its own. Made by `open_bridge()`; used by the threads of an engine."""

    @property
    def kv(self) -> Connector:
        """The connector. It belongs to the loop: use it within what `call()`, `begin()` and `post()` run."""
        return self.served


def open_bridge(
    settings: Settings | Mapping[str, Any],
    layout: Layout,
    caches: Caches = (),
    *,
    stream: Any = None,
    capabilities: EngineCapabilities = DEFAULT_CAPABILITIES,
    ports: Ports | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> Bridge:
    """Open a connector in a thread of its own, for an engine whose hooks are synchronous. Blocks until it is open.

    Arguments and errors are those of `open_connector()`. Close it with `Bridge.close()`; the end of the process does it, too.
    """
    bridge = Bridge(
        lambda: open_connector(settings, layout, caches, stream=stream, capabilities=capabilities, ports=ports),
        name="akv-bridge",
        backend=backend,
    )
    return closed_at_exit(bridge)


Thread = TypeVar("Thread", bound=ServingThread[Any])


def closed_at_exit(bridge: Thread) -> Thread:
    """Have it closed at the end of the process at the latest: after the exit guard was registered, while the pool opened, and
    so before it runs.
    """
    atexit.register(bridge.close)
    return bridge
