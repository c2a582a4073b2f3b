"""Memory that processes lend to the pool as files, and where in it the pool says a page lies."""

import msgspec

#: The form of an entry. Readers tolerate fields that they do not know, and refuse another number.
ENTRY_VERSION = 1


class SegmentEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One segment in the register: where its file is, and where its owner has it. It is checked before it is used."""

    version: int = ENTRY_VERSION
    #: Random; it names the entry's file and the segment's.
    segment_id: str
    #: The owner's process id, in the namespace of process ids that `pid_namespace` names.
    owner_pid: int
    #: Clock ticks since boot at which the owner started: process ids are used again.
    owner_started: int
    #: The inode of the owner's /proc/self/ns/pid: in another namespace its id means nothing, or another process.
    pid_namespace: int
    #: /proc/sys/kernel/random/boot_id: ids and ticks begin anew with a boot.
    boot_id: str
    #: The user that owns process, directory and files.
    uid: int
    #: "host:port" as the pool's descriptors name it; empty until the first descriptor told.
    endpoint: str
    #: Where the segment begins in the owner's memory, which is what descriptors' addresses count from.
    base: int
    #: Bytes, of the file and of the segment.
    size: int
    #: The segment's file, absolute.
    path: str
    #: "host:port" as the pool's master names its owner, which is not how descriptors do; empty until it is mounted.
    name: str = ""


class Replica(msgspec.Struct, frozen=True):
    """What the pool says of one key's copy in memory."""

    #: "host:port" of the process that lends it.
    endpoint: str
    #: Where it begins, in the address space of that process.
    address: int
    #: Bytes.
    size: int
    #: False while its writer has not finished.
    complete: bool = True
