"""Whether an engine's answer to an offer can be carried out, settled before anything is taken (L6)."""

import operator
from collections.abc import Sequence

from akv.errors import EngineContractError
from akv.units import NO_PAGE
from akv.values.offers import Offer


def check_honoured(offer: Offer, honoured_tokens: int, tokens_per_block: int) -> None:
    """Refuse an honoured part that is no whole-block part of the offer.

    Raises EngineContractError naming the request and the block in which the count ends (counted in the sequence).
    """
    if 0 <= honoured_tokens <= offer.tokens and not honoured_tokens % tokens_per_block:
        return
    if honoured_tokens < 0:
        why = "it is negative"
    elif honoured_tokens > offer.tokens:
        why = "it is more than was offered"
    else:
        block = (offer.local_tokens + honoured_tokens) // tokens_per_block
        why = f"it ends inside block {block}, and blocks of {tokens_per_block} tokens are honoured whole"
    raise EngineContractError(
        f"request {offer.request_id!r}: honoured {honoured_tokens} tokens of an offer of {offer.tokens} "
        f"behind a local match of {offer.local_tokens}: {why}. Nothing was taken"
    )


def destination_pages(
    offer: Offer,
    honoured_tokens: int,
    pages: Sequence[Sequence[int]],
    page_counts: Sequence[int],
    tokens_per_block: int,
    request_id: str,
) -> list[tuple[int, range, tuple[int, ...]]]:
    """Where the honoured blocks go: for each layer group its index, the block ordinals and their pages, in equal columns.

    `pages` is the request's page table per group (entry i is the page of block i), `page_counts` the pages that each group's
    cache has. With nothing honoured the tables are not looked at and the answer is empty: such a load completes at once (D9).

    Raises EngineContractError (fault of the engine's adapter), naming request, group and block, for what `check_honoured`
    refuses; for another number of groups; for a table that ends before the last honoured block; for a missing page (-1), one
    outside the cache, one that is no integer, and one that already belongs to an earlier block of the table. The last would
    have the load overwrite a page that the request reads, its local match included.
    """
    check_honoured(offer, honoured_tokens, tokens_per_block)
    if not honoured_tokens:
        return []
    if len(pages) != len(page_counts):
        raise EngineContractError(
            f"request {request_id!r}: {len(pages)} page tables for a layout of {len(page_counts)} layer groups. "
            "Nothing was taken"
        )
    first = offer.local_tokens // tokens_per_block
    blocks = range(first, first + honoured_tokens // tokens_per_block)
    return [
        (group, blocks, _destination(request_id, group, table, count, blocks))
        for group, (table, count) in enumerate(zip(pages, page_counts, strict=True))
    ]


def _destination(request_id: str, group: int, table: Sequence[int], count: int, blocks: range) -> tuple[int, ...]:
    """One group's destination pages, each checked."""

    def refuse(block: int, why: str) -> EngineContractError:
        return EngineContractError(f"request {request_id!r}, layer group {group}, block {block}: {why}. Nothing was taken")

    if len(table) < blocks.stop:
        raise refuse(max(len(table), blocks.start), f"the page table ends at {len(table)} blocks of {blocks.stop}")
    taken = set(table[: blocks.start])
    destination: list[int] = []
    for block, entry in zip(blocks, table[blocks.start : blocks.stop], strict=True):
        try:
            page = operator.index(entry)
        except TypeError:
            raise refuse(block, f"a page index is an integer, not a {type(entry).__name__}") from None
        if page == NO_PAGE:
            raise refuse(block, "the block has no page")
        if not 0 <= page < count:
            raise refuse(block, f"page {page} is not in the cache, which has {count}")
        if page in taken:
            raise refuse(block, f"page {page} belongs to an earlier block of this request")
        taken.add(page)
        destination.append(page)
    return tuple(destination)
