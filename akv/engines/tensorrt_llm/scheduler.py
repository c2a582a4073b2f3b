"""The scheduler half: TensorRT-LLM's hooks, each at most one hop to the loop (`serving.py` does the work there)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from akv.engines.tensorrt_llm.identity import asked, is_served
from akv.engines.tensorrt_llm.metadata import PassMetadata
from akv.engines.tensorrt_llm.reservations import Confirmed
from akv.engines.tensorrt_llm.serving import Reported, Tables
from akv.engines.tensorrt_llm.session import Session, Sessions


class SchedulerHooks:
    """`KvCacheConnectorScheduler`, by akv. Put before the engine's base class, in `connector_classes()`."""

    sessions: ClassVar[Sessions]

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]  # the engine's base class takes it
        self.session: Session = self.sessions.join(llm_args, "scheduler")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How much the pool has behind the engine's own match, and that it is loaded outside the batch. (0, False) for none.

        Waits for the pool, at most `lookup_grace_ms`: the engine asks once per allocation and has no earlier hook.
        """
        session = self.session
        if not session.reads or not is_served(request):
            return 0, False
        tokens = session.bridge.call(session.serving.match, asked(request), num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        """As below, for a cache with one layer group."""
        self._allocated(request, self.session.described.tables((), block_ids))

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: Sequence[Sequence[int]]) -> None:
        """The request has pages: what the engine takes up of the answer begins to load. Raises EngineContractError."""
        self._allocated(request, self.session.described.tables(block_ids_by_layer_group))

    def _allocated(self, request: Any, tables: Tables) -> None:
        if is_served(request):
            honoured = getattr(request, "py_num_connector_matched_tokens", None)
            # Loads write behind the last kernel of whoever had the pages before.
            self.session.stream.behind()
            self.session.bridge.call(self.session.serving.allocated, asked(request), tables, honoured)

    def build_connector_meta(self, scheduler_output: Any) -> PassMetadata:
        """The final batch: its saves are planned on the loop while the engine goes on. Raises what the plan before raised."""
        session = self.session
        reported = [
            self._reported(entry, first)
            for entries, first in ((scheduler_output.new_requests, True), (scheduler_output.cached_requests, False))
            for entry in entries
        ]
        confirmed = [
            Confirmed(
                int(load.reservation_id),
                int(load.request_id),
                int(load.start),
                int(load.end),
                session.described.tables(load.block_ids_by_layer_group),
            )
            for load in getattr(scheduler_output, "prefix_loads", ())
        ]
        if not reported and not confirmed:
            return PassMetadata()
        number = session.plan(reported, confirmed)
        return PassMetadata(number=number, loads=tuple(load.reservation_id for load in confirmed))

    def _reported(self, entry: Any, first: bool) -> Reported:
        pages = self.session.described.tables(getattr(entry, "new_block_ids_by_layer_group", ()), entry.new_block_ids)
        return Reported(
            int(entry.request_id),
            first,
            entry.new_tokens,
            pages,
            int(entry.computed_position),
            int(entry.num_scheduled_tokens),
        )

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        """As below, for a cache with one layer group."""
        return self._finished(request, self.session.described.tables((), cache_block_ids))

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: Sequence[Sequence[int]]) -> bool:
        """The request has ended, or was preempted for good. True holds its pages until `get_finished` names it."""
        return self._finished(request, self.session.described.tables(cache_block_ids_by_layer_group))

    def _finished(self, request: Any, tables: Tables) -> bool:
        if not is_served(request):
            return False
        session = self.session
        return session.bridge.call(session.serving.finished, int(request.request_id), tables)

    def request_reset(self, request: Any) -> None:
        """Its allocation has gone and it will begin again. Returns when no copy touches its pages."""
        self.session.bridge.call(self.session.serving.reset, int(request.request_id))

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """What was offered for tokens [start, end) will not be taken up. Unknown and late ones are ignored."""
        self.session.bridge.call(self.session.serving.give_up, int(request.request_id), int(start), int(end))

    def wait_for_initialization(self) -> None:
        """Nothing: the connector is open when the engine has described its cache."""

    def shutdown(self) -> None:
        """End the connector. Idempotent; the end of the process does it too."""
        self.session.close()


class ReservingSchedulerHooks(SchedulerHooks):
    """With prefix reservations: what a model with sliding windows needs."""

    def reserve_prefix(self, request: Any, num_computed_tokens: int, reservation_id: int) -> tuple[int, bool]:
        """As `get_num_new_matched_tokens`, while a batch is filled. Moves nothing; the pool's lease protects the source."""
        session = self.session
        if not session.reads or not is_served(request):
            return 0, False
        tokens = session.bridge.call(session.reservations.reserve, asked(request), num_computed_tokens, int(reservation_id))
        return tokens, tokens > 0

    def release_prefix_reservation(self, request: Any, reservation_id: int, start: int, end: int) -> None:
        """Tokens [start, end) of a reservation are not wanted, or were loaded. Unknown and late ids are ignored."""
        self.session.bridge.call(self.session.reservations.release, int(reservation_id), int(start), int(end))
