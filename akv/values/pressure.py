"""How busy a connector is, for an engine that decides what to admit (V4)."""

from enum import StrEnum

import msgspec


class BreakerState(StrEnum):
    """Whether the pool is asked (O7)."""

    #: It is. The state of a healthy connector.
    CLOSED = "closed"
    #: It is not: it did not answer. Lookups miss at once, saves are refused, queued loads have failed.
    OPEN = "open"
    #: The same, and one probe is under way to find out whether it answers again.
    PROBING = "probing"


class StagingPressure(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one direction, or of the snapshot ring."""

    #: Slots in all; each holds one page.
    slots: int
    #: Slots that nobody holds.
    free: int
    #: Slots out of use (M3): given-up work still holds them, and they come back when it has ended; or they are withheld.
    quarantined: int
    #: Of these, those that stay so while the connector is open: a peer may touch them after a transfer that failed. Always 0
    #: over TCP.
    withheld: int


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """Which way the pages of loads came, since the connector opened (R1)."""

    #: Pages that were read straight from segments of this host, and their bytes.
    direct_pages: int = 0
    direct_bytes: int = 0
    #: Pages that the store's client was asked for, and their bytes, by the reason.
    staged: dict[str, int] = {}
    staged_bytes: dict[str, int] = {}
    #: Segments of this host that can be read now, and their bytes.
    segments: int = 0
    segment_bytes: int = 0


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the work under way. Taking one costs microseconds and changes nothing."""

    #: Bytes of computed pages that are queued for the pool or on their way to it; their requests hold those pages. At most the
    #: setting of the same name, and so are the passes that such pages are of.
    backlog_bytes: int
    backlog_passes: int
    #: Blocks that were refused since the connector opened because the backlog was full; one that is offered and refused again
    #: counts again. While it grows saves are lost, or late.
    backlog_refused_blocks: int
    #: Saves that have not ended, one per request and pass.
    backlog_saves: int
    #: Reservations that no loader has taken up, and all that have not ended: requests parked outside the batch.
    queued_loads: int
    parked_loads: int
    #: How many more reservations lookups will offer at present (`max_parked_loads`).
    loads_left: int
    loading: StagingPressure
    saving: StagingPressure
    #: The snapshot ring; None without window groups, and for roles that save nothing. With no free slot the next prompt that
    #: is completed loses the window pages of its end.
    ring: StagingPressure | None
    #: Blocking calls that have not returned, and those among them that nobody waits for any more.
    outstanding_calls: int
    given_up_calls: int
    #: Bytes of the engine's pages in quarantine: given-up calls touch them, and `PagesReleased` tells when no more (M3).
    quarantined_page_bytes: int
    #: Not "closed": the pool cannot be asked at present, and every request computes.
    breaker: BreakerState
    #: Why the connector goes on without a cache (`on_failure`); empty as long as it has one.
    degraded: str = ""
    #: Whole blocks that passes computed since then, and that were not saved.
    unsaved_blocks: int = 0
    reads: Reads = Reads()
