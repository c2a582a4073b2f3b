"""An engine that heeds quarantine and nothing else, and what a connector has not given back."""

from collections.abc import Callable

import anyio
import pytest

from akv import Connector, Load, Request, Scheduled
from akv_testing.cancelling import Cancelling
from akv_testing.quarantine import QuarantineBook
from akv_testing.server import PageTable
from akv_testing.window_server import WindowServer


class Engine(QuarantineBook):
    """Runs requests on a `WindowServer`. Reuses every page as soon as it is told that it may, overwriting it first; what a
    pass releases it reuses when `after_forward` is over, however that ended.
    """

    def __init__(self, server: WindowServer) -> None:
        super().__init__(len(server.layout.groups), server.free)
        self.server = server

    async def reserve(self, request: Request, tokens: tuple[int, ...], table: PageTable) -> tuple[int, Load]:
        """Look up, and hand over the pages of the whole offer. Returns the tokens offered, and the load."""
        offer = await request.lookup()
        end = offer.tokens // self.server.tokens_per_block
        self.server._grow(table, [self.server.loads(group, end) for group in range(len(table))])
        return offer.tokens, request.reserve(offer, offer.tokens, table)

    async def run_pass(
        self, kv: Connector, request: Request, tokens: tuple[int, ...], table: PageTable, before: int, end: int
    ) -> None:
        """One pass. If it is cancelled before `after_forward`, the engine drops it."""
        self.server.prepare(table, before, end)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=before, tokens=end - before, pages=table)])
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            kv.drop_pass(plan)
            raise
        self.server.forward(tokens, table, before, end)
        try:
            await kv.after_forward(plan)
        finally:
            self.server.commit(table, end)

    async def cancel(self, kv: Connector, request: Request, table: PageTable) -> None:
        """Cancel a request, whatever comes meanwhile, and take its pages back."""
        while True:
            try:
                with anyio.CancelScope(shield=True):
                    self.name(await request.cancel())
            except anyio.get_cancelled_exc_class():  # noqa: ASYNC103 - the engine's own clean-up goes on
                continue  # noqa: ASYNC104 - as above
            break
        assert request.closed
        self.fetch(kv)
        self.give_back(table)


def books(kv: Connector) -> list[str]:
    """What a connector with nothing to do has not given back: slots, claims, plans, calls, pages."""
    halves = kv._halves
    worker, requests = halves.local_worker, halves.scheduler.requests
    pools = [("staging", staging.slots) for staging in worker.memory.stagings]
    if worker._ring is not None:
        claims = worker._ring.claims
        pools += [(name, pool) for name, pool in (("ring", claims.host), ("device", claims._device)) if pool]
    counts = {
        **{f"slots of {name} {number}": pool.count - pool.free for number, (name, pool) in enumerate(pools)},
        "claims on slots": sum(len(pool._waiting) for _, pool in pools),
        "plans with claims": 0 if worker._ring is None else worker._ring.claims.plans,
        "open plans": halves.scheduler.passes._plans.open,
        "calls": halves.calls.outstanding,
        "events": halves._poller.outstanding,
        "loads": worker._parts.reservations.active,
        "saves": worker._parts.saves.active,
        "bytes in quarantine": worker._parts.reservations.quarantined_bytes + worker._parts.saves.quarantined_bytes,
        "requests": len(requests),
        "pages": len(requests.pages.loading) + len(requests.pages.saving) + len(requests.pages.quarantined),
        "places": sum(round(place.borrowed_tokens) for place in halves._desk._places.values()),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


@pytest.fixture
def cancelling() -> type[Cancelling]:
    return Cancelling


@pytest.fixture
def engine() -> type[Engine]:
    return Engine


@pytest.fixture
def left_open() -> Callable[[Connector], list[str]]:
    return books
