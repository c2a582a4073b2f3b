"""Under which name the pool's descriptors know this process: the register has to say it, and the client does not.

So a value is put into the own segment and described. That it is the own one is seen in memory: at the address that the
descriptor names lie the random bytes that were put.
"""

import ctypes

from akv.observe import SEGMENT_UNPUBLISHED, emit
from akv.pool.data_path import VALUE_BYTES, ProbeValue, probe_key
from akv.pool.mooncake import MooncakePool
from akv.pool.segments import LentSegments
from akv.ports.pool import KeyState

#: Values that may land elsewhere, or nowhere, before it is given up. The own segment is empty, so the first lands there.
_ATTEMPTS = 4


def publish_segments(pool: MooncakePool, lent: LentSegments, namespace: str) -> None:
    """Find the name out and register the segments under it. Blocks as store calls do; leaves no key behind.

    Where it cannot be found, an event says so, and the segments are read through the store's client alone.
    """
    value = ProbeValue()
    pool.register(value)
    try:
        for _ in range(_ATTEMPTS):
            if endpoint := _endpoint(pool, lent, value, probe_key(namespace)):
                lent.publish(endpoint)
                return
    finally:
        pool.unregister(value)
    emit(SEGMENT_UNPUBLISHED, segments=len(lent.entries))


def _endpoint(pool: MooncakePool, lent: LentSegments, value: ProbeValue, key: str) -> str:
    (answer,) = pool.put([key], value, [0], [VALUE_BYTES])
    if answer.state is not KeyState.OK:
        return ""
    (replica,) = pool.describe([key])
    is_own = (
        replica is not None
        and replica.size == VALUE_BYTES
        and lent.holds(replica.address, VALUE_BYTES)
        and ctypes.string_at(replica.address, VALUE_BYTES) == value.view()[:VALUE_BYTES]
    )
    pool.remove([key])
    return replica.endpoint if replica is not None and is_own else ""
