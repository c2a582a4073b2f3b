"""What the connector counts, as vLLM's metrics carry it: increments since they were fetched last, by name."""

from collections import Counter

from akv.values.pressure import Reads

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
    "direct_pages": "Pages that loads read straight from memory of this machine",
    "direct_bytes": "Their bytes",
}

#: Those that are counted by a reason, which stands behind a colon in the increment's name.
COUNTED_BY_REASON = {
    "staged_pages": "Pages that loads had the store's client fetch",
    "staged_bytes": "Their bytes",
}


class Counts:
    """Counters of one engine."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """One of `COUNTED` grew."""
        if count:
            self._counts[name] += count

    def reads_grew(self, before: Reads, now: Reads) -> None:
        """Loads read more."""
        self.add("direct_pages", now.direct_pages - before.direct_pages)
        self.add("direct_bytes", now.direct_bytes - before.direct_bytes)
        for reason, pages in now.staged.items():
            self.add(f"staged_pages:{reason}", pages - before.staged.get(reason, 0))
        for reason, size in now.staged_bytes.items():
            self.add(f"staged_bytes:{reason}", size - before.staged_bytes.get(reason, 0))

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        taken = dict(self._counts)
        self._counts.clear()
        return taken
