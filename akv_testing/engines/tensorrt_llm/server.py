"""A server of the stand-in with akv's adapter: real memory, and the fakes of a pool and of its calls, in real time.

server = StandInServer(store, backend="trio")
server.engine.serve(StandInRequest(1, prompt))
assert server.left_behind() == []
"""

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from akv.connector import Caches
from akv.device import open_torch_device
from akv.engines.tensorrt_llm import Bases, Seams, connector_classes
from akv.engines.tensorrt_llm.session import Session
from akv.ports import Ports
from akv.settings import check_settings
from akv.values.layout import Layout
from akv_testing.calls import FakeRunner
from akv_testing.engines.tensorrt_llm.engine import IDLE_S, MOST_PASSES, StandInEngine
from akv_testing.engines.tensorrt_llm.interface import ConnectorScheduler, ConnectorWorker
from akv_testing.engines.tensorrt_llm.memory import GroupShape, StandInCache
from akv_testing.pool import FakePool
from akv_testing.store import FakeStore

#: T, unless a test says otherwise.
TOKENS_PER_BLOCK = 32
BASES = Bases(ConnectorScheduler, ConnectorWorker)


class StandInServer:
    """An engine, its connector, and the fakes behind it. Servers with one `store` share what they computed.

    `reserves`: with the classes that reserve prefixes. `settings`: fields of `akv.Settings` that a test is about. `engine` and
    `arguments`: the engine and its own.
    """

    def __init__(
        self,
        store: FakeStore,
        *,
        backend: Literal["asyncio", "trio"] = "asyncio",
        groups: Sequence[GroupShape] = (GroupShape(),),
        reserves: bool = False,
        pages: int = 64,
        args: SimpleNamespace | None = None,
        settings: dict[str, Any] | None = None,
        engine: Callable[..., StandInEngine] = StandInEngine,
        **arguments: Any,
    ) -> None:
        self.store = store
        self.pool = FakePool(store)
        self.cache = StandInCache(groups, tokens_per_block=TOKENS_PER_BLOCK, pages=pages)
        # Nothing ends by the clock: how long it takes on a busy machine is no test's affair.
        chosen = {
            "model_key": "m",
            "pool": "embedded",
            "staging_buffer_bytes": "1MiB",
            "lookup_grace_ms": 60_000,
            "lookup_deadline_s": 60.0,
            "load_deadline_s": 60.0,
        }
        self.classes = connector_classes(
            check_settings(chosen | (settings or {})),
            reserves=reserves,
            bases=BASES,
            seams=Seams(ports=self._ports, backend=backend, cuda=False),
        )
        self.engine = engine(self.classes, self.cache, args=args, **arguments)

    def _ports(self, layout: Layout, caches: Caches) -> Ports:
        #: Of the connector that is open: each has its own.
        self.runner = FakeRunner(now=time.monotonic)
        return Ports(pool=self.pool, device=open_torch_device(layout, caches), runner=self.runner)

    @property
    def session(self) -> Session:
        """What the two halves share."""
        session: Session = self.engine.scheduler.session
        return session

    def on_loop(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call something that belongs to the connector's loop, the runner's gates above all."""
        return self.session.bridge.call(function, *arguments)

    def until(self, ask: Callable[[], Any]) -> Any:
        """Ask until the answer is not empty, and return it. For tests that call hooks themselves."""
        pause = threading.Event()
        for _ in range(MOST_PASSES):
            if answer := ask():
                return answer
            pause.wait(IDLE_S)
        raise AssertionError("nothing has ended")

    def left_behind(self) -> list[str]:
        """What an idle server has not given back, or has read and should not have. Ends it."""
        left = [f"{self.cache.pages - len(free)} pages of group {group}" for group, free in enumerate(self.cache.free)]
        left = [line for line in left if not line.startswith("0 ")]
        left += [f"wrong page: request {who}, group {group}, block {block}" for who, group, block in self.engine.wrong]
        self.engine.shutdown()
        return left + [f"registered {buffer!r}" for buffer in self.pool.registered]
