"""vLLM's connector interface, by its signatures; what the calls mean stands in `scheduler.py` and `worker.py`.

The one module that follows vLLM's versions: `versions.py` says which it was tested with.
"""

from collections.abc import Iterable
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.rdma_utils import get_requester_local_hostname
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.utils.torch_utils import current_stream
from vllm.v1.request import RequestStatus

from akv import observe
from akv.engines.vllm.configuration import configuration_of, model_heads, require_recompute, traits_of
from akv.engines.vllm.ends import Results
from akv.engines.vllm.layout import WINDOW, cache_of
from akv.engines.vllm.metrics import AkvPromMetrics, AkvStats
from akv.engines.vllm.rank_role import RankRole
from akv.engines.vllm.ranked_scheduler import RankedSchedulerRole, RankStep
from akv.engines.vllm.scheduler import SchedulerRole, StepOrder
from akv.engines.vllm.session import join_session
from akv.engines.vllm.versions import check_version
from akv.engines.vllm.worker import WorkerRole


class AkvMetadata(KVConnectorMetadata):
    """What the scheduler's role says to the worker's, of one step: within the process, or to each rank."""

    def __init__(self, order: StepOrder | None = None, step: RankStep | None = None) -> None:
        self.order, self.step = order, step


class AkvHandshake(KVConnectorHandshakeMetadata):
    """What a rank says of itself, once its cache is there."""

    def __init__(self, hello: bytes) -> None:
        self.hello = hello


class AkvWorkerMetadata(KVConnectorWorkerMetadata):
    """What ranks report, of one step."""

    def __init__(self, reports: list[bytes]) -> None:
        self.reports = reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "AkvWorkerMetadata":
        """Those of other ranks beside them."""
        if not isinstance(other, AkvWorkerMetadata):
            raise TypeError(f"reports of ranks, and not a {type(other).__name__}")
        return AkvWorkerMetadata([*self.reports, *other.reports])


class AkvConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads and saves vLLM's KV cache by akv. vLLM makes one for its scheduler and one for each worker: where that is in the
    same process they share a connector, where ranks have processes of their own each has a half of one.
    """

    #: This rank's, where it has a process of its own; None elsewhere.
    _rank: RankRole | None = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises SettingsError or DependencyError: what is wrong with the configuration, by name."""
        check_version(vllm_version)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._configuration = configuration = configuration_of(vllm_config, kv_cache_config, _own_address)
        groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        windows = [spec.sliding_window for spec in groups if type(spec).__name__ in WINDOW]
        if configuration.apart and role == KVConnectorRole.WORKER:
            self._rank = RankRole(get_tensor_model_parallel_rank(), on_cpu=current_platform.is_cpu())
            return
        self._session = join_session(vllm_config.kv_transfer_config.engine_id)
        if role == KVConnectorRole.SCHEDULER:
            if require_recompute(vllm_config.kv_transfer_config):
                observe.emit(observe.ENGINE_RECOMPUTES)
            kind = RankedSchedulerRole if configuration.apart else SchedulerRole
            loads = configuration.settings.role != "producer"
            self._scheduler = kind(self._session, groups[0].block_size, windows, configuration.grace_s, loads=loads)
        else:
            self._worker = WorkerRole(self._session, windows=bool(windows), on_cpu=current_platform.is_cpu())

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again by whoever wants it."""
        return False

    # -- the worker's role

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The cache is there: open."""
        config = self._kv_cache_config
        cache = cache_of(
            config.kv_cache_groups,
            config.num_blocks,
            kv_caches,
            traits_of(self._vllm_config),
            world=self._configuration.world,
            model_heads=model_heads(self._vllm_config),
        )
        # This thread's, where forwards are queued: pages are fenced against it, and the loop's thread has another.
        stream = None if current_platform.is_cpu() else current_stream()
        if self._rank is not None:
            self._rank.open(self._configuration, cache, stream=stream)
        else:
            self._session.open(self._configuration, cache, stream=stream)

    def get_handshake_metadata(self) -> AkvHandshake | None:
        """What the scheduler is to know of this rank."""
        return None if self._rank is None else AkvHandshake(self._rank.hello)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. Waits until nothing reads blocks that it may write, where some were taken away."""
        if self._rank is not None:
            self._rank.before_forward(_step(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads run beside the engine, from the step that has blocks for them."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is computed once its load is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are saved whole, behind the pass."""

    def wait_for_save(self) -> None:
        """The pass is queued: its saves are handed over. Waits for none of them."""
        metadata = self._get_connector_metadata()
        if self._rank is not None:
            self._rank.after_forward(_step(metadata))
        elif metadata.order is not None and metadata.order.plan is not None:
            self._worker.after_forward(metadata.order.plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The older form of `get_transfer_results`, which has no place for what failed."""
        results = self._results()
        return results.sent or None, results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What ended since the last call."""
        results = self._results()
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def get_kv_connector_stats(self) -> AkvStats | None:
        """What was counted since the last call, by both roles: told by the worker's, where it can know it."""
        tells = KVConnectorRole.SCHEDULER if self._configuration.apart else KVConnectorRole.WORKER
        if self.role != tells or not (taken := self._session.counts.take()):
            return None
        return AkvStats(data=taken)

    def build_connector_worker_meta(self) -> AkvWorkerMetadata | None:
        """What this rank reports of the step."""
        if self._rank is None or not (reports := self._rank.take_reports()):
            return None
        return AkvWorkerMetadata(reports)

    def shutdown(self) -> None:
        """Close the connector. Either role may say so first."""
        if self._rank is not None:
            self._rank.close()
        else:
            self._session.close()

    def _results(self) -> Results:
        if self._rank is not None:
            return self._rank.results(_step(self._get_connector_metadata()) if self.has_connector_metadata() else None)
        order = self._get_connector_metadata().order if self.has_connector_metadata() else None
        idle = order is not None and order.idle
        return self._worker.results(idle=idle)

    # -- the scheduler's role

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The ranks are open, and nobody has asked for anything: open the scheduler's half. In one process there is none."""
        if self._configuration.apart:
            hellos = [said.hello for said in metadata.values() if isinstance(said, AkvHandshake)]
            self._session.open_ranks(self._configuration, hellos)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Where blocks are taken out of use that a fault left in a copy's hands."""
        self._scheduler.block_pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        """Its lookup begins."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What can be loaded beyond vLLM's own match. May be asked again and again."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Where to."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """One step's loads begin, and its pass is planned."""
        if isinstance(self._scheduler, RankedSchedulerRole):
            return AkvMetadata(step=self._scheduler.step_of_ranks(scheduler_output))
        return AkvMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker's role told, or the ranks' roles, is about to be acted upon."""
        received = connector_output.finished_recving or ()
        if isinstance(self._scheduler, RankedSchedulerRole):
            said = connector_output.kv_connector_worker_meta
            self._scheduler.reported(said.reports if isinstance(said, AkvWorkerMetadata) else [], received)
        else:
            self._scheduler.received(received)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, of a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are still read; then their end is told by `get_transfer_results`."""
        aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        return self._scheduler.finished(request, aborted=aborted), None

    def reset_cache(self) -> bool:
        """Nothing of before is found any more, here. What other servers read is not this one's to forget (K8)."""
        observe.emit(observe.ENGINE_RESET)
        self._session.begin_anew()
        return True

    def take_events(self) -> Iterable[Any]:
        """None: the pool has no events of its own."""
        return ()

    # -- metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> AkvStats:
        """What `get_kv_connector_stats` said, on its way to a log."""
        return AkvStats(data=data) if data is not None else AkvStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> AkvPromMetrics:
        """The same as Prometheus counters, `vllm:akv_*`."""
        return AkvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _step(metadata: Any) -> RankStep:
    """What the scheduler's role says to a rank."""
    if metadata.step is None:
        raise AssertionError("a rank in a process of its own is told by a scheduler in another")
    step: RankStep = metadata.step
    return step


def _own_address() -> str:
    """As vLLM's own connector for Mooncake stores names this machine."""
    return str(get_requester_local_hostname(get_ip()))
