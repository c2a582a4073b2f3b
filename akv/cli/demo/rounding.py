"""How measured numbers become figures, alike for conversations and for traces."""

from collections.abc import Sequence
from statistics import median


def milliseconds(seconds: Sequence[float]) -> float:
    """The median of some times, in milliseconds; 0 of no times."""
    return round(1000 * median(seconds), 2) if seconds else 0.0


def share(part: int, whole: int) -> float:
    """A part of a whole as a number of at most 1; 0 of nothing."""
    return round(part / max(1, whole), 4)
