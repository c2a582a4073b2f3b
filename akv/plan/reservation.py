"""Whether an engine's answer to an offer can be carried out, settled before anything is taken (L6, W8)."""

import operator
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from akv.errors import EngineContractError
from akv.plan.window import load_blocks, needed_blocks
from akv.plan.window_search import WindowGroup
from akv.units import NO_PAGE
from akv.values.offers import Offer


class Destination(NamedTuple):
    """Where a layer group's part of an honoured offer goes, in columns of equal length."""

    group: int
    #: Block ordinals, ascending: with full attention all of the honoured blocks, with a window its sinks and its tail.
    blocks: tuple[int, ...]
    pages: tuple[int, ...]


def check_honoured(offer: Offer, honoured_tokens: int, tokens_per_block: int, *, windows: bool = False) -> None:
    """Refuse an honoured part that is no whole-block part of the offer, or with `windows` neither all of it nor nothing (W8).

    The windows' pages are those for the offer's own end, and a part of it ends where they may never have been stored.

    Raises EngineContractError naming the request and the block in which the count ends (counted in the sequence).
    """
    if 0 <= honoured_tokens <= offer.tokens and not honoured_tokens % tokens_per_block:
        if not windows or honoured_tokens in {0, offer.tokens}:
            return
        why = "the layout has window groups, so it is all or nothing; for less of it ask offer.at_most(tokens) first"
    elif honoured_tokens < 0:
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
    windows: Sequence[WindowGroup] = (),
) -> list[Destination]:
    """Where the honoured blocks go, for each layer group that loads any.

    `pages` is the request's page table per group (entry i is the page of block i), `page_counts` the pages that each group's
    cache has, `windows` the window groups: of these only the blocks that the engine reads after resuming are loaded, and the
    entries of the others are not looked at (W8). With nothing honoured no table is, and the answer is empty: such a load
    completes at once (D9).

    Raises EngineContractError (fault of the engine's adapter), naming request, group and block, for what `check_honoured`
    refuses; for another number of groups; for a table that ends before the last block to load; for a missing page (-1), one
    outside the cache, one that is no integer, and one that already belongs to an earlier block that the request reads. The
    last would have the load overwrite a page of the request, its local match included.
    """
    check_honoured(offer, honoured_tokens, tokens_per_block, windows=bool(windows))
    if not honoured_tokens:
        return []
    if len(pages) != len(page_counts):
        raise EngineContractError(
            f"request {request_id!r}: {len(pages)} page tables for a layout of {len(page_counts)} layer groups. "
            "Nothing was taken"
        )
    local = offer.local_tokens // tokens_per_block
    end = local + honoured_tokens // tokens_per_block
    shapes = {window.group: window for window in windows}
    destinations = []
    for group, (table, count) in enumerate(zip(pages, page_counts, strict=True)):
        # Full attention is a window of no bound: nothing of it is stale.
        _, window_tokens, sink_tokens = shapes.get(group, WindowGroup(group, 0, 0))
        read = needed_blocks(end, window_tokens, sink_tokens, tokens_per_block)
        load = load_blocks(local, end, window_tokens, sink_tokens, tokens_per_block)
        own = set().union(*(table[blocks.start : min(blocks.stop, local)] for blocks in read))
        if load:
            destinations.append(_destination(request_id, group, table, count, load, own))
    return destinations


def _all_good(pages: tuple[int, ...], blocks: int, count: int, taken: set[int]) -> bool:
    """Whether these are as many pages as blocks, all of them of the cache and each only once, and none is taken; then all are.

    Decided without a step of Python for each: a prompt of 100,000 tokens has thousands, and the engine's loop waits. Where
    anything is amiss, or an engine counts its pages in numpy's integers, they are looked at one by one.
    """
    distinct = set(pages) if len(pages) == blocks and set(map(type, pages)) == {int} else set()
    return len(distinct) == blocks > 0 and min(distinct) >= 0 and max(distinct) < count and distinct.isdisjoint(taken)


def _destination(
    request_id: str, group: int, table: Sequence[int], count: int, load: Sequence[range], taken: set[int]
) -> Destination:
    """One group's destination pages, each checked; `taken` are the pages that the request reads already."""

    def refuse(block: int, why: str) -> EngineContractError:
        return EngineContractError(f"request {request_id!r}, layer group {group}, block {block}: {why}. Nothing was taken")

    blocks = tuple(chain.from_iterable(load))
    pages = tuple(chain.from_iterable(table[some.start : some.stop] for some in load))
    if _all_good(pages, len(blocks), count, taken):
        return Destination(group, blocks, pages)
    end = blocks[-1] + 1
    if len(table) < end:
        first = next(block for block in blocks if block >= len(table))
        raise refuse(first, f"the page table ends at {len(table)} blocks of {end}")
    destination: list[int] = []
    for block in blocks:
        entry = table[block]
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
    return Destination(group, blocks, tuple(destination))
