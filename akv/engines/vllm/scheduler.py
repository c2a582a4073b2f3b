"""The scheduler's role: what a request may load, where to, and what a step of the scheduler has for akv.

No hook waits for the network. Lookups run on the connector's loop; a step of the scheduler waits for them at most
`lookup_grace_ms` in all. What a step has to load, to plan or to end is begun on the loop, and nobody waits for it there.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from akv import observe
from akv.engines.vllm.identity import use_of
from akv.engines.vllm.loop_side import REFUSED, Loading, Part, Step
from akv.engines.vllm.session import Session
from akv.engines.vllm.tracked import Tracked
from akv.errors import AkvError, EngineContractError
from akv.units import NO_PAGE
from akv.values.messages import PassPlan
from akv.values.offers import Offer

#: vLLM's block that stands for none.
NULL_BLOCK = 0
#: vLLM's answers: ask again later; nothing to load.
LATER: tuple[int | None, bool] = (None, False)
NOTHING: tuple[int | None, bool] = (0, False)
#: Reasons of failed loads after which a request is computed, and not asked for again: another such load takes seconds (D3), or
#: would be refused like the first.
FINAL = ("deadline", "holder_lost", REFUSED)


#: Seconds that what concerns a computed pass may wait: until the next step plans its pass, or the engine's thread waits. Begun
#: behind the forward it would take the interpreter from that thread while it samples and answers, a millisecond or two.
STEP_TAIL_S = 0.005


class StepOrder(NamedTuple):
    """What the scheduler's role has for the worker's of one step."""

    #: The plan of its pass, which the loop is making; None where there is nothing to plan.
    plan: "Future[PassPlan | None] | None"
    #: Nothing is computed in this step.
    idle: bool


class SchedulerRole:
    """The hooks that vLLM's scheduler calls, in plain values."""

    def __init__(
        self, session: Session, tokens_per_block: int, windows: Sequence[int], grace_s: float, *, loads: bool = True
    ) -> None:
        """`windows`: the window in tokens of each group that has one. `loads`: whether this server does."""
        self._loads_at_all = loads
        self._session = session
        self._tokens_per_block = tokens_per_block
        self._windows = tuple(windows)
        self._grace_s = self._grace_left = grace_s
        self._loads: list[Loading] = []
        #: vLLM's `BlockPool`, once it has handed it over.
        self.block_pool: Any = None

    def on_new_request(self, request: Any) -> None:
        """A request arrives: its lookup begins, for no local match, as vLLM looks for one when it schedules."""
        use = use_of(request)
        if self._session.serving is None or not (use.reads or use.saves):
            return
        tracked = self._session.requests[request.request_id] = Tracked(request, use, self._session.epoch)
        tracked.local_only = not (use.reads and self._loads_at_all)
        # Also where nothing is to be loaded: it hashes the prompt, for which a pass has no time (L3).
        self._look_up(tracked, 0)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond the local match, and that this takes steps; None: not known yet."""
        session, tracked = self._session, self._session.requests.get(request.request_id)
        if tracked is None or session.serving is None or tracked.local_only:
            return NOTHING
        tracked.later = False
        most = (request.num_tokens - 1) // self._tokens_per_block * self._tokens_per_block
        if local_tokens >= most:
            self._forgo(tracked, local_tokens)
            return NOTHING
        self._look_for_preemption(tracked)
        if tracked.asked is None or tracked.asked_for != local_tokens:
            self._look_up(tracked, local_tokens)
        offer = self._answer(tracked)
        tracked.later = offer is None and tracked.asked is not None
        if offer is None:
            return LATER if tracked.later else NOTHING
        return (offer.tokens, True) if offer.tokens else NOTHING

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """There are blocks for `tokens` tokens of the offer; none: it takes up nothing. `blocks`: its `KVCacheBlocks`."""
        tracked = self._session.requests.get(request.request_id)
        if not tokens or tracked is None or tracked.asked is None:
            return
        tracked.receiving, tracked.reported, tracked.below = True, False, False
        offer, tracked.asked = tracked.asked.result(), None
        self._session.counts.add("offers")
        self._session.counts.add("offered_tokens", tokens)
        self._loads.append(Loading(tracked, offer, tokens, self._pages(blocks.get_block_ids())))

    def step(self, output: Any) -> StepOrder:
        """A step is scheduled. `output`: vLLM's `SchedulerOutput`, which is only read."""
        preempted, step = self._gather(output)
        idle = not output.num_scheduled_tokens
        if not (preempted or step.loads or step.parts) or self._session.serving is None:
            return StepOrder(None, idle)
        loop = self._session.serving.loop
        if preempted:
            # Blocks of theirs may be written in this step: no copy reads them any more when this returns.
            self._session.ask(loop.preempt, preempted, otherwise=None)
        planned = self._session.begin(loop.step, step)
        if idle:
            # Nothing is computed, so this thread will wait for the loads: they begin while it does the rest of its step.
            self._session.hurry()
        return StepOrder(planned, idle)

    def _gather(self, output: Any) -> tuple[list[Tracked], Step]:
        """What a step preempts, loads and computes, as far as akv is to know."""
        self._grace_left = self._grace_s
        requests = self._session.requests
        preempted = []
        for request_id in output.preempted_req_ids or ():
            tracked = requests.get(request_id)
            if tracked is not None and tracked.preemptions != tracked.vllm.num_preemptions:
                self._note_preemption(tracked)
                preempted.append(tracked)
        loads, self._loads = self._loads, []
        parts = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is not None and tracked.use.saves:
                drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                before = tracked.vllm.num_computed_tokens
                if self._passes_a_boundary(tracked, before + tokens - drafts, drafts):
                    tracked.send()
                    pages = self._pages(output.kv_connector_block_state.get_block_ids(request_id))
                    parts.append(Part(tracked, before, tokens - drafts, drafts, pages))
        return preempted, Step(loads, parts)

    def received(self, ended: Iterable[str]) -> None:
        """The scheduler reads that these requests' loads ended; before it frees anything."""
        self._keep_lost_blocks()
        for request_id in ended:
            if (tracked := self._session.requests.get(request_id)) is not None:
                tracked.receiving = False
                if tracked.vllm.is_finished():
                    del self._session.requests[request_id]

    def finished(self, request: Any, *, aborted: bool) -> bool:
        """A request ended. Returns whether vLLM is to keep its blocks until it is told that nothing reads them."""
        session, tracked = self._session, self._session.requests.get(request.request_id)
        if tracked is None:
            return False
        self._look_for_preemption(tracked)
        if tracked.asked is not None:
            tracked.asked.cancel()
        serving = session.serving
        if serving is None:
            free = True
        elif aborted or tracked.receiving:
            free = session.ask(serving.loop.cancel, tracked, otherwise=True)
        else:
            tracked.send()
            # Its blocks are kept until the end is told, though nothing may read them: a hop would hold up this step's answers.
            free = session.begin(serving.loop.finish, tracked, within_s=STEP_TAIL_S) is None
        # Where the connector broke over this: before vLLM gives them on.
        self._keep_lost_blocks()
        if tracked.receiving:
            # vLLM keeps the blocks until it reads that the load ended, and forgets the request then.
            return False
        if free:
            del session.requests[request.request_id]
            return False
        tracked.held = True
        return True

    def _look_for_preemption(self, tracked: Tracked) -> None:
        """A reset of the local cache preempts all that run, between two steps; and before the next step says so they begin
        anew, or end. Their blocks are free by now: returns when nothing reads them.
        """
        serving = self._session.serving
        if serving is not None and tracked.preemptions != tracked.vllm.num_preemptions:
            self._note_preemption(tracked)
            self._session.ask(serving.loop.preempt, [tracked], otherwise=None)

    @staticmethod
    def _note_preemption(tracked: Tracked) -> None:
        tracked.preemptions = tracked.vllm.num_preemptions
        tracked.asked, tracked.noted, tracked.later = None, (), False

    def _look_up(self, tracked: Tracked, local_tokens: int) -> None:
        if self._session.serving is not None:
            self._session.counts.add("lookups")
            self._begin_lookup(tracked, local_tokens)

    def _begin_lookup(self, tracked: Tracked, local_tokens: int) -> None:
        serving = self._session.serving
        if serving is None:
            return
        if tracked.asked is not None:
            tracked.asked.cancel()
        tracked.asked_for = local_tokens
        tracked.send()
        tracked.asked = self._session.begin(serving.loop.look_up, tracked, local_tokens)
        if tracked.asked is not None:
            tracked.asked.add_done_callback(self._session.answered)

    def _forgo(self, tracked: Tracked, local_tokens: int) -> None:
        """All of it is here. In place of a lookup that has not begun, as none has where vLLM schedules what has just come, one
        that asks the pool nothing: it opens the request.
        """
        if tracked.asked is not None and not tracked.asked.done() and tracked.asked_for != local_tokens:
            self._begin_lookup(tracked, local_tokens)

    def _answer(self, tracked: Tracked) -> Offer | None:
        """What the lookup found; None: not yet, or nothing was asked any more (`asked` is None then)."""
        asked = tracked.asked
        if asked is None:
            return None
        if not asked.done() and self._grace_left > 0:
            began = monotonic()
            self._session.hurry()
            with suppress(TimeoutError):
                asked.exception(self._grace_left)
            self._grace_left -= monotonic() - began
        if not asked.done():
            return None
        try:
            offer = asked.result()
        except AkvError as error:
            # It cannot be named, which was told, or the connector broke: computed, like any request.
            if isinstance(error, EngineContractError) and not tracked.ended:
                observe.emit(observe.ENGINE_LOAD_REFUSED, request_id=tracked.id, error=error)
            tracked.local_only, tracked.asked = True, None
            return None
        return offer

    def _passes_a_boundary(self, tracked: Tracked, computed: int, drafts: int) -> bool:
        """Whether this pass completes a block, or moves a window on by one: others change nothing that akv is to know, and
        a step in which every request decodes in the midst of a block asks nothing of the loop.
        """
        behind = (max(0, computed + drafts + 1 - window) // self._tokens_per_block for window in self._windows)
        # Scheduled ahead, the pass that completes a block comes before its last token is known; the one behind it saves it.
        confirmed = min(computed, tracked.vllm.num_tokens)
        noted = (computed // self._tokens_per_block, confirmed // self._tokens_per_block, *behind)
        if noted == tracked.noted:
            return False
        tracked.noted = noted
        return True

    def _pages(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        if not self._windows:
            return [list(group) for group in block_ids]  # vLLM's own lists grow while the loop reads.
        return [[NO_PAGE if block == NULL_BLOCK else block for block in group] for group in block_ids]

    def _keep_lost_blocks(self) -> None:
        """One reference more than anybody gives back: vLLM never hands them out again."""
        lost = self._session.lost_blocks
        if lost and self.block_pool is not None:
            self.block_pool.touch([self.block_pool.blocks[block] for block in sorted(lost)])
            lost.clear()
