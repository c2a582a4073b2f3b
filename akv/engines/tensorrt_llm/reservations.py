"""Prefixes that the engine reserves while it fills a batch, confirms with pages, and has loaded. Lives on the loop.

A reservation holds no page: what protects its source is the lease that the lookup's probe got from the pool (`lease_s`), which
is long beside the one pass between the answer and the load. An id is used once; what is unknown or late is ignored.
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from akv.engines.tensorrt_llm.ends import Ends
from akv.engines.tensorrt_llm.identity import Asked
from akv.engines.tensorrt_llm.serving import Held, Serving, Tables
from akv.values.offers import Offer


class Confirmed(NamedTuple):
    """A reservation that the engine has pages for: it may be loaded once the pass that says so begins."""

    reservation_id: int
    engine_id: int
    #: Tokens of the sequence, [start, end).
    start: int
    end: int
    pages: Tables


class _Reserved:
    def __init__(self, held: Held, offer: Offer) -> None:
        self.held = held
        self.offer = offer
        self.start, self.end = offer.local_tokens, offer.local_tokens + offer.tokens

    def release(self, start: int, end: int) -> bool:
        """Give back a part. Returns whether nothing is left."""
        if start <= self.start:
            self.start = max(self.start, end)
        elif end >= self.end:
            self.end = min(self.end, start)
        return self.start >= self.end


class Reservations:
    """The reservations of one server that were not released."""

    def __init__(self, serving: Serving, ends: Ends) -> None:
        self._serving = serving
        self._ends = ends
        self._reserved: dict[int, _Reserved] = {}
        self._confirmed: dict[int, Confirmed] = {}

    async def reserve(self, asked: Asked, local_tokens: int, reservation_id: int) -> int:
        """How many tokens behind the local match the pool has; nothing is moved."""
        held = await self._serving.look_up(asked, local_tokens)
        offer = None if held is None else held.offer
        if held is None or offer is None or not offer.tokens:
            return 0
        held.offer = None
        self._reserved[reservation_id] = _Reserved(held, offer)
        return offer.tokens

    def release(self, reservation_id: int, start: int, end: int) -> None:
        """The engine does not want tokens [start, end), or has them. A load that has begun goes on."""
        reserved = self._reserved.get(reservation_id)
        if reserved is not None and reserved.release(start, end):
            del self._reserved[reservation_id]
            self._confirmed.pop(reservation_id, None)

    def confirm(self, loads: Iterable[Confirmed]) -> None:
        """The engine has pages for these. Until they are dispatched they can be released as before."""
        self._confirmed.update((load.reservation_id, load) for load in loads)

    def dispatch(self, reservation_ids: Iterable[int]) -> None:
        """Begin the loads of what is confirmed and was not released meanwhile. Raises EngineContractError."""
        for reservation_id in reservation_ids:
            load, reserved = self._confirmed.pop(reservation_id, None), self._reserved.get(reservation_id)
            if load is None or reserved is None or not self._stands(reserved):
                continue
            reserved.held.allocated = True
            ended = partial(self._ends.prefix_ended, reservation_id)
            self._serving.load(reserved.held, reserved.offer, load.start, load.end, load.pages, ended)

    def _stands(self, reserved: _Reserved) -> bool:
        return self._serving.holds(reserved.held) and reserved.held.request.incarnation == reserved.offer.incarnation
