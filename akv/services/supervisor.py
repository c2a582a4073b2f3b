"""Runs the connector's services, and says when one fails (M8, O8).

Two of them see the ends of everything that is under way: whoever delivers the ends of calls, and the stream poller. When one
of these fails it is started again, although the connector stops using the pool: else nobody would learn that a copy has ended,
and pages could never be given back. What exactly failed is not tried again.
"""

from collections.abc import Callable
from typing import Any

from anyio import TASK_STATUS_IGNORED, CancelScope, sleep
from anyio.abc import TaskGroup, TaskStatus

#: Seconds before a service is started again; the pause doubles with each failure.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 1.0


class Supervisor:
    """Starts services in one task group. Only `stop` ends them: a cancelled block needs them to give back what is in
    flight.
    """

    def __init__(self, failed: Callable[[Exception], bool]) -> None:
        #: Told of each failure, at once. Says whether the program goes on: else the failure leaves through the group.
        self._failed = failed
        self._scopes: list[CancelScope] = []
        #: Set when all have started. What fails earlier is the opening's failure, and nothing is started again.
        self.all_started = False
        #: A failure leaves, or will leave, through the group.
        self.raises = False

    async def start(self, group: TaskGroup, service: Callable[..., Any], *, sees_ends: bool = False) -> None:
        """Start one service, and return once it says that it has started. Raises what it raised before that."""
        scope = CancelScope()
        self._scopes.append(scope)
        await group.start(self._serve, group, service, scope, sees_ends)
        # Not before it has started: trio lets nobody leave a start that was cancelled and whose task ignores that.
        scope.shield = True

    def stop(self) -> None:
        """End every service."""
        for scope in self._scopes:
            scope.cancel()

    async def _serve(  # noqa: ASYNC128 - the service says when it has started
        self,
        group: TaskGroup,
        service: Callable[..., Any],
        scope: CancelScope,
        sees_ends: bool,
        *,
        task_status: TaskStatus[None] = TASK_STATUS_IGNORED,
    ) -> None:
        """Run one service. If it fails, whoever waits in the engine's own tasks must learn of it: they are in no group of
        ours.
        """
        failure: Exception | None = None
        pause_s = FIRST_PAUSE_S
        with scope:
            while True:
                try:
                    await service(task_status=task_status)
                except Exception as error:
                    if not self._failed(error):
                        self.raises = True
                        if not (sees_ends and self.all_started):
                            raise
                        # It goes on until `stop`, and is raised then; the block ends now.
                        failure = failure or error
                        group.cancel_scope.cancel()
                if not sees_ends:
                    break
                task_status = TASK_STATUS_IGNORED
                # One that cannot run at all must not spin.
                await sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if failure is not None:
            raise failure
