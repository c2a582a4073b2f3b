"""What runs on the connector's loop: the hooks' work. In the order of the hooks, each up to its first wait."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import msgspec
from anyio import CancelScope
from anyio.lowlevel import checkpoint

from akv import observe
from akv.connector import Connector
from akv.engines.vllm.identity import scope_of
from akv.engines.vllm.tracked import Tracked
from akv.errors import DeviceError, EngineContractError, PagesLost, SettingsError, TokenError
from akv.request import Request
from akv.values.messages import LoadState, PassPlan
from akv.values.offers import Offer
from akv.values.pressure import Reads
from akv.values.requests import Completion, LoadCompleted, Scheduled

#: The reason of a load that akv did not begin.
REFUSED = "refused"


class Loading(msgspec.Struct, frozen=True):
    """Blocks that vLLM has put aside for an offer."""

    tracked: Tracked
    offer: Offer
    tokens: int
    pages: Sequence[Sequence[int]]


class Part(msgspec.Struct, frozen=True):
    """One request's part of a coming pass."""

    tracked: Tracked
    computed_before: int
    tokens: int
    draft_tokens: int
    pages: Sequence[Sequence[int]]


class Step(msgspec.Struct, frozen=True):
    """What one step of the scheduler has for the loop."""

    loads: Sequence[Loading]
    parts: Sequence[Part]


#: What the loop tells: what ended, and what loads have read by then.
End: TypeAlias = Completion | PagesLost | Tracked | Reads


class LoopSide:
    """The connector as the roles use it. Every method is called on its loop."""

    def __init__(self, kv: Connector, tell: Callable[[End], None]) -> None:
        """`tell` is called with what ended."""
        self._kv = kv
        self._tell = tell
        #: What had been read when that was told last.
        self._read = Reads()

    async def deliver(self) -> None:
        """Pass on whatever ends, for as long as the connector lives."""
        while True:
            await self._kv.changed.wait()
            self._tell_ends()
            # The engine's thread waits for what was told, and for the interpreter.
            await checkpoint()
            self._tell_reads()

    def _tell_ends(self) -> None:
        try:
            for ended in self._kv.completed():
                self._tell(ended)
        except PagesLost as lost:
            self._tell(lost)

    def _tell_reads(self) -> None:
        reads = self._kv.pressure().reads
        if reads != self._read:
            self._read = reads
            self._tell(reads)

    async def look_up(self, tracked: Tracked, local_tokens: int) -> Offer:
        """Ask what the pool holds of a request beyond the local match. Opens the request, where nothing has."""
        request = self._opened(tracked)
        return await request.lookup(local_tokens)

    async def preempt(self, preempted: Sequence[Tracked]) -> None:
        """The engine took the blocks of these requests away: return when nothing reads them."""
        for tracked in preempted:
            if tracked.request is not None:
                await tracked.request.preempted()

    def step(self, step: Step) -> PassPlan | None:
        """Take up the loads, then plan the pass; None where it has no part of a request that is open."""
        for load in step.loads:
            self._reserve(load)
        scheduled = [part for part in map(self._scheduled, step.parts) if part is not None]
        return self._plan(scheduled) if scheduled else None

    async def after_forward(self, planned: "Future[PassPlan | None]") -> None:
        """The pass that was planned before has been queued."""
        plan = planned.result()
        if plan is None:
            return
        try:
            await self._kv.after_forward(plan)
        except (DeviceError, EngineContractError) as error:
            observe.emit(observe.ENGINE_PASS_UNSAVED, error=error)

    async def finish(self, tracked: Tracked) -> None:
        """The request is complete. It is told when its pages are free: at once, if they are."""
        if await self._finish(tracked):
            self._tell(tracked)

    async def _finish(self, tracked: Tracked) -> bool:
        request = tracked.request
        if request is None or tracked.ended:
            return await self.cancel(tracked)
        try:
            if news := tracked.take():
                request.append(news)
            request.finish()
        except (DeviceError, EngineContractError, TokenError) as error:
            observe.emit(observe.ENGINE_PASS_UNSAVED, error=error)
            return await self.cancel(tracked)
        tracked.ended = True
        return request.closed

    async def cancel(self, tracked: Tracked) -> bool:
        """As `finish`, of a request that is not wanted any more: what has not begun is withdrawn."""
        tracked.ended = True
        request = tracked.request
        if request is None:
            return True
        with CancelScope() as scope:
            # The request is cancelled all the same. Only the wait for its end is not, which then is told like any other.
            scope.cancel()
            await request.cancel()
        return request.closed

    def _opened(self, tracked: Tracked) -> Request:
        """The request, with all its tokens, opened where nothing has. Raises EngineContractError if it ended meanwhile, and
        what opening it raises: then it is excluded, for what could not be named is missing from whatever comes behind it.
        """
        if tracked.ended:
            raise EngineContractError(f"request {tracked.id!r} has ended, or was excluded")
        news = tracked.take()
        try:
            if tracked.request is None:
                scope = scope_of(tracked.vllm, tracked.epoch, require_salt=self._kv.settings.require_salt)
                tracked.request = self._kv.open_request(tracked.id, news, scope, reads_cache=not tracked.local_only)
            elif news:
                tracked.request.append(news)
        except (TokenError, SettingsError, EngineContractError) as error:
            observe.emit(observe.ENGINE_REQUEST_EXCLUDED, request_id=tracked.id, error=error)
            tracked.ended = True
            raise
        return tracked.request

    def _reserve(self, load: Loading) -> bool:
        """Whether the load was taken up; else it has ended, which was told."""
        try:
            self._opened(load.tracked).reserve(load.offer, load.tokens, load.pages)
        except (DeviceError, EngineContractError) as error:
            observe.emit(observe.ENGINE_LOAD_REFUSED, request_id=load.tracked.id, error=error)
            self._tell(LoadCompleted(request_id=load.tracked.id, incarnation=0, state=LoadState.FAILED, reason=REFUSED))
            return False
        return True

    def _scheduled(self, part: Part) -> Scheduled | None:
        try:
            request = self._opened(part.tracked)
        except (TokenError, SettingsError, EngineContractError):
            return None
        return Scheduled(
            request=request,
            computed_before=part.computed_before,
            tokens=part.tokens,
            draft_tokens=part.draft_tokens,
            pages=part.pages,
        )

    def _plan(self, scheduled: Sequence[Scheduled]) -> PassPlan | None:
        try:
            return self._kv.plan_pass(scheduled)
        except EngineContractError as error:
            # One part is at fault, and the others are not to go without their saves.
            if len(scheduled) == 1:
                observe.emit(observe.ENGINE_PASS_UNSAVED, error=error)
                return None
            good = []
            for part in scheduled:
                plan = self._plan([part])
                if plan is not None:
                    self._kv.drop_pass(plan)
                    good.append(part)
            return self._plan(good) if len(good) < len(scheduled) and good else None
