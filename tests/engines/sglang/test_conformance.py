"""akv's backend on the stand-in for SGLang: what every backend must pass (D1, K3, K4, L2)."""

from akv_testing.conformance.sglang import HiCacheConformance


class TestAkvBackend(HiCacheConformance):
    """On a fake pool, with threads."""
