"""How much of what a process lends is one file, and whether it has room."""

from collections.abc import Iterable

import msgspec

#: Bytes. Files and mappings come in whole pages.
PAGE_BYTES = 4096


class Room(msgspec.Struct, frozen=True):
    """Memory that a segment would take its own from."""

    #: For people: "the machine's memory".
    what: str
    free_bytes: int
    total_bytes: int


def split(total_bytes: int, limit_bytes: int) -> list[int]:
    """Sizes of the segments that make up `total_bytes`: as few as the limit allows, of nearly equal size, in whole pages.

    Equal, because a small rest would be below what the store mounts. The last one may end within a page.
    """
    if total_bytes <= 0:
        return []
    count = -(-total_bytes // limit_bytes)
    size = -(-total_bytes // (count * PAGE_BYTES)) * PAGE_BYTES
    return [min(size, total_bytes - begin) for begin in range(0, total_bytes, size)]


def too_small(rooms: Iterable[Room], claimed_bytes: int) -> Room | None:
    """The tightest room, if it does not hold `claimed_bytes` more: what was promised to segments and is not allocated yet."""
    tightest = min(rooms, key=lambda room: room.free_bytes, default=None)
    return tightest if tightest is not None and tightest.free_bytes < claimed_bytes else None
