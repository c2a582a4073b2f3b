"""What SGLang's storage metrics are fed with."""

import threading
from typing import Any

_GIB = 1 << 30


class TransferMetrics:
    """Pages, and GiB per second, of each transfer since the last `take`. Used by several threads."""

    def __init__(self, kind: Any) -> None:
        """`kind`: makes an empty `StorageMetrics`; None where nobody asks for them, and nothing is kept."""
        self._kind = kind
        self._lock = threading.Lock()
        self._moved: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    def moved(self, way: str, pages: int, nbytes: int, seconds: float) -> None:
        """A transfer moved pages; `way`: "prefetch" or "backup"."""
        if self._kind is not None and pages:
            with self._lock:
                self._moved[way].append((pages, nbytes / _GIB / max(seconds, 1e-9)))

    def take(self) -> Any:
        """Hand over what was counted; None where nobody wants to know."""
        if self._kind is None:
            return None
        metrics = self._kind()
        with self._lock:
            for way, moved in self._moved.items():
                getattr(metrics, f"{way}_pgs").extend(pages for pages, _ in moved)
                getattr(metrics, f"{way}_bandwidth").extend(speed for _, speed in moved)
                moved.clear()
        return metrics
