"""What the scheduler half hands to the worker half through the engine, pickled: for one pass."""

import msgspec

#: Changes whenever the meaning changes. Both halves come from one installation; a server that mixes two is refused.
METADATA_VERSION = 1


class PassMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Names what both halves know. Pages and hashes stay where the one process of both has them."""

    #: The pass; 0 for one that has nothing for akv.
    number: int = 0
    #: Reservations whose loads may begin with it.
    loads: tuple[int, ...] = ()
    version: int = METADATA_VERSION
