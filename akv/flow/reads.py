"""What loads need to read from segments of this host: which are mapped, and whom to tell."""

from typing import Protocol

from akv import observe
from akv.flow.lull import Lulls
from akv.ownership.segments import Mapped, Segments
from akv.plan.direct import Staged


class Scout(Protocol):
    """Whoever looks at the register; in a connector that is a service."""

    @property
    def segments(self) -> Segments:
        """What it has found and mapped."""
        ...

    @property
    def off(self) -> Staged | None:
        """Why nothing is read directly; None if it may be."""
        ...

    def look(self) -> None:
        """Look again, now."""
        ...

    def look_behind(self) -> None:
        """Look again in a moment."""
        ...


class DirectReads:
    """What a worker half reads segments with."""

    def __init__(self, scout: Scout, lulls: Lulls) -> None:
        """`scout`: finds and maps them, in the background. `lulls`: when long loads make their calls."""
        self._scout = scout
        self.segments = scout.segments
        self.lulls = lulls
        #: Have the register looked at again, now.
        self.look = scout.look

    def why_none(self) -> Staged | None:
        """Why no page at all can be read directly now; None if one may."""
        if self._scout.off is not None:
            return self._scout.off
        why = self.segments.why_none
        if why is not None:
            # It may have changed, and this load loses nothing by the look.
            self.look()
        return why

    def load_ended(self) -> None:
        """Have the register looked at, which may have changed: not beside a load, which it would take the interpreter from."""
        if self._scout.off is None:
            self._scout.look_behind()

    def drop(self, mapped: Mapped, reason: Staged) -> None:
        """Read nothing from this segment any more."""
        if self.segments.mapped(mapped.entry.segment_id) is not None:
            self.segments.refuse(mapped.entry, reason)
            observe.emit(
                observe.SEGMENT_UNUSED,
                segment=mapped.entry.segment_id,
                owner_pid=mapped.entry.owner_pid,
                bytes=mapped.entry.size,
                reason=reason.value,
            )
            self.look()
