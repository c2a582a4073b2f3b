"""The worker half: TensorRT-LLM's hooks around a forward. Only `wait_for_save` hops to the loop in a pass without loads."""

from collections.abc import Iterable
from typing import Any, ClassVar

from akv.engines.tensorrt_llm.metadata import METADATA_VERSION, PassMetadata
from akv.engines.tensorrt_llm.session import Session, Sessions
from akv.errors import EngineContractError, SettingsError


class WorkerHooks:
    """`KvCacheConnectorWorker`, by akv. Put before the engine's base class, in `connector_classes()`."""

    sessions: ClassVar[Sessions]

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]  # the engine's base class takes it
        self.session: Session = self.sessions.join(llm_args, "worker")
        self._bound: PassMetadata | None = None
        self._began = False

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Refused: the older cache manager tells neither layers nor groups, so its pages cannot be named (K4)."""
        raise SettingsError(
            "kv_cache_config.use_kv_cache_manager_v2",
            False,
            f"this cache manager hands out a tensor, {tuple(getattr(kv_cache_tensor, 'shape', ()))}, and does not describe it",
            "Set it to true.",
        )

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Open the connector. Blocks until it is open; raises what `akv.open_connector()` raises."""
        self.session.open(layout)

    def bind_connector_meta(self, metadata: Any) -> None:
        """What the scheduler half said of the coming pass, perhaps through a pipe. It counts for one pass."""
        super().bind_connector_meta(metadata)  # type: ignore[misc]  # the engine's base class has it
        if isinstance(metadata, PassMetadata) and metadata.version != METADATA_VERSION:
            raise EngineContractError(
                f"metadata of version {metadata.version} met a worker of version {METADATA_VERSION}: install one akv for both"
            )
        self._bound, self._began = metadata if isinstance(metadata, PassMetadata) else None, False

    def start_load_kv(self, stream: Any) -> None:
        """Begin the loads of reservations. The others began when their requests got pages."""
        if self._began:
            # A pass of which nothing was told: what is bound was of one that has been vetoed since.
            self._bound = None
        self._began = True
        session, bound = self.session, self._bound
        if bound is not None and bound.loads:
            session.stream.behind(stream)
            session.bridge.call(session.reservations.dispatch, bound.loads)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a request computes once its load has ended."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: pages are saved whole, behind the pass."""

    def wait_for_save(self, stream: Any) -> None:
        """The pass has been queued: its saves go on behind it. Raises what planning it raised."""
        session = self.session
        bound, self._bound = self._bound, None
        if bound is None or not bound.number:
            return
        session.stream.behind(stream)
        session.bridge.call(session.serving.after, bound.number)
        session.stream.before(stream)
        session.raise_of_plan()

    def get_finished(
        self, finished_gen_req_ids: Iterable[int], started_loading_req_ids: Iterable[int]
    ) -> tuple[list[int], list[int]]:
        """Which saves and loads have ended, of all that were announced. No hop."""
        return self.session.ends.take(finished_gen_req_ids, started_loading_req_ids)

    def shutdown(self) -> None:
        """End the connector. Idempotent; the end of the process does it too."""
        self.session.close()


class RestartingWorkerHooks(WorkerHooks):
    """With failed loads told to the engine, which starts their requests anew."""

    def take_failed_load_requests(self) -> set[int]:
        """None: akv loads nothing inside a pass."""
        return set()

    def take_failed_async_load_requests(self) -> set[int]:
        """Of the loads that `get_finished` named those that lost a page. Once each."""
        return self.session.ends.take_failed()

    def drop_bound_saves(self, request_ids: Iterable[int]) -> None:
        """These requests leave the pass that is bound without having computed anything."""
        self.session.bridge.call(self.session.serving.drop, [int(number) for number in request_ids])


class ReservingWorkerHooks(WorkerHooks):
    """With prefix reservations."""

    def get_finished_prefix_loads(self) -> list[int]:
        """The reservations whose loads have ended. No hop. Raises LoadFailed: the engine counts their tokens as there."""
        return self.session.ends.take_prefixes()
