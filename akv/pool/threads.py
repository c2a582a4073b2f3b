"""The threads that run blocking calls: akv's own, daemonic, a few per kind of call (M1).

`to_thread.run_sync` will not do: a deadline around it ends no sooner than the thread, its waits cannot be given up without
losing sight of the call, and asyncio's worker threads hold up the exit of the process. Here a call is a record: whoever waits
may stop waiting, the thread goes on, its end is posted to the loop and delivered by `serve()`.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from akv.errors import NotOpenError
from akv.pool.exit_guard import PROCESS_GUARD, ExitGuard
from akv.ports.calls import CallEnd, CallKind, CallSize

#: Runs a function on the loop soon, from any thread. Raises RuntimeError when the loop is gone.
_Post = Callable[[Callable[[], None]], object]


def _nobody(wake: Callable[[], None]) -> object:
    """Stands where no loop is known yet; `start()`, `serve()` and `close()` replace it before any thread exists."""
    raise RuntimeError(f"{wake} has no loop to run on")


class _Attempt:
    """Carries whatever a call raised over to the loop, SystemExit and KeyboardInterrupt too: no thread decides about them."""

    def __init__(self) -> None:
        self.end = CallEnd()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None:
            self.end = CallEnd(error=error)
        return True


class _Job:
    """One call that was handed over, and where its end goes."""

    __slots__ = ("call", "done")

    def __init__(self, call: Callable[[], Any], done: Callable[[CallEnd], None]) -> None:
        self.call = call
        self.done = done


class _Lane:
    """The queue and the threads of one kind of call. Threads start when they are first needed, and stay."""

    def __init__(self, kind: CallKind, limit: int) -> None:
        self.kind = kind
        self.limit = limit
        self.threads: list[threading.Thread] = []
        #: None ends the thread that takes it.
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._outstanding = 0

    @property
    def outstanding(self) -> int:
        """Calls handed over that did not return yet."""
        return self._outstanding

    def put(self, job: _Job) -> bool:
        """Queue a job. True if it needs one more thread."""
        with self._lock:
            self._outstanding += 1
            needs_thread = self._outstanding > len(self.threads) < self.limit
        self._queue.put(job)
        return needs_thread

    def take(self) -> _Job | None:
        """The next job, waited for in a thread of this lane; None if that thread is to end."""
        return self._queue.get()

    def returned(self) -> None:
        """One call is back."""
        with self._lock:
            self._outstanding -= 1

    def dismiss(self) -> None:
        """Tell every thread to end once nothing is queued. Idempotent: what a thread does not take is never read."""
        for _ in self.threads:
            self._queue.put(None)

    def withdraw(self) -> list[_Job]:
        """Take back the jobs that no thread has begun; they will not run."""
        unbegun: list[_Job] = []
        with contextlib.suppress(Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    unbegun.append(job)
                    self.returned()
        self.dismiss()  # The loop above took those notices back too.
        return unbegun


class ThreadRunner:
    """Runs blocking calls on own daemon threads; the implementation of `akv.ports.calls.CallRunner` for real stores.

    `limits`: calls of each kind that run at a time, so threads of that kind; a kind that is not named has one. `guard` keeps
    count of the calls for the end of the process. One runner belongs to one event loop: the one that first calls `start()`,
    `serve()` or `close()`.
    """

    def __init__(self, limits: Mapping[CallKind, int], guard: ExitGuard = PROCESS_GUARD) -> None:
        self._lanes = {kind: _Lane(kind, limits.get(kind, 1)) for kind in CallKind}
        for lane in self._lanes.values():
            if lane.limit < 1:
                raise ValueError(f"at least one call of kind {lane.kind} must be able to run, not {lane.limit}")
        self._guard = guard
        self._pid = os.getpid()
        self._closed = False
        self._post: _Post = _nobody
        #: Ends that wait for `serve()`. They stay on record here when the loop is gone.
        self._inbox: deque[tuple[_Job, CallEnd]] = deque()
        self._arrived: anyio.Event | None = None
        #: Threads that ran to their end and are not joined yet.
        self._ended: deque[tuple[_Lane, threading.Thread]] = deque()
        self._thread_ended: anyio.Event | None = None

    @property
    def limits(self) -> dict[CallKind, int]:
        """How many calls of each kind run at a time."""
        return {kind: lane.limit for kind, lane in self._lanes.items()}

    @property
    def undelivered(self) -> int:
        """Calls that returned and whose end waits for `serve()`; for ever, if the loop is gone."""
        return len(self._inbox)

    @property
    def outstanding(self) -> int:
        """Calls that were handed over and did not return yet, of all kinds."""
        return sum(lane.outstanding for lane in self._lanes.values())

    def start(self, kind: CallKind, call: Callable[[], Any], size: CallSize, done: Callable[[CallEnd], None]) -> None:
        """Run `call` on a thread of its kind; then run `done` on the loop, from within `serve()`. Returns at once.

        Raises NotOpenError (fault of the embedding program) after `close()` and in a forked child, where no thread exists.
        """
        if self._closed or os.getpid() != self._pid:
            raise NotOpenError("a blocking call was started after its connector closed, or in a forked child process")
        self._attach()
        lane = self._lanes[kind]
        if lane.put(_Job(call, done)):
            name = f"akv-{kind}-{len(lane.threads)}"
            thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
            lane.threads.append(thread)
            thread.start()

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Deliver ends until cancelled. A `done` that raises is a crash of akv and leaves through here.

        **Cancellation:** ends that were not delivered stay on record; another `serve()` delivers them.
        """
        self._attach()
        task_status.started()
        while True:
            # The event before the inbox: an end that is posted meanwhile sets the new event and is seen in the next round.
            self._arrived = anyio.Event()
            for _ in range(len(self._inbox)):
                job, end = self._inbox.popleft()
                job.done(end)
            await self._arrived.wait()

    async def close(self, deadline_s: float) -> int:
        """End the idle threads and those that become idle within the deadline; return how many calls are still outstanding.

        Calls that no thread has begun at the deadline will not run: they end with NotOpenError, if `serve()` still delivers.
        If this returns 0, no thread is left. Idempotent.

        **Cancellation:** the threads end by themselves once idle; outstanding calls stay on record with the exit guard (O6).
        """
        self._attach()
        self._closed = True
        for lane in self._lanes.values():
            lane.dismiss()
        try:
            with anyio.move_on_after(deadline_s):
                await anyio.lowlevel.checkpoint()
                await self._wait_until_threads_ended()
        finally:
            for lane in self._lanes.values():
                for job in lane.withdraw():
                    self._deliver(job, CallEnd(error=NotOpenError("the connector closed before this call could begin")))
        return self.outstanding

    def _attach(self) -> None:
        """Find out how to reach this loop from a thread, whichever backend runs it, without importing one."""
        if self._post is _nobody:
            native: Any = anyio.lowlevel.current_token().native_token
            self._post = getattr(native, "run_sync_soon", None) or native.call_soon_threadsafe

    def _work(self, lane: _Lane) -> None:
        """A thread of `lane`, from beginning to end."""
        while (job := lane.take()) is not None:
            if not self._guard.call_began():
                return  # The process is ending; nobody will hear of this call.
            with _Attempt() as attempt:
                attempt.end = CallEnd(value=job.call())
            self._guard.call_ended()
            lane.returned()
            self._deliver(job, attempt.end)
            # Nothing of the last call stays alive in a thread that waits for the next one.
            del job, attempt
        self._ended.append((lane, threading.current_thread()))
        self._notify(self._wake_close)

    def _deliver(self, job: _Job, end: CallEnd) -> None:
        """Put an end on record, from any thread, and wake `serve()`."""
        self._inbox.append((job, end))
        self._notify(self._wake_serve)

    def _notify(self, wake: Callable[[], None]) -> None:
        try:
            self._post(wake)
        except RuntimeError:
            # The loop is gone (asyncio: closed; trio: RunFinishedError). The record stays; nobody is left to wake.
            return

    async def _wait_until_threads_ended(self) -> None:
        while True:
            self._thread_ended = anyio.Event()
            # A thread that posted its end has nothing left to do, so joining it does not hold the loop.
            while self._ended:
                lane, thread = self._ended.popleft()
                thread.join()
                lane.threads.remove(thread)
            if not any(lane.threads for lane in self._lanes.values()):
                return
            await self._thread_ended.wait()

    def _wake_serve(self) -> None:
        if self._arrived is not None:
            self._arrived.set()

    def _wake_close(self) -> None:
        if self._thread_ended is not None:
            self._thread_ended.set()
