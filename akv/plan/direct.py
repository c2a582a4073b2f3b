"""Which pages of a batch can be read straight from segments of this host, and until when (R1, R2, R4). Pure arithmetic."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

import msgspec

from akv.values.segments import Replica, SegmentEntry
from akv.values.settings import Settings

#: Share of the lease that is left unused: clocks of two hosts do not run alike, and the pool's looks at its own now and then.
MARGIN = 0.1


class Staged(StrEnum):
    """Why a page goes through staging slots and not straight from a segment. The words of events and counters."""

    #: `read_path = "staged"`.
    SETTING = "setting"
    #: `integrity` is on: the page is checked in its slot, where nobody else can change it.
    INTEGRITY = "integrity"
    #: No process of this host lends a segment that this one may read.
    NO_SEGMENT = "no_segment"
    #: The pool names no place in memory for it; the get says whether it is there at all.
    NO_REPLICA = "no_replica"
    #: Its writer has not finished.
    INCOMPLETE = "incomplete"
    #: The pool's value is longer or shorter than the page.
    OTHER_SIZE = "other_size"
    #: It lies in memory that is in no segment which this host shares: another host's, or a private one.
    NOT_SHARED = "not_shared"
    #: Its segment is not mapped yet.
    NOT_MAPPED = "not_mapped"
    #: Its segment's file is not what the register says, or it cannot be mapped or pinned here.
    REFUSED = "refused"
    #: The process that lends its segment has ended.
    OWNER_GONE = "owner_gone"


def off_by_settings(settings: Settings) -> Staged | None:
    """Why no page is read from segments, as far as the settings say; None if they may be."""
    if settings.read_path == "staged":
        return Staged.SETTING
    # The checksum is many times slower than the copy, and a page that is checked in a segment may be changed behind the check.
    return Staged.INTEGRITY if settings.integrity != "off" else None


class Stretch(msgspec.Struct, frozen=True):
    """A known segment, as the pool's addresses are looked up in it."""

    entry: SegmentEntry
    #: Why its pages are staged at present; None if they can be read.
    staged: Staged | None


class Pieces(msgspec.Struct, frozen=True):
    """Pages of a batch that lie in one segment."""

    segment_id: str
    #: Their places in the batch, ascending.
    indices: tuple[int, ...]
    #: Where each begins in the segment, in bytes.
    offsets: tuple[int, ...]


class Translation(msgspec.Struct, frozen=True):
    """What of a batch can be read directly."""

    pieces: tuple[Pieces, ...]
    #: How many pages are staged, by reason.
    staged: Mapping[Staged, int]
    #: Segments that pages lie in and that are not mapped yet.
    wanted: frozenset[str] = frozenset()


def translate(
    replicas: Sequence[Replica | None],
    known: Mapping[str, Sequence[Stretch]],
    page_bytes: int,
    bad: Mapping[str, Staged] = MappingProxyType({}),
) -> Translation:
    """Find each replica's place in a known segment, by (endpoint, address range). `known`: the segments by endpoint; `bad`:
    those that were found unfit since, by their ids.
    """
    found: dict[str, tuple[list[int], list[int]]] = {}
    staged: Counter[Staged] = Counter()
    wanted: set[str] = set()
    for index, replica in enumerate(replicas):
        place = _place(replica, known, page_bytes)
        if isinstance(place, Staged):
            staged[place] += 1
            continue
        stretch, offset = place
        segment_id = stretch.entry.segment_id
        reason = bad.get(segment_id, stretch.staged)
        if reason is not None:
            staged[reason] += 1
            if reason is Staged.NOT_MAPPED:
                wanted.add(segment_id)
            continue
        indices, offsets = found.setdefault(segment_id, ([], []))
        indices.append(index)
        offsets.append(offset)
    pieces = tuple(Pieces(segment_id, tuple(indices), tuple(offsets)) for segment_id, (indices, offsets) in found.items())
    return Translation(pieces, staged, frozenset(wanted))


def moved(before: Sequence[Replica | None], after: Sequence[Replica | None]) -> int | None:
    """The first of these pages that the pool names another place for than before, or none; None if all lie where they lay.

    The first value of a key stays, so one that is at its place after a copy was there all the while.
    """
    return next((index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other), None)


def in_time(sent: float, ended: float, lease_s: float) -> bool:
    """Whether a copy that had ended by `ended` lies within the lease, less a margin, of a query that was sent at `sent`.

    The lease began behind that moment, so counting from it is safe.
    """
    return ended - sent <= lease_s * (1 - MARGIN)


def _place(replica: Replica | None, known: Mapping[str, Sequence[Stretch]], page_bytes: int) -> tuple[Stretch, int] | Staged:
    if replica is None:
        return Staged.NO_REPLICA
    if not replica.complete:
        return Staged.INCOMPLETE
    if replica.size != page_bytes:
        return Staged.OTHER_SIZE
    for stretch in known.get(replica.endpoint, ()):
        offset = replica.address - stretch.entry.base
        if 0 <= offset <= stretch.entry.size - page_bytes:
            return stretch, offset
    return Staged.NOT_SHARED
