"""Whether values really go to the pool and come back, found out before anybody relies on it.

`setup()` proves little: it answers 0 for a local hostname that nobody can resolve, and for RDMA on a machine without a device,
where the client silently uses TCP. So a joining process looks for the device, and puts, gets and removes a small value.
"""

import ctypes
import secrets
from pathlib import Path
from typing import Literal

import anyio

from akv.errors import PoolError
from akv.plan.keys import escape
from akv.pool.mooncake import MooncakePool
from akv.ports.pool import KeyAnswer, KeyState
from akv.settings import StoreSettings

#: Bytes of the value. Too few to matter in a full pool, enough to tell two values apart.
VALUE_BYTES = 4096
#: Values tried, at most, not counting those that land on a process that is gone; and seconds in all after which none is begun.
ATTEMPTS = 8
DEADLINE_S = 5.0
#: Seconds before the next attempt. An eviction that a refused put set off is done by then.
AGAIN_S = 0.02
#: Seconds in which a value that lands on a process that is gone is tried again. Each lands on a segment that the master picks,
#: and one that died stands among the living for about 11 seconds: a server that starts again beside one that died starts late
#: rather than not at all. From the ninth on, in so many seconds each: such puts fill a log.
HOLDER_LOST_S = 13.0
SELDOM_S = 0.5
_WORTH_ANOTHER = frozenset(
    {KeyState.NO_SPACE, KeyState.UNAVAILABLE, KeyState.HOLDER_LOST, KeyState.LEASE_EXPIRED, KeyState.MISSING}
)

#: Where Linux lists RDMA devices, one entry each.
RDMA_DEVICES = Path("/sys/class/infiniband")

DataPath = Literal["proved", "no_room"]


class ProbeValue:
    """Registered memory for a value that goes out, and for the one that comes back."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(secrets.token_bytes(VALUE_BYTES), 2 * VALUE_BYTES)

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(self._bytes)

    @property
    def nbytes(self) -> int:
        """Twice the value."""
        return 2 * VALUE_BYTES

    def view(self) -> memoryview:
        """What goes out, and behind it what comes back."""
        return memoryview(self._bytes).cast("B")

    @property
    def is_back(self) -> bool:
        """Whether what came back is what went out."""
        return self._bytes[:VALUE_BYTES] == self._bytes[VALUE_BYTES:]


def probe_key(namespace: str) -> str:
    """A key that no page and no other process has."""
    return f"{escape(namespace)}/probe/{secrets.token_hex(16)}"


def check_device(store: StoreSettings, devices: Path = RDMA_DEVICES) -> None:
    """Refuse RDMA where there is no device for it. Raises PoolError (fault of the deployment), naming those that there are."""
    if store.protocol != "rdma":
        return
    there = sorted(entry.name for entry in devices.iterdir()) if devices.is_dir() else []
    wanted = [name.strip() for name in store.device_name.split(",") if name.strip()]
    missing = [name for name in wanted if name not in there]
    if missing or not there:
        raise PoolError(
            f"store.protocol is 'rdma' and this machine has no RDMA device {', '.join(map(repr, missing)) or 'at all'} "
            f"(it has: {', '.join(there) or 'none'}); the client would quietly use TCP. Set store.device_name to one that "
            "is there, give the container its devices, or use store.protocol = 'tcp'."
        )


async def prove_data_path(pool: MooncakePool, namespace: str, store: StoreSettings) -> DataPath:
    """Put, get and remove a small value, and say whether it came back; on a worker thread, since a dead peer takes seconds.

    "no_room" means that the pool took none: nobody lends memory yet, or it is full. That is no fault of this process, which
    may start before the processes that lend; nothing was moved then. Leaves no key behind.

    A value that lands in this process's own segment is copied without the transport; it proves memory and master only.

    Raises PoolError (fault of the deployment) with the code and what usually is the cause. **Cancellation:** takes effect
    after the call that is under way; nothing stays registered or stored.
    """
    value = ProbeValue()
    pool.register(value)
    began, lost, others = anyio.current_time(), 0, 0
    try:
        while others < ATTEMPTS:
            key = probe_key(namespace)
            step, answer = await anyio.to_thread.run_sync(_round_trip, pool, value, key)
            if answer.state is KeyState.OK:
                return "proved"
            lost, others = (lost + 1, others) if answer.state is KeyState.HOLDER_LOST else (lost, others + 1)
            if answer.state not in _WORTH_ANOTHER or anyio.current_time() - began > (HOLDER_LOST_S if lost else DEADLINE_S):
                break
            await anyio.sleep(AGAIN_S if lost < ATTEMPTS else SELDOM_S)
    finally:
        pool.unregister(value)
    if answer.state is KeyState.NO_SPACE:
        return "no_room"
    raise PoolError(
        f"the pool at {pool.address} was joined, but {VALUE_BYTES} bytes did not go there and back: their {step} ended "
        f"with {answer.state} (code {answer.code}). Likely causes: a process of the pool lends memory under a hostname that "
        f"cannot be reached from here (its store.local_hostname; here it is {store.local_hostname!r}), a firewall between the "
        f"two, different protocols (store.protocol; here it is {store.protocol!r}), or processes that lent memory died within "
        "the last 11 seconds: then start again."
    )


def _round_trip(pool: MooncakePool, value: ProbeValue, key: str) -> tuple[str, KeyAnswer]:
    """The step that failed and its answer; or the last step and OK."""
    # Anywhere: with the own segment preferred, nothing would be proved about the others.
    (answer,) = pool.put_anywhere([key], value, [0], [VALUE_BYTES])
    if answer.state is not KeyState.OK:
        return "put", answer
    (answer,) = pool.get([key], value, [VALUE_BYTES], [VALUE_BYTES])
    (removed,) = pool.remove([key])
    if answer.state is not KeyState.OK:
        return "get", answer
    if not value.is_back:
        return "get", KeyAnswer(KeyState.WRONG_SIZE, answer.code)
    return "removal", removed
