"""What akv needs from the world, as Protocols: a pool, a device, and somebody to run blocking calls.

Mooncake and torch appear only behind them, in `akv.pool` and `akv.device`; the fakes of `akv_testing` implement the same
Protocols and pass the same conformance suites.
"""

import msgspec

from akv.ports.board import StatBoard
from akv.ports.calls import CallRunner
from akv.ports.device import DeviceCopier
from akv.ports.pool import PagePool
from akv.ports.segments import HostSegments


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that a connector stands on. `open_connector(ports=...)` takes them instead of Mooncake, torch and
    threads.

    Who passes them owns them: the connector registers its buffers with the pool and closes neither pool nor device.
    """

    pool: PagePool
    device: DeviceCopier
    runner: CallRunner
    #: Where this host's processes lend memory to the pool; None: no page is read straight from there.
    segments: HostSegments | None = None
    #: Where the connector posts what it counted; None: nowhere.
    board: StatBoard | None = None
