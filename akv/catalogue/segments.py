"""What a process says of the memory that it lends."""

from akv.catalogue.entry import event as _event

SEGMENT_PRIVATE = _event(
    "akv.segment.private",
    "warning",
    "segment_bytes reason",
    'With `segment_memory` "auto", shared memory does not hold the segment, for `reason`. The store\'s client allocates it '
    "instead: other processes of this machine read it over a socket, and the first save into a page is slow.",
)
SEGMENT_STALE = _event(
    "akv.segment.stale",
    "info",
    "segments orphans bytes",
    "Segments of processes that ended without removing them were removed from the register, with files that nobody knows; "
    "`bytes` of memory were given back.",
)
SEGMENT_TOUCHED = _event(
    "akv.segment.touched",
    "info",
    "bytes reason duration_s",
    "All memory that this process lends was allocated and mapped, in the background. Until then the first save into a page is "
    "slower. With a `reason` it ended early: the machine has no more memory.",
)
SEGMENT_UNPUBLISHED = _event(
    "akv.segment.unpublished",
    "warning",
    "segments",
    "The pool did not say under which name it knows this process. What it lends is served, but other processes of this "
    "machine cannot read it in place.",
)
SEGMENT_MAPPED = _event(
    "akv.segment.mapped",
    "debug",
    "segment owner_pid bytes",
    "Pages in memory that a process of this host lends are read straight from there from now on.",
)
SEGMENT_UNUSED = _event(
    "akv.segment.unused",
    "warning",
    "segment owner_pid bytes reason why",
    "Pages in memory that a process of this host lends go through the store again: its owner ended, its file is not what the "
    "register says or was changed, or it cannot be mapped or pinned here.",
)
REGISTER_UNREADABLE = _event(
    "akv.segment.register_unreadable",
    "warning",
    "error",
    "The register of this host's segments could not be read, so every page goes through the store. It is read again when "
    "loads begin.",
)
