"""What `akv stat` shows, and its lines. Needs no `cli` extra."""

from collections import Counter

import msgspec

from akv.pool.board import posted_here
from akv.pool.register import lent_segments
from akv.settings import StoreSettings
from akv.values.pressure import Reads
from akv.values.segments import SegmentEntry
from akv.values.stats import PostedStats


class Report(msgspec.Struct, frozen=True):
    """What this user's processes on this machine lend and have read."""

    lent: tuple[SegmentEntry, ...]
    connectors: tuple[PostedStats, ...]
    #: The sums of all connectors; of segments only of what each has mapped.
    reads: Reads


def look(store: StoreSettings) -> Report:
    """Read what is registered and posted. Changes nothing."""
    connectors = posted_here(store)
    return Report(tuple(lent_segments(store)), tuple(connectors), _sum([posted.stats.reads for posted in connectors]))


def lines(report: Report) -> list[str]:
    """For people."""
    said = [f"lent       {size(entry.size)} by process {entry.owner_pid} as {entry.endpoint}" for entry in report.lent]
    for posted in report.connectors:
        stats = posted.stats
        said.append(f"connector  process {posted.owner_pid}: {stats.model_key} in {stats.namespace}, role {stats.role}")
        said += _reads(stats.reads)
    if len(report.connectors) > 1:
        said.append(f"all        {len(report.connectors)} connectors")
        said += _reads(report.reads)
    return said or ["no process of this user lends memory or has posted anything on this machine"]


def size(count: int) -> str:
    """Bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _reads(reads: Reads) -> list[str]:
    staged = [
        f"  staged   {pages} pages, {size(reads.staged_bytes.get(reason, 0))}: {reason}"
        for reason, pages in sorted(reads.staged.items(), key=lambda item: -item[1])
    ]
    mapped = [f"  mapped   {reads.segments} segments, {size(reads.segment_bytes)}"] if reads.segments else []
    return [f"  direct   {reads.direct_pages} pages, {size(reads.direct_bytes)}", *staged, *mapped]


def _sum(all_reads: list[Reads]) -> Reads:
    staged: Counter[str] = Counter()
    staged_bytes: Counter[str] = Counter()
    for reads in all_reads:
        staged.update(reads.staged)
        staged_bytes.update(reads.staged_bytes)
    return Reads(
        direct_pages=sum(reads.direct_pages for reads in all_reads),
        direct_bytes=sum(reads.direct_bytes for reads in all_reads),
        staged=dict(staged),
        staged_bytes=dict(staged_bytes),
        segments=sum(reads.segments for reads in all_reads),
        segment_bytes=sum(reads.segment_bytes for reads in all_reads),
    )
