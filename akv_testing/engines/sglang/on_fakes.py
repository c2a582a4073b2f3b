"""akv's own backend for SGLang on fakes: threads and real time, a store in memory, answers and waits by script."""

import threading
import time
from collections.abc import Callable
from typing import Any

from akv.engines.sglang import HiCacheBackend, storage_class
from akv.engines.sglang.page_store import StorePorts
from akv.ports.calls import CallKind
from akv_testing.calls import FakeRunner
from akv_testing.engines.sglang.interface import INTERFACE, HiCacheStorageConfig
from akv_testing.memory import FakeHostBuffer
from akv_testing.pool import FakePool
from akv_testing.store import FakeStore

#: The class that SGLang would load, of the stand-in's kind.
BACKEND = storage_class(INTERFACE)
#: Seconds after which what was let go must have ended.
PATIENCE_S = 5.0


class FakeBackends:
    """Makes backends that share one fake store, and remembers the parts of each, in order."""

    def __init__(self) -> None:
        self.store = FakeStore(time.monotonic)
        self.made: list[HiCacheBackend] = []
        self.pools: list[FakePool] = []
        self.runners: list[FakeRunner] = []
        #: Settings of those that are made from now on, beside the model's name.
        self.settings: dict[str, Any] = {}

    def __call__(self, config: HiCacheStorageConfig) -> HiCacheBackend:
        """Make one, as SGLang's factory does."""
        pool, runner = FakePool(self.store, name=f"pool-{len(self.made)}"), FakeRunner()
        ports = StorePorts(pool=pool, runner=runner, memory=lambda nbytes: FakeHostBuffer(nbytes, name="staging"))
        settings = {"model_key": "m", "pool": "embedded", **self.settings}
        config.extra_config = {**(config.extra_config or {}), "akv": settings}
        self.made.append(BACKEND(config, {}, ports=ports))
        self.pools.append(pool)
        self.runners.append(runner)
        return self.made[-1]

    def on_loop(self, function: Callable[[], Any], number: int = -1) -> Any:
        """Run a function on a backend's loop."""
        return self.made[number]._loop.call(function)

    def hold(self, kind: CallKind, number: int = -1) -> Callable[[], None]:
        """Have a backend's next call of a kind hang. Returns what lets it go on, and waits until all of its calls returned."""
        number %= len(self.made)
        runner = self.runners[number]
        gate = self.on_loop(lambda: runner.hold(kind), number)

        def go_on() -> None:
            self.on_loop(gate.release, number)
            self.wait_until(lambda: self.on_loop(runner.outstanding, number) == 0)

        return go_on

    @staticmethod
    def wait_until(holds: Callable[[], bool]) -> None:
        """Wait, in the calling thread, until something holds. Raises TimeoutError after `PATIENCE_S`."""
        until = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > until:
                raise TimeoutError(f"not within {PATIENCE_S} seconds")
            threading.Event().wait(0.001)

    def close(self) -> None:
        """Close every backend that was made."""
        for backend in self.made:
            backend.close()
