"""What loads need to read from segments of this host: which are mapped, and whom to tell."""

from collections.abc import Callable

import msgspec

from akv import observe
from akv.ownership.segments import Mapped, Segments
from akv.plan.direct import Staged


class DirectReads(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker half reads segments with."""

    segments: Segments
    #: Why nothing is read directly; None if it may be.
    off: Staged | None
    #: Has the register looked at again, soon.
    look: Callable[[], None]

    def why_none(self) -> Staged | None:
        """Why no page at all can be read directly now; None if one may. Has the register looked at, which may have changed."""
        if self.off is not None:
            return self.off
        self.look()
        return self.segments.why_none

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
