"""What `akv stat` shows, and its lines. Needs no `cli` extra."""

from collections import Counter

import msgspec

from akv.cli.stat.pool import Share
from akv.pool.board import posted_here
from akv.pool.register import read_register, register_directory
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
    #: Who lends to the pool, on this machine or another; None if its master was not asked.
    pool: tuple[Share, ...] | None = None
    #: Segments in the register whose owners have died.
    dead: int = 0

    @property
    def troubles(self) -> list[str]:
        """What somebody should look at, one sentence each (O3)."""
        found = []
        if self.dead:
            found.append(f"{self.dead} segments of processes that have died are left: run akv doctor")
        known = None if self.pool is None else {share.name for share in self.pool}
        found += [
            f"process {entry.owner_pid} lends {size(entry.size)} to another pool, or this master has forgotten it"
            for entry in self.lent
            if known is not None and entry.name not in known
        ]
        shares = [share.size_bytes for share in self.pool or ()] or list(self._lent_by_process().values())
        if shares and min(shares) != max(shares):
            found.append(f"processes lend unequally, from {size(min(shares))} to {size(max(shares))}")
        return found

    def _lent_by_process(self) -> Counter[int]:
        lent: Counter[int] = Counter()
        for entry in self.lent:
            lent[entry.owner_pid] += entry.size
        return lent


def look(store: StoreSettings, pool: list[Share] | None = None) -> Report:
    """Read what is registered and posted, and join it with what the master said. Changes nothing."""
    connectors, register = posted_here(store), read_register(register_directory(store))
    return Report(
        register.usable,
        tuple(connectors),
        _sum([posted.stats.reads for posted in connectors]),
        None if pool is None else tuple(pool),
        len(register.stale),
    )


def lines(report: Report) -> list[str]:
    """For people."""
    here = {entry.name: entry.owner_pid for entry in report.lent}
    said = [
        f"pool       {share.name}: {size(share.used_bytes)} of {size(share.size_bytes)} used, "
        + (f"process {here[share.name]} on this machine" if share.name in here else "not in this register")
        for share in report.pool or ()
    ]
    said += [f"lent       {size(entry.size)} by process {entry.owner_pid} as {entry.endpoint}" for entry in report.lent]
    for posted in report.connectors:
        stats = posted.stats
        said.append(f"connector  process {posted.owner_pid}: {stats.model_key} in {stats.namespace}, role {stats.role}")
        said += _reads(stats.reads)
    if len(report.connectors) > 1:
        said.append(f"all        {len(report.connectors)} connectors")
        said += _reads(report.reads)
    said += [f"trouble    {trouble}" for trouble in report.troubles]
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
