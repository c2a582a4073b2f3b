"""What akv counts, in the forms of a real vLLM: summed, logged, and as Prometheus counters."""

from types import SimpleNamespace

import pytest

#: Importing vLLM warns of what it uses of torch.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


def test_R1_counts_by_path_are_summed_and_logged_and_become_prometheus_counters() -> None:
    from prometheus_client import Counter, Gauge, Histogram, generate_latest

    from akv.engines.vllm.metrics import AkvPromMetrics, AkvStats

    first = {"loads": 1, "direct_pages": 3, "staged_pages:late": 2}
    told = AkvStats(data=first).aggregate(AkvStats(data={"loads": 1, "staged_pages:late": 1, "staged_bytes:late": 64}))
    sums = {"loads": 2, "direct_pages": 3, "staged_pages:late": 3, "staged_bytes:late": 64}
    assert told.reduce() == sums
    assert list(told.reduce()) == list(sums)
    metric_types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = AkvPromMetrics(SimpleNamespace(kv_transfer_config=None), metric_types, ["engine"], {0: ["7"]})
    metrics.observe(told.data)
    lines = generate_latest().decode().splitlines()
    for line in (
        'vllm:akv_loads_total{engine="7"} 2.0',
        'vllm:akv_direct_pages_total{engine="7"} 3.0',
        'vllm:akv_staged_pages_total{engine="7",reason="late"} 3.0',
        'vllm:akv_staged_bytes_total{engine="7",reason="late"} 64.0',
    ):
        assert line in lines
