"""Ending the process while a store call, or a store, is still there (O6, M1).

A thread that is inside the store's client when the interpreter finalises aborts the process, and the client's destructor
hangs for a minute when its pool does not answer. Neither can be stopped from Python. So one `atexit` hook waits for the calls,
up to a deadline, and if that does not help it leaves by `os._exit`, which runs no destructor and waits for no thread.

The registry is the one object of akv that belongs to the process and not to a connector: a process ends once, whatever it
opened.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable


class ExitGuard:
    """What of akv would break the end of this process: store calls under way, and stores that are open.

    Counting goes on whether or not the guard is armed; only the `atexit` hook depends on `arm()`. Thread safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        #: Pools that are open, with the buffers that they registered: alive until `release()`, or to the end of the process.
        self._held: list[object] = []
        #: Memory that a peer may still write. Nothing is done with it.
        self._kept: list[object] = []
        #: How long the hook waits. None: not armed.
        self._deadline_s: float | None = None
        self._status: int | None = None
        self._leaving = False
        #: Run before leaving by `os._exit`, which skips every other hook.
        self._last_words: list[Callable[[], object]] = []
        self._forked = False
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    def arm(self, deadline_s: float) -> None:
        """Register the `atexit` hook, once per process. Called before the first store is set up.

        `deadline_s`: how long the end of the process may wait for calls. Of several connectors the longest counts.
        """
        with self._changed:
            if self._deadline_s is None:
                atexit.register(self._at_exit)
            self._deadline_s = max(deadline_s, self._deadline_s or 0.0)

    def exit_with(self, status: int) -> None:
        """The status to leave with if the hook must leave by itself; the command line passes its own here.

        An `atexit` hook cannot see what `sys.exit()` was called with. Without this it is 1 after an uncaught exception,
        else 0.
        """
        self._status = status

    def before_leaving(self, last_words: Callable[[], object]) -> None:
        """Have `last_words` run if the hook leaves by itself. It must neither raise nor wait."""
        self._last_words.append(last_words)

    def call_began(self) -> bool:
        """Count a call. False once the process is ending: the call must not begin, it would outlive the interpreter."""
        with self._changed:
            if self._leaving:
                return False
            self._running += 1
            return True

    def call_ended(self) -> None:
        """Take one call off the count, after its thread is back from the client."""
        with self._changed:
            # A call that began before a fork ends in the parent only: the child's count was reset.
            self._running = max(0, self._running - 1)
            self._changed.notify_all()

    @property
    def calls_running(self) -> int:
        """Calls on threads of this process that did not return yet."""
        return self._running

    def hold(self, pool: object) -> None:
        """Keep an open pool alive until `release()`. Whoever cannot close it safely simply never releases it."""
        with self._changed:
            self._held.append(pool)

    def release(self, pool: object) -> None:
        """The pool was closed: it no longer stands in the way of an ordinary exit. Idempotent."""
        # Loops in two threads may hold and release at the same time.
        with self._changed:
            self._held = [held for held in self._held if held is not pool]

    def keep(self, memory: object) -> None:
        """Keep memory alive to the end of the process: a peer may still write there. No hindrance to an ordinary exit."""
        self._kept.append(memory)

    @property
    def forked_with_a_store(self) -> bool:
        """Whether this process is a fork of one that had a store open: no store works here, not even a fresh one."""
        return self._forked

    def _after_fork_in_child(self) -> None:
        # Threads do not survive a fork, and the lock may have been held by one of them.
        self._changed = threading.Condition()
        self._running = 0
        self._forked = self._forked or bool(self._held)

    def _at_exit(self) -> None:
        with self._changed:
            self._leaving = True
            ended = self._changed.wait_for(lambda: self._running == 0, timeout=self._deadline_s)
        if ended and not self._held:
            return
        for last_words in self._last_words:
            last_words()
        _flush()
        os._exit(_status_of_this_exit() if self._status is None else self._status)


def _status_of_this_exit() -> int:
    """1 if the interpreter printed a traceback on its way out, else 0.

    `sys.last_value` is what it sets then; unlike a wrapper around `sys.excepthook` it holds whoever replaces the hook later.
    """
    return 0 if getattr(sys, "last_value", None) is None else 1


def _flush() -> None:
    """What an ordinary exit flushes and `os._exit` does not. A closed or broken stream does not keep the process."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


#: The guard of this process.
PROCESS_GUARD = ExitGuard()
