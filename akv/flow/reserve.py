"""Second step, synchronous: the engine takes up an offer, and from here on its pages are the connector's (L6, W8, D9).

`plan/reservation.py` decides whether the engine's answer can be carried out, `ownership/requests.py` whether the pages are
free to take. All or nothing: whatever is wrong is raised here, for this request, before anything is taken.
"""

from collections.abc import Sequence

from akv.errors import EngineContractError
from akv.ownership.request_record import LoadHold, RequestRecord
from akv.ownership.requests import Requests
from akv.plan.reservation import destination_pages
from akv.plan.window_search import WindowGroup
from akv.values.messages import GroupPages, LoadOrder
from akv.values.offers import Offer


def reserve(
    requests: Requests,
    record: RequestRecord,
    offer: Offer,
    honoured_tokens: int,
    pages: Sequence[Sequence[int]],
    page_counts: Sequence[int],
    tokens_per_block: int,
    windows: Sequence[WindowGroup],
) -> tuple[LoadOrder, LoadHold]:
    """Check, take the pages, and name what is to be loaded into them. Raises EngineContractError; then nothing was taken."""
    if (offer.request_id, offer.incarnation) != record.key:
        raise EngineContractError(
            f"request {record.request_id!r} was given an offer of request {offer.request_id!r} (incarnation "
            f"{offer.incarnation}, now {record.incarnation}): an offer belongs to the request that looked it up"
        )
    taken = destination_pages(offer, honoured_tokens, pages, page_counts, tokens_per_block, record.request_id, windows)
    first = offer.local_tokens // tokens_per_block
    hashes = record.chain.hashes(first, first + honoured_tokens // tokens_per_block) if taken else []
    groups = tuple(
        GroupPages(
            group,
            blocks,
            destination,
            # All of them, but for windows.
            tuple(hashes if len(blocks) == len(hashes) else [hashes[block - first] for block in blocks]),
        )
        for group, blocks, destination in taken
    )
    return requests.reserve(record, groups, offer.local_tokens, honoured_tokens)
