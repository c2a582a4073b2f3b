"""Who gets pages and who waits for them: the oldest first, and nobody takes what another one's prompt was promised (D7)."""

from bisect import insort
from collections.abc import Callable

import anyio

from akv.host import PagedCache
from akv_testing.engine.job import Job
from akv_testing.engine.quarantine import Quarantine


class Admission:
    """Admits requests with their whole prompt booked, and lets them grow into it, and past it while there are pages.

    So what is looked up, loaded or computed of a prompt never waits for a page, and parked loads never deadlock. Generated
    tokens are not booked, since nobody knows when an answer ends: a request without a page for them waits, "stalled", until
    the batch has preempted a younger one or pages came free.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self.quarantine = Quarantine(cache)
        #: Requests that wait to be admitted, the oldest first.
        self._queue: list[Job] = []
        #: Numbers of admitted requests that wait for one more page.
        self._stalled: set[int] = set()
        #: Told whenever pages may have become free. The batch sets it.
        self.on_free: Callable[[], None] = lambda: None

    def enqueue(self, job: Job) -> None:
        """Let a request wait for pages for all its tokens; `job.admitted` is set when it has them. It keeps its age."""
        job.admitted = anyio.Event()
        insort(self._queue, job, key=lambda waiting: waiting.number)
        self._admit()

    def grow(self, job: Job, upto_tokens: int) -> bool:
        """Have pages for so many tokens of an admitted request; False if it has to wait for them."""
        if job.sequence is None:
            raise AssertionError("a request in the batch has pages")
        if not job.sequence.grow(upto_tokens):
            self._stalled.add(job.number)
            return False
        if job.number in self._stalled:
            self._stalled.remove(job.number)
            self._admit()  # who came later had to let it go first
        return True

    def release(self, job: Job) -> None:
        """Nothing touches the request's pages any more, but for those that were named to the quarantine: they are free."""
        if job.sequence is not None:
            self.quarantine.release(job.request_id, job.sequence)
            job.sequence, job.tables, job.guess = None, (), None
        self.freed()

    def leave(self, job: Job) -> None:
        """The request waits for nothing any more."""
        if job in self._queue:
            self._queue.remove(job)
        self._stalled.discard(job.number)
        self.freed()

    def freed(self) -> None:
        """Pages may have become free."""
        self._admit()
        self.on_free()

    def _admit(self) -> None:
        while self._queue:
            job = self._queue[0]
            if self._stalled and min(self._stalled) < job.number:
                return  # else pages that come free one by one would go to the younger one, which is preempted for them again
            # A match leaves of the tokens that are shown to it one to compute: so no more is reused than was asked for.
            shown = job.length if job.local_at_most is None else min(job.length, job.local_at_most + 1)
            sequence = self._cache.admit(job.known[:shown], 0, job.scope, reuse=job.local_reuse, booked_tokens=job.length)
            if sequence is None:
                return
            self._queue.pop(0)
            sequence.append(job.tokens(shown, job.length))
            job.sequence = sequence
            job.read_tables()
            job.computed = sequence.local_tokens
            self.quarantine.opened(job.request_id)
            job.admitted.set()
