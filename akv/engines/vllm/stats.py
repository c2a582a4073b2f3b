"""What the connector counts, as vLLM's metrics carry it: increments since they were fetched last, by name."""

from collections import Counter

#: Prometheus counters, and what they count.
COUNTED = {
    "lookups": "Lookups that began",
    "offers": "Offers for which the engine put blocks aside",
    "offered_tokens": "Their tokens, beyond the local match",
    "loads": "Loads that filled their blocks",
    "loaded_tokens": "Tokens that loads brought",
    "failed_loads": "Loads whose requests are computed instead",
    "saved_requests": "Requests that ended, with all their saves",
    "stored_blocks": "Blocks of ended requests that the pool took",
    "refused_blocks": "Blocks of ended requests that the pool did not take",
}


class Counts:
    """Counters of one engine."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """One of `COUNTED` grew."""
        if count:
            self._counts[name] += count

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        taken = dict(self._counts)
        self._counts.clear()
        return taken
