"""What has ended, as vLLM is told of it: by the worker's role in one process, by the ranks where these have their own."""

from collections.abc import Sequence
from typing import NamedTuple

from akv.engines.vllm.scheduler import FINAL
from akv.engines.vllm.session import Session
from akv.engines.vllm.tracked import Tracked
from akv.errors import PagesLost
from akv.values.messages import LoadState
from akv.values.pressure import Reads
from akv.values.requests import LoadCompleted, SavesCompleted


class Results(NamedTuple):
    """What ended, by vLLM's ids. A load that failed stands in two of them."""

    sent: set[str]
    received: set[str]
    failed: set[str]
    #: Loads that ranks were told of and whose end nobody will see on some rank: the blocks are lost, the request goes on.
    lost: set[str]


def no_results() -> Results:
    """Nothing ended."""
    return Results(set(), set(), set(), set())


class Ends:
    """Takes what the session was told."""

    def __init__(self, session: Session) -> None:
        self._session = session
        #: What loads had read when it was counted last.
        self._read = Reads()

    def take(self) -> Results:
        """What ended since the last call. Of a load that the ranks were told of they say themselves that it ended."""
        session = self._session
        session.see()
        results = no_results()
        while session.ends:
            ended = session.ends.popleft()
            if isinstance(ended, Tracked):
                self._over(ended, results)
                continue
            if isinstance(ended, Reads):
                session.counts.reads_grew(self._read, ended)
                self._read = ended
                continue
            tracked = session.requests.get(ended.request_id)
            match ended:
                case LoadCompleted():
                    self._load_ended(tracked, ended, results)
                case SavesCompleted():
                    self._request_ended(tracked, ended, results)
                case PagesLost():
                    self._lost(tracked, ended.pages, results)
                case _:
                    pass
        if session.failed or session.serving is None:
            self._give_back_all(results)
        return results

    def _load_ended(self, tracked: Tracked | None, ended: LoadCompleted, results: Results) -> None:
        counts = self._session.counts
        if ended.state is LoadState.LOADED:
            counts.add("loads")
            counts.add("loaded_tokens", ended.tokens)
        elif ended.state is LoadState.FAILED:
            counts.add("failed_loads")
        if tracked is None or not tracked.receiving or tracked.reported:
            return
        if ended.state is not LoadState.LOADED:
            self._failed(tracked, results)
            tracked.local_only = tracked.local_only or ended.reason in FINAL
            self._begin_again(tracked)
        self._received(tracked, results)

    def _begin_again(self, tracked: Tracked) -> None:
        """VLLM frees all blocks of a request whose load failed, its local match with them, and schedules it like a new one:
        from whatever its own cache holds by then, by passes of which akv is told those alone that complete a block. What the
        load left behind says nothing about any of them.
        """
        serving = self._session.serving
        if serving is not None and not tracked.ended:
            tracked.noted = ()
            self._session.ask(serving.loop.preempt, [tracked], otherwise=None)

    def _request_ended(self, tracked: Tracked | None, ended: SavesCompleted, results: Results) -> None:
        request = None if tracked is None else tracked.request
        if request is not None and not (request.closed and request.incarnation == ended.incarnation):
            return  # An incarnation that was preempted ends, too, and its request goes on: its last end has all of these.
        self._session.counts.add("saved_requests")
        self._session.counts.add("stored_blocks", ended.stored_blocks)
        self._session.counts.add("refused_blocks", ended.refused_blocks)
        if tracked is not None and request is not None:
            self._over(tracked, results)

    def _lost(self, tracked: Tracked | None, pages: Sequence[Sequence[int]], results: Results) -> None:
        self._session.lose(pages)
        if tracked is not None:
            # For akv it is over; vLLM computes it, in other blocks.
            self._over(tracked, results, failed=True)
            self._session.requests.pop(tracked.id, None)

    def _over(self, tracked: Tracked, results: Results, *, failed: bool = False) -> None:
        """Nothing touches the request's blocks any more, or nobody can say so and the blocks are lost."""
        if tracked.receiving:
            if not tracked.reported:
                if failed and tracked.below:
                    results.lost.add(tracked.id)
                elif failed:
                    self._failed(tracked, results)
                self._received(tracked, results)
        elif tracked.held:
            tracked.held = False
            results.sent.add(tracked.id)
            del self._session.requests[tracked.id]

    @staticmethod
    def _received(tracked: Tracked, results: Results) -> None:
        tracked.reported = True
        if not tracked.below:
            results.received.add(tracked.id)

    @staticmethod
    def _failed(tracked: Tracked, results: Results) -> None:
        if not tracked.below:
            results.failed.add(tracked.id)

    def _give_back_all(self, results: Results) -> None:
        """There is no cache any more, and what a copy may touch was taken out of use."""
        for tracked in list(self._session.requests.values()):
            if tracked.receiving or tracked.held:
                self._over(tracked, results, failed=True)
