"""What the store's client says about where values lie, in akv's words."""

from collections.abc import Sequence
from typing import Any

from akv.values.segments import Replica


def read_replicas(raw: Any, keys: Sequence[str]) -> list[Replica | None]:
    """One entry per key, in order: its first copy in memory, or None. An answer of another form says nothing of any key."""
    if not isinstance(raw, dict):
        return [None] * len(keys)
    return [_in_memory(raw.get(key) or ()) for key in keys]


def _in_memory(descriptors: Any) -> Replica | None:
    for descriptor in descriptors:
        if descriptor.is_memory_replica():
            buffer = descriptor.get_memory_descriptor().buffer_descriptor
            complete = str(descriptor.status).endswith("COMPLETE")
            return Replica(buffer.transport_endpoint, buffer.buffer_address, buffer.size, complete)
    return None
