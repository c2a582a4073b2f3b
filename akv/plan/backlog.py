"""What of one hand-over the backlog of saves has room for (S6).

The backlog is what was handed over for saving and has not ended: bytes of pages, and passes. A pool that takes pages more
slowly than passes compute them makes it grow, and requests hold their pages meanwhile; past its bound whole ends of chains are
dropped. A chain with a hole is of no use to anybody, so with a block go the later blocks of its request, and the window pages
of its end; what is left is the beginning of the chain, which a lookup can count.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from akv.values.messages import SaveOrder, select_pages

#: More blocks than any sequence has.
_NO_HOLE = 2**40


class BacklogBounds(NamedTuple):
    """How much may be under way."""

    #: Bytes of pages that were handed over and whose save has not ended.
    bytes: int
    #: Passes with such a save.
    passes: int


class Fit(NamedTuple):
    """One hand-over, cut in two. The orders of each part are in the order in which they were given."""

    #: What is handed over.
    kept: tuple[SaveOrder, ...]
    #: What is not: whole orders, or the blocks that were cut off those in `kept`, under the same number.
    dropped: tuple[SaveOrder, ...]


def fit_backlog(
    orders: Sequence[SaveOrder],
    shed: Mapping[int, Sequence[int]],
    used: BacklogBounds,
    bounds: BacklogBounds,
    page_bytes: Sequence[int],
    *,
    is_pass: bool,
) -> Fit:
    """Cut a hand-over to what fits beside `used`.

    `orders` are of one pass, or of a request's end (`is_pass=False`), which is no pass and counts in bytes only. `shed`, by
    incarnation: the blocks of a request, ascending, that were dropped before and are not handed over yet. `page_bytes`: bytes
    of one page in each layer group.

    Requests are served in the order of their first order, each its blocks first, then its window pages, all or none of them;
    last what it lists again (S8), which the pool holds as far as anybody knows: nothing else depends on it.
    """
    room = max(0, bounds.bytes - used.bytes)
    if is_pass and used.passes >= bounds.passes:
        room = 0
    kept: dict[int, SaveOrder] = {}
    dropped: dict[int, SaveOrder] = {}

    def settle(order: SaveOrder, count: int) -> int:
        """Keep the first `count` blocks of an order, and return the bytes of them."""
        head, tail = _cut(order, count)
        if head is not None:
            kept[order.save_id] = head
        if tail is not None:
            dropped[order.save_id] = tail
        return 0 if head is None else order_bytes(head, page_bytes)

    by_request: dict[int, list[SaveOrder]] = {}
    for order in orders:
        by_request.setdefault(order.incarnation, []).append(order)
    for incarnation, own in by_request.items():
        blocks = [order for order in own if not order.window and not order.probe_first]
        hole = _first_hole(shed.get(incarnation, ()), blocks)
        for order in blocks:
            listed = order.groups[0].blocks
            count = min(bisect_left(listed, hole), room // _block_bytes(order, page_bytes))
            if count < len(listed):
                hole = min(hole, listed[count])
            room -= settle(order, count)
        for order in own:
            if order.window:
                whole = hole == _NO_HOLE and order_bytes(order, page_bytes) <= room
                room -= settle(order, _NO_HOLE if whole else 0)
        for order in own:
            if order.probe_first and not order.window:
                room -= settle(order, room // _block_bytes(order, page_bytes))
    return Fit(_in_order(kept, orders), _in_order(dropped, orders))


def order_bytes(order: SaveOrder, page_bytes: Sequence[int]) -> int:
    """The bytes of an order's pages."""
    return sum(len(columns.pages) * page_bytes[columns.group] for columns in order.groups)


def _block_bytes(order: SaveOrder, page_bytes: Sequence[int]) -> int:
    """Of one block; an order of blocks lists the same ones in each of its groups."""
    return sum(page_bytes[columns.group] for columns in order.groups)


def _first_hole(shed: Sequence[int], orders: Sequence[SaveOrder]) -> int:
    """The first block that was dropped before and is not offered again now."""
    if not shed:
        return _NO_HOLE
    offered = {block for order in orders for block in order.groups[0].blocks}
    return next((block for block in shed if block not in offered), _NO_HOLE)


def _cut(order: SaveOrder, count: int) -> tuple[SaveOrder | None, SaveOrder | None]:
    """An order's first `count` blocks and its others; None for none."""
    if count <= 0:
        return None, order
    if all(count >= len(columns.blocks) for columns in order.groups):
        return order, None
    keep = [index < count for index in range(len(order.groups[0].blocks))]
    head = tuple(select_pages(columns, keep) for columns in order.groups)
    tail = tuple(select_pages(columns, [not kept for kept in keep]) for columns in order.groups)
    return msgspec.structs.replace(order, groups=head), msgspec.structs.replace(order, groups=tail)


def _in_order(some: Mapping[int, SaveOrder], orders: Sequence[SaveOrder]) -> tuple[SaveOrder, ...]:
    return tuple(some[order.save_id] for order in orders if order.save_id in some)
