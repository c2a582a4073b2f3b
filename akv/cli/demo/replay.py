"""A trace against an engine: each request starts when its time has come, whatever became of those before it."""

from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskStatus

from akv.cli.demo.scaling import ReplayedRequest
from akv_testing.engine import Engine, Result


class Replay:
    """One run, and how many of its requests were under way at a time."""

    def __init__(self, engine: Engine, *, reads_pool: bool, answered: Callable[[ReplayedRequest, Result], None]) -> None:
        """`answered(request, result)` is called as each request is answered, in the order of the answers."""
        self._engine = engine
        self._reads_pool = reads_pool
        self._answered = answered
        self._in_flight = 0
        #: The most requests that had started and were not answered yet.
        self.peak_in_flight = 0
        #: Seconds from the first start to the last answer.
        self.seconds = 0.0

    async def run(self, requests: Sequence[ReplayedRequest]) -> None:
        """Replay all of them; what they save may go on. A request's failure ends the run."""
        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            for number, request in enumerate(requests):
                await anyio.sleep_until(began + request.start_s)
                # `start`, and not `start_soon`: trio runs new tasks in any order, a trace's requests come in one.
                await group.start(self._serve, f"r{number}", request)
        self.seconds = anyio.current_time() - began

    async def _serve(self, request_id: str, request: ReplayedRequest, *, task_status: TaskStatus[None]) -> None:
        self._in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
        task_status.started()
        result = await self._engine.generate(
            request_id,
            request.prompt,
            max_new_tokens=request.new_tokens,
            reads_pool=self._reads_pool,
            keep_pages=True,
        )
        self._in_flight -= 1
        self._answered(request, result)
