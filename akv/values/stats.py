"""What a connector says of itself now and then, for whoever looks at a running server (V2)."""

import msgspec

from akv.values.pressure import Reads

#: The form of what is posted. Readers tolerate fields that they do not know, and refuse another number.
STATS_VERSION = 1


class ConnectorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one connector since it opened."""

    model_key: str
    namespace: str
    role: str
    reads: Reads


class PostedStats(msgspec.Struct, frozen=True, kw_only=True):
    """The same, with the process that says so. Whoever reads it looks whether that one lives, as with a segment's entry."""

    version: int = STATS_VERSION
    #: As in `akv.values.segments.SegmentEntry`.
    owner_pid: int
    owner_started: int
    pid_namespace: int
    boot_id: str
    stats: ConnectorStats
