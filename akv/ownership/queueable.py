"""What a pass listed for saving, when it has run: without what must not be handed over any more (S1, S2)."""

import msgspec

from akv.ownership.page_book import PageBook
from akv.ownership.request_record import RequestRecord
from akv.values.messages import SaveOrder, select_pages


def queueable(record: RequestRecord, order: SaveOrder, pages: PageBook) -> SaveOrder:
    """The order without what must not be handed over any more."""
    if order.snapshot:
        # Copied already, from pages that the request held: nobody looks at the pages again.
        return order
    if order.window:
        groups = [
            select_pages(group, [not pages.is_filled(group.group, page) for page in group.pages]) for group in order.groups
        ]
        return msgspec.structs.replace(order, groups=tuple(group for group in groups if group.blocks))
    keep = [order.probe_first or record.marks.is_open(block) for block in order.groups[0].blocks]
    for group in order.groups:
        keep = [k and not pages.is_filled(group.group, page) for k, page in zip(keep, group.pages, strict=True)]
    return order if all(keep) else msgspec.structs.replace(order, groups=tuple(select_pages(g, keep) for g in order.groups))
