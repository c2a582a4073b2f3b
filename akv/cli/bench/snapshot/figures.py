"""What `akv bench snapshot` measures, and what it must not exceed (S3)."""

from collections.abc import Sequence
from statistics import median

import msgspec

#: How many times longer the execution stream may be held by one bulk copy of as many bytes to the host, and by a copy per
#: buffer of each page, than by a snapshot: at least.
LEAST_OVER_BULK = 10.0
LEAST_OVER_COPIES = 30.0
#: Milliseconds of host time that a snapshot may take at most: the next forward is queued behind it.
MOST_HOST_MS = 2.0


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to copy the pages, medians over the runs, in milliseconds."""

    #: How long it held the execution stream, by the stream's own events; None on a CPU, which has none.
    stream_ms: float | None
    #: How long the call took that queued it; on a CPU the copying itself.
    host_ms: float


class SnapshotFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv bench snapshot --json` prints."""

    device: str
    torch: str
    pages: int
    buffers: int
    buffer_bytes: int
    runs: int
    #: akv's: one gather into device slots on the execution stream; a side stream takes them to the host.
    snapshot: Way
    #: As many bytes, in one piece, to pinned host memory.
    bulk: Way
    #: One copy to pinned host memory for each buffer of each page.
    copies: Way
    #: Medians of the runs' own ratios of stream time; None on a CPU.
    bulk_over_snapshot: float | None
    copies_over_snapshot: float | None
    #: What does not hold, a sentence each. Of a CPU nothing is asked.
    missed: tuple[str, ...]


class Run(msgspec.Struct, frozen=True):
    """One run of one way, in milliseconds."""

    stream_ms: float | None
    host_ms: float


def way(runs: Sequence[Run]) -> Way:
    """The medians of all runs."""
    streams = [run.stream_ms for run in runs if run.stream_ms is not None]
    return Way(stream_ms=median(streams) if streams else None, host_ms=median(run.host_ms for run in runs))


def ratio(longer: Sequence[Run], shorter: Sequence[Run]) -> float | None:
    """The median over the runs of how many times longer the first held the stream than the second."""
    ratios = [a.stream_ms / b.stream_ms for a, b in zip(longer, shorter, strict=True) if a.stream_ms and b.stream_ms]
    return median(ratios) if ratios else None


def missed(bulk_over: float | None, copies_over: float | None, host_ms: float) -> tuple[str, ...]:
    """What does not hold, a sentence each; nothing where there is no stream time."""
    if bulk_over is None or copies_over is None:
        return ()
    sentences: list[str] = []
    if bulk_over < LEAST_OVER_BULK:
        sentences.append(
            f"one bulk copy holds the stream {bulk_over:.1f} times as long as a snapshot, not {LEAST_OVER_BULK:g}"
        )
    if copies_over < LEAST_OVER_COPIES:
        sentences.append(
            f"a copy per buffer holds the stream {copies_over:.1f} times as long as a snapshot, not {LEAST_OVER_COPIES:g}"
        )
    if host_ms > MOST_HOST_MS:
        sentences.append(f"queueing a snapshot takes {host_ms:.2f} ms of the host, more than {MOST_HOST_MS:g}")
    return tuple(sentences)
