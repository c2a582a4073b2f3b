"""The adapter's counts in vLLM's own forms: statistics that are summed and logged, and Prometheus counters."""

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from akv.engines.vllm.stats import COUNTED, COUNTED_BY_REASON


class AkvStats(KVConnectorStats):
    """Increments by name, those of `akv.engines.vllm.stats`."""

    data: dict[str, int]

    def reset(self) -> None:
        """Forget all."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another one counted."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log, as it is."""
        return {name: self.data[name] for name in sorted(self.data, key=_place) if _known(name)}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class AkvPromMetrics(KVConnectorPromMetrics):
    """`vllm:akv_<name>`, one counter for each engine, and for each reason where there are some."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:akv_{name}", documentation=f"{meaning}.", labelnames=labelnames)
            for name, meaning in COUNTED.items()
        }
        self._by_reason = {
            name: self._counter_cls(name=f"vllm:akv_{name}", documentation=f"{meaning}.", labelnames=[*labelnames, "reason"])
            for name, meaning in COUNTED_BY_REASON.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add increments."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(count)
            kind, _, reason = name.partition(":")
            if kind in self._by_reason:
                self._by_reason[kind].labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)


def _known(name: str) -> bool:
    return name in COUNTED or name.partition(":")[0] in COUNTED_BY_REASON


def _place(name: str) -> tuple[int, str]:
    """In the order in which they are named, then by reason."""
    kinds = [*COUNTED, *COUNTED_BY_REASON]
    kind = name.partition(":")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), name)
