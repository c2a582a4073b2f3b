"""The segments of this host that a connector knows: which are mapped, and which are not used and why (R3, R4)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from akv.plan.direct import Staged, Stretch
from akv.values.segments import SegmentEntry


class Mapped(msgspec.Struct, frozen=True):
    """A segment that can be read. Whoever copies from it holds it: the memory lives as long."""

    entry: SegmentEntry
    #: A `SegmentFile`, and the `HostBuffer` over it.
    file: Any
    memory: Any


class Segments:
    """What the register said last, and what came of it."""

    def __init__(self) -> None:
        #: By segment. An entry that changed is another segment's.
        self._stretches: dict[str, Stretch] = {}
        self._mapped: dict[str, Mapped] = {}
        #: Not all of them: processes of other pools lend on this host, too.
        self._wanted: set[str] = set()
        #: The same stretches by the endpoint of their owner.
        self.by_endpoint: Mapping[str, Sequence[Stretch]] = {}

    @property
    def why_none(self) -> Staged | None:
        """Why no page at all can be read directly, now or soon; None if one may."""
        reasons = {stretch.staged for stretch in self._stretches.values()}
        return None if reasons & {None, Staged.NOT_MAPPED} else next(iter(reasons), Staged.NO_SEGMENT)

    @property
    def all_mapped(self) -> list[Mapped]:
        """Those that can be read."""
        return list(self._mapped.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all segments that can be read."""
        return sum(mapped.entry.size for mapped in self._mapped.values())

    def mapped(self, segment_id: str) -> Mapped | None:
        """The segment, if it can be read now."""
        return self._mapped.get(segment_id)

    def listed(self, entries: Sequence[SegmentEntry]) -> None:
        """The register was read: learn what is new, forget what it names no more."""
        stretches, mapped = self._stretches, self._mapped
        self._stretches, self._mapped = {}, {}
        for entry in entries:
            key = entry.segment_id
            known = stretches.get(key)
            if known is None or _but_for_endpoint(known.entry) != _but_for_endpoint(entry):
                self._stretches[key] = Stretch(entry, Staged.NOT_MAPPED)
                continue
            # An owner learns its endpoint after it lent the segment: the memory is the same.
            self._stretches[key] = Stretch(entry, known.staged)
            if key in mapped:
                self._mapped[key] = msgspec.structs.replace(mapped[key], entry=entry)
        self._sort()

    def want(self, segment_ids: Iterable[str]) -> None:
        """Pages lie in these, and cannot be read there yet."""
        self._wanted.update(segment_ids)

    def to_map(self) -> list[SegmentEntry]:
        """What is wanted and not mapped yet; from now on it is wanted no more."""
        wanted, self._wanted = self._wanted, set()
        stretches = (self._stretches.get(segment_id) for segment_id in wanted)
        return [stretch.entry for stretch in stretches if stretch is not None and stretch.staged is Staged.NOT_MAPPED]

    def use(self, mapped: Mapped) -> None:
        """A segment was mapped. Without effect if the register names it no more."""
        key = mapped.entry.segment_id
        stretch = self._stretches.get(key)
        if stretch is not None and _but_for_endpoint(stretch.entry) == _but_for_endpoint(mapped.entry):
            self._mapped[key] = msgspec.structs.replace(mapped, entry=stretch.entry)
            self._put(Stretch(stretch.entry, None))

    def refuse(self, entry: SegmentEntry, reason: Staged) -> None:
        """Its pages are staged from now on, until its entry changes. Idempotent."""
        stretch = self._stretches.get(entry.segment_id)
        if stretch is not None and _but_for_endpoint(stretch.entry) == _but_for_endpoint(entry):
            self._mapped.pop(entry.segment_id, None)
            self._put(Stretch(stretch.entry, reason))

    def clear(self) -> None:
        """Let go of all. What copies read lives until they ended."""
        self._stretches.clear()
        self._mapped.clear()
        self.by_endpoint = {}

    def _put(self, stretch: Stretch) -> None:
        self._stretches[stretch.entry.segment_id] = stretch
        self._sort()

    def _sort(self) -> None:
        by_endpoint: dict[str, list[Stretch]] = {}
        for stretch in self._stretches.values():
            by_endpoint.setdefault(stretch.entry.endpoint, []).append(stretch)
        self.by_endpoint = by_endpoint


def _but_for_endpoint(entry: SegmentEntry) -> SegmentEntry:
    return msgspec.structs.replace(entry, endpoint="")
