"""Leave to write into a load's pages, given to a call before it knows whether it will, and taken back if that is in time (D6).

A call that asks the pool where pages lie and then copies them would have to come back to the loop in between, to ask whether
the pages are the load's still. The permit answers that question on the call's own thread.
"""

import threading


class WritePermit:
    """One call's. `begin` and `end` are the call's, on its thread or behind its return; `take_back` is the loop's."""

    __slots__ = ("_lock", "_over", "_writing")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing = False
        self._over = False

    def begin(self) -> bool:
        """The call writes from now on. False if it may not any more; then it never may."""
        with self._lock:
            self._writing = not self._over
            return self._writing

    def end(self) -> None:
        """Nothing that the call began writes any more."""
        with self._lock:
            self._writing, self._over = False, True

    def take_back(self) -> bool:
        """The pages are wanted. True if nothing of this call writes or ever will; False while something does."""
        with self._lock:
            if not self._writing:
                self._over = True
            return not self._writing
