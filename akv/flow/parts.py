"""What the flows of one worker half work with."""

from collections.abc import Callable, Sequence

import msgspec

from akv.flow.calls import CallDesk, EventWatch
from akv.ownership.reservations import Reservations
from akv.ownership.saves import Saves
from akv.plan.keys import KeySpace
from akv.ports.device import DeviceCopier
from akv.ports.pool import PagePool
from akv.values.messages import PassReport


class WorkerParts(msgspec.Struct, frozen=True, kw_only=True):
    """Ports, ownership and plumbing, handed to each flow."""

    pool: PagePool
    device: DeviceCopier
    desk: CallDesk
    events: EventWatch
    keys: KeySpace
    #: Bytes of one page in each layer group.
    page_bytes: Sequence[int]
    reservations: Reservations
    saves: Saves
    #: Tells the scheduler half what ended.
    report: Callable[[PassReport], None]
    load_deadline_s: float
