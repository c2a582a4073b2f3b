"""What TensorRT-LLM gives to a connector and asks of it: base classes, descriptions and messages, by its own names."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: An entry of a page list where a block has no page.
BAD_PAGE_INDEX = -1


class NotImplementedByConnector(Exception):
    """The engine called an optional method that the connector does not have, and should not have been called for."""


@dataclass(frozen=True)
class BufferRef:
    """One buffer that a region covers."""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class CacheRegion:
    """Bytes that repeat once per page: page i lies at `base + stride * i`, `size` bytes long."""

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[BufferRef, ...]


@dataclass(frozen=True)
class LayerGroupLayout:
    """One layer group: what page indices count in."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    sink_tokens: int
    regions: tuple[CacheRegion, ...]


@dataclass(frozen=True)
class CacheLayout:
    """What `register_kv_cache_layout` is given."""

    tokens_per_block: int
    dtype: str
    groups: tuple[LayerGroupLayout, ...]


@dataclass
class RequestData:
    """One request's part in the coming pass. Tokens and pages are those that were added since it was told last."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class PrefixLoad:
    """A reservation that has pages: what may be loaded."""

    reservation_id: int
    request_id: int
    start: int
    end: int
    is_async: bool
    block_ids_by_layer_group: list[list[int]]
    tokens: list[int]
    cache_salt: str | None = None


@dataclass
class SchedulerOutput:
    """The final batch of a pass."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    prefix_loads: list[PrefixLoad] = field(default_factory=list)
    attention_dp_rank: int | None = None


class ConnectorWorker(ABC):
    """The worker half's base class. Optional methods raise, so that one which is called without being declared is seen."""

    supports_attention_dp: bool = False
    reports_failed_loads: bool = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None
        super().__init__()

    def bind_connector_meta(self, metadata: Any) -> None:
        """The scheduler half's message for this pass."""
        self._metadata = metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The cache of the older manager."""

    def register_kv_cache_layout(self, layout: CacheLayout) -> None:
        """The cache."""
        raise NotImplementedByConnector

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None:
        """The pass is about to begin."""

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """A layer is about to be queued."""

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A layer was queued."""

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None:
        """The pass was queued."""

    @abstractmethod
    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> tuple[list[int], list[int]]:
        """Announces ids, asks which of the announced ones have ended."""

    def get_finished_prefix_loads(self) -> list[int]:
        """Reservations that were loaded."""
        raise NotImplementedByConnector

    def take_failed_load_requests(self) -> set[int]:
        """Requests of this pass that lost a page."""
        raise NotImplementedByConnector

    def take_failed_async_load_requests(self) -> set[int]:
        """Parked requests, named before as loaded, that lost a page."""
        raise NotImplementedByConnector

    def drop_bound_saves(self, request_ids: set[int]) -> None:
        """These leave the pass."""
        raise NotImplementedByConnector


class ConnectorScheduler(ABC):
    """The scheduler half's base class."""

    supports_attention_dp: bool = False
    supports_speculative_prefill: bool = False
    reports_failed_loads: bool = False
    requires_block_aligned_reuse: bool = False
    drops_reuse_match_backoff: bool = False
    requires_completion_reservation: bool = False
    supports_admission_query: bool = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """The message to the workers."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """At most once per allocation."""

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """The request ended."""

    @abstractmethod
    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """The request ended, in a cache of several groups."""

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The request got pages."""

    @abstractmethod
    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """The request got pages, in a cache of several groups."""

    @abstractmethod
    def request_reset(self, request: Any) -> None:
        """The allocation has gone, the request goes on."""

    @abstractmethod
    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """An answer will not be taken up."""

    def reserve_prefix(self, request: Any, num_computed_tokens: int, reservation_id: int) -> tuple[int, bool]:
        """A question while the batch is filled."""
        raise NotImplementedByConnector

    def release_prefix_reservation(self, request: Any, reservation_id: int, start: int, end: int) -> None:
        """A part of a reservation is not wanted, or was loaded."""
        raise NotImplementedByConnector


#: The methods of prefix reservations: all of them or none.
RESERVATION_METHODS: Sequence[tuple[str, str]] = (
    ("scheduler", "reserve_prefix"),
    ("scheduler", "release_prefix_reservation"),
    ("worker", "get_finished_prefix_loads"),
)
