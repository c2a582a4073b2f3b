"""What a server of several ranks has not given back, on its scheduler's side and on each rank."""

from collections.abc import Callable
from typing import Any

import pytest

from akv.ranks import Scheduler, Worker
from akv_testing.ranked_server import RankedServer


def scheduler_books(kv: Scheduler) -> dict[str, int]:
    """Requests, plans, orders and pages that a scheduler's side still has."""
    halves, ranks = kv._halves, kv._ranks
    requests = halves.scheduler.requests
    return {
        "requests": len(requests),
        "pages": len(requests.pages.loading) + len(requests.pages.saving) + len(requests.pages.quarantined),
        "open plans": halves.scheduler.passes._plans.open,
        "backlog": halves.scheduler.backlog.passes,
        "calls": halves.calls.outstanding,
        "orders that are under way": ranks._ledger.active,
        "pages in quarantine": len(ranks._ledger.quarantined),
        "orders": len(ranks._orders),
        "plans of the ranks": len(ranks._plans),
        "loads": len(ranks._loading),
        "saves": len(ranks._saving),
    }


def worker_books(worker: Worker) -> dict[str, int]:
    """Slots, claims, plans, orders and calls that a rank still has."""
    rank: Any = worker._rank
    half = rank.worker
    pools = [(f"staging {number}", staging.slots) for number, staging in enumerate(half.memory.stagings)]
    if half._ring is not None:
        claims = half._ring.claims
        pools += [(name, pool) for name, pool in (("ring", claims.host), ("device", claims._device)) if pool]
    return {
        **{f"slots of {name}": pool.count - pool.free for name, pool in pools},
        "claims on slots": sum(len(pool._waiting) for _, pool in pools),
        "plans with claims": 0 if half._ring is None else half._ring.claims.plans,
        "open plans": len(rank._plans),
        "orders": len(rank._orders),
        "loads by number": len(rank._loads),
        "awaited ends": len(rank._read_still) + len(rank._written_still),
        "calls": rank.calls.outstanding,
        "events": rank._poller.outstanding,
        "loads": half._parts.reservations.active,
        "saves": half._parts.saves.active,
        "bytes in quarantine": half._parts.reservations.quarantined_bytes + half._parts.saves.quarantined_bytes,
        "places": sum(round(place.borrowed_tokens) for place in rank._desk._places.values()),
    }


def books(server: RankedServer, kv: Scheduler) -> list[str]:
    """What a server with nothing to do has not given back."""
    sides = {"scheduler": scheduler_books(kv)}
    sides |= {f"rank {number}": worker_books(worker) for number, worker in enumerate(server.workers)}
    return [f"{side}: {count} {what}" for side, counts in sides.items() for what, count in counts.items() if count]


class Post:
    """The engine's messages, one rank at a time: a test says who hears, and who is heard."""

    def __init__(self, server: RankedServer, kv: Scheduler) -> None:
        server.still = True
        self._server, self._kv = server, kv
        self._down: list[list[bytes]] = [[] for _ in server.ranks]

    def fetch(self) -> None:
        """Ask the scheduler's side what it has to say."""
        if orders := self._kv.take_orders():
            for queue in self._down:
                queue.append(orders)

    async def tell(self, *ranks: int) -> None:
        """Hand over to these ranks what they were not told yet."""
        self.fetch()
        for rank in ranks:
            while self._down[rank]:
                # One that is cancelled has got the orders all the same.
                await self._server.workers[rank].carry_out(self._down[rank].pop(0))

    def hear(self, *ranks: int) -> None:
        """Take the reports of these ranks to the scheduler's side."""
        for rank in ranks:
            self._kv.take_report(self._server.workers[rank].take_report())

    async def go_on(self) -> None:
        """Every rank hears the rest, and from now on the engine's steps carry the messages."""
        await self.tell(*range(len(self._down)))
        self._server.still = False


@pytest.fixture
def post() -> type[Post]:
    return Post


@pytest.fixture
def left_open() -> Callable[[RankedServer, Scheduler], list[str]]:
    return books
