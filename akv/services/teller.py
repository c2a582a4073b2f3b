"""Says every `stats_interval_s` which way the pages of loads came: one event, and a post that `akv stat` reads (V2)."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from anyio import TASK_STATUS_IGNORED, CancelScope, move_on_after, sleep
from anyio.abc import TaskStatus

from akv import observe
from akv.ports.board import StatBoard
from akv.ports.calls import CallKind, CallSize
from akv.settings import Settings
from akv.values.pressure import Reads
from akv.values.stats import ConnectorStats

#: Runs a call of this kind and size elsewhere, and returns its value or raises what it raised.
Call: TypeAlias = Callable[[CallKind, Callable[[], Any], CallSize], Awaitable[Any]]

#: Seconds that opening waits for the first post, which takes less than a millisecond.
FIRST_POST_S = 1.0


class StatsTeller:
    """Tells what changed since it told last."""

    def __init__(self, settings: Settings, board: StatBoard | None, call: Call, reads: Callable[[], Reads]) -> None:
        """`call`: runs a blocking call. `reads`: what is told."""
        self._settings = settings
        self._board = board
        self._call = call
        self._reads = reads
        self._told = Reads()
        self._telling = CancelScope()

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled or `stop`. A post that is under way goes on."""
        with self._telling:
            # Before the connector is open, so that it is there with no call of its own under way, unless the post hangs.
            with move_on_after(FIRST_POST_S):
                await self._post()
            task_status.started()
            while self._settings.stats_interval_s:
                await sleep(self._settings.stats_interval_s)
                if self.tell():
                    await self._post()

    def stop(self) -> None:
        """Begin no call any more: the connector closes."""
        self._telling.cancel()

    def tell(self) -> bool:
        """Emit the event if there is news."""
        reads = self._reads()
        if reads == self._told:
            return False
        self._told = reads
        observe.emit(
            observe.CONNECTOR_STATS,
            direct_pages=reads.direct_pages,
            direct_bytes=reads.direct_bytes,
            staged=reads.staged,
            staged_bytes=reads.staged_bytes,
            segments=reads.segments,
            segment_bytes=reads.segment_bytes,
        )
        return True

    async def _post(self) -> None:
        board, settings = self._board, self._settings
        if board is None or not settings.stats_interval_s:
            return
        stats = ConnectorStats(
            model_key=settings.model_key, namespace=settings.namespace, role=settings.role, reads=self._reads()
        )
        try:
            await self._call(CallKind.MAP, lambda: board.post(stats), CallSize())
        except OSError as error:
            # Nobody can look, and nothing else is lost: it is tried no more.
            self._board = None
            observe.emit(observe.STATS_UNPOSTED, error=error)
