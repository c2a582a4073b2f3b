"""What both roles of one engine share in its process: the bridge, the requests, and what has ended.

vLLM makes its two connectors apart, the worker's first, and neither knows the other; the engine's id joins them. They are
called by one thread; what the loop tells comes through a queue.
"""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

from akv import observe
from akv.bridge import Bridge, open_bridge
from akv.engines.vllm.configuration import Configuration
from akv.engines.vllm.identity import Use
from akv.engines.vllm.layout import Cache
from akv.engines.vllm.loop_side import End, LoopSide
from akv.engines.vllm.ranked_loop import RankedLoopSide
from akv.engines.vllm.stats import Counts
from akv.engines.vllm.tracked import Tracked
from akv.errors import AkvError, ConnectorBroken, NotOpenError, SettingsError
from akv.ports import Ports
from akv.rank_bridge import open_scheduler_bridge
from akv.values.messages import PagesPerGroup
from akv.values.offers import Offer
from akv.values.requests import LoadCompleted

Answer = TypeVar("Answer")

#: One for each engine of this process, by the engine's id. A global, because vLLM gives the two roles nothing else in common.
_sessions: dict[str, "Session"] = {}
_joining = threading.Lock()


def join_session(engine_id: str) -> "Session":
    """The session of that engine; made by whichever role comes first."""
    with _joining:
        return _sessions.setdefault(engine_id, Session(engine_id))


class Serving:
    """A bridge and what runs on its loop."""

    def __init__(self, bridge: Bridge, loop: LoopSide) -> None:
        self.bridge = bridge
        self.loop = loop
        #: Ends with the connector alone.
        self.delivery: Future[None] = bridge.begin(loop.deliver)


class Session:
    """One engine's connector. The engine's thread calls every method but `_told`."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        #: None before the worker has the cache, and once nothing can be asked any more.
        self.serving: Serving | None = None
        #: The loop's side where the worker halves live in other processes.
        self.ranks: RankedLoopSide | None = None
        self._failed = False
        #: What failed on the loop and was no outcome: a fault of the adapter's, after which nothing it says can be trusted.
        self._fault: BaseException | None = None
        #: The requests that vLLM has not forgotten, by its id.
        self.requests: dict[str, Tracked] = {}
        #: What ended and was not looked at, oldest first; and whether there is something new, lookups included.
        self.ends: deque[End] = deque()
        self.arrived = threading.Event()
        #: Blocks that must never be used again, which the scheduler's role takes out of use.
        self.lost_blocks: set[int] = set()
        self.counts = Counts()
        #: Separates what is computed from what was before a reset; empty until there is one.
        self.epoch = ""

    def open(self, configuration: Configuration, cache: Cache, *, stream: Any = None, ports: Ports | None = None) -> None:
        """Open the connector on the engine's cache. Blocks until it is open; raises what opening one raises. `stream`: the
        CUDA stream of the forwards.
        """
        self._check_alone()
        settings, capabilities = configuration.settings, configuration.capabilities
        bridge = open_bridge(settings, cache.layout, cache.tensors, stream=stream, capabilities=capabilities, ports=ports)
        self.serving = Serving(bridge, LoopSide(bridge.kv, self._told))

    def open_ranks(self, configuration: Configuration, hellos: Sequence[bytes], *, ports: Ports | None = None) -> None:
        """Open the scheduler half of a server whose ranks have opened theirs in processes of their own. As `open`."""
        self._check_alone()
        settings, capabilities = configuration.settings, configuration.capabilities
        bridge = open_scheduler_bridge(settings, hellos, capabilities=capabilities, ports=ports)
        self.ranks = RankedLoopSide(bridge.scheduler, self._told)
        self.serving = Serving(bridge, self.ranks)

    def _check_alone(self) -> None:
        if self.serving is not None:
            why = "another engine of this process has it, and the two roles of a connector find each other by it"
            raise SettingsError("kv_transfer_config.engine_id", self._engine_id, why, "Leave it out: vLLM makes one up.")

    def close(self) -> None:
        """Close the connector, whichever role says so first. Later hooks are answered without a cache."""
        serving, self.serving = self.serving, None
        with _joining:
            if _sessions.get(self._engine_id) is self:
                del _sessions[self._engine_id]
        if serving is not None:
            serving.bridge.close()

    def begin_anew(self) -> None:
        """The weights may have changed: requests that come find nothing of before, and nothing more is loaded for those that
        are there, or saved of them.
        """
        self.epoch = secrets.token_hex(16)
        for tracked in self.requests.values():
            tracked.use, tracked.local_only = Use(reads=False, saves=False), True

    def wait(self, limit_s: float, most_s: float, held_s: float) -> None:
        """Wait until all has ended that keeps vLLM from computing, loads and lookups that it was put off with: at most
        `limit_s` for the next of them to end, and `most_s` in all.

        Not only until the first of them: the pass of one request would compete with the loads of the others for the
        interpreter, and each of them would have a pass of its own. What ended requests leave to be told is waited for where
        nothing else is, for `held_s`: whoever comes next waits as long, and gains nothing by it.
        """
        deadline = monotonic() + most_s
        while self.serving is not None:
            self.arrived.clear()
            wanted_s = limit_s if self._outstanding() else held_s if self._only_held() else 0.0
            left = min(wanted_s, deadline - monotonic())
            if left <= 0:
                return
            self.hurry()
            if not self.arrived.wait(left):
                return

    def _outstanding(self) -> bool:
        over = {ended.request_id for ended in list(self.ends) if isinstance(ended, LoadCompleted)}
        requests = self.requests.values()
        loading = any(one.receiving and not one.reported and one.id not in over for one in requests)
        return loading or any(one.later and _asking(one) for one in requests)

    def _only_held(self) -> bool:
        requests = self.requests.values()
        # A lookup whose answer is there is asked for again in the next step.
        return not self.ends and any(one.held for one in requests) and not any(one.later for one in requests)

    def answered(self, _: "Future[Offer]") -> None:
        """On the loop, as a rule: a lookup has ended."""
        self.arrived.set()

    def ask(self, function: Callable[..., Any], *args: object, otherwise: Answer) -> Any | Answer:
        """Call a function of the loop's side and return its result; `otherwise` where there is no cache any more."""
        serving = self._sound()
        if serving is None:
            return otherwise
        try:
            return serving.bridge.call(function, *args)
        except (ConnectorBroken, NotOpenError) as error:
            self.fail(error)
            return otherwise

    def begin(self, function: Callable[..., Any], *args: object, within_s: float = 0.0) -> "Future[Any] | None":
        """Begin a function of the loop's side; None where there is no cache any more. `within_s`: seconds that it may wait for
        something more urgent to begin with.
        """
        serving = self._sound()
        if serving is None:
            return None
        try:
            future = serving.bridge.begin_within(within_s, function, *args)
        except (ConnectorBroken, NotOpenError) as error:
            self.fail(error)
            return None
        future.add_done_callback(self._ended)
        return future

    def hurry(self) -> None:
        """The engine's thread is about to wait: what was begun may have the interpreter, and begins at once."""
        if self.serving is not None:
            self.serving.bridge.hurry()

    def see(self) -> None:
        """Notice a connector that broke while nothing was asked of it: what was to end is not told any more."""
        serving = self._sound()
        if serving is not None and serving.delivery.done() and (error := serving.delivery.exception()) is not None:
            self.fail(error)

    def _sound(self) -> Serving | None:
        if self._fault is not None and self.serving is not None:
            # The connector itself lives, and would go on with copies that nobody here is told of.
            self.serving.bridge.close()
            self.fail(self._fault)
        return self.serving

    def _ended(self, future: "Future[Any]") -> None:
        """On the loop, as a rule: what was begun has ended. A fault that nobody may be waiting for is kept."""
        if not future.cancelled() and not isinstance(error := future.exception(), AkvError | None):
            self._fault = error
            self.arrived.set()

    def fail(self, error: BaseException) -> None:
        """The connector serves no more. Blocks that a copy may still touch are lost; all others are vLLM's again."""
        serving, self.serving = self.serving, None
        if serving is None or self._failed:
            return
        self._failed = True
        observe.emit(observe.ENGINE_WITHOUT_CACHE, error=error)
        self.lose(serving.bridge.kv.touched_pages)

    @property
    def failed(self) -> bool:
        """Whether the connector broke."""
        return self._failed

    def lose(self, pages: PagesPerGroup | Sequence[Sequence[int]]) -> None:
        """Blocks that nobody can give back."""
        self.lost_blocks.update(block for group in pages for block in group)

    def _told(self, ended: End) -> None:
        """On the loop."""
        self.ends.append(ended)
        self.arrived.set()


def _asking(tracked: Tracked) -> bool:
    return tracked.asked is not None and not tracked.asked.done()
