"""What is inconsistent in a cache's books, in words: for tests and for post-mortems. Walks everything."""

from collections import Counter
from collections.abc import Iterator

from akv.host.holding import Holdings
from akv.host.pages import Block
from akv.host.window_pool import WindowPool


def inconsistencies(holdings: Holdings) -> list[str]:
    """Wrong counts, pages with two owners and pages with none; empty when all is well."""
    held = Counter(id(block) for blocks, _ in holdings.held.values() for block in blocks)
    cached = list(holdings.tree)
    known = list(
        {
            id(block): block for blocks in [*(blocks for blocks, _ in holdings.held.values()), cached] for block in blocks
        }.values()
    )
    wrong = [*_of_blocks(known, held), *_of_tree(holdings, cached), *_of_rests(holdings)]
    free = holdings.free_pages()
    for at, group in enumerate(holdings.full):
        wrong += _of_pages(
            holdings,
            group,
            Counter(free[group]) + Counter(holdings.free.withheld[at]) + Counter(block.pages[at] for block in known),
        )
    for pool in holdings.pools:
        wrong += _of_window(holdings, pool, cached)
    return wrong


def _of_blocks(known: list[Block], held: Counter[int]) -> Iterator[str]:
    for block in known:
        if block.holders != held[id(block)]:
            yield f"block {block.pages} counts {block.holders} holders and has {held[id(block)]}"
        if isinstance(block.parent, Block) and block.holders and not block.parent.holders:
            yield f"block {block.pages} is held and the block before it is not"
        if not block.cached and any(block.windows):
            yield f"block {block.pages} is in no tree, and window pages are to be found with it"


def _of_tree(holdings: Holdings, cached: list[Block]) -> Iterator[str]:
    tree = holdings.tree
    if len(cached) != tree.blocks:
        yield f"the tree counts {tree.blocks} blocks and has {len(cached)}"
    idle = sum(not block.holders for block in cached)
    if idle != tree.idle:
        yield f"the tree counts {tree.idle} idle blocks and has {idle}"


def _of_rests(holdings: Holdings) -> Iterator[str]:
    if holdings.booked != sum(holdings.rests.values()):
        yield f"{holdings.booked} blocks are booked, by their holders {sum(holdings.rests.values())}"
    if holdings.booked > holdings.available:
        yield f"{holdings.booked} blocks are booked, and there are {holdings.available}"
    gone = sorted(set(holdings.rests) - set(holdings.held))
    if gone:
        yield f"blocks are booked for {gone}, who hold nothing any more"


def _of_pages(holdings: Holdings, group: int, owners: Counter[int]) -> Iterator[str]:
    twice = sorted(page for page, count in owners.items() if count > 1)
    lost = sorted(set(range(holdings.page_counts[group])) - set(owners))
    if twice or lost:
        yield f"group {group}: pages with two owners {twice}, pages lost {lost}"


def _of_window(holdings: Holdings, pool: WindowPool, cached: list[Block]) -> Iterator[str]:
    group = pool.rule.group
    tables = [table for _, tables in holdings.held.values() for table in tables if table.pool is pool]
    held = Counter(page for table in tables for page in table.pages.values())
    found = {page: block for block in cached if (page := block.windows[pool.position]) is not None}
    for page in {*held, *found, *pool.idle}:
        if page.holders != held[page]:
            yield f"group {group}: page {page.page} counts {page.holders} holders and has {held[page]}"
        if page.block is not found.get(page):
            yield f"group {group}: page {page.page} and its block do not agree"
        if page.holders and page.block is not None and not page.block.holders:
            yield f"group {group}: page {page.page} is held and its block is not"
        if (page in pool.idle) != (not page.holders):
            yield f"group {group}: page {page.page} has {page.holders} holders, idle is {page in pool.idle}"
    yield from _of_pages(holdings, group, Counter(pool.free) + Counter(page.page for page in {*held, *found}))
    booked = sum(table.booked for table in tables)
    if booked != pool.booked:
        yield f"group {group}: {pool.booked} pages are booked, by its holders {booked}"
    to_take, there = booked - sum(len(table.pages) for table in tables), len(pool.free) + len(pool.idle)
    if to_take > there:
        yield f"group {group}: holders may take {to_take} pages more, and there are {there}"
    for table in tables:
        if len(table.pages) > table.booked:
            yield f"group {group}: a holder has {len(table.pages)} pages and booked {table.booked}"
