"""A pool that halts a process at the moment when two loads stand where it hurts.

Each load makes one get after the other, on a thread of its own. Of the first two gets that arrive the first one runs, and its
load then stands between two gets; inside the second one the process is halted. So one run shows both, and which is which is no
matter of luck.
"""

import threading
from collections.abc import Callable, Sequence

from anyio import to_thread

from akv.pool import MooncakePool
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer

#: Loads that have to be on their way at a time.
LOADS = 2
#: Seconds from the beginning of a get to the halt: enough for it to begin, and a fraction of what it takes to move its bytes.
INSIDE_S = 0.001
#: Seconds that a get waits at most for the others. They follow from requests that are made at once.
_PATIENCE_S = 5.0


class HaltingPool:
    """A pool, and a halt that is planned. Everything but a planned get goes through as it is."""

    def __init__(self, pool: MooncakePool) -> None:
        self._pool = pool
        self._plan: Halt | None = None
        self.probe, self.put, self.remove, self.remove_all = pool.probe, pool.put, pool.remove, pool.remove_all
        self.describe = pool.describe
        self.register, self.unregister, self.close = pool.register, pool.unregister, pool.close

    @property
    def lets_go_at_return(self) -> bool:
        """What the pool says."""
        return self._pool.lets_go_at_return

    def halt_inside_a_get(self, halt: Callable[[], None]) -> "Halt":
        """Have the next two gets meet a halt. `halt` is run on a thread of its own."""
        self._plan = Halt(halt)
        return self._plan

    def get(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        """Read, in its turn if a halt is planned."""

        def call() -> list[KeyAnswer]:
            return self._pool.get(keys, buffer, offsets, sizes)

        return call() if self._plan is None else self._plan.run(call)


class Halt:
    """One halt. Thread safe."""

    def __init__(self, halt: Callable[[], None]) -> None:
        self._halt = halt
        self._lock = threading.Lock()
        self._arrived = 0
        self._between, self._returned = threading.Event(), threading.Event()
        self.halted = threading.Event()
        #: Whether a get was under way as the process was halted.
        self.inside_a_get = False

    async def over(self) -> None:
        """Wait until the process is halted, or long enough to know that it will not be."""
        await to_thread.run_sync(self.halted.wait, _PATIENCE_S)

    def run(self, call: Callable[[], list[KeyAnswer]]) -> list[KeyAnswer]:
        """Make a call, as the first or the second one that arrived; others pass."""
        with self._lock:
            self._arrived += 1
            turn = self._arrived
        match turn:
            case 1:
                answers = call()
                self._between.set()
                self.halted.wait(_PATIENCE_S)
                return answers
            case 2:
                self._between.wait(_PATIENCE_S)
                threading.Thread(target=self._halt_soon, daemon=True).start()
                answers = call()
                self._returned.set()
                return answers
            case _:
                return call()

    def _halt_soon(self) -> None:
        self._returned.wait(INSIDE_S)
        self.inside_a_get = not self._returned.is_set()
        self._halt()
        self.halted.set()
