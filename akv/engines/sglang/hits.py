"""How much of a prompt SGLang may prefetch, from which of its pages are there, pool by pool. Pure."""

from collections.abc import Hashable, Sequence

import msgspec

#: The words of SGLang's `PoolHitPolicy`, whose members are these strings.
ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"


class PoolPages(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for of one side pool, and found."""

    #: The pool, as SGLang's own object: results are looked up by it.
    name: Hashable
    #: One of the words above; with any other the pool reports nothing and bounds nothing.
    policy: str
    #: Pages at the end of a prefix that must be there, with `TRAILING_PAGES`.
    trailing: int
    #: For each page of the prefix whether it is there.
    there: Sequence[bool]


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in pages from the beginning of what was asked for."""

    #: The longest prefix that every pool can serve.
    pages: int
    #: The longest that each pool can serve by itself, those that can serve none left out.
    by_pool: dict[Hashable, int]
    #: Every length that all pools can serve, ascending. Pools that keep windows leave holes, and ranks intersect these.
    restorable: list[int]


def prefix_length(there: Sequence[bool]) -> int:
    """How many lead, before the first that is not there."""
    return next((index for index, is_there in enumerate(there) if not is_there), len(there))


def hits_of(kv: Hashable, kv_pages: int, pools: Sequence[PoolPages]) -> Hits:
    """Combine the prefix that is there in the KV pool, named `kv`, with what the side pools have."""
    by_pool: dict[Hashable, int] = {kv: kv_pages} if kv_pages else {}
    restorable = list(range(1, kv_pages + 1))
    for pool in pools:
        if pool.policy == ALL_PAGES:
            ends = set(range(1, prefix_length(pool.there[:kv_pages]) + 1))
        elif pool.policy == TRAILING_PAGES:
            ends = _window_ends(pool.there[:kv_pages], max(1, pool.trailing))
        else:
            continue
        if ends:
            by_pool[pool.name] = max(ends)
        restorable = [end for end in restorable if end in ends]
    return Hits(pages=restorable[-1] if restorable else 0, by_pool=by_pool, restorable=restorable)


def _window_ends(there: Sequence[bool], trailing: int) -> set[int]:
    """The prefix lengths whose last `trailing` pages, or all if there are fewer, are there."""
    ends: set[int] = set()
    run = 0
    for index, is_there in enumerate(there):
        run = run + 1 if is_there else 0
        if run >= min(trailing, index + 1):
            ends.add(index + 1)
    return ends
