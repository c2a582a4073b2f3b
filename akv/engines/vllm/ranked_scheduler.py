"""The scheduler's role of a server whose ranks have processes of their own: what it says, vLLM carries to each of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from akv.engines.vllm.ends import Ends, Results, no_results
from akv.engines.vllm.ranked_loop import Said
from akv.engines.vllm.scheduler import SchedulerRole
from akv.engines.vllm.session import Session


class RankStep(msgspec.Struct, frozen=True):
    """What one step says to every rank. Pickled by vLLM."""

    said: Said
    #: What each rank repeats to vLLM, which counts their answers: requests whose blocks nothing reads any more; loads that the
    #: ranks never heard of, and those of them that failed.
    sent: frozenset[str]
    received: frozenset[str]
    failed: frozenset[str]
    #: Loads of which a rank that has not seen their end says that they failed.
    lost: frozenset[str]
    #: Nothing is computed in this step, and no lookup keeps vLLM from it; then whether ended requests wait for their saves.
    idle: bool
    held: bool


class RankedSchedulerRole(SchedulerRole):
    """The hooks that vLLM's scheduler calls, in plain values."""

    def __init__(
        self, session: Session, tokens_per_block: int, windows: Sequence[int], grace_s: float, *, loads: bool = True
    ) -> None:
        """As `SchedulerRole`."""
        super().__init__(session, tokens_per_block, windows, grace_s, loads=loads)
        self._ends = Ends(session)
        #: What the ranks are to be told of with the next step.
        self._results = no_results()

    def step_of_ranks(self, output: Any) -> RankStep:
        """A step is scheduled. `output`: vLLM's `SchedulerOutput`, which is only read."""
        session = self._session
        preempted, step = self._gather(output)
        said: Said | None = Said()
        ranks = session.ranks
        if ranks is not None and (preempted or step.loads or step.parts or ranks.has_orders):
            said = session.ask(ranks.step_of_ranks, preempted, step, otherwise=None)
        self._note(self._ends.take())
        if said is None:
            # The connector broke over it, and no rank will hear of these.
            said = Said()
        for request_id in said.loads:
            if (tracked := session.requests.get(request_id)) is not None:
                tracked.below = True
        results, self._results = self._results, no_results()
        requests = session.requests.values()
        return RankStep(
            said,
            frozenset(results.sent),
            frozenset(results.received),
            frozenset(results.failed),
            frozenset(results.lost),
            idle=not output.num_scheduled_tokens and not any(one.later for one in requests),
            held=any(one.held for one in requests),
        )

    def reported(self, reports: Sequence[bytes], received: Iterable[str]) -> None:
        """What the ranks reported is about to be acted upon, and that these requests' loads ended on all of them."""
        ranks = self._session.ranks
        if ranks is not None and reports:
            self._session.ask(ranks.take_reports, reports, otherwise=None)
        self._note(self._ends.take())
        self.received(received)

    def _note(self, results: Results) -> None:
        self._results = Results(*(told | news for told, news in zip(self._results, results, strict=True)))
