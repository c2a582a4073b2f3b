"""What the store's client says about where values lie, in akv's words."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from akv.values.segments import Replica

#: In one go: each look at a descriptor costs as much as all else of it, with the interpreter lock held.
_PLACE = attrgetter("transport_endpoint", "buffer_address", "size")
#: Whether a status says so, by its number.
_COMPLETE: dict[int, bool] = {}


def read_replicas(raw: Any, keys: Sequence[str]) -> list[Replica | None]:
    """One entry per key, in order: its first copy in memory, or None. An answer of another form says nothing of any key."""
    if not isinstance(raw, dict):
        return [None] * len(keys)
    return [_in_memory(raw.get(key) or ()) for key in keys]


def _in_memory(descriptors: Any) -> Replica | None:
    for descriptor in descriptors:
        if descriptor.is_memory_replica():
            endpoint, address, size = _PLACE(descriptor.get_memory_descriptor().buffer_descriptor)
            return Replica(endpoint, address, size, _is_complete(descriptor.status))
    return None


def _is_complete(status: Any) -> bool:
    # Its name takes four microseconds, twice as long as all else of a descriptor, and there are thousands of them.
    number = int(status)
    if number not in _COMPLETE:
        _COMPLETE[number] = str(status).endswith(".COMPLETE")
    return _COMPLETE[number]
