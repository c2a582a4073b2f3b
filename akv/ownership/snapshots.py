"""The snapshot ring: slots that hold window pages from the pass that computed them until they are stored (S3, S4).

Slots are asked for when a pass is planned and granted, first come first served, while its forward runs. Each order of a plan
has a claim of its own, so that a ring which is short drops the ends that do not fit and keeps the others.
"""

from collections.abc import Callable, Iterable

from akv.ownership.slots import SlotPool, SlotTicket
from akv.values.messages import SaveOrder


class SnapshotClaim:
    """The slots of one order: on the host, and on the device where there are any to pass through."""

    __slots__ = ("device", "host", "order")

    def __init__(self, order: SaveOrder, host: SlotTicket | None, device: SlotTicket | None) -> None:
        self.order = order
        #: None if it asks for more slots than are in use: it can never be granted.
        self.host = host
        self.device = device

    @property
    def granted(self) -> bool:
        """Whether the pages can be copied."""
        return self.host is not None and self.host.granted

    @property
    def waiting(self) -> bool:
        """Whether slots may still be granted."""
        return self.host is not None and not self.host.granted and not self.host.hopeless

    def settle(self) -> None:
        """The copy is about to be queued: it passes through the device if there are slots now, else it does without them."""
        if self.device is not None and not self.device.granted:
            self.device.leave()
            self.device = None

    def leave(self) -> None:
        """Give up the asker's hold. What a copy or a put still touches stays out of use until its end."""
        for ticket in (self.host, self.device):
            if ticket is not None:
                ticket.leave()


class SnapshotClaims:
    """The claims of plans that have not ended."""

    def __init__(self, host: SlotPool, device: SlotPool | None) -> None:
        #: The slots on the host.
        self.host = host
        self._device = device
        self._plans: dict[int, list[SnapshotClaim]] = {}

    @property
    def plans(self) -> int:
        """Plans that hold or await slots."""
        return len(self._plans)

    def ask(self, plan_id: int, orders: Iterable[SaveOrder], wake: Callable[[], None]) -> None:
        """A plan arrived: ask for the slots of its snapshots. `wake` is called at each grant."""
        claims = [SnapshotClaim(order, _ask(self.host, order, wake), _ask(self._device, order, _ignored)) for order in orders]
        if claims:
            self._plans[plan_id] = claims

    def has(self, plan_id: int) -> bool:
        """Whether this plan asked for slots."""
        return plan_id in self._plans

    def take(self, plan_id: int) -> list[SnapshotClaim]:
        """The pass ran: its claims are the caller's, to be used or left."""
        return self._plans.pop(plan_id, [])

    def drop(self, plan_id: int) -> None:
        """The pass will not run: its slots go back. Idempotent."""
        for claim in self.take(plan_id):
            claim.leave()

    def drop_all(self) -> None:
        """No planned pass will run any more."""
        for plan_id in list(self._plans):
            self.drop(plan_id)


def _ask(pool: SlotPool | None, order: SaveOrder, wake: Callable[[], None]) -> SlotTicket | None:
    return None if pool is None or order.pages > pool.usable else pool.request(order.pages, wake)


def _ignored() -> None:
    """The grant of a device slot: looked at when the copy is queued, and waited for by nobody."""
